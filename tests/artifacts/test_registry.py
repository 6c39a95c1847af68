"""The registry on local disk: drafts, versions, the pointer and its history."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from clickline.artifacts.registry import Move, Registry
from clickline.artifacts.version import Draft, Version, VersionFile, verify
from clickline.errors import ArtifactError, RegistryMoved, StorageError
from clickline.storage.storage import Storage
from version_manifests import version_manifest


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Storage(), str(tmp_path / "registry"))


def fill(draft: Draft, **files: bytes) -> Draft:
    for name, content in (files or {"table": b"rows of " + str(draft.number).encode()}).items():
        (draft.folder / f"{name}.bin").write_bytes(content)
    return draft


def publish(registry: Registry, parent: int | None = None, **files: bytes) -> Version:
    with fill(registry.draft(parent), **files) as draft:
        return draft.commit(version_manifest(parent))


# ── drafts and versions ────────────────────────────────────────────────────────────────────────


def test_commit_creates_a_version_from_the_files(registry: Registry) -> None:
    with fill(registry.draft(), table=b"rows", dense=b"weights") as draft:
        assert registry.versions() == []
        version = draft.commit(version_manifest(table_precision="int8"))
    assert [one.number for one in registry.versions()] == [version.number] == [1]
    assert version == registry.version(1)
    assert version.files == {
        "dense.bin": VersionFile(hashlib.sha256(b"weights").hexdigest(), 7),
        "table.bin": VersionFile(hashlib.sha256(b"rows").hexdigest(), 4),
    }
    assert (version.parent, version.size, version.manifest.table_precision) == (None, 11, "int8")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", version.created)
    folder = registry.fetch(version, Path("/nowhere"))
    assert folder == Path(registry.uri, "versions", "000000001")
    verify(version, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["dense.bin", "manifest.json", "table.bin"]
    assert list(Path(registry.uri, "drafts").iterdir()) == []


def test_known_checksums_are_not_computed_again(registry: Registry) -> None:
    with fill(registry.draft(), table=b"rows") as draft:
        version = draft.commit(version_manifest(), {"table.bin": "5" * 64})
    assert version.files["table.bin"] == VersionFile("5" * 64, 4)
    with (
        fill(registry.draft()) as draft,
        pytest.raises(ArtifactError, match=r"has no file tabel\.bin, whose"),
    ):
        draft.commit(version_manifest(), {"tabel.bin": "5" * 64})


def test_commit_sets_number_time_and_files(registry: Registry) -> None:
    with fill(registry.draft()) as draft:
        version = draft.commit(version_manifest(number=77, created="yesterday"))
    assert version.number == 1
    assert version.created.startswith("20")
    assert list(version.files) == ["table.bin"]


def test_abandoned_draft_leaves_only_its_claim(registry: Registry) -> None:
    with fill(registry.draft()) as draft:
        pass
    assert registry.versions() == []
    assert not draft.folder.exists()
    with pytest.raises(ZeroDivisionError), fill(registry.draft()):
        _ = 1 / 0
    assert publish(registry).number == 3
    assert registry.gc(1) == []
    assert list(Path(registry.uri, "drafts").iterdir()) == []
    assert publish(registry).number == 4


def test_concurrent_drafts_get_different_numbers(registry: Registry) -> None:
    first, second = fill(registry.draft()), fill(registry.draft())
    assert (first.number, second.number) == (1, 2)
    second.commit(version_manifest())
    assert [one.number for one in registry.versions()] == [2]
    first.commit(version_manifest())
    assert [one.number for one in registry.versions()] == [1, 2]


@pytest.mark.parametrize("name", ["manifest.json", "_hidden", ".hidden", "with space", "folder/"])
def test_invalid_file_names_are_refused(registry: Registry, name: str) -> None:
    with fill(registry.draft()) as draft:
        if name.endswith("/"):
            (draft.folder / name).mkdir()
        else:
            (draft.folder / name).touch()
        with pytest.raises(ArtifactError, match="cannot be part of a version: its files are in one folder"):
            draft.commit(version_manifest())
    assert registry.versions() == []


@pytest.mark.parametrize("parent", [2, 7, 0, -1])
def test_parent_must_be_an_earlier_version(registry: Registry, parent: int) -> None:
    publish(registry)
    with fill(registry.draft()) as draft, pytest.raises(ArtifactError, match="it is not an earlier version"):
        draft.commit(version_manifest(parent))
    assert [one.number for one in registry.versions()] == [1]


def test_parent_must_exist(registry: Registry) -> None:
    publish(registry), publish(registry)
    Path(registry.uri, "versions", "000000001", "manifest.json").unlink()
    gone = pytest.raises(ArtifactError, match="version 3 builds on version 1, which is missing or damaged")
    with fill(registry.draft(parent=1)) as draft, gone:
        draft.commit(version_manifest(1))
    assert [one.number for one in registry.versions()] == [2]


def test_registry_uri_may_be_a_file_uri_or_contain_glob_characters(tmp_path: Path) -> None:
    for uri in (f"file://{tmp_path}/a", f"{tmp_path}/b [1]*"):
        registry = Registry(Storage(), uri)
        version = publish(registry)
        registry.move(1, "first", after=None)
        assert [one.number for one in registry.versions()] == [1]
        verify(version, registry.fetch(version, tmp_path))
        registry.check(version)
        assert registry.gc(1) == []


# ── chains ─────────────────────────────────────────────────────────────────────────────────────


def test_chain_begins_with_the_base(registry: Registry) -> None:
    publish(registry), publish(registry, parent=1), publish(registry), publish(registry, parent=2)
    assert [one.number for one in registry.chain(registry.version(4))] == [1, 2, 4]
    assert [one.number for one in registry.chain(registry.version(3))] == [3]


def test_chain_with_a_gap_is_refused(registry: Registry) -> None:
    publish(registry), publish(registry, parent=1), publish(registry, parent=2)
    Storage().delete(f"{registry.uri}/versions/000000001")
    with pytest.raises(
        ArtifactError, match=r"version 3 cannot be used: version 1, which it builds on, is missing"
    ):
        registry.chain(registry.version(3))


def test_cyclic_chain_is_refused(registry: Registry) -> None:
    publish(registry), publish(registry, parent=1)
    edit(registry, 1, parent=2)
    with pytest.raises(
        ArtifactError, match=r"version 2 cannot be used: version 1.* its parent is 2, which is no"
    ):
        registry.chain(registry.version(2))


# ── damage ─────────────────────────────────────────────────────────────────────────────────────


def edit(registry: Registry, number: int, /, **changes: Any) -> None:
    manifest = Path(registry.uri, "versions", f"{number:09d}", "manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


@pytest.mark.parametrize(
    "change",
    [{"rows": "1"}, {"rows": 1.0}, {"rows": True}, {"config": 1}, {"width": None}, {"logit_shift": "0"}],
)
def test_values_of_a_manifest_are_not_converted(registry: Registry, change: dict[str, Any]) -> None:
    publish(registry)
    edit(registry, 1, **change)
    with pytest.raises(ArtifactError, match=f"is invalid: {next(iter(change))}: Input should be a valid"):
        registry.version(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a manifest"),
        (b'{"kind": "version", "form', "is not a manifest"),
        (b"[" * 100_000, "is not a manifest"),
        (b"[]", "has kind None"),
        (b'{"kind": "dataset", "format": 1}', "has kind 'dataset'"),
        (b'{"kind": "version", "format": 1}', "format 1; this release reads"),
        (b'{"kind": "version", "format": 3}', r"is invalid: number: Field required \(22 in all\)"),
    ],
)
def test_damaged_manifest_is_not_a_version(registry: Registry, content: bytes, message: str) -> None:
    publish(registry), publish(registry)
    registry.move(1, "first", after=None)
    Path(registry.uri, "versions", "000000002", "manifest.json").write_bytes(content)
    assert [one.number for one in registry.versions()] == [1]
    with pytest.raises(ArtifactError, match=message):
        registry.version(2)
    with pytest.raises(ArtifactError, match=message):
        registry.move(2, "second", after=registry.current())
    with pytest.raises(
        ArtifactError, match="gc cannot tell what version 2 builds on, so nothing was removed"
    ):
        registry.gc(1)
    current = registry.current()
    assert current is not None
    assert current.version == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 2},
        {"parent": "x"},
        {"created": None},
        {"files": []},
        {"files": {"../../escaped": {"size": 1, "sha256": "0"}}},
        {"files": {"/etc/passwd": {"size": 1, "sha256": "0"}}},
        {"files": {"a": {"size": "x", "sha256": "0"}}},
        {"files": {"a": {"size": 1}}},
    ],
)
def test_manifest_with_invalid_values_is_refused(registry: Registry, changes: dict[str, Any]) -> None:
    publish(registry)
    edit(registry, 1, **changes)
    with pytest.raises(
        ArtifactError, match=r"manifest\.json is (damaged: .*Use another version|invalid: .*create it again)"
    ):
        registry.version(1)


def test_verify_names_the_damaged_file(registry: Registry) -> None:
    version = publish(registry, first=b"1" * 100, second=b"2" * 100)
    folder = registry.fetch(version, Path())
    bad = folder / "second.bin"
    for content, message in (
        (b"2" * 99, r"second\.bin has 99 bytes; the manifest of version 1 says 100"),
        (
            b"2" * 99 + b"3",
            r"second\.bin is damaged: its SHA-256 is [0-9a-f]{12}…, the manifest of version 1 says",
        ),
        (None, r"second\.bin of version 1 cannot be read: No such file"),
    ):
        bad.unlink() if content is None else bad.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            registry.verify(version, folder)


def test_check_includes_all_versions_that_a_version_builds_on(registry: Registry) -> None:
    publish(registry), publish(registry, parent=1), publish(registry, parent=2)
    registry.check(registry.version(3))
    (Path(registry.uri, "versions", "000000001") / "table.bin").write_bytes(b"")
    with pytest.raises(
        ArtifactError, match=r"version 3 is incomplete: .*000000001/table\.bin has 0 bytes, its"
    ):
        registry.check(registry.version(3))
    (Path(registry.uri, "versions", "000000001") / "table.bin").unlink()
    with pytest.raises(ArtifactError, match=r"version 3 is incomplete: .*000000001/table\.bin is missing"):
        registry.check(registry.version(3))


def test_unknown_number_is_refused_with_the_existing_ones(registry: Registry) -> None:
    with pytest.raises(
        ArtifactError, match=r"registry has no version 1\. It has none yet: `clickline publish`"
    ):
        registry.version(1)
    publish(registry)
    with pytest.raises(ArtifactError, match=r"has no version 9\. It has 1\."):
        registry.version(9)
    for _ in range(21):
        publish(registry)
    with pytest.raises(ArtifactError, match=r"has no version 99\. It has … 3, 4, .*, 22\."):
        registry.version(99)


# ── the pointer ────────────────────────────────────────────────────────────────────────────────


def test_moves_are_the_pointer_and_its_history(registry: Registry) -> None:
    assert registry.current() is None
    assert registry.moves() == []
    publish(registry), publish(registry)
    first = registry.move(1, "first", after=None)
    second = registry.move(2, "better", after=first)
    assert registry.current() == second
    assert registry.moves() == [first, second]
    assert Registry(Storage(), registry.uri).moves() == [first, second]
    assert [path.name for path in sorted(Path(registry.uri, "moves").iterdir())] == [
        "000000001.json",
        "000000002.json",
    ]
    assert (second.sequence, second.version, second.reason, second.pinned) == (2, 2, "better", False)
    assert re.fullmatch(r".+@.+", second.by)
    assert second.at >= first.at > "2026"


def test_move_is_refused_if_the_pointer_has_moved(registry: Registry) -> None:
    publish(registry), publish(registry), publish(registry)
    with pytest.raises(RegistryMoved, match="there is no current version"):
        registry.move(1, "r", after=Move(1, 1, "r", "t", False, "", (), 1))
    first = registry.move(1, "first", after=None)
    second = registry.move(2, "second", after=first)
    message = r"another process moved the pointer of .*: version 2 has been current since .* \(second; .+@.+\)\. Check"
    with pytest.raises(RegistryMoved, match=message):
        registry.move(3, "third", after=first)
    with pytest.raises(RegistryMoved, match=message):
        registry.move(3, "third", after=None)
    assert registry.current() == second


def test_pointer_moves_only_to_versions(registry: Registry) -> None:
    publish(registry)
    draft = registry.draft()
    with pytest.raises(ArtifactError, match=r"has no version 2\. It has 1"):
        registry.move(draft.number, "too early", after=None)
    assert registry.current() is None


def test_repeated_rollback_goes_further_back(registry: Registry) -> None:
    for _ in range(5):
        publish(registry)
    now = None
    for number in (1, 2, 3, 4):
        now = registry.move(number, "publish", after=now)
    assert now is not None
    visited = []
    while now.previous is not None:
        now = registry.move(now.previous, "rollback", after=now)
        visited.append(now.version)
    assert visited == [3, 2, 1]
    now = registry.move(5, "publish", after=now)
    assert now.previous == 1, "never to a version that was rolled back"
    now = registry.move(5, "pin", after=now, pinned=True)
    assert now.previous == 1
    assert registry.move(3, "forward", after=now).previous == 5


def test_damaged_move_is_reported(registry: Registry) -> None:
    publish(registry)
    move = registry.move(1, "first", after=None)
    torn = Path(registry.uri, "moves", "000000002.json")
    for content in (b"", b"{}", b'{"version": "x"}', b"[1]"):
        torn.write_bytes(content)
        with pytest.raises(
            ArtifactError, match=r"000000002\.json is damaged \(.+\)\. Remove it: the previous move"
        ):
            Registry(Storage(), registry.uri).current()
    torn.unlink()
    assert registry.current() == move


def test_other_files_are_ignored(registry: Registry) -> None:
    publish(registry)
    move = registry.move(1, "first", after=None)
    for name in ("moves/README", "moves/.000000009.json.0123456789abcdef", "moves/9.json", "versions/old"):
        path = Path(registry.uri, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert registry.current() == move
    assert registry.numbers() == [1]
    assert publish(registry).number == 2


def test_numbers_are_not_reused_while_moves_name_them(registry: Registry) -> None:
    now = None
    for _ in range(3):
        now = registry.move(publish(registry).number, "publish", after=now)
    registry.move(1, "rollback", after=now)
    Storage().delete(f"{registry.uri}/versions/000000003")  # by hand
    Storage().delete(f"{registry.uri}/versions/000000002")
    assert publish(registry).number == 4


def test_poll_reads_a_move_only_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry), publish(registry)
    move = registry.move(1, "first", after=None)
    server = Registry(Storage(), registry.uri)
    assert server.current() == move
    reads: list[str] = []
    real = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, uri: reads.append(uri) or real(self, uri))
    for _ in range(3):
        assert server.current() == move
    assert reads == []
    second = registry.move(2, "second", after=move)
    reads.clear()
    assert server.current() == second
    assert len(reads) == 1


def test_version_removed_during_a_move_moves_the_pointer_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gc of another process decides before the move and removes after it."""
    publish(registry), publish(registry)
    first = registry.move(2, "first", after=None)
    real = Storage.create

    def gc_then_create(self: Storage, uri: str, data: bytes) -> bool:
        Path(registry.uri, "versions", "000000001", "manifest.json").unlink(missing_ok=True)
        return real(self, uri, data)

    monkeypatch.setattr(Storage, "create", gc_then_create)
    with pytest.raises(ArtifactError, match=r"version 1, .* was removed meanwhile\. It has 2\."):
        registry.move(1, "back", after=first)
    assert [(m.version, m.reason) for m in registry.moves()] == [
        (2, "first"),
        (1, "back"),
        (2, "version 1 is gone"),
    ]


