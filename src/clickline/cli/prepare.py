"""clickline prepare: converts logs to a dataset."""

from __future__ import annotations

from clickline.cli.console import emit, facts
from clickline.cli.options import ProgressOptions


def prepare(options: ProgressOptions) -> None:
    """Convert the logs to a dataset: Parquet shards, statistics, quarantined bad rows."""
    from clickline.data.prepare.run import prepare as run

    config = options.config()
    with options.progress() as progress:
        result = run(config, progress)
    dataset = result.dataset
    if options.as_json:
        emit(
            {
                "dataset": dataset.folder,
                "train_rows": result.train_rows,
                "eval_rows": result.eval_rows,
                "bad_rows": result.bad_rows,
                "reused": result.reused,
                "seconds": result.seconds,
                "report": {name: dict(split.report) for name, split in dataset.splits.items()},
            }
        )
        return
    named: dict[str, object] = {"dataset": dataset.folder + (" (up to date)" if result.reused else "")}
    for name, split in dataset.splits.items():
        report = split.report
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards)} shards"
        named[name] = f"{report['rows']:,} rows in {shards}, click rate {report['click_rate']:.4f}"
        if report["bad"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["bad"].items())
            named[f"{name}, skipped"] = f"{reasons}: see {dataset.folder}/quarantine"
    features = dataset.features
    distinct = sum(slot["distinct"] for slot in dataset.splits["train"].report["slots"])
    named["features"] = (
        f"{len(features.dense)} dense, {len(features.slots)} slots with about {distinct:,} ids"
    )
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)
