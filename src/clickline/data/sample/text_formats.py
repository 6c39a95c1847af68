"""Formats generated rows as text: Numba kernels that write directly into a byte buffer.

The same rows have the same values in every format: a slot's value is 8 hex digits, a dense value is an
integer, missing is empty. The `slots` and `paddlerec` formats hold XXH64 of those texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.data.sample.click_model import MISSING_COUNT, MISSING_ID
from clickline.features.encoder_kernels import fmix64, xxh64
from clickline.numba_cache import njit

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
Clicks = NDArray[np.int8]

_HEX_PAIRS = np.frombuffer("".join(f"{n:02x}" for n in range(256)).encode(), np.uint8).copy()
_DIGIT_PAIRS = np.frombuffer("".join(f"{n:02d}" for n in range(100)).encode(), np.uint8).copy()
_CLICK = np.frombuffer(b"click:", np.uint8).copy()
_DENSE = np.frombuffer(b" dense_feature:", np.uint8).copy()
_TAB, _NEWLINE, _SPACE, _COMMA, _MINUS, _POINT, _ZERO, _ONE, _COLON = 9, 10, 32, 44, 45, 46, 48, 49, 58
_DECIMALS = 9
_BILLION = np.uint64(10**_DECIMALS)

PADDLEREC_SCALES = (20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50)
"""The divisors that PaddleRec applies to Criteo's I1..I13, after adding 3 to I2."""
_SCALES = np.array(PADDLEREC_SCALES, np.int64)
_I2, _LOWEST_I2 = 1, -3
_I13 = 12


@njit(cache=True, nogil=True, inline="always")
def _write_unsigned(out: Bytes, at: int, value: np.uint64) -> int:
    """Write `value` in decimal digits; returns the position after them."""
    digits = 1
    bound = np.uint64(10)
    while digits < 20 and value >= bound:
        digits += 1
        bound *= np.uint64(10)  # overflows after 20 digits, when the loop has ended
    end = at + digits
    to = end
    while value >= np.uint64(100):
        rest = value // np.uint64(100)
        pair = np.int64(value - rest * np.uint64(100))
        out[to - 2] = _DIGIT_PAIRS[2 * pair]
        out[to - 1] = _DIGIT_PAIRS[2 * pair + 1]
        value = rest
        to -= 2
    if value >= np.uint64(10):
        out[at] = _DIGIT_PAIRS[2 * np.int64(value)]
        out[at + 1] = _DIGIT_PAIRS[2 * np.int64(value) + 1]
    else:
        out[at] = _ZERO + np.int64(value)
    return end


@njit(cache=True, nogil=True, inline="always")
def _write_count(out: Bytes, at: int, value: int) -> int:
    """Write a dense value as an integer, nothing if missing."""
    if value == MISSING_COUNT:
        return at
    if value < 0:
        out[at] = _MINUS
        return _write_unsigned(out, at + 1, np.uint64(-value))
    return _write_unsigned(out, at, np.uint64(value))


