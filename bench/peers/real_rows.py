"""Shared by the quality benchmarks: the real rows and their splits, the encoding for peers, and the metrics.

Settings are tuned on the last fifth of the training rows, never on the test rows; the best one is then trained on all training
rows, once for each seed. Needs only NumPy.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILES = {
    "criteo": ("criteo_137k_train.tsv.gz",),
    "adult": ("adult_train.csv.gz", "adult_test.csv.gz"),
    "openbandit": ("openbandit_10k.csv.gz",),
}
TRAIN_ROWS = {
    "criteo": 109_711,
    "adult": 32_561,
    "openbandit": 8_000,
}  # the first; the others are for the test
ADULT = (
    "age", "workclass", "fnlwgt", "education", "grade", "marital", "occupation", "relation", "race", "sex",
    "gain", "loss", "hours", "country", "income",
)  # fmt: skip
ADULT_NUMBERS = ("age", "fnlwgt", "grade", "gain", "loss", "hours")
BANDIT_WORDS = ("item_id", "position", *(f"user_feature_{n}" for n in range(4)))
BANDIT_AFFINITIES = tuple(f"user-item_affinity_{n}" for n in range(80))
MOST_EPOCHS = 12
PATIENCE = 2  # epochs without a better log loss
ECE_BINS = 20


@dataclass(frozen=True)
class Rows:
    label_N: np.ndarray
    numbers_ND: np.ndarray  # NaN where missing
    words_NS: np.ndarray  # empty where missing


@dataclass(frozen=True)
class Encoded:
    """Each field's values numbered from 0, the unknown one; floats between 0 and 1."""

    codes_NF: np.ndarray
    sizes_F: list[int]
    floats_ND: np.ndarray


def read(folder: Path, dataset: str) -> Rows:
    """All rows, those of the test last."""
    return {"criteo": _criteo, "adult": _adult, "openbandit": _openbandit}[dataset](folder, FILES[dataset])


def _criteo(folder: Path, files: Sequence[str]) -> Rows:
    with gzip.open(folder / files[0], "rt") as lines:
        cells = [line.rstrip("\n").split("\t") for line in lines]
    numbers = [[float(cell) if cell else np.nan for cell in row[1:14]] for row in cells]
    return Rows(
        np.array([float(row[0]) for row in cells]),
        np.array(numbers),
        np.array([row[14:] for row in cells], dtype="S8"),
    )


def _adult(folder: Path, files: Sequence[str]) -> Rows:
    rows: list[dict[str, str]] = []
    for name in files:
        with gzip.open(folder / name, "rt") as lines:
            cells = csv.reader(lines, skipinitialspace=True)
            rows += [dict(zip(ADULT, row, strict=True)) for row in cells if row]
    words = [name for name in ADULT[:-1] if name not in ADULT_NUMBERS]
    return Rows(
        np.array([float(row["income"].startswith(">")) for row in rows]),
        np.array([[float(row[name]) for name in ADULT_NUMBERS] for row in rows]),
        np.array([[row[name].replace("?", "") for name in words] for row in rows], dtype="S32"),
    )


