"""Publishers in separate processes: racing each other, and killed at named moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version, verify
from clickline.errors import ArtifactError
from clickline.storage.storage import Storage
from version_manifests import IMPORT, version_manifest

# ── races ──────────────────────────────────────────────────────────────────────────────────────

_RACE = (
    IMPORT
    + """
import json, sys
from clickline.artifacts.registry import Registry
from clickline.errors import RegistryMoved
from clickline.storage.storage import Storage

registry, me, rounds = Registry(Storage(), sys.argv[1]), sys.argv[2], int(sys.argv[3])
made, moved, lost = [], [], 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    now = registry.current()
    with registry.draft(parent=None if now is None else now.version) as draft:
        (draft.folder / "table.bin").write_text(f"{me} {draft.number}")
        version = draft.commit(version_manifest(None if now is None else now.version))
    made.append(version.number)
    try:
        moved.append(registry.move(version.number, me, after=now).sequence)
    except RegistryMoved:
        lost += 1
print(json.dumps({"made": made, "moved": moved, "lost": lost}))
"""
)


@contextmanager
def started(script: str, *arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a child for each row of arguments and wait until all are ready; kill those still running at the end."""
    with ExitStack() as stack:
        children = []
        for row in arguments:
            command = [sys.executable, "-c", script, *row]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield children


def test_racing_publishers_never_share_a_number_or_a_move(tmp_path: Path) -> None:
    registry = Registry(Storage(), str(tmp_path / "registry"))
    racers, rounds = 4, 15
    rows = [(registry.uri, f"racer {n}", str(rounds)) for n in range(racers)]
    with started(_RACE, *rows) as children:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        results = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert [child.returncode for child in children] == [0] * racers

    numbers = sorted(number for one in results for number in one["made"])
    assert numbers == registry.numbers()
    assert len(set(numbers)) == racers * rounds
    assert all(one["made"] == sorted(one["made"]) for one in results)
    for n, one in enumerate(results):
        for number in one["made"]:
            folder = registry.fetch(registry.version(number), tmp_path)
            assert (folder / "table.bin").read_text() == f"racer {n} {number}"
    sequences = sorted(sequence for one in results for sequence in one["moved"])
    moves = registry.moves()
    assert sequences == list(range(1, len(moves) + 1)) == [move.sequence for move in moves]
    for n, one in enumerate(results):
        assert one["moved"] == [move.sequence for move in moves if move.reason == f"racer {n}"]
    assert sum(one["lost"] for one in results) == racers * rounds - len(moves)
    assert sum(one["lost"] for one in results) > 0, "no publisher met another: the test proves nothing"


# ── killed ─────────────────────────────────────────────────────────────────────────────────────

_PUBLISH_AND_DIE = (
    IMPORT
    + """
import os, signal, sys
from pathlib import Path
from clickline.artifacts import registry as registry_module, version as version_module
from clickline.artifacts.registry import Registry
from clickline.storage import atomic
from clickline.storage.storage import Storage

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_call(count, real):
    calls = []
    def counted(*arguments, **options):
        calls.append(arguments)
        return die() if len(calls) == count else real(*arguments, **options)
    return counted

place, moment = sys.argv[1:]
registry = Registry(Storage(), place)
after = registry.current()
if moment == "before its claim":
    Path.hardlink_to = die
if moment == "with its claim":
    Path.mkdir = die_at_call(3, Path.mkdir)  # the first two are for the claim
draft = registry.draft(parent=1)
(draft.folder / "table.bin").write_bytes(b"new" * 1000)
(draft.folder / "dense.onnx").write_bytes(b"net" * 1000)
if moment == "with half of its files":
    die()
if moment == "before the rename":
    Path.rename = die
if moment == "after the rename":
    version_module.manifest_bytes = die
if moment == "with the manifest written under a hidden name":
    Path.replace = die_at_call(2, Path.replace)  # the first is for the claim
if moment == "after the manifest":
    Storage.delete = die
version = draft.commit(version_manifest(1))
if moment == "before the move":
    Path.hardlink_to = die
if moment == "after the move":
    Path.unlink = die
registry.move(version.number, "publish", after=after)
raise SystemExit("not killed")
"""
)

BEFORE_MANIFEST = [
    "before its claim",
    "with its claim",
    "with half of its files",
    "before the rename",
    "after the rename",
    "with the manifest written under a hidden name",
]
AFTER_MANIFEST = ["after the manifest", "before the move"]


def publish(registry: Registry, parent: int | None = None) -> Version:
    with registry.draft(parent) as draft:
        (draft.folder / "table.bin").write_bytes(b"rows" * 1000)
        return draft.commit(version_manifest(parent))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    registry = Registry(Storage(), str(tmp_path / "registry"))
    publish(registry)
    registry.move(1, "first", after=None)
    return registry


