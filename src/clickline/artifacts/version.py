"""A version: everything a server needs to score, in one folder, for good.

    <registry>/versions/000000012/manifest.json   written last
                                  dense.onnx, table-00000-of-00002.bin …, sample.npz
                                  manifest.sig          where versions are signed, see signing.py
    <registry>/drafts/000000013.json              a number that is taken: by whom, since when
    <registry>/drafts/000000013/                  its files while they are made, where the registry is local

A draft takes its number by creating a file that nobody else can create, so no two versions ever share one. Numbers only
rise: the taken number of a failed draft is left out.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickline.artifacts.manifest import (
    MANIFEST,
    SIGNATURE,
    as_json,
    digest,
    manifest_bytes,
    read_manifest,
)
from clickline.errors import ArtifactError, StorageError
from clickline.storage.atomic import sync
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import explained

if TYPE_CHECKING:
    from clickline.artifacts.signing import Signer, Trusted

VERSION_FORMAT = 1
SCRATCH_PREFIX = "clickline-draft-"

_ABANDONED_SECONDS = 3600.0
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Version:
    """A whole version; its files never change."""

    number: int
    folder: str
    body: Mapping[str, Any]

    @property
    def parent(self) -> int | None:
        """The version that this one's table is a delta of."""
        parent: int | None = self.body.get("parent")
        return parent

    @property
    def created(self) -> str:
        return str(self.body["created"])

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """`sha256` and `size` of each file by its name, without the manifest."""
        files: Mapping[str, Mapping[str, Any]] = self.body["files"]
        return files

    @property
    def size(self) -> int:
        return sum(file["size"] for file in self.files.values())


def open_version(storage: Storage, folder: str, trusted: Trusted | None = None) -> Version:
    """The version in a folder, once its manifest is known to be one, signed by a key of `trusted`. Its files are not
    looked at."""

    def check(manifest: bytes) -> None:
        if trusted is not None:
            trusted.check(storage, folder, manifest)

    body = read_manifest(storage, folder, "version", VERSION_FORMAT, check)
    name = folder.rstrip("/").rpartition("/")[2]
    number, parent, files = body.get("number"), body.get("parent"), body.get("files")
    wrong = None
    if not isinstance(number, int) or number_name(number) != name:
        wrong = f"it says number {number!r}, its folder {name}"
    elif parent is not None and not (isinstance(parent, int) and 0 < parent < number):
        wrong = f"its parent is {parent!r}, which is no earlier version"
    elif not isinstance(body.get("created"), str):
        wrong = "it does not say when it was made"
    elif not isinstance(files, dict) or not all(map(_is_file, files.items())):
        wrong = "its list of files is not one"
    if wrong:
        raise ArtifactError(
            f"{shown(Storage.join(folder, MANIFEST))} is damaged: {wrong}. Use another version."
        )
    return Version(body["number"], folder, body)


def verify(version: Version, folder: Path) -> None:
    """Check size and SHA-256 of every file of a version in a local folder; ArtifactError names the bad one."""
    for name, told in version.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != told["size"]:
                raise ArtifactError(
                    f"{path} has {size:,} bytes; the manifest of version {version.number} says {told['size']:,}. "
                    "Use another version, or publish again."
                )
            found = digest(path)
        except OSError as error:
            raise ArtifactError(
                f"{path} of version {version.number} cannot be read: {error.strerror}. "
                "Use another version, or publish again."
            ) from error
        if found != told["sha256"]:
            raise ArtifactError(
                f"{path} is damaged: its SHA-256 is {found[:12]}…, the manifest of version {version.number} says "
                f"{str(told['sha256'])[:12]}…. Use another version, or publish again."
            )


class Verifier:
    """Checks files of versions, and does not read again what has not changed since."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Version, list[tuple[int, int, int]]]] = {}

    def check(self, version: Version, folder: Path) -> None:
        """What `verify` does, once for the same files."""
        found = self._seen.get(version.number)
        if found is None or found != (version, _marks(version, folder)):
            verify(version, folder)
            self._seen[version.number] = (version, _marks(version, folder))

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all other versions."""
        kept = set(numbers)
        self._seen = {number: seen for number, seen in self._seen.items() if number in kept}


def _marks(version: Version, folder: Path) -> list[tuple[int, int, int]]:
    """What changes when somebody writes to a file."""
    marks = []
    for name in version.files:
        with suppress(OSError):
            status = (folder / name).stat()
            marks.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return marks


def created_once(storage: Storage, uri: str, document: Mapping[str, Any]) -> bool:
    """Create a small JSON file; False if somebody else did."""
    token = secrets.token_hex(8)
    if storage.create(uri, as_json({**document, "token": token})):
        return True
    # The store may have answered too late and have been asked twice: then what is there is ours.
    try:
        return bool(json.loads(storage.read(uri))["token"] == token)
    except (StorageError, ValueError, TypeError, KeyError):
        return False


