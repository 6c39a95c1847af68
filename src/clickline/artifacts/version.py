"""A version: everything that a server needs to score, in one folder that never changes.

    <registry>/versions/000000012/manifest.json   written last
                                  dense.onnx, table-00000-of-00002.bin …, sample.npz
                                  manifest.sig          if versions are signed, see signing.py
    <registry>/drafts/000000013.json              a claimed number: by which process, since when
    <registry>/drafts/000000013/                  its files while they are written, in a local registry

A draft claims its number by creating a file exclusively, so no two versions ever share a number. Numbers only rise: the
number of a failed draft is not used again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clickline.artifacts.manifest import (
    MANIFEST,
    SIGNATURE,
    as_json,
    digest,
    manifest_bytes,
    read_manifest,
)
from clickline.errors import ArtifactError, StorageError
from clickline.features import FeatureSpec
from clickline.records import PartShape, Precision
from clickline.storage.atomic import fsync
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import translate_errors
from clickline.validation import validate

if TYPE_CHECKING:
    from clickline.artifacts.signing import Signer, TrustedKeys

VERSION_FORMAT = 3
SCRATCH_PREFIX = "clickline-draft-"

_DEAD_AFTER_SECONDS = 3600.0
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class VersionFile:
    """The checksum and size of one file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class VersionSlot:
    """A slot of the table: its place, and the row of an id that the table does not have."""

    name: str
    dim: int
    pooling: str
    part: int
    wide: float
    vector: tuple[float, ...]


@dataclass(frozen=True)
class VersionNetwork:
    """The network in dense.onnx. Versions with the same one differ only in their weights."""

    name: str | None  # None: a custom network
    file_sha256: str | None  # of a custom network's Python file
    hidden: tuple[int, ...]
    batch_norm: bool