# ── gc ─────────────────────────────────────────────────────────────────────────────────────────


def numbers_after_gc(registry: Registry, keep: int) -> list[int]:
    before = registry.numbers()
    garbage = registry.garbage(keep)
    removed = registry.gc(keep)
    assert removed == list(garbage.versions)
    assert sorted([*removed, *registry.numbers()]) == before
    return registry.numbers()


def test_gc_keeps_the_newest(registry: Registry) -> None:
    for _ in range(5):
        publish(registry)
    assert numbers_after_gc(registry, 9) == [1, 2, 3, 4, 5]
    assert numbers_after_gc(registry, 2) == [4, 5]
    assert numbers_after_gc(registry, 1) == [5]
    assert not Path(registry.uri, "versions", "000000004").exists()
    with pytest.raises(ArtifactError, match="gc must keep at least 1 version, not 0"):
        registry.gc(0)


def test_gc_keeps_the_current_and_the_previous_version(registry: Registry) -> None:
    now = None
    for number in range(1, 9):
        publish(registry)
        if number in (2, 4):
            now = registry.move(number, "publish", after=now)
    assert numbers_after_gc(registry, 1) == [2, 4, 8]
    registry.move(4, "pin", after=now, pinned=True)
    assert numbers_after_gc(registry, 1) == [2, 4, 8]


