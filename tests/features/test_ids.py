"""Ids are the same everywhere: against the xxhash package, against the vectors of earlier releases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from clickline.features import Encoder, FeatureSpec, SlotField, encoder_kernels, slot_number
from clickline.features.raw_columns import raw_column
from clickline.records import NumberColumn, RawRows

VECTORS = Path(__file__).with_name("id_vectors.json")


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


@given(st.binary(max_size=200), st.integers(0, 40), st.integers(0, 40))
def test_xxh64_matches_the_xxhash_package_at_any_offset(text, before, after):
    data = array(b"\xaa" * before + text + b"\x55" * after)
    assert encoder_kernels.xxh64(data, before, before + len(text)) == xxhash.xxh64(text).intdigest()


def test_every_length_up_to_three_rounds_of_lanes():
    data = np.arange(100, dtype=np.uint8)
    for length in range(101):
        assert encoder_kernels.xxh64(data, 0, length) == xxhash.xxh64(data[:length].tobytes()).intdigest()


def test_missing_is_the_hash_of_the_empty_text():
    assert xxhash.xxh64(b"").intdigest() == encoder_kernels.MISSING_FEATURE_ID


def test_ids_do_not_change_between_releases():
    """Ids are stored in datasets, checkpoints and versions: a change here breaks every one of them."""
    for vector in json.loads(VECTORS.read_text()):
        slot = SlotField(vector["slot"], vector["slot"], slot_number(vector["slot"]), vector["source"])
        assert slot.number == vector["number"]
        column = raw_column([vector["value"]], "v")
        if vector.get("type") == "float32":
            column = NumberColumn(np.array([vector["value"]], np.float32).astype(np.float64), precision=24)
        rows = RawRows(1, {vector["slot"]: column}, np.ones(1, dtype=np.int64))
        encoded, faults = Encoder(FeatureSpec((), (slot,))).encode(rows)
        assert not faults
        assert int(encoded.slots[0].ids_N[0]) == vector["id"], vector


def test_another_process_gives_the_same_ids():
    program = (
        "from clickline.features import *\n"
        "spec = FeatureSpec((), (SlotField('C1', 'C1', 1),))\n"
        "print(Encoder(spec).encode_values([{'C1': '68fd1e64'}])[0].slots[0].ids_N[0])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    here, _ = Encoder(FeatureSpec((), (SlotField("C1", "C1", 1),))).encode_values([{"C1": "68fd1e64"}])
    assert outputs == {f"{here.slots[0].ids_N[0]}\n"}


# 0 means that there is no value, and so does the hash of the empty text.
@given(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=50), st.integers(0, 2**64 - 1))
@example([1, encoder_kernels.MISSING_FEATURE_ID], 0)
def test_two_values_of_a_slot_never_collide(feasigns, number):
    slot = SlotField("s", "s", number, "feasign")
    encoded, _ = Encoder(FeatureSpec((), (slot,))).encode_values([{"s": feasign} for feasign in feasigns])
    assert len(set(encoded.slots[0].ids_N.tolist())) == len(feasigns)


def test_the_same_value_in_two_slots_gives_two_ids_and_missing_has_one_for_each_slot():
    slots = tuple(SlotField(str(n), "value", n) for n in range(100))
    encoded, _ = Encoder(FeatureSpec((), slots)).encode_values([{"value": "x"}, {"value": None}])
    ids = np.array([slot.ids_N for slot in encoded.slots])
    assert len(np.unique(ids)) == 200
    assert [int(missing) for missing in ids[:, 1]] == [slot.missing_id for slot in slots]


def test_text_and_its_feasign_give_the_same_id():
    text = SlotField("C1", "C1", 1, "text")
    feasign = SlotField("1", "1", 1, "feasign")
    for value in ("68fd1e64", "", "日本"):
        a, _ = Encoder(FeatureSpec((), (text,))).encode_values([{"C1": value}])
        b, _ = Encoder(FeatureSpec((), (feasign,))).encode_values(
            [{"1": xxhash.xxh64(value.encode()).intdigest()}]
        )
        assert a.slots[0].ids_N[0] == b.slots[0].ids_N[0]
    zero, _ = Encoder(FeatureSpec((), (feasign,))).encode_values([{"1": 0}])
    assert int(zero.slots[0].ids_N[0]) == feasign.missing_id
