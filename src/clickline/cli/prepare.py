"""clickline prepare: logs to a dataset."""

from __future__ import annotations

from pathlib import Path

from clickline.cli.console import emit, facts, watching
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet

__all__ = ["prepare"]


def prepare(
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn the logs into a dataset: Parquet shards, statistics, quarantined bad rows."""
    from clickline.config import load_config
    from clickline.prepare.run import prepare as run

    config = load_config(config_file, overrides or ())
    with watching(as_json=as_json, quiet=quiet) as progress:
        result = run(config, progress)
    dataset = result.dataset
    if as_json:
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
    facts(
        {
            "dataset": dataset.folder + (" (up to date)" if result.reused else ""),
            "train rows": f"{result.train_rows:,}",
            "eval rows": f"{result.eval_rows:,}",
            "bad rows": f"{result.bad_rows:,}",
            "time": f"{result.seconds:.1f} s",
        }
    )