# ── drafts ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Claim:
    """A number that is taken: by which process, since when, and the version that it builds on."""

    number: int
    parent: int | None
    since: float
    machine: str
    process: str  # empty: the draft was given up, only the number stays taken
    scratch: str | None  # where the files are made, if not in the registry

    @classmethod
    def ours(cls, number: int, parent: int | None, scratch: Path | None) -> Claim:
        process = _process(os.getpid()) or str(os.getpid())
        return cls(
            number, parent, time.time(), _machine(), process, None if scratch is None else str(scratch)
        )

    @classmethod
    def read(cls, storage: Storage, uri: str) -> Claim:
        """What a claim says; one that cannot be understood is dead."""
        try:
            told = json.loads(storage.read(uri))
            if not (told["process"] == "" or re.fullmatch(r"\d+( \d+)?", told["process"])):
                raise ValueError(told["process"])
            parent = None if told["parent"] is None else int(told["parent"])
            scratch = None if told["scratch"] is None else str(told["scratch"])
            where = str(told["machine"]), str(told["process"])
            return cls(int(told["number"]), parent, float(told["since"]), *where, scratch)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return cls(int(uri.rpartition("/")[2].split(".")[0]), None, 0.0, "", "", None)

    def ended(self) -> Claim:
        return replace(self, parent=None, process="", scratch=None)

    @property
    def is_ended(self) -> bool:
        return not self.process

    @property
    def dead(self) -> bool:
        """Whether its process is gone; on another machine, whether it was silent for too long."""
        if self.is_ended:
            return True
        if self.machine and self.machine == _machine():
            return not _is_running(self.process)
        return time.time() - self.since > _ABANDONED_SECONDS

    def remove_scratch(self) -> None:
        """Remove what a dead draft of this machine left on local disk."""
        # The place was read from a file: remove nothing that does not carry a draft's name.
        if self.scratch and self.machine == _machine() and Path(self.scratch).name.startswith(SCRATCH_PREFIX):
            shutil.rmtree(self.scratch, ignore_errors=True)


