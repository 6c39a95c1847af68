"""The registry: versions, and the pointer to the current one, on local disk or in any store.

<registry>/versions/000000012/     see version.py
<registry>/moves/000000017.json    each move of the pointer; the highest number is where it points now
<registry>/gc.json                 while somebody cleans up

A move is a file that can be created only once, so of two publishers that saw the same pointer one moves it and the
other is told. The files are the history too, and servers learn the current version from one listing.
"""

from __future__ import annotations

import fcntl
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
from contextlib import contextmanager, suppress
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
    created_once,
    draft_folder,
    local_folder,
    number_name,
    open_version,
    utc_now,
    verify,
    version_folder,
    wrong_files,
)
from clickline.errors import ArtifactError, RegistryMoved, StorageError, VersionUntrusted
from clickline.storage.atomic import hidden_name, is_hidden_name, sync
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import explained

if TYPE_CHECKING:
    from clickline.artifacts.signing import Trusted

_KEPT_MOVES = 100
_TRAIL = 100  # versions that a move remembers to have been current before
_LEFTOVER_SECONDS = 3600.0  # nobody takes that long to write a small file
_REQUESTS = 8  # at once, to a store far away
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
    pinned: bool = False  # publishes leave the pointer alone
    by: str = ""
    before: tuple[int, ...] = ()  # versions to go back to, the last one first to be taken
    highest: int = 0  # of all versions that any move has named

    @property
    def previous(self) -> int | None:
        """The version that was current before this one."""
        return self.before[-1] if self.before else None


@dataclass(frozen=True)
class Garbage:
    """What gc removes, or would."""

    versions: tuple[int, ...]
    drafts: tuple[int, ...]  # numbers of versions that were never finished
    size: int  # bytes of the versions


@dataclass(frozen=True)
class _Seen:
    """What others change when they publish or move."""

    pointer: Move | None
    drafts: set[str]
    versions: set[int]