def _openbandit(folder: Path, files: Sequence[str]) -> Rows:
    with gzip.open(folder / files[0], "rt", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return Rows(
        np.array([float(row["click"]) for row in rows]),
        np.array([[float(row[name]) for name in BANDIT_AFFINITIES] for row in rows]),
        np.array([[row[name] for name in BANDIT_WORDS] for row in rows], dtype="S32"),
    )


def number_words(numbers_ND: np.ndarray) -> np.ndarray:
    """Numbers as categories, floor(ln(v)²) above 2: what won the contest these rows are from, and FuxiCTR's own way."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bucket_ND = np.where(numbers_ND > 2, np.floor(np.log(numbers_ND) ** 2) + 100, numbers_ND)
    return np.where(np.isnan(numbers_ND), -100, bucket_ND).astype(np.int64)


def number_floats(numbers_ND: np.ndarray, known: int) -> np.ndarray:
    """Logarithms, scaled to 0 … 1 by the rows that may be known."""
    floats_ND = np.log1p(np.maximum(np.nan_to_num(numbers_ND), 0))
    low_D, high_D = floats_ND[:known].min(0), floats_ND[:known].max(0)
    return np.clip((floats_ND - low_D) / np.maximum(high_D - low_D, 1e-9), 0, 1).astype(np.float32)


def encode(rows: Rows, known: int, numbers: str, min_count: int) -> Encoded:
    """By the first `known` rows: a value they show less often than `min_count` times is the unknown one."""
    words = [rows.words_NS[:, s] for s in range(rows.words_NS.shape[1])]
    floats_ND = np.zeros((len(rows.label_N), 0), np.float32)
    if numbers == "buckets":
        words += list(number_words(rows.numbers_ND).T)
    else:
        floats_ND = number_floats(rows.numbers_ND, known)
    codes, sizes = [], []
    for words_N in words:
        _, place_N = np.unique(words_N, return_inverse=True)
        kept_V = np.bincount(place_N[:known], minlength=place_N.max() + 1) >= min_count
        code_V = np.where(kept_V, np.cumsum(kept_V), 0)
        codes.append(code_V[place_N])
        sizes.append(int(kept_V.sum()) + 1)
    return Encoded(np.stack(codes, axis=1), sizes, floats_ND)


def measure(label_N: np.ndarray, probability_N: np.ndarray) -> dict[str, float]:
    p_N = np.clip(np.asarray(probability_N, np.float64).reshape(-1), 1e-7, 1 - 1e-7)
    order_N = np.argsort(p_N, kind="stable")
    _, place_N, count_V = np.unique(p_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(count_V) - (count_V - 1) / 2)[place_N]
    clicks = label_N.sum()
    area = rank_N[label_N == 1].sum() - clicks * (clicks + 1) / 2
    gaps = [np.abs((p_N - label_N)[bin_].sum()) for bin_ in np.array_split(order_N, ECE_BINS)]
    return {
        "auc": float(area / (clicks * (len(label_N) - clicks))),
        "logloss": float(-np.mean(label_N * np.log(p_N) + (1 - label_N) * np.log(1 - p_N))),
        "accuracy": float(np.mean((p_N >= 0.5) == (label_N == 1))),
        "calibration": float(p_N.sum() / clicks),
        "ece": float(sum(gaps) / len(label_N)),
    }


def contest(
    settings: Sequence[Any], learn: Callable[[Rows, Any, int, slice, int], Iterable[np.ndarray]]
) -> None:
    """FOLDER DATASET SEEDS [CHOICES EPOCHS] from the command line; prints the result as JSON.

    learn(rows, setting, known, scored, seed) learns the first `known` rows and after each epoch gives the
    probabilities of the `scored` ones. CHOICES and EPOCHS cut the search short, to try whether everything runs.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # for what the libraries print
    folder, dataset, seeds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    choices, most = (int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 4 else (None, MOST_EPOCHS)
    rows, trained = read(folder, dataset), TRAIN_ROWS[dataset]
    choosing = trained * 4 // 5
    cut, test = slice(choosing, trained), slice(trained, None)
    tried = []
    for setting in settings[:choices]:
        epochs, figures = _best(rows, cut, learn(rows, setting, choosing, cut, 0), most)
        print(asdict(setting), f"{epochs} epochs", figures)
        tried.append((figures["logloss"], epochs, figures, setting))
    _, epochs, validated, chosen = min(tried, key=lambda one: one[0])
    results = []
    for seed in range(seeds):
        last = _nth(learn(rows, chosen, trained, test, seed), epochs)
        results.append({"seed": seed, **measure(rows.label_N[test], last)})
        print(results[-1])
    document = {"setting": asdict(chosen), "epochs": epochs, "choosing": validated, "test": results}
    print(json.dumps(document), file=answers)


def _best(rows: Rows, cut: slice, after: Iterable[np.ndarray], most: int) -> tuple[int, dict[str, float]]:
    """The epoch with the least log loss, and its figures."""
    best: tuple[int, dict[str, float]] | None = None
    for epoch, probability_N in enumerate(after, start=1):
        figures = measure(rows.label_N[cut], probability_N)
        if best is None or figures["logloss"] < best[1]["logloss"]:
            best = epoch, figures
        if epoch == most or epoch - best[0] >= PATIENCE:
            break
    assert best is not None
    return best


def _nth(after: Iterable[np.ndarray], count: int) -> np.ndarray:
    steps: Iterator[np.ndarray] = iter(after)
    for _ in range(count - 1):
        next(steps)
    return next(steps)
