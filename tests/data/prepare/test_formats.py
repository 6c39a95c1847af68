"""Each format, from a real file to the dataset; the same log gives the same ids in every form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from clickline.config import load_config
from clickline.data.prepare.column_sketches import median_and_spread, quantile_edges
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.features import Encoder, FeatureSpec, slot_number
from clickline.progress import Progress

SLOTS = [f"C{i}" for i in range(1, 27)]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 2,000 rows in every format that `sample` writes."""
    folder = tmp_path_factory.mktemp("sampled")
    for name in ("criteo", "slots", "paddlerec", "csv"):
        generate(SampleOptions(format=name, rows=2000, out=folder / name, seed=3), Progress())
    return folder


def test_one_log_has_the_same_ids_as_criteo_text_slot_lines_paddlerec_lines_and_csv(project, sampled):
    project.configure({"format": "criteo", "train": str(sampled / "criteo/train.tsv")})
    criteo = project.table(project.prepare())
    project.configure(
        {
            "format": "slots",
            "train": str(sampled / "slots/train.txt"),
            "slot_conf": str(sampled / "slots/slot.conf"),
        }
    )
    slots = project.table(project.prepare())
    project.configure({"format": "paddlerec", "train": str(sampled / "paddlerec/train.txt")})
    paddlerec = project.table(project.prepare())
    fields = (
        {"click": "label", "timestamp": "time"}
        | {f"C{i}": {"slot": i} for i in range(1, 27)}
        | {f"I{i}": "log1p" for i in range(1, 14)}
    )
    project.configure({"format": "csv", "train": str(sampled / "csv/train.csv"), "fields": fields})
    csv = project.table(project.prepare())
    assert criteo.num_rows == slots.num_rows == paddlerec.num_rows == csv.num_rows > 1000
    for i in range(1, 27):
        ids = criteo.column(f"C{i}").to_pylist()
        assert ids == [one for (one,) in slots.column(str(i)).to_pylist()]
        assert ids == [one for (one,) in paddlerec.column(str(i)).to_pylist()]
        assert ids == csv.column(f"C{i}").to_pylist()
    for other in (slots, paddlerec, csv):
        assert other.column("label").equals(criteo.column("label"))
    for i in range(1, 14):
        assert csv.column(f"I{i}").equals(criteo.column(f"I{i}"))
    assert set(criteo.column("event_hour").to_pylist()) == {-1}
    assert min(csv.column("event_hour").to_pylist()) > 400_000


def test_each_task_of_slot_lines_can_be_the_label(project):
    lines = [(1, 1, 1), (1, 1, 0), (1, 0, 0), (4, 2, 1)]
    project.write("a.txt", "".join(f"{s} {c} {v} 1{i}:7 5:8\n" for i, (s, c, v) in enumerate(lines)))
    data = {"format": "slots", "train": "a.txt", "columns": ["show", "click", "conversion"]}
    project.configure(data)
    click = project.table(project.prepare())
    project.configure(data | {"fields": {"conversion": "label"}})
    conversion = project.table(project.prepare())
    assert click.column("label").to_pylist() == [1, 1, 0, 0.5]
    assert conversion.column("label").to_pylist() == [1, 0, 0, 0.25]
    assert conversion.column("weight").to_pylist() == [1, 1, 1, 4]
    assert conversion.column("7").equals(click.column("7"))
    assert len(set(map(str, click.column("7").to_pylist()))) == 4


def test_conversions_after_a_click_are_learned_from_the_clicked_rows(project):
    """The rows of PaddleRec's ESMM: sample, click, conversion, then slot:feature, separated by commas."""
    project.write("a.txt", "1,1,1,210:1,210:2,150_14:18\n2,1,0,210:2\n3,0,0,210:1,150_14:19\n")
    data = {"format": "paddlerec", "train": "a.txt", "columns": ["sample", "click", "conversion"]}
    fields = {"click": "weight", "conversion": "label", "150_14": "slot"}
    project.configure(data | {"fields": fields})
    table = project.table(project.prepare())
    assert table.column("label").to_pylist() == [1, 0, 0]
    assert table.column("weight").to_pylist() == [1, 1, 0]
    assert [len(ids) for ids in table.column("210").to_pylist()] == [2, 1, 1]
    assert (
        len(set(map(str, table.column("150_14").to_pylist()))) == 3
    )  # two values, and the id of a missing one


