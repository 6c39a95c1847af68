"""The gate of an hour: the model on held-out rows against thresholds and the live version."""

from __future__ import annotations

from pathlib import Path

from clickline.artifacts.from_config import registry_of
from clickline.artifacts.registry import Move
from clickline.config import Config
from clickline.errors import ArtifactError
from clickline.evaluation.gate import Thresholds, Verdict, check_gate, clearly_worse
from clickline.evaluation.live_version import check_fields, with_live_version
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.scorer import Scorer
from clickline.training.hourly_trainer import HourResult


def check_hour(config: Config, trained: HourResult, why_no_live: str) -> Verdict:
    """Whether the model of an hour may be published. `why_no_live`: why the live version did not score its rows."""
    thresholds, held_out, this_hour = Thresholds.of(config.gate), trained.held_out, trained.this_hour
    if held_out is None:
        why = "follow.holdout is 0, so there are no rows that neither model was trained on"
    else:
        why = "the current version has not scored all of the held-out rows"
    if held_out is not None and not held_out.rows:
        reason = (
            f"no rows are held out yet to evaluate the model on: the hour has {trained.rows:,} rows, and "
            f"follow.holdout keeps {config.follow.holdout:g} of them. The next hours decide; raise "
            "follow.holdout if hours are this small."
        )
        return Verdict(False, (reason,))
    verdict = check_gate(held_out or trained.progressive.total, thresholds, trained.live, why_no_live or why)
    if held_out is None or this_hour is None or this_hour.rows == held_out.rows:
        return verdict  # there are no rows of earlier hours that could hide a fault of this one
    return verdict.refused(clearly_worse(this_hour, thresholds, trained.live_this_hour))


def open_live_scorer(config: Config, hour: str, features: FeatureSpec) -> tuple[Scorer | None, str]:
    """The live version, to score the rows of an hour that were encoded with `features`; without one, the reason."""
    registry = registry_of(config)

    def opened(move: Move) -> Scorer | None:
        version = registry.version(move.version)
        if version.manifest.model.hour == hour:
            # Killed between publishing and the checkpoint: this version was trained on the hour, the previous one
            # was not.
            if move.previous is None:
                return None
            version = registry.version(move.previous)
        scorer = open_scorer(registry, version, Path(config.cache.dir), cores())
        try:
            check_fields(version.number, scorer.features, features)
        except ArtifactError:
            scorer.close()
            raise
        return scorer

    scorer, why = with_live_version(registry, opened, requested=True)
    if scorer is None and not why:
        why = "the current version was trained on this hour, and there is no earlier one"
    return scorer, why
