"""Moving the pointer by hand: a rollback only goes back, a promotion only goes forward."""

from __future__ import annotations

from pathlib import Path

import pytest

from clickline.artifacts.promotion import pin, promote, roll_back
from clickline.artifacts.registry import Registry
from clickline.errors import ArtifactError
from clickline.storage.storage import Storage
from version_manifests import version_manifest


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Three versions, each made current after the other."""
    registry = Registry(Storage(), str(tmp_path / "registry"))
    for _ in range(3):
        with registry.draft() as draft:
            (draft.folder / "table.bin").write_bytes(b"rows")
            version = draft.commit(version_manifest())
        registry.move(version.number, "publish", after=registry.current())
    return registry


def current(registry: Registry) -> tuple[int, bool, str]:
    move = registry.current()
    assert move is not None
    return move.version, move.pinned, move.reason


def test_rollback_then_promotion_each_with_its_reason(registry: Registry) -> None:
    result = roll_back(registry, 1, None)
    assert (result.before and result.before.version, result.now.version, result.changed) == (3, 1, True)
    assert current(registry) == (1, False, "rollback from 3")
    assert promote(registry, 2, None).changed
    assert current(registry) == (2, False, "promotion from 1")
    assert promote(registry, 3, "looks good").changed
    assert current(registry) == (3, False, "looks good")
    assert roll_back(registry, None, None).now.version == 2, "the version that was current before"
    assert [move.version for move in registry.moves()] == [1, 2, 3, 1, 2, 3, 2]


def test_the_current_version_is_left_unchanged(registry: Registry) -> None:
    assert not roll_back(registry, 3, None).changed
    assert not promote(registry, 3, None).changed
    assert len(registry.moves()) == 3


def test_rollback_refuses_a_newer_version_and_names_promote(registry: Registry) -> None:
    roll_back(registry, 1, None)
    with pytest.raises(
        ArtifactError, match=r"version 3 is newer than .* 1, .*`clickline versions promote 3`"
    ):
        roll_back(registry, 3, None)
    with pytest.raises(ArtifactError, match="has no version 9"):
        roll_back(registry, 9, None)
    assert current(registry)[0] == 1


def test_promote_refuses_an_older_version_and_names_rollback(registry: Registry) -> None:
    with pytest.raises(
        ArtifactError, match=r"version 1 is older than .* 3, .*`clickline versions rollback --to 1`"
    ):
        promote(registry, 1, None)
    with pytest.raises(ArtifactError, match="has no version 9"):
        promote(registry, 9, None)
    assert current(registry)[0] == 3


def test_a_pin_moves_with_the_pointer(registry: Registry) -> None:
    pin(registry, 2, "campaign")
    with pytest.raises(ArtifactError, match=r"version 2 is pinned since .* \(campaign\)"):
        roll_back(registry, None, None)
    promote(registry, 3, None)
    assert current(registry) == (3, True, "promotion from 2")
    roll_back(registry, 1, None)
    assert current(registry) == (1, True, "rollback from 3")