def test_named_tokens_of_paddlerec_lines_are_labels_and_weights(project):
    project.write(
        "a.txt",
        "click:1 conversion:1 ins_weight:0.5 dense_feature:2 3:9\nclick:1 conversion:0 ins_weight:2 dense_feature:1 3:8\n",
    )
    fields = {"click": "ignore", "conversion": "label", "ins_weight": "weight"}
    project.configure({"format": "paddlerec", "train": "a.txt", "fields": fields})
    table = project.table(project.prepare())
    assert table.column("label").to_pylist() == [1, 0]
    assert table.column("weight").to_pylist() == [0.5, 2]
    assert table.column_names[-2:] == ["dense_1", "3"]


def test_a_number_can_be_a_float_and_a_slot_at_once(project, criteo_line):
    project.write("a.tsv", "".join(criteo_line(row % 2, row, I1=row) for row in range(100)))
    fields = {
        "I*": "none",
        "I1": "minmax",
        "I1_log": {"column": "I1", "transform": "bucket"},
        "I1_share": {"column": "I1", "transform": "bucket", "buckets": 4},
        "C2*": "ignore",
    }
    project.configure({"train": "a.tsv", "eval": "a.tsv", "fields": fields})
    result = project.prepare()
    table = project.table(result)
    assert table.column("I1").to_pylist() == pytest.approx([row / 99 for row in range(100)])
    assert table.column("I2").to_pylist()[3] == 6.0
    assert len(set(table.column("I1_log").to_pylist())) == 8
    assert len(set(table.column("I1_share").to_pylist())) == 4
    assert "C2" not in table.column_names and "C20" not in table.column_names and "C1" in table.column_names


def test_statistics_come_from_the_training_rows_alone(project, criteo_line):
    project.write("train.tsv", "".join(criteo_line(row % 2, row, I1=row) for row in range(11)))
    project.write("eval.tsv", criteo_line(1, 0, I1=1000) + criteo_line(0, 0, I1=5))
    project.configure({"train": "train.tsv", "eval": "eval.tsv", "fields": {"I1": "minmax", "I2": "zscore"}})
    result = project.prepare()
    assert project.table(result, "eval").column("I1").to_pylist() == [1.0, 0.5]
    (known,) = [field.statistics for field in result.dataset.features.dense if field.name == "I1"]
    assert (known.low, known.high, known.count) == (0.0, 10.0, 11)


def test_numbers_without_a_transform_are_scaled_and_requests_get_the_same_floats(project):
    """Large, heavy-tailed, signed, mostly zero, constant, absurd: none needs a setting."""
    rng = np.random.default_rng(3)
    columns = {
        "large": rng.lognormal(np.log(4e5), 1, 4000).round(),
        "signed": rng.standard_cauchy(4000) * 1e6,
        "rare": np.where(rng.random(4000) < 0.02, rng.integers(1, 9, 4000), 0),
        "same": np.full(4000, 123456.0),
        "absurd": np.where(np.arange(4000) % 100 == 7, 1e19, rng.random(4000)),
    }
    lines = zip(np.arange(4000) % 2, *columns.values(), strict=True)
    text = f"y,{','.join(columns)}\n" + "".join(",".join(map(str, line)) + "\n" for line in lines)
    project.write("a.csv", text)
    fields = {"y": "label", **{name: {"kind": "dense"} for name in columns}}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields})
    result = project.prepare()
    features = result.dataset.features
    assert {field.transform for field in features.dense} == {"robust"}
    table = project.table(result)
    for name in columns:
        floats = table.column(name).to_numpy()
        assert np.abs(floats).max() <= 10
        assert np.quantile(np.abs(floats), 0.9) < 2.5
    rows = [{name: float(values[row]) for name, values in columns.items()} for row in range(50)]
    encoded, faults = Encoder(FeatureSpec.from_json(features.to_json())).encode_values(rows)
    assert not faults
    for d, field in enumerate(features.dense):
        assert np.array_equal(encoded.dense_DB[d], table.column(field.name).to_numpy()[:50])