def killed(registry: Registry, moment: str, script: str = _PUBLISH_AND_DIE) -> None:
    child = subprocess.run(
        [sys.executable, "-c", script, registry.uri, moment], check=False, timeout=60, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()


def all_paths(registry: Registry) -> list[str]:
    """Every file and folder below the registry."""
    return sorted(str(path.relative_to(registry.uri)) for path in Path(registry.uri).rglob("*"))


@pytest.mark.parametrize("moment", BEFORE_MANIFEST)
def test_publisher_killed_before_its_manifest_leaves_no_version(registry: Registry, moment: str) -> None:
    killed(registry, moment)
    assert [version.number for version in registry.versions()] == [1]
    current = registry.current()
    assert current is not None
    assert (current.version, current.sequence) == (1, 1)
    assert registry.gc(1) == []
    taken = 1 if moment == "before its claim" else 2
    version = publish(registry, parent=1)
    assert version.number == taken + 1
    registry.gc(9)
    rest = [name for name in all_paths(registry) if not name.startswith(".") and "/." not in name]
    assert rest == sorted(
        [
            "drafts",
            "moves",
            "moves/000000001.json",
            "versions",
            *(
                f"versions/{n:09d}{file}"
                for n in (1, taken + 1)
                for file in ("", "/manifest.json", "/table.bin")
            ),
        ]
    )
    verify(version, registry.fetch(version, Path()))


@pytest.mark.parametrize("moment", AFTER_MANIFEST)
def test_publisher_killed_after_its_manifest_leaves_a_version(registry: Registry, moment: str) -> None:
    killed(registry, moment)
    [_, made] = registry.versions()
    assert (made.number, made.parent) == (2, 1)
    verify(made, registry.fetch(made, Path()))
    current = registry.current()
    assert current is not None
    assert current.version == 1
    assert registry.gc(1) == []
    assert [path.name for path in Path(registry.uri, "drafts").iterdir()] == []
    assert registry.move(2, "by hand", after=current).sequence == 2
    assert publish(registry).number == 3


def test_publisher_killed_after_its_move_has_moved_the_pointer(registry: Registry) -> None:
    killed(registry, "after the move")
    current = registry.current()
    assert current is not None
    assert (current.version, current.reason, current.sequence) == (2, "publish", 2)
    assert registry.moves()[-1] == current

    [left] = Path(registry.uri, "moves").glob(".*")
    registry.gc(1)
    assert left.exists(), "another process may be writing it"
    os.utime(left, (0, 0))
    registry.gc(1)
    assert not left.exists()
    assert registry.current() == current


_PUBLISH_AND_GC = (
    IMPORT
    + """
import sys
from clickline.artifacts.registry import Registry
from clickline.errors import ArtifactError
from clickline.storage.storage import Storage
registry, rounds = Registry(Storage(), sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    now = registry.current()
    with registry.draft(parent=now.version) as draft:
        (draft.folder / "table.bin").write_bytes(b"rows")
        try:
            number = draft.commit(version_manifest(None if draft.number % 3 else now.version)).number
            registry.move(number, "publish", after=now)
        except ArtifactError as error:  # another one was first, or gc removed what the loser built on
            assert any(part in str(error) for part in ("another process", "missing", "removed", "no version")), error
    registry.gc(1)
print("done")
"""
)


def assert_current_is_complete(registry: Registry) -> None:
    """The current version is complete, or was when the pointer left it. gc may remove a manifest for a moment."""
    deadline = time.monotonic() + 10
    while True:
        current = registry.current()
        assert current is not None
        try:
            return registry.check(registry.version(current.version))
        except ArtifactError:
            if registry.current() == current:
                assert time.monotonic() < deadline, f"version {current.version} stays incomplete"


def test_publishers_that_run_gc_never_remove_needed_versions(registry: Registry) -> None:
    with started(_PUBLISH_AND_GC, *[(registry.uri, "12")] * 3) as children:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        checks = 0
        while any(child.poll() is None for child in children):
            checks += 1
            assert_current_is_complete(registry)
        assert [child.communicate(timeout=60)[0] for child in children] == ["done\n"] * 3
    assert checks > 10
    assert [child.returncode for child in children] == [0, 0, 0]
    assert_current_is_complete(registry)
    for version in registry.versions():
        registry.check(version)
    registry.gc(1)
    assert registry.gc(1) == []
    for version in registry.versions():
        registry.check(version)


_GC_AND_DIE = """
import os, signal, sys
from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage

real = Storage.delete
def delete_manifest_and_die(self, uri):
    real(self, uri)
    os.kill(os.getpid(), signal.SIGKILL)
Storage.delete = delete_manifest_and_die
Registry(Storage(), sys.argv[1]).gc(1)
"""


def test_gc_killed_while_removing_a_version(registry: Registry) -> None:
    publish(registry), publish(registry)
    killed(registry, "", _GC_AND_DIE)
    assert [path.name for path in sorted(Path(registry.uri, "versions").iterdir())] == [
        "000000001",
        "000000002",
        "000000003",
    ], "the child was killed too early or too late for this test to prove anything"
    assert [version.number for version in registry.versions()] == [1, 3]
    registry.gc(1)
    assert [path.name for path in sorted(Path(registry.uri, "versions").iterdir())] == [
        "000000001",
        "000000003",
    ]


_DRAFT_AND_WAIT = (
    IMPORT
    + """
import sys
from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage
draft = Registry(Storage(), sys.argv[1]).draft(parent=1)
(draft.folder / "table.bin").write_bytes(b"new")
print("ready", flush=True)
sys.stdin.readline()
print(draft.commit(version_manifest(1)).number, flush=True)
"""
)


def test_gc_of_another_process_tells_live_drafts_from_dead_ones(registry: Registry) -> None:
    publish(registry), publish(registry)
    registry.move(2, "second", after=registry.current())
    registry.move(3, "third", after=registry.current())
    with started(_DRAFT_AND_WAIT, [registry.uri], [registry.uri]) as (alive, dead):
        dead.kill()  # not waited for: a zombie counts as dead
        deadline = time.monotonic() + 30
        while len(registry.garbage(1).drafts) < 1:
            assert time.monotonic() < deadline
        assert registry.gc(1) == [], "version 1 is the parent of a live draft"
        committed, _ = alive.communicate("go\n", timeout=60)
    assert int(committed) in registry.numbers()
    assert registry.garbage(9).drafts == ()
