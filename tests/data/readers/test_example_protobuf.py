"""tf.Examples written by the protobuf library, read by our parser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from reading import by_row

from clickline.data.readers.tf_example import ExampleParser, Records
from clickline.records import Block


def example_class() -> Any:
    """tf.Example's message type, built from its published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str], holder: Any = file.message_type) -> Any:
        made = holder.add(name=name)
        for field_name, number, label, kind, type_name in fields:
            field = made.field.add(name=field_name, number=number, label=label, type=kind)
            if type_name:
                field.type_name = type_name
        return made

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    message("BytesList", ("value", 1, many, kinds.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, kinds.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, kinds.TYPE_INT64, ""))
    feature = message(
        "Feature",
        ("bytes_list", 1, one, kinds.TYPE_MESSAGE, ".t.BytesList"),
        ("float_list", 2, one, kinds.TYPE_MESSAGE, ".t.FloatList"),
        ("int64_list", 3, one, kinds.TYPE_MESSAGE, ".t.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", 1, many, kinds.TYPE_MESSAGE, ".t.Features.FeatureEntry"))
    entry = message(
        "FeatureEntry",
        ("key", 1, one, kinds.TYPE_STRING, ""),
        ("value", 2, one, kinds.TYPE_MESSAGE, ".t.Feature"),
        holder=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", ("features", 1, one, kinds.TYPE_MESSAGE, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "label": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2),
                "price": st.lists(st.floats(width=32, allow_nan=False), max_size=3),
                "C1": st.lists(st.binary(min_size=1, max_size=200), max_size=3),
            }
        ),
        min_size=1,
        max_size=6,
    )
)
def test_messages_of_the_protobuf_library_are_read(rows):
    records = []
    for row in rows:
        made = Example()
        made.features.feature["label"].int64_list.value.extend(row["label"])
        made.features.feature["price"].float_list.value.extend(row["price"])
        made.features.feature["C1"].bytes_list.value.extend(row["C1"])
        records.append(made.SerializeToString())
    ends = np.cumsum([len(record) for record in records])
    spans = Records(np.frombuffer(b"".join(records), np.uint8), ends - [len(r) for r in records], ends)
    found = ExampleParser(("label", "price", "C1")).rows(Block("f", 1, spans, int(ends[-1])))
    assert not found.bad
    for expected, row in zip(rows, by_row(found), strict=True):
        assert row["label"] == expected["label"]
        assert row["price"] == pytest.approx(expected["price"])
        assert row["C1"] == expected["C1"]
