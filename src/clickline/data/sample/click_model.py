"""The generative click model: the values of a synthetic row, and its click probability.

    row number ──▶ hour ──▶ ids per slot, counts per dense field ──▶ logit ──▶ p ──▶ click

Every value is a hash of (seed, row, column), so rows can be generated independently, in any order, by
any thread. Only integer operations and IEEE double arithmetic are used (no libm, no fast-math): the
same seed gives the same bits on every machine.

Slots come in pairs (1,2), (3,4), …: a small one and a large one, sizes log-spaced from 10 to the
cardinality. The pairs take these roles in turn:
  * the ids of both have weights, and the two slots interact (a product of latent vectors);
  * the ids of both have weights, the small slot interacts with the small one of the previous pair, and
    the weights of half of the large slot's ids drift to new values every 12 hours;
  * noise that a model must learn to ignore.
Dense fields, in turn: linear in log1p, a hump in log1p, a step, noise. Missing has its seed_bits effect.
Slots of 1000 ids or more take a share of their values from ids that first occurred in the last hours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.features.encoder_kernels import fmix64, log1p
from clickline.numba_cache import njit

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

START = 1_767_225_600
"""Unix time of the first row: 2026-01-01T00 UTC."""
CLICK_RATE = 0.25
MISSING_ID = -1
MISSING_COUNT = -(1 << 62)

_SPREAD = 1.5  # standard deviation of the logit; with CLICK_RATE it determines the best possible AUC
_SMALLEST_SLOT = 10
_FRESH_MIN_SIZE = 1000  # slots at least this large have new ids every hour
_FRESH_SHARE = 0.2  # of a large slot's values; half of them are from ids that are new in that hour
_MAX_AGE = 7  # hours after which a new id no longer occurs
_DRIFT_HOURS = 12  # hours until drifting ids have entirely new weights
_DAILY_SWING = 0.2  # daily variation of the logit, in units of its spread
_TRIALS = 1 << 15  # rows generated to find the intercept
_WEIGHT_SMALL, _WEIGHT_LARGE = 1.0, 0.7  # of ids, before the logit is scaled
_CROSS_BEFORE, _CROSS_PARTNER = 1.0, 0.6  # of interactions

_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROWS, _TRIAL_ROWS, _SLOT_WEIGHTS, _DENSE_WEIGHTS, _SHAPE = 1, 2, 3, 4, 5  # streams of randomness
_LATENT = np.uint64(0xD1B54A32D192ED03)
_DENSE_COLUMNS = 1 << 20
_LINEAR, _HUMP, _STAIR, _NOISE = 0, 1, 2, 3


class ClickModel(NamedTuple):
    """Parameters of the model. Shares are in 1/65536; a slot's `power` is its Zipf exponent less one."""

    hours: int
    rows_key: np.uint64
    trials_key: np.uint64
    slot_keys_S: NDArray[np.uint64]
    slot_sizes_S: Integers
    slot_powers_S: Floats
    slot_ends_S: Floats  # size ** -power: the end of the inverse distribution
    slot_missing_S: Integers
    slot_weights_S: Floats
    slot_drifts_S: NDArray[np.bool_]
    cross_weights_S: Floats  # of the interaction with another slot; 0 for none
    cross_slots_S: Integers
    fresh_shares_S: Integers
    fresh_sizes_S: Integers  # new ids per hour
    fresh_ends_S: Floats
    dense_centres_D: Floats
    dense_widths_D: Floats
    dense_lowest_D: Integers
    dense_missing_D: Integers
    dense_kinds_D: Integers
    dense_weights_D: Floats
    dense_gaps_D: Floats  # effect of a missing value
    intercept: float
    slope: float


@njit(cache=True, nogil=True, inline="always")
def _exp(x: float) -> float:
    """e ** x for |x| < 700, from basic arithmetic only; libm's last bit differs between machines."""
    x = min(max(x, -700.0), 700.0)
    shifted = x * 1.4426950408889634 + 1024.5
    whole = np.int64(shifted) - 1024  # floor, since `shifted` is positive
    r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10
    r2 = r * r
    # The Taylor series to r**11, in two halves that a processor can compute in parallel.
    even = 1.0 + r2 * (
        1 / 2.0 + r2 * (1 / 24.0 + r2 * (1 / 720.0 + r2 * (1 / 40320.0 + r2 * (1 / 3628800.0))))
    )
    odd = 1.0 + r2 * (
        1 / 6.0 + r2 * (1 / 120.0 + r2 * (1 / 5040.0 + r2 * (1 / 362880.0 + r2 * (1 / 39916800.0))))
    )
    return (even + r * odd) * np.int64((whole + 1023) << 52).view(np.float64)


