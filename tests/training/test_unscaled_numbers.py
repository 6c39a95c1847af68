"""Numbers of any size: harmless by default, and named where somebody has left them unscaled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.evaluation.run import evaluate
from clickline.pipeline.flow import TrainResult, train
from clickline.progress import Progress


def logs(folder: Path) -> None:
    """A click depends on a city and on an amount around 4e5."""
    rng = np.random.default_rng(8)
    for name, rows in (("train", 8000), ("eval", 2000)):
        amount = rng.lognormal(np.log(4e5), 1, rows).round()
        city = rng.integers(0, 20, rows)
        logit = -1 + 0.8 * (np.log(amount) - np.log(4e5)) + 0.5 * (city % 2)
        click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
        lines = (f"{c},{a:.0f},{t}\n" for c, a, t in zip(click, amount, city, strict=True))
        (folder / f"{name}.csv").write_text("click,amount,city\n" + "".join(lines))


def trained(folder: Path, amount: str, said: list[str]) -> TrainResult:
    (folder / "clickline.yaml").write_text(
        "data: {format: csv, train: train.csv, eval: eval.csv,\n"
        f"       fields: {{click: label, amount: {amount}, city: slot}}}}\n"
        "model: {name: wide_deep, hidden: [64, 32]}\ntracking: {enabled: false}\ngate: {accuracy: 0.01, extra_epochs: 0}\n"
    )

    class Heard(Progress):
        def log(self, message: str) -> None:
            said.append(message)

    config = load_config(folder / "clickline.yaml")
    prepare(config)
    return train(config, Heard())


def test_number_around_400000_trains_without_a_warning(tmp_path):
    logs(tmp_path)
    said: list[str] = []
    total = trained(tmp_path, "dense", said).evaluation.total
    assert total.auc > 0.65
    assert total.normalised_entropy < 0.97
    assert not any("base rate" in line for line in said)


def test_model_worse_than_the_base_rate_is_reported_with_the_unscaled_field(tmp_path):
    logs(tmp_path)
    said: list[str] = []
    result = trained(tmp_path, "none", said)
    total = result.evaluation.total
    assert total.normalised_entropy > 1
    (warning,) = [line for line in said if "base rate" in line]
    assert warning.startswith(f"log loss is {total.logloss:.4g}, worse than the ")
    assert "are the likely cause: amount (transform: none; median 3.9e+05, up to " in warning
    assert "Set transform: robust or log1p for them; then prepare and train again." in warning
    assert warning in result.verdict.warnings
    assert warning in json.loads(result.report.read_text())["gate"]["warnings"]
    again = evaluate(load_config(tmp_path / "clickline.yaml"))
    assert [line for line in again.verdict.warnings if "base rate" in line] == [warning]
