"""Whatever a file holds, prepare builds a dataset or reports an error; it never crashes, and every line is counted."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import example as such_as
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.errors import ClicklineError
from data.readers.record_writers import example, recordio, tfrecord

FIELDS = {"label": "label", "C1": {"multi": True}, "I1": "log1p"}
FORMATS = {
    "criteo": {},
    "slots": {},
    "paddlerec": {},
    "csv": {"fields": FIELDS},
    "parquet": {"fields": FIELDS},
    "tfrecord": {"fields": FIELDS},
    "recordio": {"fields": FIELDS},
}
ROWS = [
    b"0\t" + b"\t".join([b"1"] * 39),
    b"1 0 5:1 6:2",
    b"click:1 dense_feature:0.5 1:7",
    b"label,C1,I1",
    b"1,a,2.5",
    b'0,"a""b\n,",',
    tfrecord([example({"label": [1], "C1": [b"x"], "I1": [0.5]})]),
    b"\xff\xfe\x00",
    b"",
]
content = st.lists(st.one_of(st.sampled_from(ROWS), st.binary(max_size=60)), max_size=12).map(b"\n".join)


@pytest.mark.parametrize("name", FORMATS)
@given(data=content, packed=st.booleans(), cut=st.integers(0, 40))
@such_as(data=b"\r\x00", packed=False, cut=0)  # a header with a lone carriage return
@such_as(data=b"\n".join(ROWS[:2]), packed=True, cut=1)  # a block that is all fault
@settings(max_examples=30)
def test_any_bytes_in_any_format(project, name, data, packed, cut):
    if packed:
        data = gzip.compress(data)
        data = data[: len(data) - cut] if cut < 20 else data
    path = project.write("a.bin.gz" if packed else "a.bin", data)
    project.configure({"format": name, "train": path.name, "max_bad_ratio": 1, **FORMATS[name]})
    try:
        result = project.prepare()
    except ClicklineError as error:
        assert str(error)  # noqa: PT017 - either end is fine, silence is not
    else:
        report = result.dataset.splits["train"].report
        assert report["rows"] == project.table(result).num_rows
        assert report["rows"] + sum(report["bad"].values()) > 0


@pytest.mark.parametrize("name", ["tfrecord", "recordio"])
def test_records_of_tf_examples(project, name):
    rows = [{"label": [row % 2], "C1": [b"a", b"b"][: row % 3], "I1": [float(row)]} for row in range(50)]
    records = [example(row) for row in rows]
    project.write("a.rec", tfrecord(records) if name == "tfrecord" else recordio(records, "gzip"))
    project.configure({"format": name, "train": "a.rec", "fields": FIELDS})
    table = project.table(project.prepare())
    assert table.column("label").to_pylist() == [float(row % 2) for row in range(50)]
    assert [len(ids) for ids in table.column("C1").to_pylist()] == [max(1, row % 3) for row in range(50)]
