"""Reads corrupted requests that end right before a protected page, whose access crashes. Run by test_wire_fuzz.py."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys

import numpy as np
from test_wire_fuzz import COLUMNS, MAX_ROWS, PLAIN, READER

from clickline.errors import RequestRefused
from clickline.wire.request_reader import top_level_fields

pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = np.frombuffer(pages, dtype=np.uint8).ctypes.data
libc = ctypes.CDLL(None, use_errno=True)
if libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0):
    sys.exit("mprotect failed")
page = memoryview(pages)[: mmap.PAGESIZE]


def corrupt(body: bytes, chance: random.Random) -> bytes:
    corrupted = bytearray(body)
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(corrupted))
        match chance.randrange(4):
            case 0:
                corrupted[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
            case 1:
                del corrupted[max(at, 1) :]
            case 2:
                corrupted[at:at] = chance.randbytes(chance.randrange(1, 4))
            case 3:
                corrupted += body
    return bytes(corrupted)


accepted = refused = 0
chance = random.Random(5)
for n in range(6000):
    kind = ("predict", "infer")[n % 2]
    body = corrupt(PLAIN[kind](), chance)
    page[mmap.PAGESIZE - len(body) :] = body
    guarded = page[mmap.PAGESIZE - len(body) :].toreadonly()
    try:
        for _ in top_level_fields(guarded, 1, 3):
            pass
        rows = (
            READER.tensors(guarded, 2, MAX_ROWS, bool(n % 3))
            if kind == "predict"
            else READER.inputs(guarded, MAX_ROWS, bool(n % 3))[0]
        )
        for c in range(len(COLUMNS)):
            if rows.kind_C[c] == 1:
                assert (rows.starts_CB[c] >= 0).all() and (rows.ends_CB[c] <= len(body)).all()
        accepted += 1
    except RequestRefused:
        refused += 1
sys.stdout.write(f"{accepted} {refused}")