@njit(cache=True, nogil=True, inline="always")
def _write_value(out: Bytes, at: int, slot: int, id_: int) -> int:
    """Write a slot's value as 8 hex digits, nothing if missing. Distinct ids of a slot have distinct texts."""
    if id_ == MISSING_ID:
        return at
    mask = np.uint64(0xFFFFFFFF)
    word = (np.uint64(id_) + fmix64(np.uint64(slot + 1))) & mask
    word = ((word ^ (word >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & mask
    word = ((word ^ (word >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & mask
    word ^= word >> np.uint64(16)
    for k in range(4):
        pair = np.int64((word >> np.uint64(24 - 8 * k)) & np.uint64(0xFF))
        out[at + 2 * k] = _HEX_PAIRS[2 * pair]
        out[at + 2 * k + 1] = _HEX_PAIRS[2 * pair + 1]
    return at + 8


@njit(cache=True, nogil=True, inline="always")
def _write_text(out: Bytes, at: int, text: Bytes) -> int:
    for k in range(text.size):
        out[at + k] = text[k]
    return at + text.size


@njit(cache=True, nogil=True)
def _write_columns(out: Bytes, at: int, separator: int, dense_D: Integers, ids_S: Integers) -> int:
    for field in range(dense_D.size):
        out[at] = separator
        at = _write_count(out, at + 1, dense_D[field])
    for slot in range(ids_S.size):
        out[at] = separator
        at = _write_value(out, at + 1, slot, ids_S[slot])
    out[at] = _NEWLINE
    return at + 1


@njit(cache=True, nogil=True)
def _write_criteo(
    clicks_B: Clicks, times_B: Integers, dense_BD: Integers, ids_BS: Integers, out: Bytes
) -> int:
    at = 0
    for b in range(clicks_B.size):
        out[at] = _ZERO + clicks_B[b]
        at = _write_columns(out, at + 1, _TAB, dense_BD[b], ids_BS[b])
    return at


@njit(cache=True, nogil=True)
def _write_csv(clicks_B: Clicks, times_B: Integers, dense_BD: Integers, ids_BS: Integers, out: Bytes) -> int:
    at = 0
    for b in range(clicks_B.size):
        out[at] = _ZERO + clicks_B[b]
        out[at + 1] = _COMMA
        at = _write_unsigned(out, at + 2, np.uint64(times_B[b]))
        at = _write_columns(out, at, _COMMA, dense_BD[b], ids_BS[b])
    return at


@njit(cache=True, nogil=True)
def _write_slots(
    clicks_B: Clicks, times_B: Integers, dense_BD: Integers, ids_BS: Integers, out: Bytes
) -> int:
    text = np.empty(32, np.uint8)
    at = 0
    for b in range(clicks_B.size):
        out[at] = _ONE
        out[at + 1] = _SPACE
        out[at + 2] = _ZERO + clicks_B[b]
        at += 3
        for slot in range(0 if dense_BD.shape[1] > _I13 else 1, ids_BS.shape[1] + 1):
            if slot == 0:
                size = _write_count(text, 0, dense_BD[b, _I13])
            else:
                size = _write_value(text, 0, slot - 1, ids_BS[b, slot - 1])
            out[at] = _SPACE
            at = _write_unsigned(out, at + 1, xxh64(text, 0, size))
            out[at] = _COLON
            at = _write_unsigned(out, at + 1, np.uint64(slot))
        out[at] = _NEWLINE
        at += 1
    return at


@njit(cache=True, nogil=True)
def _write_scaled(out: Bytes, at: int, field: int, value: int) -> int:
    """Write a dense value as PaddleRec scales it, rounded to 9 decimals with integers, for exact output."""
    scale = np.uint64(_SCALES[field])
    shifted = np.uint64(0)
    if value != MISSING_COUNT:
        shifted = np.uint64(value - _LOWEST_I2 if field == _I2 else value)
    billionths = (shifted * _BILLION + scale // np.uint64(2)) // scale
    at = _write_unsigned(out, at, billionths // _BILLION)
    out[at] = _POINT
    rest = billionths % _BILLION
    for k in range(_DECIMALS):
        out[at + _DECIMALS - k] = _ZERO + np.int64(rest % np.uint64(10))
        rest //= np.uint64(10)
    end = at + 1 + _DECIMALS
    while out[end - 1] == _ZERO and end > at + 2:
        end -= 1
    return end


@njit(cache=True, nogil=True)
def _write_paddlerec(
    clicks_B: Clicks, times_B: Integers, dense_BD: Integers, ids_BS: Integers, out: Bytes
) -> int:
    text = np.empty(32, np.uint8)
    at = 0
    for b in range(clicks_B.size):
        at = _write_text(out, at, _CLICK)
        out[at] = _ZERO + clicks_B[b]
        at += 1
        for field in range(dense_BD.shape[1]):
            at = _write_text(out, at, _DENSE)
            at = _write_scaled(out, at, field, dense_BD[b, field])
        for slot in range(ids_BS.shape[1]):
            out[at] = _SPACE
            at = _write_unsigned(out, at + 1, np.uint64(slot + 1))
            out[at] = _COLON
            size = _write_value(text, 0, slot, ids_BS[b, slot])
            at = _write_unsigned(out, at + 1, xxh64(text, 0, size) if size > 0 else np.uint64(0))
        out[at] = _NEWLINE
        at += 1
    return at


def _csv_header(dense: int, slots: int) -> bytes:
    names = [*(f"I{d + 1}" for d in range(dense)), *(f"C{s + 1}" for s in range(slots))]
    return ",".join(["click", "timestamp", *names]).encode() + b"\n"


def _no_header(dense: int, slots: int) -> bytes:
    return b""


def _slots_conf(dense: int, slots: int) -> bytes:
    return b"".join(b"%d\n" % slot for slot in range(0 if dense > _I13 else 1, slots + 1))


def _paddlerec_conf(dense: int, slots: int) -> bytes:
    return b"".join(b"%d\n" % slot for slot in range(1, slots + 1))


@dataclass(frozen=True)
class TextFormat:
    """One format: its file extension, its kernel, and the maximum number of bytes in a line."""

    extension: str
    write: Callable[[Clicks, Integers, Integers, Integers, Bytes], int]
    """(clicks_B, times_B, dense_BD, ids_BS, out) -> bytes written"""
    line_bytes: int
    dense_bytes: int
    slot_bytes: int
    header: Callable[[int, int], bytes] = _no_header
    slot_conf: Callable[[int, int], bytes] | None = None


FORMATS = {
    "criteo": TextFormat("tsv", _write_criteo, line_bytes=2, dense_bytes=22, slot_bytes=9),
    "slots": TextFormat(
        "txt", _write_slots, line_bytes=40, dense_bytes=0, slot_bytes=32, slot_conf=_slots_conf
    ),
    "paddlerec": TextFormat(
        "txt", _write_paddlerec, line_bytes=8, dense_bytes=48, slot_bytes=32, slot_conf=_paddlerec_conf
    ),
    "csv": TextFormat("csv", _write_csv, line_bytes=24, dense_bytes=22, slot_bytes=9, header=_csv_header),
}