def test_no_statistics_pass_if_every_number_has_its_own_transform(project):
    project.write("a.csv", "y,a,b\n1,1,2\n0,3,4\n")
    project.configure(
        {"format": "csv", "train": "a.csv", "fields": {"y": "label", "a": "none", "b": "log1p"}}
    )
    begun: list[str] = []

    class Heard(Progress):
        def begin(self, name, **totals) -> None:
            begun.append(name)

    prepare(load_config(project.folder / "clickline.yaml"), Heard())
    assert not any(name.startswith("measure") for name in begun)


@pytest.mark.parametrize(
    ("values", "median", "spread"),
    [
        ([5], 5, 5),
        ([0.25], 0.25, 1),  # a constant's is its size, and at least 1: a later value that differs is seen
        ([-7] * 3, -7, 7),
        ([1, 2, 3, 4, 5, 6, 7, 8], 5, 4),
        ([0] * 90 + [4] * 5 + [9] * 5, 0, 9),  # mostly one value
        ([7] * 99 + [1e19], 7, 1e19),
        ([3] * 50, 3, 3),
    ],
)
def test_median_and_spread_do_not_depend_on_extremes(values, median, spread):
    sample = np.random.default_rng(0).permutation(np.array(values, dtype=np.float32))
    assert median_and_spread(sample) == pytest.approx((median, spread))


def test_a_number_constant_or_missing_in_training_is_reported_and_later_changes_are_visible(project):
    project.write("a.csv", "y,same,none,u\n1,5,,a\n0,5,,b\n")
    fields = {"y": "label", "same": {"kind": "dense"}, "none": {"kind": "dense"}, "u": "slot"}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields})
    said: list[str] = []

    class Heard(Progress):
        def log(self, message: str) -> None:
            said.append(message)

    dataset = prepare(load_config(project.folder / "clickline.yaml"), Heard()).dataset
    (constant,) = (line for line in said if line.startswith("same "))
    (without,) = (line for line in said if line.startswith("none "))
    assert constant.startswith("same is 5 in all 2 rows with a value: ")
    assert without.startswith("none has no values in the training rows: ")
    rows = [{"same": 5, "none": 0}, {"same": 6, "none": 3}]
    encoded, faults = Encoder(dataset.features).encode_values(rows)
    assert not faults
    assert (encoded.dense_DB[:, 0] == 0).all() and (encoded.dense_DB[:, 1] > 0.1).all()


def test_impressions_and_clicks_above_one_are_counted(project):
    project.write("a.txt", "5 2 17:1 18:1 9:2\n1 0 0:1 9:2\n3 3 17:1\n")
    project.configure({"format": "slots", "train": "a.txt"})
    result = project.prepare()
    table = project.table(result)
    assert table.column("impression").to_pylist() == [5, 1, 3]
    assert table.column("click").to_pylist() == [2, 0, 3]
    assert table.column("label").to_pylist() == pytest.approx([0.4, 0.0, 1.0])
    assert table.column("weight").to_pylist() == [5.0, 1.0, 3.0]
    first, second = (slot.missing_id for slot in result.dataset.features.slots)
    lists = table.column("1").to_pylist()
    assert [len(ids) for ids in lists] == [2, 1, 1]
    assert lists[1] == [first] and lists[2] == lists[0][:1]
    assert table.column("2").to_pylist()[2] == [second]
    assert result.dataset.splits["train"].report["click_rate"] == pytest.approx(5 / 9)


def test_modulo_reduces_feasigns_before_anything_else(project):
    project.write("a.txt", "1 0 100000018:1 200000002:2\n1 1 17:1 0:2\n")
    project.configure({"format": "slots", "train": "a.txt", "modulo": 100000001})
    table = project.table(project.prepare())
    for slot in ("1", "2"):
        one, two = table.column(slot).to_pylist()
        assert one == two


def test_slot_conf_chooses_the_slots_and_one_that_never_occurs_is_reported(project):
    project.write("a.txt", "1 0 5:1 6:2 7:3\n1 1 5:1 6:2\n")
    project.write("slot.conf", "1\n3\n26\n")
    project.configure({"format": "slots", "train": "a.txt", "slot_conf": "slot.conf"})
    result = project.prepare()
    assert [slot.name for slot in result.dataset.features.slots] == ["1", "3", "26"]
    assert "slot 26 never occurs in the training data" in project.heard.said