@njit(cache=True, nogil=True)
def _power(base: float, exponent: float) -> float:
    """base ** exponent for base >= 1."""
    return _exp(exponent * log1p(base - 1.0))


@njit(cache=True, nogil=True, inline="always")
def _hash(key: np.uint64, number: int) -> np.uint64:
    return fmix64(key + (np.uint64(number) + np.uint64(1)) * _STEP)


@njit(cache=True, nogil=True, inline="always")
def _unit(bits: np.uint64) -> float:
    """A double in [0, 1)."""
    return np.float64(np.int64(bits >> np.uint64(11))) * (1.0 / 9007199254740992.0)


@njit(cache=True, nogil=True, inline="always")
def _quarter(bits: np.uint64, which: int) -> float:
    """One of four independent numbers from 64 bits: mean 0, variance 1, uniform over ±sqrt(3)."""
    part = np.int64((bits >> np.uint64(16 * which)) & np.uint64(0xFFFF))
    return (np.float64(part) - 32767.5) * 5.285759576360943e-05


@njit(cache=True, nogil=True, inline="always")
def _normal(bits: np.uint64) -> float:
    """Approximately standard normal, within ±3.47: the sum of four uniform numbers."""
    return 0.5 * ((_quarter(bits, 0) + _quarter(bits, 1)) + (_quarter(bits, 2) + _quarter(bits, 3)))


@njit(cache=True, nogil=True, inline="always")
def _rank(u: float, end: float, power: float, size: int) -> int:
    """Rank 0, 1, … with probability falling as (rank + 1) ** -(power + 1), by inversion."""
    base = (1.0 - u) + u * end
    return min(int(_exp(log1p(1.0 / base - 1.0) / power)) - 1, size - 1)


@njit(cache=True, nogil=True, inline="always")
def _id(model: ClickModel, row_key: np.uint64, slot: int, hour: int) -> int:
    # Selections instead of branches: coin flips cannot be predicted, and this is the hottest code.
    more = _hash(row_key, 2 + 2 * slot)
    fresh = np.int64((more >> np.uint64(16)) & np.uint64(0xFFFF)) < model.fresh_shares_S[slot]
    age = 0
    for older in range(1, _MAX_AGE + 1):
        heads = np.uint64((1 << older) - 1) << np.uint64(32)
        age += 1 if more & heads == heads else 0
    size = model.slot_sizes_S[slot]
    born = model.fresh_sizes_S[slot]
    end = model.fresh_ends_S[slot] if fresh else model.slot_ends_S[slot]
    within = born if fresh else size
    start = size + (hour - age + _MAX_AGE) * born if fresh else 0
    identity: int = start + _rank(_unit(_hash(row_key, 1 + 2 * slot)), end, model.slot_powers_S[slot], within)
    missing = np.int64(more & np.uint64(0xFFFF)) < model.slot_missing_S[slot]
    return MISSING_ID if missing else identity


@njit(cache=True, nogil=True)
def _dense_value(model: ClickModel, row_key: np.uint64, field: int) -> int:
    column = _DENSE_COLUMNS + 2 * field
    missing = model.dense_missing_D[field]
    if missing > 0 and np.int64(_hash(row_key, column + 1) & np.uint64(0xFFFF)) < missing:
        return MISSING_COUNT
    drawn = model.dense_centres_D[field] + model.dense_widths_D[field] * _normal(_hash(row_key, column))
    lowest: int = model.dense_lowest_D[field]
    return lowest + int(_exp(drawn))


@njit(cache=True, nogil=True, inline="always")
def _dense_effect(model: ClickModel, field: int, count: int) -> float:
    kind = model.dense_kinds_D[field]
    if kind == _NOISE:
        return 0.0
    gap: float = model.dense_gaps_D[field]
    if count == MISSING_COUNT:
        return gap
    level = log1p(np.float64(count - model.dense_lowest_D[field]))
    z: float = (level - model.dense_centres_D[field]) / model.dense_widths_D[field]
    weight: float = model.dense_weights_D[field]
    if kind == _LINEAR:
        return weight * z
    if kind == _HUMP:
        return weight * (1.0 - min(z * z, 4.0))
    return weight if z > 0.5 else -0.5 * weight


@njit(cache=True, nogil=True, inline="always")
def _id_hash(model: ClickModel, slot: int, ids_S: Integers) -> np.uint64:
    """The hash of an id, from which its weights and its latent vector are derived."""
    return fmix64(model.slot_keys_S[slot] + np.uint64(ids_S[slot]) * _STEP)


