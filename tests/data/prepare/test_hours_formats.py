"""An hour prepared alone equals what `prepare` builds from the same files, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clickline.config import load_config
from clickline.data.prepare.hour_dataset import PreparedHour, prepare_hour
from clickline.data.prepare.run import prepare
from clickline.errors import ConfigError, DataError, HourNotReady, TooManyBadRows
from clickline.progress import Progress

FIRST = 20454 * 24  # 2026-01-01T00, where samples begin


def shards_of(dataset: Any, split: str) -> list[tuple[int, str]]:
    return [(shard.rows, shard.sha256) for shard in dataset.splits[split].shards]


def rows_of(found: PreparedHour) -> pa.Table:
    shards = found.dataset.splits["train"].shards
    return pa.concat_tables([pq.read_table(Path(found.dataset.folder, shard.file)) for shard in shards])


@pytest.mark.parametrize("form", ["criteo", "csv", "slots", "paddlerec"])
def test_an_hour_equals_what_prepare_builds_from_the_same_files(project, form, hourly):
    hours = hourly(form)
    first = hours.prepare(0, None)
    second = hours.prepare(1, first.dataset.features)
    # Prepare measures on the training part and encodes the other by that.
    both = prepare(
        hours.config(
            "data.dates={from: 20260101/00, to: 20260101/00}",
            "data.eval=logs/{date}/{hour}/part-*",
            "data.eval_dates={from: 20260101/01, to: 20260101/01}",
        )
    ).dataset
    assert (first.hour, second.hour, first.reused, second.reused) == (FIRST, FIRST + 1, False, False)
    assert first.dataset.features == second.dataset.features == both.features
    assert len(both.splits["train"].shards) > 1
    assert shards_of(first.dataset, "train") == shards_of(both, "train")
    assert shards_of(second.dataset, "train") == shards_of(both, "eval")
    assert first.dataset.splits["train"].report == both.splits["train"].report
    assert second.dataset.splits["train"].report == both.splits["eval"].report
    assert second.dataset.splits["train"].report["hours"] == [FIRST + 1, FIRST + 1]
    assert list(second.dataset.splits) == ["train"]
    folder = project.folder / ".clickline" / "hours" / "20260101-01"
    assert second.dataset.folder == str(folder)
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".parquet") == [
        "manifest.json",
        "resolved.yaml",
    ]


def test_an_unchanged_hour_is_reused_and_a_changed_one_rebuilt(project, hourly):
    hours = hourly("criteo")
    first = hours.prepare(0, None)
    assert hours.prepare(0, None).reused
    assert hours.prepare(0, first.dataset.features).reused  # they are given now, and they are these
    assert hours.prepare(0, first.dataset.features, "data.max_bad_ratio=0.5", "train.epochs=3").reused

    other = hours.prepare(1, None).dataset.features
    assert other != first.dataset.features
    by_others = hours.prepare(0, other)
    assert not by_others.reused
    assert by_others.dataset.features == other
    assert shards_of(by_others.dataset, "train") != shards_of(first.dataset, "train")
    measured = hours.prepare(0, None)  # by its own again, which nobody knows to be those
    assert not measured.reused
    assert shards_of(measured.dataset, "train") == shards_of(first.dataset, "train")

    assert not hours.prepare(0, None, "data.shard_size=1MiB").reused
    (shard,) = Path(first.dataset.folder).glob("*.parquet")  # of the many before, one is left
    hours.file(0).write_text("".join(hours.file(0).read_text().splitlines(keepends=True)[:100]))
    shorter = hours.prepare(0, None, "data.shard_size=1MiB")
    assert not shorter.reused
    assert pq.read_metadata(shard).num_rows == shorter.dataset.splits["train"].rows == 100


def test_a_missing_hour_is_not_waited_for(project, hourly):
    hours = hourly("criteo", hours=2)
    with pytest.raises(HourNotReady, match=r"^20260101/02 of .*donefile donefile is missing"):
        hours.prepare(2, None)
    hours.file(1).with_name("donefile").unlink()
    with pytest.raises(HourNotReady, match=r"^20260101/01 of"):
        hours.prepare(1, None)
    assert not (project.folder / ".clickline").exists()
    assert hours.prepare(1, None, "data.donefile=null").dataset.splits["train"].rows == 1500


def test_an_hour_that_changes_while_it_is_read_is_not_ready(project):
    """It is neither trained on in part nor counted as bad: the next attempt finds it complete."""
    project.write("logs/20260101/00/a.txt", "1")
    project.write("logs/20260101/00/donefile", "")
    reader = (
        "import pyarrow as pa\n\n\ndef read(path):\n"
        "    yield pa.RecordBatch.from_pylist([{'y': LABEL, 'u': 'a'}])\n"
        "    if path.stat().st_size == 1:\n        path.write_text('more')\n"
    )
    dates = {"from": "20260101/00"}
    fields = {"y": "label", "u": "slot"}
    data = {"reader": "my_reader.py", "train": "logs/{date}/{hour}/*.txt", "dates": dates, "fields": fields}
    project.configure(data)
    project.write("my_reader.py", reader)
    config = load_config(project.folder / "clickline.yaml", ())
    for label, rows in (("7", None), ("1", 1)):  # bad ones too: what is read is not what will be there
        project.write("logs/20260101/00/a.txt", "1")
        project.write("my_reader.py", reader.replace("LABEL", label))
        with pytest.raises(HourNotReady, match="20260101/00 changed while it was read"):
            prepare_hour(config, FIRST, None, Progress())
        if rows:
            assert prepare_hour(config, FIRST, None, Progress()).dataset.splits["train"].rows == rows


def test_a_day_is_prepared_where_the_pattern_has_no_hour(project, criteo_line):
    for day in ("20260101", "20260102"):
        project.write(f"logs/{day}/a.tsv", criteo_line(1, 3) + criteo_line(0, 4))
        project.write(f"logs/{day}/donefile", "")
    project.configure({"train": "logs/{date}/*.tsv", "dates": {"from": "20260101"}})
    config = load_config(project.folder / "clickline.yaml", ())
    found = prepare_hour(config, FIRST + 24, None, Progress())
    assert found.dataset.splits["train"].report["hours"] == [FIRST + 24, FIRST + 24]
    assert Path(found.dataset.folder).name == "20260102"


def test_a_source_without_dates_is_an_error(project, criteo_line):
    project.write("a.tsv", criteo_line(1, 3))
    project.configure({"train": "a.tsv"})
    with pytest.raises(
        ConfigError, match=r"data\.train holds .*a\.tsv, which has no \{date\}.*\{date\}/\{hour\}"
    ):
        prepare_hour(load_config(project.folder / "clickline.yaml", ()), FIRST, None, Progress())


# ── slots that come and go ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("form", "token"), [("slots", "77:{slot}"), ("paddlerec", "{slot}:77")])
def test_slots_that_the_model_lacks_are_ignored_and_reported_once(project, form, token, hourly):
    hours = hourly(form)
    features = hours.prepare(0, None).dataset.features
    plain = rows_of(hours.prepare(1, features))
    for hour in (1, 2):
        more = token.format(slot=900 + hour) + " " + token.format(slot=950)
        text = "".join(f"{line} {more}\n" for line in hours.file(hour).read_text().splitlines())
        hours.file(hour).write_text(text)
    again = hours.prepare(1, features)
    assert (again.reused, again.dataset.features) == (False, features)
    assert rows_of(again) == plain
    (said,) = project.heard.said
    assert said.startswith("ignoring slots that the model does not have: 901, 950.")
    hours.prepare(2, features)
    (said,) = project.heard.said
    assert said.startswith("ignoring slots that the model does not have: 902.")


def test_unused_slots_are_not_reported(project, hourly):
    hours = hourly("slots")
    features = hours.prepare(0, None, "data.fields={'3': ignore}").dataset.features
    assert "3" not in features.columns
    hours.prepare(1, features, "data.fields={'3': ignore}")
    assert project.heard.said == []
    project.write("slot.conf", "1\n2\n")
    chosen = hours.prepare(0, None, "data.slot_conf=slot.conf").dataset.features
    assert chosen.columns == ("1", "2")
    hours.prepare(1, chosen, "data.slot_conf=slot.conf")
    assert project.heard.said == []


def test_a_slot_that_is_absent_in_an_hour_is_missing_there(project, hourly):
    hours = hourly("slots")
    features = hours.prepare(0, None).dataset.features
    lines = hours.file(1).read_text().splitlines()
    kept = [" ".join(token for token in line.split(" ") if not token.endswith(":7")) for line in lines]
    hours.file(1).write_text("\n".join(kept) + "\n")
    found = hours.prepare(1, features).dataset
    report = {slot["name"]: slot for slot in found.splits["train"].report["slots"]}
    assert report["7"]["missing_rate"] == 1.0
    assert report["8"]["missing_rate"] < 1.0


def test_dense_values_that_a_paddlerec_hour_lacks_make_its_rows_bad(project, hourly):
    hours = hourly("paddlerec")
    features = hours.prepare(0, None).dataset.features
    text = hours.file(1).read_text()
    hours.file(1).write_text("".join(_without_one(line) for line in text.splitlines(keepends=True)))
    with pytest.raises(TooManyBadRows, match=r"1,000 of 1,000 rows .* 1,000 wrong column count"):
        hours.prepare(1, features)
    hours.file(1).write_text(text.replace("dense_feature:", "dense_feature:9 dense_feature:", 1))
    found = hours.prepare(1, features).dataset.splits["train"]
    assert (found.rows, found.report["bad"]) == (999, {"wrong column count": 1})


def _without_one(line: str) -> str:
    click, dense, rest = line.split(" ", 2)
    assert dense.startswith("dense_feature:")
    return f"{click} {rest}"


# ── empty hours and bad ones ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["criteo", "csv", "slots", "paddlerec"])
@pytest.mark.parametrize("emptied", ["no file", "no row"])
def test_an_hour_without_rows_is_a_dataset_without_rows(project, form, emptied, hourly):
    hours = hourly(form)
    features = hours.prepare(0, None).dataset.features
    for hour in (1, 2):
        file = hours.file(hour)
        header = file.read_text().splitlines(keepends=True)[0] if form == "csv" else ""
        file.write_text(header)
        if emptied == "no file":
            file.unlink()
    given, asked = hours.prepare(1, features), hours.prepare(2, None)
    assert given.dataset.features == features
    for found in (given, asked):
        split = found.dataset.splits["train"]
        assert (split.rows, split.report["rows"], split.report["bad"]) == (0, 0, {})
        assert list(found.dataset.row_groups("train")) == []
    assert hours.prepare(1, features).reused
    assert hours.prepare(2, None).reused


@pytest.mark.parametrize("form", ["criteo", "csv", "slots", "paddlerec"])
def test_an_hour_of_bad_rows_stays_in_quarantine(project, form, hourly):
    hours = hourly(form)
    features = hours.prepare(0, None).dataset.features
    whole = hours.file(1).read_text()
    lines = whole.splitlines(keepends=True)
    for number in range(100, 400):
        lines[number] = "what is this\n"
    hours.file(1).write_text("".join(lines))
    with pytest.raises(TooManyBadRows, match=r"300 of 1,000 rows of data\.train are bad \(30\.00%"):
        hours.prepare(1, features)
    folder = project.folder / ".clickline" / "hours" / "20260101-01"
    assert not (folder / "manifest.json").exists()
    quarantine = (folder / "quarantine").iterdir()
    listed = [json.loads(line) for path in quarantine for line in path.read_text().splitlines()]
    assert len(listed) == 300
    assert {row["file"] for row in listed} == {str(hours.file(1))}
    with pytest.raises(TooManyBadRows):  # again, and as much
        hours.prepare(1, features)
    allowed = hours.prepare(1, features, "data.max_bad_ratio=0.3").dataset.splits["train"]
    assert (allowed.rows, sum(allowed.report["bad"].values())) == (700, 300)
    hours.file(1).write_text(whole)
    mended = hours.prepare(1, features)
    assert (mended.reused, mended.dataset.splits["train"].rows) == (False, 1000)
    assert not (folder / "quarantine").exists()


@pytest.mark.parametrize("form", ["slots", "paddlerec"])
def test_first_hour_in_another_format_is_not_treated_as_empty(project, form, criteo_line, hourly):
    hours = hourly(form)
    hours.file(0).write_text(criteo_line(1, 5) * 20)
    with pytest.raises(TooManyBadRows, match="20 of 20 rows"):
        hours.prepare(0, None)
    hours.file(1).write_text({"slots": "1 0\n1 1\n", "paddlerec": "click:1\n"}[form])
    with pytest.raises(DataError, match=r"no slot was found in data\.train"):
        hours.prepare(1, None, "data.fields={}")


def test_damage_is_reported_and_rows_before_it_are_kept(project, hourly):
    import gzip

    hours = hourly("criteo")
    text = gzip.compress(hours.file(0).read_bytes())
    hours.file(0).with_name("part-1.tsv.gz").write_bytes(text[: len(text) // 2])
    found = hours.prepare(0, None)
    assert found.dataset.splits["train"].rows > 1000
    (said,) = project.heard.said
    assert said.startswith("data.train: truncated")


def test_an_hour_is_prepared_once_a_list_of_complete_folders_names_it(project, hourly):
    """The lines of cube's donefile/base.txt."""
    hours = hourly("slots", rows=300, hours=2, donefile="logs/donefile/base.txt")
    with pytest.raises(HourNotReady, match=r"20260101/00 of .* its line in .*donefile/base.txt is missing"):
        hours.prepare(0, None)
    folder = hours.logs / "20260101" / "00"
    project.write("logs/donefile/base.txt", json.dumps({"id": "1", "key": "1", "input": str(folder)}) + "\n")
    assert rows_of(hours.prepare(0, None)).num_rows > 100
    with pytest.raises(HourNotReady):
        hours.prepare(1, None)