class Draft:
    """A version on its way: a number of its own, and a local folder to make its files in.

    As a context manager it is given up when the block ends without a commit.
    """

    def __init__(self, storage: Storage, registry: str, claim: Claim) -> None:
        """Made by `Registry.draft`, which took the number."""
        self.number = claim.number
        self._storage = storage
        self._claim = claim
        self._registry = registry
        self._target = version_folder(registry, claim.number)
        self._claim_file = claim_file(registry, claim.number)
        self._local = Storage.is_local(registry)
        self._open = True
        self.folder = Path(claim.scratch) if claim.scratch else draft_folder(registry, claim.number)
        with explained(str(self.folder), shown):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o777 if self._local else 0o700)

    def commit(
        self, body: Mapping[str, Any], sha256: Mapping[str, str] | None = None, signer: Signer | None = None
    ) -> Version:
        """Bring every file of the folder into the registry, then write the manifest: the version exists.

        `body` is the manifest's, without number, created and files. `sha256` holds checksums that are known
        already, by the file's name; the other files are read.
        """
        whole = {"number": 0, "created": "", "parent": self._claim.parent, **body}
        whole |= {"number": self.number, "created": utc_now(), "files": self._files(sha256 or {})}
        self._keep_claim()
        self._check_parent(whole["parent"])
        if self._local:
            self._move()
        else:
            self._upload(whole["files"])
        manifest = manifest_bytes("version", VERSION_FORMAT, whole)
        if signer is not None:
            self._storage.put(Storage.join(self._target, SIGNATURE), signer.sign(manifest))
        self._storage.put(Storage.join(self._target, MANIFEST), manifest)
        self._check_parent(whole["parent"])  # gc may have removed it meanwhile
        version = open_version(self._storage, self._target)
        self._open = False
        self._storage.delete(self._claim_file)
        shutil.rmtree(self.folder, ignore_errors=True)
        return version

    def abandon(self) -> None:
        """Leave nothing but the number, which is not used again."""
        if not self._open:
            return
        self._open = False
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(StorageError):  # the store may be why the draft failed; then gc does it
            remove_version(self._storage, self._target)
            self._storage.put(self._claim_file, as_json(asdict(self._claim.ended())))

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.abandon()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.folder)  # a full disk does not say which one it is

    def _files(self, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        with explained(str(self.folder), shown):
            paths = sorted(self.folder.iterdir())
            for path in paths:
                own = path.name in (MANIFEST, SIGNATURE)
                if not path.is_file() or own or not _SAFE_NAME.fullmatch(path.name):
                    raise ArtifactError(
                        f"{path} cannot be part of a version: its files lie in one folder, have plain names, and "
                        f"{MANIFEST} and {SIGNATURE} are written by the commit."
                    )
            unknown = sorted(known.keys() - {path.name for path in paths})
            if unknown:
                raise ArtifactError(f"{self.folder} has no file {unknown[0]}, whose checksum was given.")
            return {
                path.name: {"sha256": known.get(path.name) or digest(path), "size": path.stat().st_size}
                for path in paths
            }

    def _keep_claim(self) -> None:
        """Tell that we are alive; refuse to go on when gc thought otherwise."""
        found = None
        if self._storage.describe(self._claim_file):
            found = Claim.read(self._storage, self._claim_file)
        if found is None or (found.machine, found.process) != (self._claim.machine, self._claim.process):
            raise ArtifactError(
                f"version {self.number} was being made for so long without a sign of life that `clickline versions "
                "gc` gave it up. Publish again."
            )
        self._claim = replace(self._claim, since=time.time())
        self._storage.put(self._claim_file, as_json(asdict(self._claim)))

    def _check_parent(self, parent: int | None) -> None:
        if parent is None:
            return
        if not isinstance(parent, int) or not 0 < parent < self.number:
            raise ArtifactError(
                f"version {self.number} cannot build on {parent!r}: it is no earlier version."
            )
        try:
            open_version(self._storage, version_folder(self._registry, parent))
        except ArtifactError as error:
            raise ArtifactError(
                f"version {self.number} builds on version {parent}, which is gone or damaged: {error}"
            ) from error

    def _move(self) -> None:
        """One rename within the registry, of files that are on disk for good."""
        target = local_folder(self._target)
        with explained(str(target), shown):
            for path in (*self.folder.iterdir(), self.folder):
                sync(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.folder.rename(target)
            sync(target.parent)

    def _upload(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        for name in files:
            self._storage.put(Storage.join(self._target, name), self.folder / name)
            self._keep_claim()
        missing = wrong_files(self._storage, self._target, files)
        if missing:
            raise ArtifactError(
                f"the upload of version {self.number} did not arrive: {missing}. Publish again."
            )


def wrong_files(storage: Storage, folder: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The first file that is not there with its size, in words; empty when all are. Content is not read."""
    found = {file.uri.rpartition("/")[2]: file.size for file in storage.list(Storage.inside(folder, "*"))}
    for name, told in files.items():
        place = shown(Storage.join(folder, name))
        if name not in found:
            return f"{place} is gone"
        if found[name] != told["size"]:
            return f"{place} has {found[name]:,} bytes, its manifest says {told['size']:,}"
    return ""


def remove_version(storage: Storage, folder: str) -> None:
    """Remove a version or the rest of one: its manifest first, so that nobody opens half of it.

    Whoever has its files mapped keeps them: on POSIX a removed file lives until the last mapping ends.
    """
    storage.delete(Storage.join(folder, MANIFEST))
    storage.delete(folder)


# ── places, times, processes ───────────────────────────────────────────────────────────────────


def number_name(number: int) -> str:
    """As it is written in names, so that they sort."""
    return f"{number:09d}"


def version_folder(registry: str, number: int) -> str:
    return Storage.join(registry, "versions", number_name(number))


def claim_file(registry: str, number: int) -> str:
    return Storage.join(registry, "drafts", f"{number_name(number)}.json")


def draft_folder(registry: str, number: int) -> Path:
    """Where a draft of a local registry makes its files: on the same disk, so that a rename brings them in."""
    return local_folder(Storage.join(registry, "drafts", number_name(number)))


def local_folder(uri: str) -> Path:
    return Path(uri.removeprefix("file://")).expanduser()


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_file(entry: tuple[str, Any]) -> bool:
    """Whether it names a file of the folder itself, never one elsewhere, with its size and checksum."""
    name, told = entry
    return (
        bool(_SAFE_NAME.fullmatch(name))
        and name not in (MANIFEST, SIGNATURE)
        and isinstance(told, dict)
        and isinstance(told.get("size"), int)
        and told["size"] >= 0
        and isinstance(told.get("sha256"), str)
    )


def _machine() -> str:
    """This run of this machine, and the space of process ids in it; empty where Linux is not there to tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_running(process: str) -> bool:
    pid = int(process.split()[0])
    found = _process(pid)
    if found:
        return found == process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's, and this machine hides those in /proc
    return False


def _process(pid: int) -> str:
    """A process by its number and start, because numbers are used again; empty when it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid} {fields[18]}"