def test_gc_keeps_everything_that_kept_versions_build_on(registry: Registry) -> None:
    publish(registry), publish(registry, parent=1), publish(registry, parent=2)  # 3: current
    publish(registry), publish(registry, parent=4)  # not needed
    publish(registry), publish(registry, parent=6), publish(registry, parent=7)  # 8: newest
    publish(registry, parent=2)
    registry.move(3, "publish", after=None)
    assert numbers_after_gc(registry, 2) == [1, 2, 3, 6, 7, 8, 9]
    for version in registry.versions():
        registry.check(version)


def test_gc_removes_deltas_before_their_bases(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry), publish(registry, parent=1), publish(registry, parent=2), publish(registry)
    real, left = Storage.delete, []

    def watched(self: Storage, uri: str) -> None:
        real(self, uri)
        for version in registry.versions():
            registry.check(version)
        left.append(registry.numbers())

    monkeypatch.setattr(Storage, "delete", watched)
    assert registry.gc(1) == [1, 2, 3]
    assert [now for n, now in enumerate(left) if n == 0 or now != left[n - 1]] == [[1, 2, 4], [1, 4], [4]]


def test_gc_keeps_what_a_draft_builds_on(registry: Registry) -> None:
    for _ in range(4):
        publish(registry)
    draft = fill(registry.draft(parent=2))
    assert numbers_after_gc(registry, 1) == [2, 4]
    assert draft.commit(version_manifest(2)).parent == 2
    assert numbers_after_gc(registry, 1) == [2, 5]