@dataclass(frozen=True)
class VersionModel:
    """The trained model that a version was made from."""

    checkpoint: str  # run/checkpoint, or run/hour
    step: int
    snapshot: str = ""  # digest of its tables
    # of `clickline publish`
    dataset: str | None = None
    tables_sha256: str | None = None
    dense_sha256: str | None = None
    # of `clickline up --follow`
    hour: str | None = None
    identity: str | None = None
    data_until: float | None = None  # the end of the newest trained hour, in Unix seconds

    def to_json(self) -> dict[str, Any]:
        """Only what is known: a version of `publish` has no hour."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class VersionSample:
    """The rows stored with their scores, which every server scores again before it uses the version."""

    requested_rows: int  # publish.sample_rows
    rows: int = 0
    tolerance: float = 0.0  # largest allowed difference of a score
    difference: float = 0.0  # largest difference from the checkpoint's scores


@dataclass(frozen=True)
class PrecisionCost:
    """The change in AUC and log loss from a lower precision, on `rows` rows; None: not defined on them."""

    rows: int = 0
    auc: float | None = 0.0
    logloss: float | None = 0.0


@dataclass(frozen=True)
class VersionManifest:
    """The manifest of a version. `features`, `calibration` and `report` belong to the modules that write them."""

    number: int
    created: str  # UTC, ISO
    parent: int | None  # the version that this one's table is a delta of
    table: Literal["base", "delta"]
    rows: int
    tombstones: int
    table_precision: Precision
    dense_precision: Precision
    shards: int
    parts: tuple[PartShape, ...]
    slots: tuple[VersionSlot, ...]
    features: dict[str, Any]
    network: VersionNetwork
    width: int  # inputs of the network
    logit_shift: float
    calibration: dict[str, Any] | None
    model: VersionModel
    config: str  # resolved, as YAML
    report: dict[str, Any] | None  # the evaluation report, shortened
    sample: VersionSample
    cost: PrecisionCost
    files: dict[str, VersionFile]  # without the manifest and its signature

    @property
    def feature_spec(self) -> FeatureSpec:
        return FeatureSpec.from_json(self.features)


@dataclass(frozen=True)
class Version:
    """A complete version; its files never change."""

    folder: str
    manifest: VersionManifest

    @property
    def number(self) -> int:
        return self.manifest.number

    @property
    def parent(self) -> int | None:
        return self.manifest.parent

    @property
    def created(self) -> str:
        return self.manifest.created

    @property
    def files(self) -> Mapping[str, VersionFile]:
        return self.manifest.files

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def open_version(storage: Storage, folder: str, trusted: TrustedKeys | None = None) -> Version:
    """The version in a folder, after checking its manifest and, with `trusted`, its signature. Its other files are not
    read."""

    def check(manifest: bytes) -> None:
        if trusted is not None:
            trusted.check(storage, folder, manifest)

    manifest = read_version_manifest(storage, folder, check)
    name = folder.rstrip("/").rpartition("/")[2]
    wrong = None
    if number_name(manifest.number) != name:
        wrong = f"it has number {manifest.number}, its folder is {name}"
    elif manifest.parent is not None and not 0 < manifest.parent < manifest.number:
        wrong = f"its parent is {manifest.parent}, which is not an earlier version"
    elif not all(_is_file_name(name) and file.size >= 0 for name, file in manifest.files.items()):
        wrong = "its list of files is malformed"
    if wrong:
        raise ArtifactError(
            f"{redacted(Storage.join(folder, MANIFEST))} is damaged: {wrong}. Use another version."
        )
    return Version(folder, manifest)


def read_version_manifest(
    storage: Storage, folder: str, check: Callable[[bytes], None] = lambda content: None
) -> VersionManifest:
    """The manifest of the version in any folder, such as a local copy."""
    document = read_manifest(storage, folder, "version", VERSION_FORMAT, check)
    return validate(VersionManifest, document, redacted(Storage.join(folder, MANIFEST)))


def verify(version: Version, folder: Path) -> None:
    """Check the size and SHA-256 of every file of a version in a local folder; ArtifactError names a bad file."""
    for name, expected in version.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                raise ArtifactError(
                    f"{path} has {size:,} bytes; the manifest of version {version.number} says {expected.size:,}. "
                    "Use another version, or publish again."
                )
            sha256 = digest(path)
        except OSError as error:
            raise ArtifactError(
                f"{path} of version {version.number} cannot be read: {error.strerror}. "
                "Use another version, or publish again."
            ) from error
        if sha256 != expected.sha256:
            raise ArtifactError(
                f"{path} is damaged: its SHA-256 is {sha256[:12]}…, the manifest of version {version.number} says "
                f"{expected.sha256[:12]}…. Use another version, or publish again."
            )


class Verifier:
    """Checks the files of versions, and reads only those again that have changed."""

    def __init__(self) -> None:
        self._verified: dict[int, tuple[Version, list[tuple[int, int, int]]]] = {}

    def check(self, version: Version, folder: Path) -> None:
        """Like `verify`, but only once for unchanged files."""
        verified = self._verified.get(version.number)
        if verified is None or verified != (version, _file_stamps(version, folder)):
            verify(version, folder)
            self._verified[version.number] = (version, _file_stamps(version, folder))

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all other versions."""
        kept = set(numbers)
        self._verified = {number: files for number, files in self._verified.items() if number in kept}


def _file_stamps(version: Version, folder: Path) -> list[tuple[int, int, int]]:
    """Inode, size and modification time of each file, which change when it is written."""
    stamps = []
    for name in version.files:
        with suppress(OSError):
            status = (folder / name).stat()
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return stamps


def create_exclusively(storage: Storage, uri: str, document: Mapping[str, Any]) -> bool:
    """Create a small JSON file; False if another process created it first."""
    token = secrets.token_hex(8)
    if storage.create(uri, as_json({**document, "token": token})):
        return True
    # If the store answered too late, the request was sent twice, and the existing file may be ours.
    try:
        return bool(json.loads(storage.read(uri))["token"] == token)
    except (StorageError, ValueError, TypeError, KeyError):
        return False


