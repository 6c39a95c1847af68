"""The arithmetic of the encoder, as Numba kernels over plain arrays.

Everything that determines an id or a float is here, built from integer operations and IEEE double
arithmetic only: no call into the C library's `log`, no fast-math, no dependence on threads. So a row gets
the same bits in every process, on every machine and in every release.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.kernel_intrinsics import bits_of_f64, f64_from_bits, load_u8, load_u32, load_u64
from clickline.numba_cache import njit

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Ids = NDArray[np.uint64]

MISSING_FEATURE_ID = 17241709254077376921
"""XXH64 of the empty text: the feature id of a missing value, as in ElasticCTR's own data."""

NUMBER_OK, NUMBER_MISSING, NUMBER_BAD, NUMBER_SLOW = 0, 1, 2, 3
LOG1P, SCALE, SCALE_LOG1P = 0, 1, 2

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


# ── canonical text ─────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True, inline="always")
def _is_blank(byte: np.uint8) -> bool:
    return bool(byte == 32 or byte == 9 or byte == 10 or byte == 13)


@njit(cache=True, nogil=True, inline="always")
def _may_change(data: Bytes, start: int, end: int) -> bool:
    """Whether `canonical` may change a nonempty text: it has a blank at an end, or ends in a 0 after a point, a sign
    or a 0. This checks three bytes without a branch, and rules out nearly all values."""
    last = load_u8(data, end - 1)
    before = load_u8(data, max(end - 2, start))
    return bool((load_u8(data, start) <= 32) | (last <= 32) | ((last == 48) & (before <= 48)))


@njit(cache=True, nogil=True)
def canonical(data: Bytes, start: int, end: int) -> tuple[int, int]:
    """The canonical part of `data[start:end]`, the same for every spelling of a value.

    Blanks at the ends are dropped. An integer with a fraction of zeros is that integer ("7.0" is "7"), and zero has
    no sign. Nothing else changes: "007", "1.10" and "1e3" may be codes, not numbers.
    """
    while start < end and _is_blank(data[start]):
        start += 1
    while start < end and _is_blank(data[end - 1]):
        end -= 1
    zeros = end
    while zeros > start and data[zeros - 1] == 48:
        zeros -= 1
    if zeros == end:
        return start, end
    whole = zeros - 1 if zeros > start and data[zeros - 1] == 46 else end  # the end of its integer part
    first = start + 1 if data[start] == 45 else start
    if first >= whole:
        return start, end
    if data[first] == 48:  # zero, which has no sign; or a code with leading zeros, which is not a number
        return (first, whole) if whole - first == 1 else (start, end)
    for at in range(first, whole):
        if data[at] < 48 or data[at] > 57:
            return start, end
    return start, whole


@njit(cache=True, nogil=True)
def canonicalize_spans(
    data: Bytes, starts_N: Offsets, ends_N: Offsets, canonical_starts_N: Offsets, canonical_ends_N: Offsets
) -> None:
    """The canonical part of every span."""
    for n in range(starts_N.size):
        start, end = starts_N[n], ends_N[n]
        if start < end and _may_change(data, start, end):
            start, end = canonical(data, start, end)
        canonical_starts_N[n], canonical_ends_N[n] = start, end


@njit(cache=True, nogil=True, inline="always")
def _is_one_of(data: Bytes, start: int, end: int, texts: Bytes, ends_T1: Offsets) -> bool:
    """Whether a canonical text equals one of `texts`, which are concatenated."""
    found = False
    for t in range(ends_T1.size - 1):
        first = ends_T1[t]
        if ends_T1[t + 1] - first == end - start:
            same = True
            for i in range(end - start):
                same &= load_u8(data, start + i) == load_u8(texts, first + i)
            found |= same
    return found


@njit(cache=True, nogil=True)
def match_texts(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    texts: Bytes,
    ends_T1: Offsets,
    found_N: NDArray[np.bool_],
) -> None:
    """Which spans have a canonical text that is one of `texts`."""
    for n in range(starts_N.size):
        start, end = starts_N[n], ends_N[n]
        if start < end and _may_change(data, start, end):
            start, end = canonical(data, start, end)
        found_N[n] = _is_one_of(data, start, end, texts, ends_T1)