def test_gc_keeps_live_drafts(registry: Registry) -> None:
    publish(registry)
    draft = fill(registry.draft())
    age(registry, draft.number, seconds=7200, machine=None)
    assert registry.garbage(1).drafts == ()
    registry.gc(1)
    assert draft.commit(version_manifest()).number == 2


def age(registry: Registry, number: int, *, seconds: float, machine: str | None) -> None:
    """Make a draft's claim look older, and as if from another machine."""
    file = Path(registry.uri, "drafts", f"{number:09d}.json")
    claim = json.loads(file.read_text())
    file.write_text(
        json.dumps({**claim, "since": time.time() - seconds, "machine": machine or claim["machine"]})
    )


@pytest.mark.parametrize("later", [False, True], ids=["newest number", "others after it"])
def test_draft_of_another_machine_is_dead_after_an_hour(registry: Registry, later: bool) -> None:
    draft = fill(registry.draft())
    if later:
        publish(registry)
    age(registry, draft.number, seconds=3000, machine="another")
    assert registry.garbage(1).drafts == ()
    age(registry, draft.number, seconds=4000, machine="another")
    assert registry.garbage(1).drafts == (1,)
    registry.gc(1)
    assert not draft.folder.exists()
    assert registry.garbage(1).drafts == ()
    draft.folder.mkdir()
    fill(draft)
    with pytest.raises(
        ArtifactError, match=r"was inactive for so long that `clickline versions gc` removed it"
    ):
        draft.commit(version_manifest())
    draft.abandon()
    assert publish(registry).number == (3 if later else 2)


