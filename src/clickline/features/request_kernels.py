"""Encodes all fields of a request in one call, with the kernels of `encoder_kernels.py`, column by column.

No id or float is computed here, so a request is always encoded like a log. A value that these kernels cannot
handle (an error to report, a number that only Python parses or prints exactly) marks its column as slow: the
ordinary `Encoder` then encodes that column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.features import encoder_kernels
from clickline.numba_cache import njit
from clickline.records import ABSENT, FEATURE_ID, INTEGER, TEXT

Offsets = NDArray[np.int64]
Ids = NDArray[np.uint64]


class MissingValues(NamedTuple):
    """The values that mean missing: categories by canonical text, numbers by value."""

    texts: NDArray[np.uint8]
    ends_T1: Offsets
    integers_M: Offsets  # integers whose text is one of `texts`
    floats_M: NDArray[np.float64]
    feature_ids_T: Ids  # feature ids of the texts
    numbers_M: NDArray[np.float32]


class CategoryPlan(NamedTuple):
    """Slots whose values are text or feature ids, one per row."""

    columns_S: Offsets
    places_S: Offsets  # row in ids_SB
    salts_S: Ids
    feature_id_S: NDArray[np.bool_]


class NumberPlan(NamedTuple):
    """Columns read as numbers, and what they become: D dense fields, K buckets."""

    columns_P: Offsets
    dense_from_D: Offsets  # index in columns_P
    kernel_D: Offsets
    scaling_D4: NDArray[np.float64]  # shift, factor, low, high
    bucket_from_K: Offsets  # index in columns_P
    log2_K: NDArray[np.bool_]
    places_K: Offsets  # row in ids_SB
    salts_K: Ids
    edges: NDArray[np.float32]
    edges_K1: Offsets


@njit(cache=True, nogil=True, inline="always")
def _is_one_of(value: Any, values_M: NDArray[Any]) -> bool:
    found = False
    for m in range(values_M.size):
        found |= values_M[m] == value
    return found


@njit(cache=True, nogil=True)
def _encode_categories(inputs: Any, plan: CategoryPlan, ids_SB: Ids, slow_C: NDArray[np.bool_]) -> None:
    """Ids of every slot whose values are text or feature ids, one per row."""
    data, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB, missing = inputs
    rows = ids_SB.shape[1]
    values_B = np.empty(rows, dtype=np.uint64)
    missing_B = np.empty(rows, dtype=np.bool_)
    status_B = np.empty(rows, dtype=np.uint8)
    for s in range(plan.columns_S.size):
        c = plan.columns_S[s]
        kind = kind_C[c]
        salt = plan.salts_S[s]
        ids_B = ids_SB[plan.places_S[s]]
        if slow_C[c]:
            continue
        if kind == ABSENT:
            ids_B[:] = encoder_kernels.fmix64(np.uint64(encoder_kernels.MISSING_FEATURE_ID) ^ salt)
        elif kind == TEXT:
            starts_B, ends_B = starts_CB[c], ends_CB[c]
            if not plan.feature_id_S[s]:
                encoder_kernels.hash_spans(
                    data, starts_B, ends_B, missing.texts, missing.ends_T1, salt, ids_B
                )
            elif encoder_kernels.parse_feature_ids(
                data, starts_B, ends_B, missing.texts, missing.ends_T1, values_B, status_B
            ):
                slow_C[c] = True
            else:
                for row in range(rows):
                    missing_B[row] = status_B[row] != encoder_kernels.NUMBER_OK
                encoder_kernels.mix_feature_ids(values_B, missing_B, salt, ids_B)
        elif kind == FEATURE_ID:
            for row in range(rows):
                values_B[row] = np.uint64(integers_CB[c, row])
                missing_B[row] = values_B[row] == np.uint64(0) or _is_one_of(
                    values_B[row], missing.feature_ids_T
                )
            encoder_kernels.mix_feature_ids(values_B, missing_B, salt, ids_B)
        else:
            if kind == INTEGER:
                for row in range(rows):
                    value = integers_CB[c, row]
                    values_B[row] = np.uint64(value)
                    missing_B[row] = _is_one_of(value, missing.integers_M)
            else:
                for row in range(rows):
                    number = numbers_CB[c, row]
                    missing_B[row] = number != number or _is_one_of(number, missing.floats_M)
                    is_integer = not missing_B[row] and np.trunc(number) == number and abs(number) < 2.0**63
                    if not is_integer and not missing_B[row]:
                        slow_C[c] = True
                    values_B[row] = np.uint64(np.int64(number)) if is_integer else np.uint64(0)
            if plan.feature_id_S[s]:
                for row in range(rows):
                    missing_B[row] |= values_B[row] == np.uint64(0)
                encoder_kernels.mix_feature_ids(values_B, missing_B, salt, ids_B)
            else:
                encoder_kernels.hash_integers(values_B, missing_B, True, salt, ids_B)


@njit(cache=True, nogil=True)
def _encode_numbers(
    inputs: Any, plan: NumberPlan, dense_DB: NDArray[np.float32], ids_SB: Ids, slow_C: NDArray[np.bool_]
) -> None:
    """Floats of every dense field and ids of every bucket; each column is read once."""
    data, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB, missing = inputs
    rows = dense_DB.shape[1]
    raw_PB = np.empty((plan.columns_P.size, rows), dtype=np.float32)
    status_B = np.empty(rows, dtype=np.uint8)
    for p in range(plan.columns_P.size):
        c = plan.columns_P[p]
        kind = kind_C[c]
        raw_B = raw_PB[p]
        if slow_C[c] or kind == ABSENT:
            raw_B[:] = np.nan
        elif kind == TEXT:
            if encoder_kernels.parse_numbers(
                data,
                starts_CB[c],
                ends_CB[c],
                missing.texts,
                missing.ends_T1,
                missing.numbers_M,
                raw_B,
                status_B,
            ):
                slow_C[c] = True
        elif kind == INTEGER:
            for row in range(rows):
                raw_B[row] = np.float64(integers_CB[c, row])
            encoder_kernels.mask_missing_numbers(raw_B, missing.numbers_M)
        else:
            for row in range(rows):
                raw_B[row] = numbers_CB[c, row]
                if abs(raw_B[row]) == np.inf:
                    slow_C[c] = True
            encoder_kernels.mask_missing_numbers(raw_B, missing.numbers_M)
    for d in range(plan.dense_from_D.size):
        raw_B = raw_PB[plan.dense_from_D[d]]
        encoder_kernels.transform(plan.kernel_D[d], plan.scaling_D4[d], raw_B, dense_DB[d])
    for k in range(plan.bucket_from_K.size):
        raw_B = raw_PB[plan.bucket_from_K[k]]
        edges_E = plan.edges[plan.edges_K1[k] : plan.edges_K1[k + 1]]
        encoder_kernels.bucket(plan.log2_K[k], edges_E, plan.salts_K[k], raw_B, ids_SB[plan.places_K[k]])


@njit(cache=True, nogil=True)
def encode_fields(
    data: NDArray[np.uint8],
    kind_C: NDArray[np.uint8],
    starts_CB: Offsets,
    ends_CB: Offsets,
    numbers_CB: NDArray[np.float64],
    integers_CB: Offsets,
    missing: MissingValues,
    categories: CategoryPlan,
    numbers: NumberPlan,
    dense_DB: NDArray[np.float32],
    ids_SB: Ids,
    slow_C: NDArray[np.bool_],
) -> None:
    """Ids and floats of every field with one value per row; columns that are not done are marked in `slow_C`."""
    inputs = (data, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB, missing)
    _encode_categories(inputs, categories, ids_SB, slow_C)
    _encode_numbers(inputs, numbers, dense_DB, ids_SB, slow_C)
