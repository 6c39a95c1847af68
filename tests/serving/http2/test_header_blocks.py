"""Header blocks of any size are decoded or refused, and later blocks are still decoded correctly."""

from __future__ import annotations

import random

import pytest
from hpack import Encoder, HPACKError

from clickline.serving.http2.hpack_decoder import HeaderDecoder

LIMIT = 1 << 16


def some_headers(rng: random.Random) -> list[tuple[bytes, bytes]]:
    names = [f"x-{n}".encode() for n in range(30)]
    sizes = (0, 1, 20, 200, 3000, 30_000) if rng.random() < 0.5 else (0, 1, 20)
    return [
        (rng.choice(names), bytes(rng.choices(range(32, 127), k=rng.choice(sizes))))
        for _ in range(rng.randint(1, 40))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_large_blocks_keep_the_header_table_in_sync(seed: int) -> None:
    rng = random.Random(seed)
    encoder, decoder = Encoder(), HeaderDecoder(LIMIT)
    refused = 0
    for n in range(60):
        if n % 20 == 19:
            encoder.header_table_size = rng.choice((0, 100, 4096))
        headers = some_headers(rng)
        size = sum(len(name) + len(value) + 32 for name, value in headers)
        huffman = size < 20_000 and rng.random() < 0.5  # which is slow in `hpack`
        found = decoder.decode(encoder.encode(headers, huffman=huffman))
        assert found == (headers if size <= LIMIT else None)
        refused += size > LIMIT
    assert refused >= 5


@pytest.mark.parametrize(
    "block",
    [
        b"\x00\x01a\x7f" + b"\xff" * 5000,  # an endless length
        b"\x00\x01a\x7f\xff\xff\x7f" + b"v" * 5000,  # a value that continues after the block
        b"\x82" * 4999 + b"\x40",
        b"\x00\x01a\x01v" + b"\x3f\xe1\x1f" + b"\x82" * 5000,  # a table size after a field
        b"\xff" * 5000,
        b"\x00\x01a\x7f\xf1\xa1\x04" + b"v" * 70_000 + b"\x80",  # index 0, after the limit
    ],
)
def test_malformed_large_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(HPACKError):
        HeaderDecoder(LIMIT).decode(block)