def test_parquet_with_lists_numbers_text_and_time(project):
    table = pa.table(
        {
            "clicked": [True, False, True],
            "user": pa.array([7, None, 8], pa.int64()),
            "tags": [["a", "b"], [], None],
            "price": pa.array([1.5, None, 0.0]),
            "at": pa.array([720_000_000, 1_080_000_000, 720_000_001], pa.timestamp("s")),
            "w": pa.array([1.0, 2.0, 0.5]),
        }
    )
    pq.write_table(table, project.folder / "a.parquet")
    fields = {
        "clicked": "label",
        "user": "slot",
        "tags": {"multi": True},
        "price": "none",
        "at": "time",
        "w": "weight",
    }
    project.configure({"format": "parquet", "train": "a.parquet", "fields": fields})
    result = project.prepare()
    out = project.table(result)
    assert out.column("label").to_pylist() == [1.0, 0.0, 1.0]
    assert out.column("weight").to_pylist() == [1.0, 2.0, 0.5]
    assert out.column("event_hour").to_pylist() == [200_000, 300_000, 200_000]
    assert out.column("price").to_pylist() == [1.5, 0.0, 0.0]
    assert [len(ids) for ids in out.column("tags").to_pylist()] == [2, 1, 1]
    project.write("a.csv", "clicked,user\n1,7\n0,\n1,8\n")
    project.configure({"format": "csv", "train": "a.csv", "fields": {"clicked": "label", "user": "slot"}})
    assert project.table(project.prepare()).column("user").equals(out.column("user"))


def test_csv_with_label_texts_missing_marks_separators_and_dates(project):
    text = (
        "day;city;tags;income\n"
        "2026-01-01 10:20:30;Paris;a|b;>50K\n"
        "2026-01-01T11:00:00Z;?;;<=50K\n"
        '2026-01-01 12:59:59.5+01:00;"Rio; Brazil";c;>50K.\n'
    )
    project.write("a.csv", text)
    fields = {
        "income": {"kind": "label", "positive": [">50K", ">50K."]},
        "day": "time",
        "city": "slot",
        "tags": {"separator": "|"},
    }
    project.configure(
        {"format": "csv", "train": "a.csv", "delimiter": ";", "missing": ["?"], "fields": fields}
    )
    result = project.prepare()
    table = project.table(result)
    assert table.column("label").to_pylist() == [1.0, 0.0, 1.0]
    hours = np.array(table.column("event_hour").to_pylist())
    assert (hours - 20454 * 24).tolist() == [10, 11, 11]
    city = next(slot for slot in result.dataset.features.slots if slot.name == "city")
    assert table.column("city").to_pylist()[1] == city.missing_id
    assert city.number == slot_number("city")
    top = next(s for s in result.dataset.splits["train"].report["slots"] if s["name"] == "city")["top"]
    assert {entry["value"] for entry in top} == {"Paris", "Rio; Brazil"}


def test_a_custom_reader(project):
    project.write(
        "my_reader.py",
        "import json\nimport pyarrow as pa\n\n\ndef read(path):\n"
        "    with open(path) as file:\n        rows = [json.loads(line) for line in file]\n"
        "    yield pa.RecordBatch.from_pylist(rows)\n",
    )
    project.write(
        "a.jsonl", "".join(json.dumps({"y": i % 2, "u": f"user{i}", "x": i * 0.5}) + "\n" for i in range(10))
    )
    fields = {"y": "label", "u": "slot", "x": "none"}
    project.configure({"reader": "my_reader.py", "train": "a.jsonl", "fields": fields})
    table = project.table(project.prepare())
    assert table.column("x").to_pylist() == [i * 0.5 for i in range(10)]
    assert len(set(table.column("u").to_pylist())) == 10


def test_a_named_field_wins_over_a_glob_whatever_the_order(project, criteo_line):
    project.write("a.tsv", criteo_line(1, 1, I1=7, I2=7) + criteo_line(0, 2, I1=7, I2=7))
    project.configure({"train": "a.tsv"})
    own = "own: {column: I1, transform: bucket}"
    first = project.table(project.prepare(f"data.fields={{I*: none, I1: log1p, {own}}}"))
    second = project.table(project.prepare(f"data.fields={{{own}, I1: log1p, I*: none}}"))
    for table in (first, second):
        assert table.column("I1").to_pylist() == pytest.approx([np.log1p(7)] * 2)
        assert table.column("I2").to_pylist() == [7.0, 7.0]
        assert str(table.schema.field("own").type) == "uint64"