def test_gc_removes_leftovers_of_a_killed_gc(registry: Registry) -> None:
    publish(registry), publish(registry)
    Path(registry.uri, "versions", "000000001", "manifest.json").unlink()
    assert registry.garbage(1).drafts == (1,)
    registry.gc(1)
    assert [path.name for path in Path(registry.uri, "versions").iterdir()] == ["000000002"]


@pytest.mark.parametrize("by", ["a move", "a draft that builds on it"])
def test_gc_restores_a_version_that_becomes_needed_at_the_last_moment(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    for _ in range(3):
        publish(registry)
    now = registry.move(3, "publish", after=None)
    other = Registry(Storage(), registry.uri)
    real, done = Storage.delete, []

    def others_first(self: Storage, uri: str) -> None:
        if uri.endswith("000000001/manifest.json") and not done:
            done.append(uri)
            if by == "a move":
                other.move(1, "rollback", after=now)
            else:
                publish(other, parent=1)
        real(self, uri)

    monkeypatch.setattr(Storage, "delete", others_first)
    assert registry.gc(1) == [2]
    assert done
    monkeypatch.undo()
    kept = other.version(1 if by == "a move" else 4)
    other.check(kept)
    registry.gc(1)
    other.check(kept)


def test_gc_stops_when_the_pointer_moves(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        publish(registry)
    now = registry.move(4, "publish", after=None)
    real = Registry.garbage

    def then_move(self: Registry, keep: int) -> Any:
        found = real(self, keep)
        Registry(Storage(), registry.uri).move(1, "rollback", after=now)
        return found

    monkeypatch.setattr(Registry, "garbage", then_move)
    assert registry.gc(1) == []
    monkeypatch.undo()
    assert numbers_after_gc(registry, 1) == [1, 4]


def test_gc_prunes_old_moves_but_keeps_the_history_they_hold(registry: Registry) -> None:
    publish(registry), publish(registry), publish(registry)
    now = registry.move(3, "publish", after=registry.move(1, "publish", after=None))
    for turn in range(120):
        now = registry.move(3, "again", after=now, pinned=turn % 2 == 0)
    assert registry.gc(1) == [2]
    moves = registry.moves()
    assert [move.sequence for move in moves] == list(range(23, 123))
    assert moves[-1] == now == registry.current()
    assert now.previous == 1
    assert registry.move(1, "rollback", after=now).sequence == 123


def test_failing_store_is_not_an_empty_registry(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry)

    def fail(self: Storage, uri: str) -> bytes:
        raise StorageError(f"{uri}: the store did not answer")

    monkeypatch.setattr(Storage, "read", fail)
    with pytest.raises(StorageError, match="the store did not answer"):
        registry.versions()


def test_temporary_store_failure_does_not_mark_a_version_as_damaged(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers refuse a damaged version permanently, but retry after a store failure."""
    publish(registry)
    delta = publish(registry, parent=1)
    read, failures = Storage.read, iter([True, False, True])

    def fail_at_times(self: Storage, uri: str) -> bytes:
        if next(failures, False):
            raise StorageError(f"{uri}: the store did not answer")
        return read(self, uri)

    monkeypatch.setattr(Storage, "read", fail_at_times)
    with pytest.raises(StorageError, match="the store did not answer"):
        registry.version(2)
    assert registry.version(2) == delta
    with pytest.raises(StorageError, match="the store did not answer"):
        registry.chain(delta)
    assert [one.number for one in registry.chain(delta)] == [1, 2]