# ── drafts ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Claim:
    """A claimed version number: by which process, since when, and the version that it builds on."""

    number: int
    parent: int | None
    since: float
    machine: str
    process: str  # empty: the draft was abandoned, and only its number is still claimed
    scratch: str | None  # where the files are written, if not in the registry

    @classmethod
    def for_this_process(cls, number: int, parent: int | None, scratch: Path | None) -> Claim:
        process = _process(os.getpid()) or str(os.getpid())
        return cls(
            number, parent, time.time(), _machine(), process, None if scratch is None else str(scratch)
        )

    @classmethod
    def read(cls, storage: Storage, uri: str) -> Claim:
        """Read a claim; one that cannot be parsed is dead."""
        try:
            claim = validate(cls, json.loads(storage.read(uri)), uri)
            if not re.fullmatch(r"(\d+( \d+)?)?", claim.process):
                raise ValueError(claim.process)
            return claim
        except (ValueError, RecursionError, ArtifactError):
            return cls(int(uri.rpartition("/")[2].split(".")[0]), None, 0.0, "", "", None)

    def released(self) -> Claim:
        return replace(self, parent=None, process="", scratch=None)

    @property
    def is_released(self) -> bool:
        return not self.process

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended; on another machine, whether it was not refreshed for too long."""
        if self.is_released:
            return True
        if self.machine and self.machine == _machine():
            return not _is_running(self.process)
        return time.time() - self.since > _DEAD_AFTER_SECONDS

    def remove_scratch(self) -> None:
        """Remove the scratch files of a dead draft of this machine."""
        # The path was read from a file: remove nothing that is not named like a draft.
        if self.scratch and self.machine == _machine() and Path(self.scratch).name.startswith(SCRATCH_PREFIX):
            shutil.rmtree(self.scratch, ignore_errors=True)


class Draft:
    """A version in progress: its number, and a local folder for its files.

    As a context manager it is abandoned if the block ends without a commit.
    """

    def __init__(self, storage: Storage, registry: str, claim: Claim) -> None:
        """Created by `Registry.draft`, which claims the number."""
        self.number = claim.number
        self._storage = storage
        self._claim = claim
        self._registry = registry
        self._target = version_folder(registry, claim.number)
        self._claim_file = claim_file(registry, claim.number)
        self._local = Storage.is_local(registry)
        self._open = True
        self.folder = Path(claim.scratch) if claim.scratch else draft_folder(registry, claim.number)
        with translate_errors(str(self.folder), redacted):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o777 if self._local else 0o700)

    def commit(
        self,
        manifest: VersionManifest,
        sha256: Mapping[str, str] | None = None,
        signer: Signer | None = None,
    ) -> Version:
        """Move or upload every file of the folder into the registry, then write the manifest, which makes it a version.

        The manifest gets its number, creation time and files here. `sha256` contains known checksums by file name; the
        other files are read.
        """
        manifest = replace(manifest, number=self.number, created=utc_now(), files=self._files(sha256 or {}))
        self._refresh_claim()
        self._check_parent(manifest.parent)
        if self._local:
            self._move()
        else:
            self._upload(manifest.files)
        content = manifest_bytes("version", VERSION_FORMAT, manifest)
        if signer is not None:
            self._storage.put(Storage.join(self._target, SIGNATURE), signer.sign(content))
        self._storage.put(Storage.join(self._target, MANIFEST), content)
        self._check_parent(manifest.parent)  # gc may have removed it meanwhile
        version = open_version(self._storage, self._target)
        self._open = False
        self._storage.delete(self._claim_file)
        shutil.rmtree(self.folder, ignore_errors=True)
        return version

    def abandon(self) -> None:
        """Remove everything except the claim on the number, which is not used again."""
        if not self._open:
            return
        self._open = False
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(StorageError):  # the draft may have failed because of the store; then gc removes it
            remove_version(self._storage, self._target)
            self._storage.put(self._claim_file, as_json(asdict(self._claim.released())))

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.abandon()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.folder)  # the error of a full disk does not name the file

    def _files(self, known: Mapping[str, str]) -> dict[str, VersionFile]:
        with translate_errors(str(self.folder), redacted):
            paths = sorted(self.folder.iterdir())
            for path in paths:
                if not path.is_file() or not _is_file_name(path.name):
                    raise ArtifactError(
                        f"{path} cannot be part of a version: its files are in one folder, have plain names, and "
                        f"{MANIFEST} and {SIGNATURE} are written by the commit."
                    )
            unknown = sorted(known.keys() - {path.name for path in paths})
            if unknown:
                raise ArtifactError(f"{self.folder} has no file {unknown[0]}, whose checksum was given.")
            return {
                path.name: VersionFile(known.get(path.name) or digest(path), path.stat().st_size)
                for path in paths
            }

    def _refresh_claim(self) -> None:
        """Refresh the claim; refuse to continue if gc has removed it."""
        stored = None
        if self._storage.describe(self._claim_file):
            stored = Claim.read(self._storage, self._claim_file)
        if stored is None or (stored.machine, stored.process) != (self._claim.machine, self._claim.process):
            raise ArtifactError(
                f"the draft of version {self.number} was inactive for so long that `clickline versions gc` removed it. "
                "Publish again."
            )
        self._claim = replace(self._claim, since=time.time())
        self._storage.put(self._claim_file, as_json(asdict(self._claim)))

    def _check_parent(self, parent: int | None) -> None:
        if parent is None:
            return
        if not 0 < parent < self.number:
            raise ArtifactError(
                f"version {self.number} cannot build on {parent}: it is not an earlier version."
            )
        try:
            open_version(self._storage, version_folder(self._registry, parent))
        except ArtifactError as error:
            raise ArtifactError(
                f"version {self.number} builds on version {parent}, which is missing or damaged: {error}"
            ) from error

    def _move(self) -> None:
        """Rename the folder within the registry, after its files are flushed to disk."""
        target = Storage.local_path(self._target)
        with translate_errors(str(target), redacted):
            for path in (*self.folder.iterdir(), self.folder):
                fsync(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.folder.rename(target)
            fsync(target.parent)

    def _upload(self, files: Mapping[str, VersionFile]) -> None:
        for name in files:
            self._storage.put(Storage.join(self._target, name), self.folder / name)
            self._refresh_claim()
        missing = first_bad_file(self._storage, self._target, files)
        if missing:
            raise ArtifactError(
                f"the upload of version {self.number} is incomplete: {missing}. Publish again."
            )


def first_bad_file(storage: Storage, folder: str, files: Mapping[str, VersionFile]) -> str:
    """A message about the first file that is missing or has the wrong size; empty if all are right."""
    sizes = storage.sizes(folder)
    for name, expected in files.items():
        uri = redacted(Storage.join(folder, name))
        if name not in sizes:
            return f"{uri} is missing"
        if sizes[name] != expected.size:
            return f"{uri} has {sizes[name]:,} bytes, its manifest says {expected.size:,}"
    return ""


def remove_version(storage: Storage, folder: str) -> None:
    """Remove a complete or partial version: its manifest first, so that no process opens half of it.

    Processes that have its files mapped keep them: on POSIX a removed file exists until the last mapping ends.
    """
    storage.delete(Storage.join(folder, MANIFEST))
    storage.delete(folder)


# ── places, times, processes ───────────────────────────────────────────────────────────────────


def number_name(number: int) -> str:
    """The number as it appears in file names, padded so that they sort."""
    return f"{number:09d}"


def version_folder(registry: str, number: int) -> str:
    return Storage.join(registry, "versions", number_name(number))


def claim_file(registry: str, number: int) -> str:
    return Storage.join(registry, "drafts", f"{number_name(number)}.json")


def draft_folder(registry: str, number: int) -> Path:
    """Where a draft of a local registry writes its files: on the same disk, so that they can be renamed into uri."""
    return Storage.local_path(Storage.join(registry, "drafts", number_name(number)))


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_file_name(name: str) -> bool:
    """Whether a manifest may list a file of this name: one in the folder itself."""
    return name not in (MANIFEST, SIGNATURE) and _SAFE_NAME.fullmatch(name) is not None


def _machine() -> str:
    """The boot id of this machine and its PID namespace; empty if not on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_running(process: str) -> bool:
    pid = int(process.split()[0])
    running = _process(pid)
    if running:
        return running == process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process, which /proc hides on this machine
    return False


def _process(pid: int) -> str:
    """A process by its id and start time, since ids are reused; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid} {fields[18]}"
