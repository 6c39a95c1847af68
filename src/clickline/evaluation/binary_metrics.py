"""Metrics of click predictions: streaming, mergeable, in memory that does not grow with the rows.

A row with label 0.4 and weight 5 counts as two impressions with a click and three without. `MetricCounts` measures one
set of rows, `HourlyCounts` each hour of them; both may be split over batches and workers in any way.

Intervals agree with a bootstrap over rows. They come from the influence of each row on the metric (for plain rows,
DeLong's variance of the AUC), so no replicates are needed. The sampling unit is a row, however many impressions it has;
if rows of one user are alike, the true interval is wider. With fewer than `ENOUGH_ROWS` rows with a click, or without,
the variance cannot be estimated from them, and the AUC gets Newcombe's interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.errors import ClicklineError, DataError
from clickline.evaluation.score_digest import Bins, ScoreDigest
from clickline.models.calibration import CLIP, Probabilities
from clickline.numba_cache import njit

Floats = NDArray[np.float32]
ECE_BINS = 20
HOUR_LIMIT = 1 << 13
"""Distinct scores kept per hour: at most 0.7 MB per hour."""

ENOUGH_ROWS = 100
"""Rows of each class (Kish's effective number) from which on the variance of the AUC is estimated."""

MAX_HOURS = 24 * 366
"""Hours that are counted separately."""

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Metrics:
    """Metrics of a set of rows. A metric that these rows cannot give is None, and `notes` says why."""

    rows: int
    impressions: float  # the sum of weights
    clicks: float
    base_rate: float | None = None  # clicks / impressions
    mean_prediction: float | None = None
    lowest_prediction: float | None = None
    highest_prediction: float | None = None
    spread: float | None = None  # standard deviation of the predictions
    auc: float | None = None  # of scores compared as float32; ties count half
    auc_error: float | None = None  # bound of the approximation error; 0: exact
    auc_interval: tuple[float, float] | None = None  # 95 % confidence
    logloss: float | None = None
    logloss_interval: tuple[float, float] | None = None
    normalised_entropy: float | None = None  # log loss / log loss of always predicting the base rate
    accuracy: float | None = None  # with a threshold of 0.5
    calibration: float | None = None  # predicted clicks / clicks
    ece: float | None = None  # mean |predicted - observed rate| over 20 bins of equal weight
    brier: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Metrics:
        """Read what `to_json` wrote; other keys are ignored."""
        known: dict[str, Any] = {field.name: document[field.name] for field in fields(cls)}
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(value)
        return cls(**known)


@dataclass(frozen=True)
class HourMetrics:
    """Metrics of one hour; `hour` counts from 1970-01-01T00 UTC, -1 if the time is unknown."""

    hour: int
    metrics: Metrics

    @property
    def utc(self) -> str | None:
        """As text, 2026-01-31T23; None if unknown or past the year 9999."""
        return hour_to_utc(self.hour)

    def to_json(self) -> dict[str, Any]:
        return {"hour": self.hour, "utc": self.utc, **self.metrics.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HourMetrics:
        return cls(document["hour"], Metrics.from_json(document))


def hour_to_utc(hour: int) -> str | None:
    """An hour since 1970 as text, 2026-01-31T23; None for -1 and for hours past the year 9999."""
    try:
        return f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%dT%H}" if hour >= 0 else None
    except (ValueError, OverflowError, OSError):
        return None


def auc_of(bins: Bins) -> float | None:
    """Probability that a click has a higher score than a non-click; None if either is missing."""
    clicks, others = bins.clicks_N.sum(), bins.others_N.sum()
    if not (clicks > 0 and others > 0):
        return None
    below_N = np.cumsum(bins.others_N) - bins.others_N / 2
    # Sums, not dot products: the rounding of those depends on the number of threads.
    return float(np.sum(bins.clicks_N * below_N) / (clicks * others))


class MetricCounts:
    """Accumulates everything that the metrics of a set of rows need.

    The AUC is exact up to `limit` distinct scores and known to about 1 / limit beyond that. The default takes 5 MB, and
    25 MB for short times, for any number of rows.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self._sums = np.zeros(_SUMS, dtype=np.float64)
        self._sums[_LOWEST], self._sums[_HIGHEST] = np.inf, -np.inf
        self._digest = ScoreDigest(limit)

    @property
    def rows(self) -> int:
        return int(self._sums[_ROWS])

    @property
    def impressions(self) -> float:
        return float(self._sums[_IMPRESSIONS])

    def add(self, label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> None:
        """Add rows. An invalid value (NaN, out of range) is an error, and the batch is not counted."""
        _same_length(label_B, weight_B, probability_B)
        at, column = _first_bad_row(label_B, weight_B, probability_B)
        if at >= 0:
            raise _bad_value(column, self.rows + at, (label_B[at], weight_B[at], probability_B[at]))
        _sum_rows(label_B, weight_B, probability_B, self._sums)
        self._digest.add(label_B, weight_B, probability_B.astype(np.float32, copy=False))

    def merge(self, other: MetricCounts) -> None:
        """Add the counts of another object, which is not changed."""
        ends = (
            np.minimum(self._sums[_LOWEST], other._sums[_LOWEST]),
            np.maximum(self._sums[_HIGHEST], other._sums[_HIGHEST]),
        )
        self._sums += other._sums
        self._sums[_LOWEST], self._sums[_HIGHEST] = ends
        self._digest.merge(other._digest)

    def bins(self) -> Bins:
        """Clicks by score, on which a calibration is fitted."""
        return self._digest.bins()

    def metrics(self) -> Metrics:
        sums = [float(value) for value in self._sums]
        rows, impressions, clicks = int(sums[_ROWS]), sums[_IMPRESSIONS], sums[_CLICKS]
        if not impressions > 0:
            why = "there are no rows" if rows == 0 else f"all {rows:,} rows have weight 0"
            note = f"Nothing can be measured: {why}. Evaluate on rows with a positive weight."
            return Metrics(rows, impressions, clicks, notes=(note,))
        base_rate, logloss = clicks / impressions, sums[_LOSS] / impressions
        mean = sums[_PREDICTED] / impressions
        bins = self.bins()
        auc = auc_of(bins)
        error = interval = entropy = None
        notes: tuple[str, ...] = ()
        if auc is None:
            found = "have" if clicks > 0 else "lack"
            notes = (
                f"AUC and normalised entropy cannot be measured: all {impressions:,.10g} impressions {found} a click. "
                "Evaluate on rows with and without clicks.",
            )
        else:
            others = float(bins.others_N.sum())
            error = bins.unordered / (clicks * others)
            interval = _auc_interval(bins, auc)
            entropy = (
                logloss
                * impressions
                / -(clicks * math.log(clicks / impressions) + others * math.log(others / impressions))
            )
        deviation = sums[_SQUARED_LOSS] - 2 * logloss * sums[_WEIGHTED_LOSS] + logloss**2 * sums[_SQUARES]
        margin = _Z95 * math.sqrt(max(deviation, 0.0)) / impressions
        return Metrics(
            rows=rows,
            impressions=impressions,
            clicks=clicks,
            base_rate=base_rate,
            mean_prediction=mean,
            lowest_prediction=sums[_LOWEST],
            highest_prediction=sums[_HIGHEST],
            spread=math.sqrt(max(sums[_PREDICTED_SQUARED] / impressions - mean**2, 0.0)),
            auc=auc,
            auc_error=error,
            auc_interval=interval,
            logloss=logloss,
            logloss_interval=(max(logloss - margin, 0.0), logloss + margin),
            normalised_entropy=entropy,
            accuracy=sums[_CORRECT] / impressions,
            calibration=sums[_PREDICTED] / clicks if clicks > 0 else None,
            ece=_ece(bins),
            brier=sums[_BRIER] / impressions,
            notes=notes,
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """The whole state, for a checkpoint: restored counts give bit-identical results."""
        return {"sums": self._sums.copy(), **self._digest.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], limit: int = 1 << 16) -> MetricCounts:
        counts = cls(limit)
        counts._sums = np.array(arrays["sums"], dtype=np.float64)
        counts._digest = ScoreDigest.from_arrays(arrays, limit)
        return counts


class HourlyCounts:
    """`MetricCounts` for each hour, with fewer distinct scores: the AUC is known to about 1e-4.

    At most `MAX_HOURS` hours are kept: beyond that, hours with the fewest rows are merged into the unknown hour, so
    that rows with wrong times cost little and real hours stay."""

    def __init__(self) -> None:
        self._hours: dict[int, MetricCounts] = {}

    def add(
        self, hour_B: NDArray[np.int32], label_B: Floats, weight_B: Floats, probability_B: Probabilities
    ) -> None:
        """Add rows by their hour; -1 stands for an unknown time."""
        _same_length(hour_B, label_B, weight_B, probability_B)
        if not len(hour_B):
            return
        first = int(hour_B[0])
        if np.all(hour_B == first):  # the usual case: logs are ordered by time
            self._counts_of(first).add(label_B, weight_B, probability_B)
            self._merge_smallest_hours()
            return
        order_B = np.argsort(hour_B, kind="stable")
        sorted_B = hour_B[order_B]
        starts = np.flatnonzero(np.concatenate(([True], sorted_B[1:] != sorted_B[:-1])))
        for rows in np.split(order_B, starts[1:]):
            self._counts_of(int(hour_B[rows[0]])).add(label_B[rows], weight_B[rows], probability_B[rows])
        self._merge_smallest_hours()

    def merge(self, other: HourlyCounts, closed: Collection[int] = ()) -> int:
        """Add the counts of another object, except to closed hours; returns the number of rows left out."""
        for hour, counts in other._hours.items():
            if hour not in closed:
                self._counts_of(hour).merge(counts)
        self._merge_smallest_hours()
        return sum(counts.rows for hour, counts in other._hours.items() if hour in closed)

    def close(self, keep: int) -> tuple[HourMetrics, ...]:
        """Drop the counts of all but the newest `keep` hours and return their metrics."""
        known = sorted(hour for hour in self._hours if hour >= 0)
        return tuple(HourMetrics(hour, self._hours.pop(hour).metrics()) for hour in known[:-keep])

    def hours(self) -> tuple[HourMetrics, ...]:
        """The hours in order; empty if no row has a time."""
        if set(self._hours) <= {-1}:
            return ()
        return tuple(HourMetrics(hour, self._hours[hour].metrics()) for hour in sorted(self._hours))

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        return {
            f"{hour}/{name}": array
            for hour, counts in self._hours.items()
            for name, array in counts.to_arrays().items()
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> HourlyCounts:
        hourly = cls()
        for hour in dict.fromkeys(key.split("/")[0] for key in arrays):
            arrays_of_hour = {
                key.split("/")[1]: array for key, array in arrays.items() if key.split("/")[0] == hour
            }
            hourly._hours[int(hour)] = MetricCounts.from_arrays(arrays_of_hour, HOUR_LIMIT)
        return hourly

    def _merge_smallest_hours(self) -> None:
        known = [hour for hour in self._hours if hour >= 0]
        if len(known) > MAX_HOURS:  # a quarter at once, so that it is rare
            known.sort(key=lambda hour: (self._hours[hour].rows, hour))
            for hour in known[: len(known) - 3 * MAX_HOURS // 4]:
                self._counts_of(-1).merge(self._hours.pop(hour))

    def _counts_of(self, hour: int) -> MetricCounts:
        if hour not in self._hours:
            self._hours[hour] = MetricCounts(HOUR_LIMIT)
        return self._hours[hour]


def _auc_interval(bins: Bins, auc: float) -> tuple[float, float]:
    """The 95 % confidence interval of the AUC, within [0, 1]."""
    clicks, others = bins.clicks_N.sum(), bins.others_N.sum()
    rows = float(clicks**2 / bins.clicks_squared_N.sum()), float(others**2 / bins.others_squared_N.sum())
    variance = _auc_variance(bins, auc) if min(rows) >= ENOUGH_ROWS else 0.0
    if not (0 < auc < 1 and variance > 0):  # too few rows for a variance, or a perfect order
        return _small_sample_interval(auc, *rows)
    middle, margin = math.log(auc / (1 - auc)), _Z95 * math.sqrt(variance) / (auc * (1 - auc))
    return 1 / (1 + math.exp(margin - middle)), 1 / (1 + math.exp(-margin - middle))  # symmetric in log odds


def _auc_variance(bins: Bins, auc: float) -> float:
    clicks, others = bins.clicks_N.sum(), bins.others_N.sum()
    of_click_N = (np.cumsum(bins.others_N) - bins.others_N / 2) / others - auc
    of_other_N = 1 - (np.cumsum(bins.clicks_N) - bins.clicks_N / 2) / clicks - auc
    return float(
        np.sum(bins.clicks_squared_N * of_click_N**2) / clicks**2
        + np.sum(bins.others_squared_N * of_other_N**2) / others**2
        + 2 * np.sum(bins.clicks_others_N * of_click_N * of_other_N) / (clicks * others)
    )


def _small_sample_interval(auc: float, clicks: float, others: float) -> tuple[float, float]:
    """All true AUCs that the measured one does not reject (Newcombe 2006, method 5).

    The variance cannot be estimated from a few clicks, so it is that of the hypothesised true AUC. For 0.5 it is the
    variance of the Mann-Whitney statistic of random scores.
    """

    def rejected(true: float) -> bool:
        mean = (clicks + others) / 2 - 1
        pairs = 1 + mean * ((1 - true) / (2 - true) + true / (1 + true))
        return abs(auc - true) > _Z95 * math.sqrt(true * (1 - true) * pairs / (clicks * others))

    ends = []
    for far in (0.0, 1.0):
        near = auc
        for _ in range(50):  # bisection, to the last bits
            middle = (far + near) / 2
            far, near = (middle, near) if rejected(middle) else (far, middle)
        ends.append(near)
    return ends[0], ends[1]


def _ece(bins: Bins) -> float:
    """The expected calibration error. Equal scores stay in one bin."""
    impressions_N = bins.impressions_N
    gap_N = bins.score_N * impressions_N - bins.clicks_N
    return float(np.abs(np.bincount(calibration_bin(bins), gap_N)).sum() / impressions_N.sum())


def calibration_bin(bins: Bins) -> NDArray[np.int64]:
    """The bin of each score, among `ECE_BINS` bins of equal weight."""
    impressions_N = bins.impressions_N
    place_N: NDArray[np.int64] = (
        (np.cumsum(impressions_N) - impressions_N / 2) / impressions_N.sum() * ECE_BINS
    ).astype(np.int64)
    return np.minimum(place_N, ECE_BINS - 1)


def _same_length(*columns: NDArray[Any]) -> None:
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"columns of a batch differ in length: {sorted(lengths)}")


def _bad_value(column: int, row: int, values: tuple[float, float, float]) -> ClicklineError:
    value, where = float(values[column]), f"row {row + 1:,} of the evaluated rows"
    if column == _LABEL:
        return DataError(f"{where} has label {value:g}; a label is a share of clicks between 0 and 1.")
    if column == _WEIGHT:
        return DataError(f"{where} has weight {value:g}; a weight is finite and not negative.")
    return ClicklineError(
        f"{where} got the probability {value:g}; it must be between 0 and 1. The network's weights or "
        "inputs are not finite: use an earlier checkpoint, or train again with a lower learning rate."
    )


# ── kernels ────────────────────────────────────────────────────────────────────────────────────

_ROWS, _IMPRESSIONS, _CLICKS, _PREDICTED, _PREDICTED_SQUARED, _LOSS, _CORRECT, _BRIER = range(8)
_SQUARES, _WEIGHTED_LOSS, _SQUARED_LOSS, _LOWEST, _HIGHEST = range(
    8, 13
)  # weights squared, times loss, loss**2
_SUMS = 13

_LABEL, _WEIGHT, _PROBABILITY = range(3)


@njit(cache=True, nogil=True)
def _first_bad_row(label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> tuple[int, int]:
    """The first row with an invalid value, and the column of that value; (-1, 0) if all are valid."""
    for b in range(label_B.size):  # written so that NaN fails
        if not (label_B[b] >= 0 and label_B[b] <= 1):
            return b, _LABEL
        if not (weight_B[b] >= 0 and weight_B[b] < np.inf):
            return b, _WEIGHT
        if not (probability_B[b] >= 0 and probability_B[b] <= 1):
            return b, _PROBABILITY
    return -1, 0


@njit(cache=True, nogil=True)
def _loss_of(label: float, probability: float) -> float:
    """Log loss of one impression; a label of 0 or 1 needs only one logarithm."""
    clipped = min(max(probability, CLIP), 1 - CLIP)
    if label == 0:
        return -math.log(1 - clipped)
    if label == 1:
        return -math.log(clipped)
    return -(label * math.log(clipped) + (1 - label) * math.log(1 - clipped))


@njit(cache=True, nogil=True)
def _sum_rows(
    label_B: Floats, weight_B: Floats, probability_B: Probabilities, sums: NDArray[np.float64]
) -> None:
    """Add rows one by one, so that the sums do not depend on the batches."""
    for b in range(label_B.size):
        label, weight = np.float64(label_B[b]), np.float64(weight_B[b])
        probability = np.float64(probability_B[b])
        loss = _loss_of(label, probability)
        sums[_ROWS] += 1
        if weight == 0:
            continue
        sums[_IMPRESSIONS] += weight
        sums[_CLICKS] += weight * label
        sums[_PREDICTED] += weight * probability
        sums[_PREDICTED_SQUARED] += weight * probability * probability
        sums[_LOSS] += weight * loss
        sums[_CORRECT] += weight * (label if probability >= 0.5 else 1 - label)
        sums[_BRIER] += weight * (label * (1 - probability) ** 2 + (1 - label) * probability**2)
        sums[_SQUARES] += weight * weight
        sums[_WEIGHTED_LOSS] += weight * weight * loss
        sums[_SQUARED_LOSS] += weight * weight * loss * loss
        sums[_LOWEST] = min(sums[_LOWEST], probability)
        sums[_HIGHEST] = max(sums[_HIGHEST], probability)