class Registry:
    """Versions and the pointer to the current one. Safe under several processes and machines."""

    def __init__(self, storage: Storage, uri: str, trusted: Trusted | None = None) -> None:
        """`trusted`: versions that none of these keys has signed are refused; only `gc` judges them too."""
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
        """Take the next number for a version to be made; gc leaves `parent` alone meanwhile.

        The files are made within a local registry, else in a new folder in `scratch` (by default where the system
        keeps temporary files).
        """
        folder = None
        if not self._local:
            folder = (scratch or Path(tempfile.gettempdir())) / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
        number = self._highest()
        while True:
            number += 1
            claim = Claim.ours(number, parent, folder)
            if not created_once(self._storage, claim_file(self.uri, number), asdict(claim)):
                continue
            # Between our look and our claim another draft may have taken the number, become a version and given
            # its claim back.
            newest = max(_numbers(self._storage.names(self._versions)), default=0)
            if newest < number:
                return Draft(self._storage, self.uri, claim)
            self._storage.delete(claim_file(self.uri, number))
            number = newest

    def numbers(self) -> list[int]:
        """The numbers of all versions, rising; whether their manifests can be read is not looked at."""
        found = self._storage.list(Storage.inside(self._versions, f"*/{MANIFEST}"))
        return _numbers(file.uri.split("/")[-2] for file in found)

    def versions(self) -> list[Version]:
        """All versions whose manifests can be read and trusted, by number."""
        return [version for version in self._each(self._readable, self.numbers()) if version is not None]

    def version(self, number: int) -> Version:
        """One version; ArtifactError tells which there are when it is not among them."""
        try:
            return self._open(number, self._trusted)
        except ArtifactError:
            if self._has_manifest(number):
                raise
            raise ArtifactError(f"{shown(self.uri)} has no version {number}. {self._there()}") from None

    def chain(self, version: Version) -> list[Version]:
        """The version and all that its table builds on, base first."""
        chain = [version]
        while (parent := chain[-1].parent) is not None:  # a parent's number is lower, so this ends
            try:
                chain.append(self._open(parent, self._trusted))
            except VersionUntrusted as error:
                raise VersionUntrusted(
                    f"version {version.number} cannot be used, because of a version on which it builds: {error}"
                ) from error
            except ArtifactError as error:
                raise ArtifactError(
                    f"version {version.number} cannot be used: version {parent}, on which it builds, is gone or "
                    f"damaged ({error})"
                ) from error
        return chain[::-1]

    def check(self, version: Version) -> None:
        """Refuse a version that lacks a file, or builds on one that does. Sizes are compared, no content."""
        for one in self.chain(version):
            wrong = wrong_files(self._storage, one.folder, one.files)
            if wrong:
                raise ArtifactError(f"version {version.number} is not whole: {wrong}. Use another version.")

    def check_trust(self) -> None:
        """Refuse when the current version, or one on which it builds, is not signed by a trusted key. A store that does
        not answer, and a version that is damaged, say nothing about that."""
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
        """Where the pointer is; None before the first move. One listing, when it has not moved since."""
        sequences = self._sequences()
        if not sequences:
            return None
        last = self._last
        if last is None or last.sequence != sequences[-1]:
            last = self._last = self._read_move(sequences[-1])
        return last

    def moves(self) -> list[Move]:
        """The history, oldest first, as far as gc has left it."""
        return self._each(self._read_move, self._sequences())

    def move(self, number: int, reason: str, *, after: Move | None, pinned: bool = False) -> Move:
        """Make a version the current one if the pointer is still at `after`; RegistryMoved when it is not."""
        chain = [version.number for version in self.chain(self.version(number))]
        now = self.current()
        if now != after:
            raise self._moved(now)
        made = Move(
            sequence=1 if after is None else after.sequence + 1,
            version=number,
            reason=reason,
            at=utc_now(),
            pinned=pinned,
            by=_who(),
            before=_trail(after, number),
            highest=max(number, 0 if after is None else after.highest),
        )
        if not created_once(self._storage, self._move_file(made.sequence), asdict(made)):
            raise self._moved(self.current())
        if not all(self._each(self._has_manifest, chain)):  # gc had chosen one of them just before
            if after is not None:
                self.move(after.version, f"version {number} is gone", after=made, pinned=after.pinned)
            raise ArtifactError(
                f"version {number}, or one on which it builds, was removed meanwhile. {self._there()}"
            )
        return made

    # Local copies

    def fetch(self, version: Version, into: Path) -> Path:
        """A local folder with the version's files: its own where the registry is local, else a copy in `into`.

        A copy is made once, by whichever process comes first; it is seen whole or not at all, and the checksums
        of its files were right when it was made.
        """
        if self._local:
            return local_folder(version.folder)
        folder = into / _copy_name(version)
        if not folder.is_dir():
            with explained(str(folder), shown):
                into.mkdir(parents=True, exist_ok=True)
                with _locked(into / ".lock"):
                    if not folder.is_dir():  # another process may have been faster
                        self._download(version, folder)
        return folder

    @staticmethod
    def verify(version: Version, folder: Path) -> None:
        """Check size and SHA-256 of every file of a version in a local folder; ArtifactError names the bad one."""
        verify(version, folder)

    def forget(self, into: Path, keep: Iterable[Version]) -> None:
        """Remove the copies in `into` of all versions but these, unless one is being fetched right now.

        Files that somebody has mapped live on until unmapped; a copy that somebody is about to open must be kept.
        """
        kept = {_copy_name(version) for version in keep}
        with (
            explained(str(into), shown),
            suppress(FileNotFoundError, BlockingIOError),
            _locked(into / ".lock", fcntl.LOCK_NB),
        ):
            for folder in into.iterdir():
                if _COPY.fullmatch(folder.name) and folder.name not in kept:
                    if not folder.name.startswith("."):  # by a rename first: nobody finds half of it
                        folder = folder.rename(into / hidden_name(folder.name))
                    shutil.rmtree(folder)

    def _download(self, version: Version, folder: Path) -> None:
        hidden = folder.with_name(hidden_name(folder.name))
        hidden.mkdir()
        try:
            self._each(lambda name: self._download_file(version, name, hidden / name), version.files)
            write_manifest(Storage(), str(hidden), "version", VERSION_FORMAT, version.body)
            sync(hidden)
            hidden.rename(folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def _download_file(self, version: Version, name: str, path: Path) -> None:
        told = version.files[name]
        uri = Storage.join(version.folder, name)
        file = self._storage.describe(uri)
        sha256 = hashlib.sha256()
        if file is not None and file.size == told["size"]:
            with path.open("wb") as copy:
                for piece in self._storage.stream(file):
                    copy.write(piece)
                    sha256.update(piece)
                copy.flush()
                os.fsync(copy.fileno())
        if sha256.hexdigest() != told["sha256"]:
            state = "is gone" if file is None else "is damaged: its size or SHA-256 is not the manifest's"
            raise ArtifactError(f"{shown(uri)} {state}. Use another version, or publish again.")

    # Old versions

    def gc(self, keep: int) -> list[int]:
        """Remove old versions, what dead drafts left, and old moves; the numbers of the versions removed.

        Kept are the current version, the one before it, those that drafts build on, the newest `keep`, and
        whatever these build on. It stops where somebody publishes or moves meanwhile; the next one goes on.
        """
        if not self._take_gc():
            return []
        try:
            removed = self._remove_old(keep)
            for sequence in self._sequences()[:-_KEPT_MOVES]:
                self._storage.delete(self._move_file(sequence))
            if self._local:
                self._remove_leftovers()
        finally:
            self._storage.delete(self._gc)
        return removed

    def _take_gc(self) -> bool:
        """Whether nobody else cleans up now; two at once would get in each other's way."""
        claim = asdict(Claim.ours(0, None, None))
        if created_once(self._storage, self._gc, claim):
            return True
        try:
            if not Claim.read(self._storage, self._gc).dead:
                return False
        except StorageError:
            return False  # done this moment, or out of reach: the next one will see
        self._storage.delete(self._gc)
        return created_once(self._storage, self._gc, claim)

    def _remove_old(self, keep: int) -> list[int]:
        seen = self._seen()
        garbage = self.garbage(keep)
        removed = []
        for number in reversed(garbage.versions):  # those that build on others first
            if self._seen() != seen:  # by a publish or a move that may need what nobody needed before
                break
            # They look for the manifest once more when they are done, and we look for them once more when it is
            # removed. So at least one sees the other, and steps back.
            version = self._open(number)
            self._storage.delete(Storage.join(version.folder, MANIFEST))
            if self._seen() != seen:
                write_manifest(self._storage, version.folder, "version", VERSION_FORMAT, version.body)
                break
            self._storage.delete(version.folder)
            seen.versions.discard(number)
            removed.append(number)
        for number in garbage.drafts:
            self._remove_draft(number)
        return sorted(removed)

    def garbage(self, keep: int) -> Garbage:
        """What `gc` would remove now."""
        if keep < 1:
            raise ArtifactError(f"gc has to keep 1 version at least, not {keep}.")
        claims = self._claims()  # first: a draft that is committed meanwhile is then among the versions
        numbers = self.numbers()
        versions = dict(zip(numbers, self._each(self._known, numbers), strict=True))
        wanted = set(numbers[-keep:])
        if (pointer := self.current()) is not None:
            wanted |= {pointer.version, *pointer.before[-1:]}
        for number, claim in claims.items():
            if not claim.dead:
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
            tuple(self._dead_drafts(claims, set(numbers))),
            sum(version.size for version in old),
        )

    def _seen(self) -> _Seen:
        drafts = {name for name in self._storage.names(self._drafts) if not name.startswith(".")}
        return _Seen(self.current(), drafts, set(_numbers(self._storage.names(self._versions))))

    def _known(self, number: int) -> Version | None:
        """A version that gc must judge. One it cannot read it must not remove, nor what that may build on."""
        try:
            return self._open(number)
        except ArtifactError as error:
            if not self._has_manifest(number):
                return None  # removed by another gc
            raise ArtifactError(
                f"gc cannot know what version {number} builds on, so nothing is removed: {error}"
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
                return None  # given back
            raise

    def _dead_drafts(self, claims: Mapping[int, Claim], finished: set[int]) -> Iterator[int]:
        folders = {
            *_numbers(self._storage.names(self._drafts)),
            *_numbers(self._storage.names(self._versions)),
        }
        highest = self._highest()
        for number in sorted((folders - finished) | claims.keys()):
            claim = claims.get(number)
            if claim is None or (claim.dead and not (number == highest and claim.is_ended)):
                yield number

    def _remove_draft(self, number: int) -> None:
        claim, place = self._claim(number), claim_file(self.uri, number)
        if claim is not None:
            if not claim.dead:
                return
            claim.remove_scratch()
            if number == self._highest() and not self._has_manifest(number):
                # Only the number stays taken, or it would be given out again.
                self._storage.put(place, as_json(asdict(claim.ended())))
            else:
                self._storage.delete(place)
        # A commit writes its manifest before it gives its claim back: without both it was never finished.
        if not self._has_manifest(number):
            self._storage.delete(version_folder(self.uri, number))
        if self._local:
            self._storage.delete(str(draft_folder(self.uri, number)))

    def _remove_leftovers(self) -> None:
        """Moves and claims that killed processes were about to make."""
        for folder in (self._moves, self._drafts):
            for path in local_folder(folder).glob(".*"):
                with explained(str(path), shown), suppress(FileNotFoundError):  # it was finished meanwhile
                    if is_hidden_name(path.name) and time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                        path.unlink()

    # Files

    def _open(self, number: int, trusted: Trusted | None = None) -> Version:
        """ArtifactError: it is gone or damaged. StorageError: the store failed, which says nothing about it."""
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

    def _highest(self) -> int:
        """The highest number that a version, a draft or a move has, also of versions that are gone."""
        # Drafts first: a claim is given back when the version is there.
        names = [*self._storage.names(self._drafts), *self._storage.names(self._versions)]
        pointer = self.current()
        told = 0 if pointer is None else pointer.highest
        return max(told, *_numbers(name.removesuffix(".json") for name in names), 0)

    def _sequences(self) -> list[int]:
        names = self._storage.names(self._moves)
        return _numbers(name.removesuffix(".json") for name in names if name.endswith(".json"))

    def _move_file(self, sequence: int) -> str:
        return Storage.join(self._moves, f"{number_name(sequence)}.json")

    def _read_move(self, sequence: int) -> Move:
        place = self._move_file(sequence)
        content = self._storage.read(place)
        try:
            told = json.loads(content)
            move = Move(
                sequence,
                int(told["version"]),
                str(told["reason"]),
                str(told["at"]),
                bool(told["pinned"]),
                str(told["by"]),
                tuple(int(number) for number in told["before"]),
                int(told["highest"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ArtifactError(
                f"{shown(place)} is damaged ({error!r}). Remove it: the move before it is then the last one."
            ) from error
        return move

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        if self._local:
            return [work(item) for item in items]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(work, items))

    # Words

    def _moved(self, now: Move | None) -> RegistryMoved:
        found = (
            "there is no current version"
            if now is None
            else f"version {now.version} is current since {now.at} ({now.reason}; {now.by})"
        )
        return RegistryMoved(
            f"somebody else moved the pointer of {shown(self.uri)} meanwhile: {found}. Look again."
        )

    def _there(self) -> str:
        numbers = self.numbers()
        if not numbers:
            return "It has none yet: `clickline publish` makes one."
        listed = ", ".join(map(str, numbers[-20:]))
        return f"There {'is' if len(numbers) == 1 else 'are'} {'… ' if len(numbers) > 20 else ''}{listed}."


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def _trail(after: Move | None, number: int) -> tuple[int, ...]:
    """The versions to go back to from `number`. Going back to one forgets those that came after it."""
    if after is None:
        return ()
    trail = (*after.before, after.version)
    if number in trail:
        return trail[: trail.index(number)]
    return trail[-_TRAIL:]


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without names for its users
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _copy_name(version: Version) -> str:
    """Says which version, of whichever registry: another one may have used the number."""
    return f"{number_name(version.number)}-{fingerprint(version.body)}"


@contextmanager
def _locked(path: Path, option: int = 0) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | option)
        yield
    finally:
        os.close(handle)