@njit(cache=True, nogil=True)
def _raw_logit(model: ClickModel, turn: int, share: float, ids_S: Integers, dense_D: Integers) -> float:
    """The logit before scaling; drifting weights are `share` of the way from period `turn` to the next."""
    logit = 0.0
    scale = 1.0 / np.sqrt((1.0 - share) * (1.0 - share) + share * share)
    for slot in range(ids_S.size):
        if model.slot_weights_S[slot] == 0.0:
            continue
        identity = _id_hash(model, slot, ids_S)
        if model.slot_drifts_S[slot] and identity & np.uint64(1):
            old, new = _normal(_hash(identity, turn)), _normal(_hash(identity, turn + 1))
            weight = ((1.0 - share) * old + share * new) * scale
        else:
            weight = _normal(identity)
        logit += model.slot_weights_S[slot] * weight
        if model.cross_weights_S[slot] != 0.0:
            here = fmix64(identity ^ _LATENT)
            there = fmix64(_id_hash(model, model.cross_slots_S[slot], ids_S) ^ _LATENT)
            product = 0.0
            for k in range(4):
                product += _quarter(here, k) * _quarter(there, k)
            logit += model.cross_weights_S[slot] * 0.5 * product
    for field in range(dense_D.size):
        logit += _dense_effect(model, field, dense_D[field])
    return logit


