"""The model registry: versions and the pointer to the current one, on local disk or in any object store.

<registry>/versions/000000012/     see version.py
<registry>/moves/000000017.json    each move of the pointer; the one with the highest number is current
<registry>/gc.json                 exists while a gc is running

A move is a file that can be created only once, so of two publishers that read the same pointer one moves it and the
other gets an error. These files are also the history, and one listing tells servers the current version.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clickline.artifacts.manifest import MANIFEST, as_json, fingerprint, write_manifest
from clickline.artifacts.version import (
    SCRATCH_PREFIX,
    VERSION_FORMAT,
    Claim,
    Draft,
    Version,
    claim_file,
    create_exclusively,
    draft_folder,
    first_bad_file,
    number_name,
    open_version,
    utc_now,
    verify,
    version_folder,
)
from clickline.errors import ArtifactError, RegistryMoved, StorageError, VersionUntrusted
from clickline.storage.atomic import fsync, is_temporary_name, temporary_name
from clickline.storage.file_lock import locked
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import translate_errors
from clickline.validation import document_of, validate

if TYPE_CHECKING:
    from clickline.artifacts.signing import TrustedKeys

_MAX_MOVES = 100
_MAX_HISTORY = 100  # earlier current versions that a move lists
_STALE_FILE_SECONDS = 3600.0  # no process takes that long to write a small file
_CONCURRENT_REQUESTS = 8  # to a remote store
_NUMBER = re.compile(r"\d{9,}")
_COPY = re.compile(r"\.?\d{9,}-[0-9a-f]{12}(\.[0-9a-f]{16})?")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Move:
    """One move of the pointer."""

    sequence: int
    version: int
    reason: str
    at: str  # UTC, ISO
    pinned: bool  # publishes leave the pointer alone
    by: str
    before: tuple[int, ...]  # versions to roll back to, the last one first
    highest: int  # version number in any move so far

    @property
    def previous(self) -> int | None:
        """The version that was current before this one."""
        return self.before[-1] if self.before else None


@dataclass(frozen=True)
class Garbage:
    """What a gc removes, or would remove."""

    versions: tuple[int, ...]
    drafts: tuple[int, ...]  # numbers of versions that were never finished
    size: int  # bytes of the versions


@dataclass(frozen=True)
class _State:
    """What other processes change when they publish or move the pointer."""

    pointer: Move | None
    drafts: set[str]
    versions: set[int]


class Registry:
    """Versions and the pointer to the current one. Safe to use from several processes and machines."""

    def __init__(self, storage: Storage, uri: str, trusted: TrustedKeys | None = None) -> None:
        """`trusted`: versions not signed by one of these keys are refused, except by `gc`."""
        self.uri = uri
        self._trusted = trusted
        self._storage = storage
        self._local = Storage.is_local(uri)
        self._versions = Storage.join(uri, "versions")
        self._moves = Storage.join(uri, "moves")
        self._drafts = Storage.join(uri, "drafts")
        self._gc = Storage.join(uri, "gc.json")
        self._last: Move | None = None

    # Versions

    def draft(self, parent: int | None = None, scratch: Path | None = None) -> Draft:
        """Claim the next version number; until the draft ends, gc keeps `parent`.

        The files are written inside a local registry, else to a new folder in `scratch` (by default the system's
        folder for temporary files).
        """
        folder = None
        if not self._local:
            folder = (scratch or Path(tempfile.gettempdir())) / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
        number = self._highest_number()
        while True:
            number += 1
            claim = Claim.for_this_process(number, parent, folder)
            if not create_exclusively(self._storage, claim_file(self.uri, number), asdict(claim)):
                continue
            # Between our listing and our claim another draft may have used the number and released its claim.
            newest = max(_numbers(self._storage.names(self._versions)), default=0)
            if newest < number:
                return Draft(self._storage, self.uri, claim)
            self._storage.delete(claim_file(self.uri, number))
            number = newest

    def numbers(self) -> list[int]:
        """The numbers of all versions, ascending; their manifests are not read."""
        manifests = self._storage.list(Storage.pattern_in(self._versions, f"*/{MANIFEST}"))
        return _numbers(file.uri.split("/")[-2] for file in manifests)

    def versions(self) -> list[Version]:
        """All versions with a readable and trusted manifest, by number."""
        return [version for version in self._map(self._readable, self.numbers()) if version is not None]

    def version(self, number: int) -> Version:
        """One version; if it does not exist, ArtifactError lists the existing ones."""
        try:
            return self._open(number, self._trusted)
        except ArtifactError:
            if self._has_manifest(number):
                raise
            raise ArtifactError(f"{redacted(self.uri)} has no version {number}. {self._existing()}") from None

    def chain(self, version: Version) -> list[Version]:
        """The version and all versions that its table builds on, base first."""
        chain = [version]
        while (parent := chain[-1].parent) is not None:  # a parent's number is lower, so this ends
            try:
                chain.append(self._open(parent, self._trusted))
            except VersionUntrusted as error:
                raise VersionUntrusted(
                    f"version {version.number} cannot be used, because of a version that it builds on: {error}"
                ) from error
            except ArtifactError as error:
                raise ArtifactError(
                    f"version {version.number} cannot be used: version {parent}, which it builds on, is missing or "
                    f"damaged ({error})"
                ) from error
        return chain[::-1]

    def check(self, version: Version) -> None:
        """Refuse a version if it, or one that it builds on, lacks a file. Compares sizes, reads no content."""
        for one in self.chain(version):
            wrong = first_bad_file(self._storage, one.folder, one.files)
            if wrong:
                raise ArtifactError(f"version {version.number} is incomplete: {wrong}. Use another version.")

    def check_trust(self) -> None:
        """Refuse if the current version, or one that it builds on, is not signed by a trusted key. Does nothing if the
        store does not answer or the version is damaged."""
        if self._trusted is None:
            return
        try:
            move = self.current()
            if move is not None:
                self.chain(self.version(move.version))
        except VersionUntrusted:
            raise
        except (ArtifactError, StorageError, OSError):
            return

    # The pointer

    def current(self) -> Move | None:
        """The last move of the pointer; None before the first one. A single listing if it has not moved since."""
        sequences = self._sequences()
        if not sequences:
            return None
        last = self._last
        if last is None or last.sequence != sequences[-1]:
            last = self._last = self._read_move(sequences[-1])
        return last

    def moves(self) -> list[Move]:
        """The history, oldest first, as far as gc has kept it."""
        return self._map(self._read_move, self._sequences())

    def move(self, number: int, reason: str, *, after: Move | None, pinned: bool = False) -> Move:
        """Make a version current if the pointer is still at `after`, else raise RegistryMoved."""
        chain = [version.number for version in self.chain(self.version(number))]
        now = self.current()
        if now != after:
            raise self._moved_error(now)
        move = Move(
            sequence=1 if after is None else after.sequence + 1,
            version=number,
            reason=reason,
            at=utc_now(),
            pinned=pinned,
            by=_user_and_host(),
            before=_history(after, number),
            highest=max(number, 0 if after is None else after.highest),
        )
        if not create_exclusively(self._storage, self._move_file(move.sequence), asdict(move)):
            raise self._moved_error(self.current())
        if not all(self._map(self._has_manifest, chain)):  # a gc had just chosen one of them
            if after is not None:
                self.move(after.version, f"version {number} is gone", after=move, pinned=after.pinned)
            raise ArtifactError(
                f"version {number}, or one that it builds on, was removed meanwhile. {self._existing()}"
            )
        return move

    # Local copies

    def fetch(self, version: Version, into: Path) -> Path:
        """A local folder with the version's files: that of a local registry, else a copy in `into`.

        The first process makes the copy, which appears complete or not at all, with its checksums verified.
        """
        if self._local:
            return Storage.local_path(version.folder)
        folder = into / _copy_name(version)
        if not folder.is_dir():
            with translate_errors(str(folder), redacted), locked(into / ".lock"):
                if not folder.is_dir():  # another process may have been first
                    self._download(version, folder)
        return folder

    @staticmethod
    def verify(version: Version, folder: Path) -> None:
        """Check the size and SHA-256 of every file of a version in a local folder; ArtifactError names a bad file."""
        verify(version, folder)

    def remove_copies(self, into: Path, keep: Iterable[Version]) -> None:
        """Remove the copies in `into` of all versions but these, unless one is being fetched.

        Files that are still mapped exist until they are unmapped; a copy that is about to be opened must be kept.
        """
        if not into.exists():
            return
        kept = {_copy_name(version) for version in keep}
        with (
            translate_errors(str(into), redacted),
            locked(into / ".lock", wait=False) as free,
        ):
            for folder in into.iterdir() if free else ():
                if _COPY.fullmatch(folder.name) and folder.name not in kept:
                    if not folder.name.startswith("."):  # renamed first, so that no process opens half of it
                        folder = folder.rename(into / temporary_name(folder.name))
                    shutil.rmtree(folder)

    def _download(self, version: Version, folder: Path) -> None:
        hidden = folder.with_name(temporary_name(folder.name))
        hidden.mkdir()
        try:
            self._map(lambda name: self._download_file(version, name, hidden / name), version.files)
            write_manifest(Storage(), str(hidden), "version", VERSION_FORMAT, version.manifest)
            fsync(hidden)
            hidden.rename(folder)
            fsync(folder.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def _download_file(self, version: Version, name: str, path: Path) -> None:
        expected = version.files[name]
        uri = Storage.join(version.folder, name)
        file = self._storage.describe(uri)
        sha256 = hashlib.sha256()
        if file is not None and file.size == expected.size:
            with path.open("wb") as copy:
                for piece in self._storage.stream(file):
                    copy.write(piece)
                    sha256.update(piece)
                copy.flush()
                os.fsync(copy.fileno())
        if sha256.hexdigest() != expected.sha256:
            state = (
                "is missing" if file is None else "is damaged: its size or SHA-256 differs from the manifest"
            )
            raise ArtifactError(f"{redacted(uri)} {state}. Use another version, or publish again.")

    # Old versions

    def gc(self, keep: int) -> list[int]:
        """Remove old versions, files of dead drafts, and old moves; returns the numbers of the removed versions.

        It keeps the current version, the previous one, those that drafts build on, the newest `keep`, and all that
        these build on. It stops if another process publishes or moves the pointer meanwhile; the next gc continues.
        """
        if not self._lock_gc():
            return []
        try:
            removed = self._remove_old(keep)
            for sequence in self._sequences()[:-_MAX_MOVES]:
                self._storage.delete(self._move_file(sequence))
            if self._local:
                self._remove_stale_files()
        finally:
            self._storage.delete(self._gc)
        return removed

    def _lock_gc(self) -> bool:
        """Whether no other gc is running; two at once would interfere."""
        claim = asdict(Claim.for_this_process(0, None, None))
        if create_exclusively(self._storage, self._gc, claim):
            return True
        try:
            if not Claim.read(self._storage, self._gc).is_dead:
                return False
        except StorageError:
            return False  # it has just ended, or the store does not answer: leave it to the next gc
        self._storage.delete(self._gc)
        return create_exclusively(self._storage, self._gc, claim)

    def _remove_old(self, keep: int) -> list[int]:
        before = self._state()
        garbage = self.garbage(keep)
        removed = []
        for number in reversed(garbage.versions):  # deltas before the versions that they build on
            if self._state() != before:  # a publish or a move may need a version that was not needed before
                break
            # They check for the manifest again when they are done, and we check for them again after removing it. So at
            # least one side notices the other and steps back.
            folder = version_folder(self.uri, number)
            manifest = Storage.join(folder, MANIFEST)
            content = self._storage.read(manifest)
            self._storage.delete(manifest)
            if self._state() != before:
                self._storage.put(manifest, content)
                break
            self._storage.delete(folder)
            before.versions.discard(number)
            removed.append(number)
        for number in garbage.drafts:
            self._remove_draft(number)
        return sorted(removed)

    def garbage(self, keep: int) -> Garbage:
        """What `gc` would remove now."""
        if keep < 1:
            raise ArtifactError(f"gc must keep at least 1 version, not {keep}.")
        claims = self._claims()  # before the versions, so that a draft committed meanwhile is among them
        numbers = self.numbers()
        versions = dict(zip(numbers, self._map(self._version_for_gc, numbers), strict=True))
        wanted = set(numbers[-keep:])
        if (pointer := self.current()) is not None:
            wanted |= {pointer.version, *pointer.before[-1:]}
        for number, claim in claims.items():
            if not claim.is_dead:
                wanted |= {number} if claim.parent is None else {number, claim.parent}
        needed: set[int] = set()
        for number in wanted:
            one: int | None = number
            while one is not None and one not in needed:
                needed.add(one)
                version = versions.get(one)
                one = None if version is None else version.parent
        old = [
            version for version in versions.values() if version is not None and version.number not in needed
        ]
        return Garbage(
            tuple(version.number for version in old),
            tuple(self._abandoned_drafts(claims, set(numbers))),
            sum(version.size for version in old),
        )

    def _state(self) -> _State:
        drafts = {name for name in self._storage.names(self._drafts) if not name.startswith(".")}
        return _State(self.current(), drafts, set(_numbers(self._storage.names(self._versions))))

    def _version_for_gc(self, number: int) -> Version | None:
        """A version as gc sees it. If it cannot be read, gc must not remove it, nor what it may build on."""
        try:
            return self._open(number)
        except ArtifactError as error:
            if not self._has_manifest(number):
                return None  # removed by another gc
            raise ArtifactError(
                f"gc cannot tell what version {number} builds on, so nothing was removed: {error}"
            ) from error

    def _claims(self) -> dict[int, Claim]:
        names = self._storage.names(self._drafts)
        numbers = _numbers(name.removesuffix(".json") for name in names if name.endswith(".json"))
        claims = ((number, self._claim(number)) for number in numbers)
        return {number: claim for number, claim in claims if claim is not None}

    def _claim(self, number: int) -> Claim | None:
        place = claim_file(self.uri, number)
        try:
            return Claim.read(self._storage, place)
        except StorageError:
            if self._storage.describe(place) is None:
                return None  # released meanwhile
            raise

    def _abandoned_drafts(self, claims: Mapping[int, Claim], finished: set[int]) -> Iterator[int]:
        folders = {
            *_numbers(self._storage.names(self._drafts)),
            *_numbers(self._storage.names(self._versions)),
        }
        highest = self._highest_number()
        for number in sorted((folders - finished) | claims.keys()):
            claim = claims.get(number)
            if claim is None or (claim.is_dead and not (number == highest and claim.is_released)):
                yield number

    def _remove_draft(self, number: int) -> None:
        claim, place = self._claim(number), claim_file(self.uri, number)
        if claim is not None:
            if not claim.is_dead:
                return
            claim.remove_scratch()
            if number == self._highest_number() and not self._has_manifest(number):
                # Keep the claim, or the number would be used again.
                self._storage.put(place, as_json(asdict(claim.released())))
            else:
                self._storage.delete(place)
        # A commit writes the manifest before it releases the claim: with neither, it was never finished.
        if not self._has_manifest(number):
            self._storage.delete(version_folder(self.uri, number))
        if self._local:
            self._storage.delete(str(draft_folder(self.uri, number)))

    def _remove_stale_files(self) -> None:
        """Remove temporary files of moves and claims that killed processes left."""
        for folder in (self._moves, self._drafts):
            for path in Storage.local_path(folder).glob(".*"):
                with (
                    translate_errors(str(path), redacted),
                    suppress(FileNotFoundError),
                ):  # it was finished meanwhile
                    if (
                        is_temporary_name(path.name)
                        and time.time() - path.stat().st_mtime > _STALE_FILE_SECONDS
                    ):
                        path.unlink()

    # Files

    def _open(self, number: int, trusted: TrustedKeys | None = None) -> Version:
        """ArtifactError: it is missing or damaged. StorageError: the store failed, so nothing is known about it."""
        try:
            return open_version(self._storage, version_folder(self.uri, number), trusted)
        except ArtifactError as error:
            failed = error.__cause__
            if isinstance(failed, StorageError) and self._has_manifest(number):
                raise failed from None
            raise

    def _readable(self, number: int) -> Version | None:
        try:
            return self._open(number, self._trusted)
        except ArtifactError:
            return None

    def _has_manifest(self, number: int) -> bool:
        return self._storage.describe(Storage.join(version_folder(self.uri, number), MANIFEST)) is not None

    def _highest_number(self) -> int:
        """The highest number of any version, draft or move, including removed versions."""
        # Drafts first: a claim is released once its version exists.
        names = [*self._storage.names(self._drafts), *self._storage.names(self._versions)]
        pointer = self.current()
        moved = 0 if pointer is None else pointer.highest
        return max(moved, *_numbers(name.removesuffix(".json") for name in names), 0)

    def _sequences(self) -> list[int]:
        names = self._storage.names(self._moves)
        return _numbers(name.removesuffix(".json") for name in names if name.endswith(".json"))

    def _move_file(self, sequence: int) -> str:
        return Storage.join(self._moves, f"{number_name(sequence)}.json")

    def _read_move(self, sequence: int) -> Move:
        place = self._move_file(sequence)
        content = self._storage.read(place)
        try:
            return validate(Move, {**json.loads(content), "sequence": sequence}, "the move")
        except (ValueError, TypeError, RecursionError, ArtifactError) as error:
            raise ArtifactError(
                f"{redacted(place)} is damaged ({error!r}). Remove it: the previous move is then the last one."
            ) from error

    def _map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        if self._local:
            return [work(item) for item in items]
        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(work, items))

    # Messages

    def _moved_error(self, now: Move | None) -> RegistryMoved:
        state = (
            "there is no current version"
            if now is None
            else f"version {now.version} has been current since {now.at} ({now.reason}; {now.by})"
        )
        return RegistryMoved(
            f"another process moved the pointer of {redacted(self.uri)} meanwhile: {state}. Check and try again."
        )

    def _existing(self) -> str:
        numbers = self.numbers()
        if not numbers:
            return "It has none yet: `clickline publish` creates one."
        listed = ", ".join(map(str, numbers[-20:]))
        return f"It has {'… ' if len(numbers) > 20 else ''}{listed}."


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def _history(after: Move | None, number: int) -> tuple[int, ...]:
    """The versions to roll back to from `number`. Returning to one drops those that came after it."""
    if after is None:
        return ()
    history = (*after.before, after.version)
    if number in history:
        return history[: history.index(number)]
    return history[-_MAX_HISTORY:]


def _user_and_host() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without user names
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _copy_name(version: Version) -> str:
    """A name unique to the version: another registry may have used the same number."""
    return f"{number_name(version.number)}-{fingerprint(document_of(version.manifest))}"