# ── ids ────────────────────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True, inline="always")
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@njit(cache=True, nogil=True, inline="always")
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _P2, 31) * _P1


@njit(cache=True, nogil=True)
def xxh64(data: Bytes, start: int, end: int) -> np.uint64:
    """XXH64 with seed 0 of `data[start:end]`."""
    at = np.int64(start)
    stop = np.int64(end)
    if stop - at >= 32:
        one = _P1 + _P2
        two = _P2
        three = np.uint64(0)
        four = np.uint64(0) - _P1
        while stop - at >= 32:
            one = _round(one, load_u64(data, at))
            two = _round(two, load_u64(data, at + 8))
            three = _round(three, load_u64(data, at + 16))
            four = _round(four, load_u64(data, at + 24))
            at += 32
        digest = _rotate(one, 1) + _rotate(two, 7) + _rotate(three, 12) + _rotate(four, 18)
        for lane in (one, two, three, four):
            digest = (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        digest = _P5
    digest += np.uint64(end - start)
    while stop - at >= 8:
        digest = _rotate(digest ^ _round(np.uint64(0), load_u64(data, at)), 27) * _P1 + _P4
        at += 8
    if stop - at >= 4:
        digest = _rotate(digest ^ (np.uint64(load_u32(data, at)) * _P1), 23) * _P2 + _P3
        at += 4
    while at < stop:
        digest = _rotate(digest ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    digest = (digest ^ (digest >> np.uint64(33))) * _P2
    digest = (digest ^ (digest >> np.uint64(29))) * _P3
    return digest ^ (digest >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def fmix64(value: np.uint64) -> np.uint64:
    """MurmurHash3's finalizer: a bijection in which every input bit affects every output bit."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@njit(cache=True, nogil=True)
def slot_salt(number: np.uint64) -> np.uint64:
    """The salt of a slot, so that the same value in two slots gets two ids."""
    return fmix64(np.uint64(number) + _GOLDEN_RATIO)


@njit(cache=True, nogil=True)
def mix_feature_ids(values_N: Ids, missing_N: NDArray[np.bool_], salt: np.uint64, ids_N: Ids) -> None:
    """Ids of values that are 64-bit feature ids already."""
    missing_id = fmix64(np.uint64(MISSING_FEATURE_ID) ^ salt)
    for n in range(values_N.size):
        ids_N[n] = missing_id if missing_N[n] else fmix64(values_N[n] ^ salt)


@njit(cache=True, nogil=True)
def hash_spans(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    missing: Bytes,
    missing_T1: Offsets,
    salt: np.uint64,
    ids_N: Ids,
) -> None:
    """Ids of texts. The empty text is missing, and its hash is the missing id without a special case."""
    if missing_T1.size > 1:
        for n in range(starts_N.size):
            start, end = starts_N[n], ends_N[n]
            if start < end and _may_change(data, start, end):
                start, end = canonical(data, start, end)
            if _is_one_of(data, start, end, missing, missing_T1):
                end = start
            ids_N[n] = fmix64(xxh64(data, start, end) ^ salt)
        return
    for n in range(starts_N.size):  # the same without comparing each value with `missing`
        start, end = starts_N[n], ends_N[n]
        if start < end and _may_change(data, start, end):
            start, end = canonical(data, start, end)
        ids_N[n] = fmix64(xxh64(data, start, end) ^ salt)


@njit(cache=True, nogil=True)
def hash_integers(
    values_N: Ids, missing_N: NDArray[np.bool_], signed: bool, salt: np.uint64, ids_N: Ids
) -> None:
    """Ids of integers used as text: the same as the ids of their decimal digits."""
    digits = np.empty(24, dtype=np.uint8)
    for n in range(values_N.size):
        at = 24
        if not missing_N[n]:
            rest = values_N[n]
            negative = signed and (rest >> np.uint64(63)) == np.uint64(1)
            if negative:
                rest = np.uint64(0) - rest
            while True:
                at -= 1
                digits[at] = np.uint8(48) + np.uint8(rest % np.uint64(10))
                rest = rest // np.uint64(10)
                if rest == np.uint64(0):
                    break
            if negative:
                at -= 1
                digits[at] = np.uint8(45)
        ids_N[n] = fmix64(xxh64(digits, at, 24) ^ salt)


@njit(cache=True, nogil=True)
def split_spans(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    separator: int,
    piece_starts_P: Offsets,
    piece_ends_P: Offsets,
    offsets_N1: Offsets,
) -> int:
    """Spans of the nonempty pieces between separators, and the offsets of each text's pieces. Returns how many there
    are, which may be more than fit."""
    pieces = 0
    offsets_N1[0] = 0
    for n in range(starts_N.size):
        at = starts_N[n]
        stop = ends_N[n]
        while at < stop:
            begin = at
            while at < stop and data[at] != separator:
                at += 1
            if at > begin:
                if pieces < piece_starts_P.size:
                    piece_starts_P[pieces] = begin
                    piece_ends_P[pieces] = at
                pieces += 1
            at += 1
        offsets_N1[n + 1] = pieces
    return pieces


@njit(cache=True, nogil=True)
def drop_missing_values(
    ids_N: Ids, offsets_B1: Offsets, missing_id: np.uint64, pooled_N: Ids, pooled_offsets_B1: Offsets
) -> int:
    """Drop missing values from rows with several values; a row without any other value keeps the missing id."""
    count = 0
    pooled_offsets_B1[0] = 0
    for row in range(offsets_B1.size - 1):
        before = count
        for n in range(offsets_B1[row], offsets_B1[row + 1]):
            if ids_N[n] != missing_id:
                pooled_N[count] = ids_N[n]
                count += 1
        if count == before:
            pooled_N[count] = missing_id
            count += 1
        pooled_offsets_B1[row + 1] = count
    return count


@njit(cache=True, nogil=True)
def parse_feature_ids(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    missing: Bytes,
    missing_T1: Offsets,
    values_N: Ids,
    status_N: NDArray[np.uint8],
) -> int:
    """Parse texts as 64-bit integers, unsigned or signed; 0, the empty text and the texts in `missing` are missing.

    Returns the number of bad texts.
    """
    bad = 0
    for n in range(starts_N.size):
        at, end = starts_N[n], ends_N[n]
        if at < end and _may_change(data, at, end):
            at, end = canonical(data, at, end)
        if _is_one_of(data, at, end, missing, missing_T1):
            end = at
        value = np.uint64(0)
        status = NUMBER_MISSING if at == end else NUMBER_OK
        negative = at < end and data[at] == 45
        limit = np.uint64(0xFFFFFFFFFFFFFFFF)
        if negative:
            limit = np.uint64(1) << np.uint64(63)
            at += 1
        if (negative and at == end) or end - at > 20:
            status = NUMBER_BAD
            at = end
        while at < end:
            digit = np.uint64(data[at]) - np.uint64(48)
            if digit > np.uint64(9) or value > (limit - digit) // np.uint64(10):
                status = NUMBER_BAD
                break
            value = value * np.uint64(10) + digit
            at += 1
        if status == NUMBER_BAD:
            bad += 1
        elif value == np.uint64(0):
            status = NUMBER_MISSING
        values_N[n] = np.uint64(0) - value if negative else value
        status_N[n] = status
    return bad


# ── numbers ────────────────────────────────────────────────────────────────────────────────────

_TENS = 10.0 ** np.arange(23)  # exact in a double up to 10**22


@njit(cache=True, nogil=True)
def _parse_number(data: Bytes, start: int, end: int) -> tuple[float, int]:
    if start == end:
        return np.nan, NUMBER_MISSING
    at = start
    negative = data[at] == 45
    if negative or data[at] == 43:
        at += 1
    mantissa = np.int64(0)
    digits = 0  # significant digits
    digit_count = 0
    exponent = np.int64(0)
    point = False
    while at < end:
        byte = data[at]
        if 48 <= byte <= 57:
            digit_count += 1
            if digits < 18:
                mantissa = mantissa * 10 + (np.int64(byte) - 48)
                if mantissa != 0:
                    digits += 1
                if point:
                    exponent -= 1
            else:
                digits += 1  # too long for exact arithmetic: left to Python's own parser
        elif byte == 46 and not point:
            point = True
        else:
            break
        at += 1
    if digit_count == 0:
        return np.nan, NUMBER_BAD
    if at < end:
        if data[at] != 101 and data[at] != 69:
            return np.nan, NUMBER_BAD
        at += 1
        down = False
        if at < end and (data[at] == 45 or data[at] == 43):
            down = data[at] == 45
            at += 1
        if at == end:
            return np.nan, NUMBER_BAD
        power = np.int64(0)
        while at < end:
            byte = data[at]
            if byte < 48 or byte > 57:
                return np.nan, NUMBER_BAD
            if power < 100_000:
                power = power * 10 + (np.int64(byte) - 48)
            at += 1
        exponent += -power if down else power
    # With a mantissa up to 2**53 and an exact power of ten, one multiplication or division rounds
    # once, so the result is the nearest double, the same as Python's float().
    if digits > 18 or mantissa > 9007199254740992:
        return np.nan, NUMBER_SLOW
    value = np.float64(mantissa)
    if mantissa != 0 and exponent != 0:
        if exponent < -22 or exponent > 22:
            return np.nan, NUMBER_SLOW
        if exponent < 0:
            value = value / _TENS[-exponent]
        else:
            value = value * _TENS[exponent]
    return (-value if negative else value), NUMBER_OK


@njit(cache=True, nogil=True)
def parse_numbers(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    missing: Bytes,
    missing_T1: Offsets,
    missing_M: NDArray[np.float32],
    raw_N: NDArray[np.float32],
    status_N: NDArray[np.uint8],
) -> int:
    """Parse texts as doubles rounded to float32, NaN for missing. Returns how many need more work.

    The numbers `missing_M`, however they are written, and the other texts in `missing` are missing."""
    unparsed = _parse_unchanged(data, starts_N, ends_N, raw_N, status_N)
    if unparsed > 0:
        unparsed = _parse_again(data, starts_N, ends_N, missing, missing_T1, raw_N, status_N)
    mask_missing_numbers(raw_N, missing_M)
    return unparsed


@njit(cache=True, nogil=True)
def _parse_unchanged(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    raw_N: NDArray[np.float32],
    status_N: NDArray[np.uint8],
) -> int:
    """Parse the texts unchanged: nearly all are numbers. A function of its own, so that the parser is inlined."""
    unparsed = 0
    for n in range(starts_N.size):
        value, status = _parse_number(data, starts_N[n], ends_N[n])
        raw_N[n] = value
        if status == NUMBER_OK and np.isinf(raw_N[n]):
            status = NUMBER_SLOW  # beyond float32: reported by the caller
        status_N[n] = status
        if status >= NUMBER_BAD:
            unparsed += 1
    return unparsed


@njit(cache=True, nogil=True)
def _parse_again(
    data: Bytes,
    starts_N: Offsets,
    ends_N: Offsets,
    missing: Bytes,
    missing_T1: Offsets,
    raw_N: NDArray[np.float32],
    status_N: NDArray[np.uint8],
) -> int:
    """Parse again what is not a number: it may have blanks at its ends, or mean a missing value."""
    unparsed = 0
    for n in range(starts_N.size):
        if status_N[n] == NUMBER_BAD:
            start, end = canonical(data, starts_N[n], ends_N[n])
            if _is_one_of(data, start, end, missing, missing_T1):
                end = start
            value, status = _parse_number(data, start, end)
            raw_N[n] = value
            if status == NUMBER_OK and np.isinf(raw_N[n]):
                status = NUMBER_SLOW
            status_N[n] = status
        if status_N[n] >= NUMBER_BAD:
            unparsed += 1
    return unparsed


@njit(cache=True, nogil=True)
def mask_missing_numbers(raw_N: NDArray[np.float32], missing_M: NDArray[np.float32]) -> None:
    """Set the numbers that mean a missing value to NaN."""
    for m in range(missing_M.size):
        for n in range(raw_N.size):
            if raw_N[n] == missing_M[m]:
                raw_N[n] = np.nan


@njit(cache=True, nogil=True, inline="always")
def log1p(value: float) -> float:
    """log(1 + value) for value >= 0, to within 2 ulp: the atanh series around a power of two."""
    total = 1.0 + value
    rounding_error = ((total - 1.0) - value) / total  # the rounding error of 1 + value
    bits = bits_of_f64(total)
    exponent = (bits >> 52) - 1023
    mantissa = f64_from_bits((bits & 0x000FFFFFFFFFFFFF) | (1023 << 52))  # in [1, 2)
    if mantissa > 1.4142135623730951:
        mantissa *= 0.5
        exponent += 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = 1.0 / 23.0
    for odd in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        series = series * z + 1.0 / odd
    tail = 2.0 * s * series * z
    # ln 2 in two parts, the first with trailing zeros so that exponent * part is exact.
    high = 6.93147180369123816490e-01 * exponent
    low = 1.90821492927058770002e-10 * exponent
    result: float = high + (2.0 * s + (tail + (low - rounding_error)))
    return result


@njit(cache=True, nogil=True)
def transform(
    kernel: int, scaling_4: NDArray[np.float64], raw_N: NDArray[np.float32], out_N: NDArray[np.float32]
) -> None:
    """The floats of a dense field: scaled, or the logarithm, or both."""
    if kernel == LOG1P:
        _signed_log1p(raw_N, out_N)
    else:
        shift, factor, low, high = scaling_4
        _scale(raw_N, shift, factor, low, high, out_N)
        if kernel == SCALE_LOG1P:
            _signed_log1p(out_N, out_N)


@njit(cache=True, nogil=True)
def _signed_log1p(raw_N: NDArray[np.float32], out_N: NDArray[np.float32]) -> None:
    """sign(x) * log(1 + |x|); missing (NaN) becomes 0."""
    for n in range(raw_N.size):
        value = np.float64(raw_N[n])
        if value != value:
            out_N[n] = 0.0
        elif value < 0.0:
            out_N[n] = -log1p(-value)
        else:
            out_N[n] = log1p(value)


@njit(cache=True, nogil=True)
def _scale(
    raw_N: NDArray[np.float32],
    shift: float,
    factor: float,
    low: float,
    high: float,
    out_N: NDArray[np.float32],
) -> None:
    """(x - shift) * factor, clipped to [low, high]; missing (NaN) becomes 0."""
    for n in range(raw_N.size):
        value = np.float64(raw_N[n])
        if value != value:
            out_N[n] = 0.0
        else:
            # "+ 0.0" turns -0.0 into 0.0, so that every spelling of zero has the same bits.
            out_N[n] = min(max((value - shift) * factor, low), high) + 0.0


@njit(cache=True, nogil=True)
def bucket(
    log2: bool, edges_E: NDArray[np.float32], salt: np.uint64, raw_N: NDArray[np.float32], ids_N: Ids
) -> None:
    """Ids of buckets: those of powers of two, or those between edges."""
    for n in range(raw_N.size):
        code = np.uint64(MISSING_FEATURE_ID)
        if raw_N[n] == raw_N[n]:
            code = _log2_bucket(np.float64(raw_N[n])) if log2 else _edge_bucket(raw_N[n], edges_E)
        ids_N[n] = fmix64(code ^ salt)


@njit(cache=True, nogil=True, inline="always")
def _log2_bucket(value: float) -> np.uint64:
    """One bucket for zero, and one per power of two for each sign."""
    if value == 0.0:
        return np.uint64(0)
    exponent = (bits_of_f64(value) >> 52) & 0x7FF  # exact: a float32 is always a normal double
    return np.uint64(exponent) | (np.uint64(1 << 11) if value < 0.0 else np.uint64(0))


@njit(cache=True, nogil=True, inline="always")
def _edge_bucket(value: np.float32, edges_E: NDArray[np.float32]) -> np.uint64:
    """The number of edges at or below a number: one on an edge belongs to the upper bucket."""
    below = 0
    above = edges_E.size
    while below < above:
        middle = (below + above) >> 1
        if edges_E[middle] <= value:
            below = middle + 1
        else:
            above = middle
    return np.uint64(below)
