"""A version of a registry, opened on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version, verify
from clickline.features import FeatureSpec
from clickline.metrics.binary import Metrics
from clickline.metrics.evaluation import measure
from clickline.records import LabelledRows
from clickline.scoring.scorer import Scorer

__all__ = ["measure_current", "open_scorer"]


def open_scorer(registry: Registry, version: Version, cache: Path, threads: int) -> Scorer:
    """A version that can score, from files that were checked; `cache` holds copies of remote ones."""
    folders = []
    for one in registry.chain(version):
        folders.append(registry.fetch(one, cache / "versions"))
        verify(one, folders[-1])
    return Scorer.open(version.body, folders, threads=threads)


def measure_current(
    registry: Registry, features: FeatureSpec, rows: Iterable[LabelledRows], cache: Path, threads: int
) -> tuple[Metrics | None, str]:
    """The current version on rows that were encoded by `features`; without figures, why there are none."""
    move = registry.current()
    if move is None:
        return None, "there is no current version"
    scorer = open_scorer(registry, registry.version(move.version), cache, threads)
    try:
        if scorer.features != features:
            return None, f"version {move.version} has other fields or statistics than these rows"
        return measure(scorer.probabilities, rows).total, ""
    finally:
        scorer.close()
