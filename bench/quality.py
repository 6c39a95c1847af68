"""Quality on real rows: our `criteo` preset beside Wide & Deep of FuxiCTR and DeepCTR-Torch and logistic regression, over 3 seeds.

python bench/quality.py                    rows from ../shared/data
python bench/quality.py FOLDER             from elsewhere
python bench/quality.py --try              one setting, one epoch, one seed, printed only
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import clickline
from clickline.config import load_config
from measure import ROOT, Row, peer_python, publish

DATA = ROOT.parent / "shared" / "data"
FILE = "criteo_137k_train.tsv.gz"
TRAIN_ROWS = 109_711
SEEDS = 3
CLICKLINE = Path(sys.executable).with_name("clickline")


@dataclass(frozen=True)
class Result:
    """What one contestant reached on the test rows: the same measures for each seed."""

    name: str
    setting: str
    seeds: list[dict[str, float]]

    def __getitem__(self, measure: str) -> float:
        return mean(seed[measure] for seed in self.seeds)

    def spread(self, measure: str) -> str:
        """The mean, and how far the seeds are from it."""
        values = [seed[measure] for seed in self.seeds]
        return f"{mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"

    @property
    def row(self) -> Row:
        figure = f"AUC {self.spread('auc')}, log loss {self.spread('logloss')}"
        return Row(self.name, figure, f"predicted / clicked {self['calibration']:.3f}, ECE {self['ece']:.4f}")


def ours(folder: Path, precision: str) -> Result:
    """The `criteo` preset as `clickline init` writes it."""
    name = "Clickline, `criteo` preset" + ("" if precision == "fp32" else f", `precision: {precision}`")
    print(f"  {name} …", flush=True)
    seeds = []
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch, "ads")
        initialise("criteo", project)
        with gzip.open(folder / FILE, "rb") as rows:
            lines = rows.readlines()
        (project / "data").mkdir()
        for split, part in (("train", lines[:TRAIN_ROWS]), ("eval", lines[TRAIN_ROWS:])):
            (project / "data" / f"{split}.tsv").write_bytes(b"".join(part))
        config = load_config(project / "clickline.yaml")
        clickline.prepare(config)
        for seed in range(SEEDS):
            chosen = [f"train.seed={seed}", f"train.precision={precision}", "tracking.enabled=false"]
            trained = clickline.train(load_config(project / "clickline.yaml", chosen)).evaluation
            assert trained is not None
            measured = trained.total.to_json()
            seeds.append({key: measured[key] for key in ("auc", "logloss", "calibration", "ece")})
    result = Result(name, "as it is", seeds)
    print(f"  {result.row.figure}; {result.row.ratio}", flush=True)
    return result


def initialise(preset: str, folder: Path) -> None:
    subprocess.run([str(CLICKLINE), "init", str(folder), "--preset", preset], check=True, capture_output=True)


def peer(name: str, environment: str, script: str, folder: Path, *limits: str) -> Result:
    """A script in its own environment chooses its settings on training rows, then learns with each seed."""
    print(f"  {name} …", flush=True)
    seeds = "1" if limits else str(SEEDS)
    path = ROOT / "bench" / "peers" / script
    command = [str(peer_python(environment)), str(path), str(folder), seeds, *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    setting = ", ".join(f"{key} {value}" for key, value in told["setting"].items())
    result = Result(name, f"{setting}, epochs {told['epochs']}", told["test"])
    print(f"  {result.row.figure}; {result.row.ratio}; {result.setting}", flush=True)
    return result


def peers(folder: Path, *limits: str) -> list[Result]:
    return [
        peer("FuxiCTR, Wide & Deep", "fuxictr", "quality_fuxictr.py", folder, *limits),
        peer("DeepCTR-Torch, Wide & Deep", "deepctr", "quality_deepctr.py", folder, *limits),
        peer("scikit-learn, logistic regression", "sklearn", "quality_sklearn.py", folder, *limits),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DATA)
    parser.add_argument("--try", dest="only_try", action="store_true", help="tiny, and nothing is written")
    asked = parser.parse_args()
    if not (asked.folder / FILE).exists():
        print(
            f"quality: left out, {asked.folder} has no {FILE} (real Criteo rows, which may not be passed on)"
        )
        return
    print("quality", flush=True)
    own = [ours(asked.folder, precision) for precision in ("fp32", "bf16")]
    others = peers(asked.folder, *(("1", "1") if asked.only_try else ()))
    chosen = "; ".join(f"{result.name}: {result.setting}" for result in others)
    publish(
        "quality",
        "Quality on real rows",
        f"`python bench/quality.py` (Criteo, the first 109,711 rows to learn, the last 27,428 to measure; mean of "
        f"{SEEDS} seeds ± half their range).",
        [result.row for result in (*own, *others)],
        "Our preset's defaults were chosen on two cuts of the training rows and checked on synthetic rows, before the last "
        "rows were looked at. Each peer's setting is the best of several by log loss on the last fifth of the training rows, the number of "
        f"epochs too; it then learns all training rows. Chosen: {chosen}.",
        write=not asked.only_try,
    )


if __name__ == "__main__":
    main()