def test_the_order_of_fields_is_part_of_the_identity(project):
    project.write("a.csv", "y,a,b\n1,1,2\n0,3,4\n")
    project.configure({"format": "csv", "train": "a.csv", "fields": {"y": "label", "a": "none"}})
    first = project.prepare("data.fields={y: label, a: none, b: none}")
    second = project.prepare("data.fields={y: label, b: none, a: none}")
    assert not second.reused
    assert [field.name for field in first.dataset.features.dense] == ["a", "b"]
    assert [field.name for field in second.dataset.features.dense] == ["b", "a"]


def test_targets_with_several_values_in_a_row_are_bad_rows_not_moved_ones(project):
    table = pa.table(
        {"y": [["yes", "no"], ["no"], ["yes"]], "t": [[7e8], [7e8, 8e8], [9e8]], "u": ["a", "b", "c"]}
    )
    pq.write_table(table, project.folder / "a.parquet")
    fields = {"y": {"kind": "label", "positive": ["yes"]}, "t": "time", "u": "slot"}
    project.configure({"format": "parquet", "train": "a.parquet", "fields": fields, "max_bad_ratio": 1})
    result = project.prepare()
    assert result.dataset.splits["train"].report["bad"] == {"several values": 2}
    out = project.table(result)
    assert out.column("label").to_pylist() == [1.0]
    assert out.column("event_hour").to_pylist() == [int(9e8) // 3600]


def test_marks_for_missing_do_not_enter_the_statistics(project):
    rows = "".join(f"{i % 2},u{i},{-999 if i % 5 == 0 else i % 10}\n" for i in range(1000))
    project.write("a.csv", "y,u,x\n" + rows)
    fields = {"y": "label", "u": "slot", "x": "minmax"}
    project.configure({"format": "csv", "train": "a.csv", "missing": ["-999"], "fields": fields})
    (x,) = project.prepare().dataset.features.dense
    assert (x.statistics.low, x.statistics.high, x.statistics.count) == (1.0, 9.0, 800)


def test_quantiles_part_values_that_lie_close_together(project):
    rows = "".join(f"{i % 2},u,{1_700_000_000 + i * 64},{2000 + i % 25}\n" for i in range(5000))
    project.write("a.csv", "y,u,at,year\n" + rows)
    ten = {"transform": "bucket", "buckets": 10}
    fields = {"y": "label", "u": "slot", "at": ten, "year": ten}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields})
    table = project.table(project.prepare())
    for name in ("at", "year"):
        _, counts = np.unique(table.column(name).to_numpy(), return_counts=True)
        assert len(counts) == 10
        assert counts.max() < 1.6 * counts.min()


def shares(sample, edges):
    return np.bincount(np.searchsorted(edges, sample, side="right"), minlength=len(edges) + 1)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=300), st.integers(2, 40))
def test_buckets_are_used_up_and_none_is_empty(values, buckets):
    sample = np.array(values, dtype=np.float32)
    edges = quantile_edges(sample, buckets)
    assert list(edges) == sorted(set(edges))
    assert len(edges) < buckets
    assert shares(sample, edges).min() > 0
    if len(set(values)) <= buckets:
        assert edges == tuple(sorted(set(values)))[1:]  # each value has its own


@pytest.mark.parametrize("below", [0, 4000])
def test_a_dominant_value_leaves_the_other_buckets_to_the_others(below):
    others = np.random.default_rng(0).permutation(8000).astype(np.float32) + 1
    others[:below] *= -1
    sample = np.concatenate((np.zeros(92_000, dtype=np.float32), others))
    edges = quantile_edges(sample, 21)
    of_zero = np.searchsorted(edges, 0, side="right")
    counts = shares(sample, edges)
    assert (len(counts), counts[of_zero]) == (21, 92_000)
    light = np.delete(counts, of_zero)
    assert light.max() <= 1.1 * light.min()


