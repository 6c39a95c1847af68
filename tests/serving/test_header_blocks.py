"""Header blocks of any size: what is kept of them, and that later ones are read as if all had been kept."""

from __future__ import annotations

import random

import pytest
from hpack import Encoder, HPACKError

from clickline.serving.hpack_decoder import HeaderDecoder

MOST = 1 << 16


def some_headers(chosen: random.Random) -> list[tuple[bytes, bytes]]:
    names = [f"x-{n}".encode() for n in range(30)]
    sizes = (0, 1, 20, 200, 3000, 30_000) if chosen.random() < 0.5 else (0, 1, 20)
    return [
        (chosen.choice(names), bytes(chosen.choices(range(32, 127), k=chosen.choice(sizes))))
        for _ in range(chosen.randint(1, 40))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_large_blocks_keep_the_header_table_in_sync(seed: int) -> None:
    chosen = random.Random(seed)
    encoder, decoder = Encoder(), HeaderDecoder(MOST)
    refused = 0
    for n in range(60):
        if n % 20 == 19:
            encoder.header_table_size = chosen.choice((0, 100, 4096))
        headers = some_headers(chosen)
        size = sum(len(name) + len(value) + 32 for name, value in headers)
        huffman = size < 20_000 and chosen.random() < 0.5  # which takes `hpack` long
        found = decoder.decode(encoder.encode(headers, huffman=huffman))
        assert found == (headers if size <= MOST else None)
        refused += size > MOST
    assert refused >= 5


@pytest.mark.parametrize(
    "block",
    [
        b"\x00\x01a\x7f" + b"\xff" * 5000,  # a length without an end
        b"\x00\x01a\x7f\xff\xff\x7f" + b"v" * 5000,  # a value that goes on after the block
        b"\x82" * 4999 + b"\x40",
        b"\x00\x01a\x01v" + b"\x3f\xe1\x1f" + b"\x82" * 5000,  # a table size after a field
        b"\xff" * 5000,
        b"\x00\x01a\x7f\xf1\xa1\x04" + b"v" * 70_000 + b"\x80",  # number 0, after too much
    ],
)
def test_malformed_large_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(HPACKError):
        HeaderDecoder(MOST).decode(block)