@njit(cache=True, nogil=True)
def _generate_row(model: ClickModel, key: np.uint64, hour: int, ids_S: Integers, dense_D: Integers) -> float:
    """Fill in the row's values and return its logit before scaling."""
    for slot in range(ids_S.size):
        ids_S[slot] = _id(model, key, slot, hour)
    for field in range(dense_D.size):
        dense_D[field] = _dense_value(model, key, field)
    return _raw_logit(model, hour // _DRIFT_HOURS, (hour % _DRIFT_HOURS) / _DRIFT_HOURS, ids_S, dense_D)


@njit(cache=True, nogil=True)
def _daily_curve(hour: int) -> float:
    """A smooth daily curve: -1 at nine in the morning, +1 at nine in the evening."""
    u = ((hour + 21) % 24) / 12.0 - 1.0
    return 4.0 * u * (1.0 - abs(u))


@njit(cache=True, nogil=True)
def generate_rows(
    model: ClickModel,
    rows: int,
    first: int,
    ids_BS: Integers,
    dense_BD: Integers,
    times_B: Integers,
    probability_B: Floats,
    clicks_B: NDArray[np.int8],
) -> None:
    """Generate rows `first`, `first` + 1, … of a log of `rows` rows, spread evenly over the model's hours."""
    hours = model.hours
    hour = -1
    begin = end = 0
    for b in range(times_B.size):
        row = first + b
        if hour < 0 or row >= end:
            hour = ((row + 1) * hours - 1) // rows
            begin = hour * rows // hours
            end = (hour + 1) * rows // hours
        key = _hash(model.rows_key, row)
        raw = _generate_row(model, key, hour, ids_BS[b], dense_BD[b])
        logit = model.intercept + model.slope * raw + _SPREAD * _DAILY_SWING * _daily_curve(hour)
        probability = 1.0 / (1.0 + _exp(-logit))
        times_B[b] = START + 3600 * hour + (row - begin) * 3600 // (end - begin)
        probability_B[b] = probability
        clicks_B[b] = 1 if _unit(_hash(key, 0)) < probability else 0


@njit(cache=True, nogil=True)
def _calibration(model: ClickModel) -> tuple[float, float]:
    """Intercept and slope that give the logit its spread and the clicks their rate, found with trial rows."""
    ids_S = np.empty(model.slot_sizes_S.size, np.int64)
    dense_D = np.empty(model.dense_kinds_D.size, np.int64)
    raw_T = np.empty(_TRIALS, np.float64)
    waves_T = np.empty(_TRIALS, np.float64)
    mean = 0.0
    for t in range(_TRIALS):
        key = _hash(model.trials_key, t)
        hour = t * model.hours // _TRIALS
        raw_T[t] = _generate_row(model, key, hour, ids_S, dense_D)
        waves_T[t] = _SPREAD * _DAILY_SWING * _daily_curve(hour)
        mean += raw_T[t] / _TRIALS
    variance = 0.0
    for t in range(_TRIALS):
        variance += (raw_T[t] - mean) * (raw_T[t] - mean) / _TRIALS
    slope = _SPREAD / np.sqrt(variance) if variance > 0.0 else 0.0
    low, high = -50.0, 50.0
    for _ in range(60):
        shift = 0.5 * (low + high)
        rate = 0.0
        for t in range(_TRIALS):
            rate += 1.0 / (1.0 + _exp(-(shift + slope * (raw_T[t] - mean) + waves_T[t])))
        if rate < CLICK_RATE * _TRIALS:
            low = shift
        else:
            high = shift
    return 0.5 * (low + high) - slope * mean, slope


@njit(cache=True, nogil=True)
def _stream(seed: np.uint64, stream: int) -> np.uint64:
    return _hash(_hash(seed, 0), stream)


def _hashes(seed: np.uint64, stream: int, size: int) -> NDArray[np.uint64]:
    key = np.uint64(_stream(seed, stream))
    return np.array([_hash(key, n) for n in range(size)], np.uint64)


def _inverse_powers(sizes_S: Integers, powers_S: Floats) -> Floats:
    pairs = zip(sizes_S.tolist(), powers_S.tolist(), strict=True)
    return np.array([_power(float(size), -power) for size, power in pairs])


def _sizes(slots: int, cardinality: int) -> Integers:
    """Sizes of slots: even positions ascend from the smallest size, odd ones descend from the largest."""
    sizes_S = np.full(slots, cardinality, np.int64)
    for s in range(slots if slots > 1 else 0):
        place = s // 2 if s % 2 == 0 else slots - 1 - s // 2
        growth = _power(cardinality / _SMALLEST_SLOT, place / (slots - 1))
        sizes_S[s] = min(int(_SMALLEST_SLOT * growth + 0.5), cardinality)
    return sizes_S


def build_model(seed: int, slots: int, dense: int, cardinality: int, hours: int) -> ClickModel:
    """The model of a seed. Sizes and missing rates depend only on a field's position, weights on the seed."""
    seed_bits = np.uint64(seed)
    shapes = [_unit(bits) for bits in _hashes(np.uint64(0), _SHAPE, 3 * (slots + dense))]
    shapes_F3 = np.array(shapes).reshape(-1, 3)
    slot_shapes_S3, dense_shapes_D3 = shapes_F3[:slots], shapes_F3[slots:]
    sizes_S = _sizes(slots, cardinality)
    powers_S: Floats = 0.05 + 0.3 * slot_shapes_S3[:, 0]
    born_S = np.clip(sizes_S // 50, 10, 10_000)
    places_S = np.arange(slots)
    roles_S = places_S // 2 % 3  # 0 weights and interaction, 1 weights that drift, 2 noise
    meets_partner_S = (roles_S == 0) & (places_S % 2 == 1)
    meets_before_S = (roles_S == 1) & (places_S % 2 == 0)
    fields_D = np.arange(dense)
    signs_D = _hashes(seed_bits, _DENSE_WEIGHTS, dense)
    model = ClickModel(
        hours=hours,
        rows_key=np.uint64(_stream(seed_bits, _ROWS)),
        trials_key=np.uint64(_stream(seed_bits, _TRIAL_ROWS)),
        slot_keys_S=_hashes(seed_bits, _SLOT_WEIGHTS, slots),
        slot_sizes_S=sizes_S,
        slot_powers_S=powers_S,
        slot_ends_S=_inverse_powers(sizes_S, powers_S),
        slot_missing_S=_missing_shares(slot_shapes_S3[:, 1]),
        slot_weights_S=np.where(roles_S == 2, 0.0, np.where(places_S % 2 == 0, _WEIGHT_SMALL, _WEIGHT_LARGE)),
        slot_drifts_S=(roles_S == 1) & (places_S % 2 == 1),
        cross_weights_S=np.where(
            meets_partner_S, _CROSS_PARTNER, np.where(meets_before_S, _CROSS_BEFORE, 0.0)
        ),
        cross_slots_S=np.where(meets_partner_S, places_S - 1, np.where(meets_before_S, places_S - 2, 0)),
        fresh_shares_S=np.where(sizes_S >= _FRESH_MIN_SIZE, int(65536 * _FRESH_SHARE), 0),
        fresh_sizes_S=born_S,
        fresh_ends_S=_inverse_powers(born_S, powers_S),
        dense_centres_D=0.5 + 5.0 * dense_shapes_D3[:, 0],
        dense_widths_D=0.8 + 1.2 * dense_shapes_D3[:, 2],
        dense_lowest_D=np.where(fields_D == 1, -3, 0),  # like Criteo's I2
        dense_missing_D=_missing_shares(dense_shapes_D3[:, 1]),
        dense_kinds_D=fields_D % 4,
        dense_weights_D=np.where(signs_D & np.uint64(1), 1.0, -1.0),
        dense_gaps_D=np.array([_normal(bits) for bits in signs_D]),
        intercept=0.0,
        slope=1.0,
    )
    intercept, slope = _calibration(model)
    return model._replace(intercept=intercept, slope=slope)


def _missing_shares(shapes_F: Floats) -> Integers:
    """Shares of missing values: none for 40 % of the fields, up to 30 % of the rows for the others."""
    return (65536 * 0.5 * np.maximum(shapes_F - 0.4, 0.0)).astype(np.int64)