def test_values_of_a_separated_slot_are_counted_one_by_one(project):
    project.write("a.csv", "y,s\n1,x|q\n0,q|x\n1,x\n")
    project.configure({"format": "csv", "train": "a.csv", "fields": {"y": "label", "s": {"separator": "|"}}})
    (slot,) = project.prepare().dataset.splits["train"].report["slots"]
    assert [top["value"] for top in slot["top"]] == ["x", "q"]


def test_dates_written_as_numbers_are_not_taken_for_seconds(project):
    project.write("a.csv", "y,u,at\n1,a,20231114\n0,b,2023-11-14 22:60:00\n1,c,2023-11-14 22:59:59\n")
    fields = {"y": "label", "u": "slot", "at": "time"}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields, "max_bad_ratio": 1})
    result = project.prepare()
    assert result.dataset.splits["train"].report["bad"] == {"bad time": 2}


def test_hours_of_a_pattern_give_the_event_hour(project):
    for hour in ("00", "01"):
        project.write(f"logs/20260101/{hour}/part.txt", f"1 0 {int(hour) + 5}:1\n")
        project.write(f"logs/20260101/{hour}/donefile", "")
    dates = {"from": "20260101/00", "to": "20260101/01"}
    project.configure({"format": "slots", "train": "logs/{date}/{hour}/*", "dates": dates})
    hours = project.table(project.prepare()).column("event_hour").to_pylist()
    assert hours == [20454 * 24, 20454 * 24 + 1]


def test_real_criteo_rows_and_their_slot_lines_agree(project, real_data):
    """The ElasticCTR lines are the first 100 rows of the Criteo sample, hashed by that system."""
    project.configure({"train": str(real_data / "criteo_200_header.csv")})
    table = project.table(project.prepare())
    assert table.num_rows == 200
    assert sum(table.column("label").to_pylist()) == 49
    conf = str(real_data / "elasticctr_slot.conf")
    project.configure(
        {"format": "slots", "train": str(real_data / "elasticctr_100_slots.txt"), "slot_conf": conf}
    )
    slots = project.table(project.prepare())
    assert slots.num_rows == 100
    assert sum(slots.column("label").to_pylist()) == 22


@pytest.mark.slow
def test_real_criteo_counts_and_ids_against_a_plain_python_count(project, real_data):
    source = real_data / "criteo_137k_train.tsv.gz"
    project.configure({"train": str(source)})
    result = project.prepare()
    report = result.dataset.splits["train"].report
    assert report["rows"] == 137_139 and not report["bad"]
    distinct = [set() for _ in SLOTS]
    clicks = 0
    with gzip.open(source, "rt") as file:
        for line in file:
            cells = line.rstrip("\n").split("\t")
            clicks += cells[0] == "1"
            for values, cell in zip(distinct, cells[14:], strict=True):
                values.add(cell)
    assert report["clicks"] == clicks
    for slot, values in zip(report["slots"], distinct, strict=True):
        assert slot["distinct"] == pytest.approx(len(values), rel=0.06, abs=2)
    stored = project.table(result).column("C1").to_numpy()
    assert len(np.unique(stored)) == len(distinct[0])
    assert xxhash.xxh64(b"").intdigest() == 17241709254077376921


@pytest.mark.parametrize(("name", "rows"), [("adult_train.csv.gz", 32_561), ("adult_test.csv.gz", 16_281)])
def test_real_adult_rows(project, real_data, name, rows):
    columns = [
        "age",
        "workclass",
        "fnlwgt",
        "education",
        "grade",
        "marital",
        "occupation",
        "relation",
        "race",
        "sex",
    ]
    columns += ["gain", "loss", "hours", "country", "income"]
    fields = dict.fromkeys(columns, "slot") | dict.fromkeys(("age", "gain", "loss", "hours"), "log1p")
    fields |= {"income": {"kind": "label", "positive": [">50K", ">50K."]}, "fnlwgt": "ignore"}
    data = {"format": "csv", "train": str(real_data / name), "header": False, "columns": columns}
    project.configure(data | {"missing": ["?"], "fields": fields})
    report = project.prepare().dataset.splits["train"].report
    assert report["rows"] == rows and not report["bad"]
    assert report["click_rate"] == pytest.approx(0.24, abs=0.005)
