"""The allowed values of each key, and which keys exclude each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clickline.config import Config, DataSection, load_config
from clickline.config.value_types import looks_secret
from clickline.errors import ConfigError


def data(**keys: Any) -> DataSection:
    return DataSection.model_validate({"train": "a", **keys})


def refused(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        data(**keys)
    return str(caught.value)


CSV: dict[str, Any] = {"format": "csv", "fields": {"click": "label", "city": "slot"}}


def with_fields(**fields: Any) -> dict[str, Any]:
    return {"format": "csv", "fields": {"click": "label", "city": "slot", **fields}}


def test_defaults() -> None:
    config = Config.model_validate({"data": {"train": "a"}})
    assert (config.name, config.home) == ("clickline", ".clickline")
    assert (config.data.format, config.data.donefile, config.data.max_bad_ratio) == (
        "criteo",
        "donefile",
        0.01,
    )
    assert (config.data.shard_size, config.cache.size) == (64 * 2**20, 50 * 2**30)
    assert (config.model.name, config.model.embedding_dim) == ("wide_deep", 9)
    assert config.model.hidden == (512, 256, 128, 32)
    assert (config.train.mode, config.train.batch_size, config.train.epochs) == ("local", "auto", 1)
    assert (config.gate.auc, config.gate.extra_epochs, config.publish.shards) == (None, 3, 2)
    assert (config.serve.http_port, config.serve.grpc_port) == (8501, 8500)


def test_every_key_has_a_description() -> None:
    schema = Config.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, key in section["properties"].items():
            words = key.get("description") or schema["$defs"][key["$ref"].split("/")[-1]]["description"]
            assert words.endswith("."), (section["title"], name)


# ── sources ────────────────────────────────────────────────────────────────────────────────────


def test_reader_replaces_format() -> None:
    fields = {"click": "label", "city": "slot"}
    assert data(reader="r.py", fields=fields).format is None
    assert data(reader="r.py", format=None, fields=fields).reader == "r.py"
    assert "is given together with format: csv. Allowed: one of the two." in refused(reader="r.py", **CSV)


def test_model_file_replaces_name() -> None:
    assert Config.model_validate({"data": {"train": "a"}, "model": {"file": "m.py"}}).model.name is None
    with pytest.raises(
        ValidationError, match=r"file is given together with name: lr\. Allowed: one of the two"
    ):
        Config.model_validate({"data": {"train": "a"}, "model": {"file": "m.py", "name": "lr"}})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (65536, 65536),
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("1MB", 10**6),
        ("1.5GiB", 3 * 2**29),
        ("2tb", 2 * 10**12),
        ("100000B", 100_000),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert data(shard_size=text).shard_size == size


@pytest.mark.parametrize("text", ["64", "1KiB", "-1MB", "1 apple", "MB", "1e9", "", "1iB", True])
def test_invalid_or_too_small_sizes_are_rejected(text: object) -> None:
    assert "shard_size" in refused(shard_size=text)


@pytest.mark.parametrize(
    ("text", "seconds"), [(0, 0), ("0", 0), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("5", 5)]
)
def test_duration_formats(text: object, seconds: int) -> None:
    found = data(train="{date}", dates={"from": 20240101, "to": 20240101, "wait": text}).dates
    assert found is not None
    assert found.wait == seconds


@pytest.mark.parametrize("text", ["-1", "1.5h", "soon", "1w", -3])
def test_invalid_durations_are_rejected(text: object) -> None:
    assert "dates.wait" in refused(train="{date}", dates={"from": 20240101, "to": 20240101, "wait": text})


@pytest.mark.parametrize(
    "hour",
    ["2024010", "20240230", "20241301", "20240101/24", "20240101/1", "2024-01-01", "٢٠٢٤٠١٠١", 1, True],
)
def test_dates_that_do_not_exist_are_rejected(hour: object) -> None:
    assert "dates.from" in refused(train="{date}/{hour}", dates={"from": hour, "to": 20250101})


@pytest.mark.parametrize(
    ("first", "last", "fits"),
    [
        ("20240101", "20240101", True),
        ("20240101/05", "20240101", True),
        ("20240101/05", "20240101/05", True),
        ("20240101/05", "20240101/04", False),
        ("20240102", "20240101", False),
        ("20240102", "20240101/23", False),
    ],
)
def test_from_after_to_is_rejected(first: str, last: str, fits: bool) -> None:
    keys = {"train": "{date}/{hour}", "dates": {"from": first, "to": last}}
    if fits:
        assert data(**keys).dates is not None
    else:
        assert f"from is {first}, after `to`, which is {last}. Lower from or raise to." in refused(**keys)


DAY = {"from": 20240101, "to": 20240101}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train": "a/{date}"}, "dates is missing, but train is a {date}/{hour} pattern. Give dates: {from:"),
        ({"eval": "a/{date}/{hour}"}, "eval_dates is missing, but eval is a {date}/{hour} pattern."),
        ({"train": "a/{hour}", "dates": DAY}, "train contains {hour} but no {date}."),
        ({"train": "a/{day}"}, "train contains {day}. Allowed in braces: {date} and {hour}."),
        ({"train": "a", "dates": DAY}, "dates is given, but train contains no {date}."),
        ({"eval_dates": DAY}, "eval_dates is given, but eval contains no {date}."),
        (
            {"train": "{date}", "dates": {"from": "20240101/03", "to": 20240102}},
            "dates names hours, but train contains no {hour}.",
        ),
    ],
)
def test_patterns_and_dates_must_match(keys: dict[str, Any], words: str) -> None:
    assert words in refused(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"slot_conf": "s"}, "slot_conf is given, but the format is criteo. Allowed only for format: slots or paddlerec"),
        ({"modulo": 7, **CSV}, "modulo is given, but the format is csv."),
        ({"delimiter": ";"}, "delimiter is given, but the format is criteo. Allowed only for format: csv."),
        ({"header": False}, "header is given, but the format is criteo."),
        ({"missing": "NA"}, "missing is given, but the format is criteo."),
        ({**CSV, "columns": ["click", "city"]}, "columns is given, but the header already names the columns."),
        ({**CSV, "header": False}, "columns is missing, but header is false."),
        ({**CSV, "header": False, "columns": ["click", "city", "city"]}, "columns names city twice."),
        ({**CSV, "header": False, "columns": ["click", "cty"]}, "comes from column city, which does not exist. Did you mean cty?"),
    ],
)  # fmt: skip
def test_keys_of_other_formats_are_rejected(keys: dict[str, Any], words: str) -> None:
    assert words in refused(**keys)


# ── fields ─────────────────────────────────────────────────────────────────────────────────────


def test_one_word_field() -> None:
    fields = data(
        **with_fields(age="log1p", income="dense", plain="none", size="bucket", junk="ignore")
    ).fields
    assert (fields["age"].kind, fields["age"].transform) == ("dense", "log1p")
    assert (fields["income"].kind, fields["income"].transform) == ("dense", None)
    assert (fields["plain"].kind, fields["plain"].transform) == ("dense", "none")
    assert (fields["size"].kind, fields["size"].transform, fields["size"].buckets) == (
        "dense",
        "bucket",
        "log2",
    )
    assert fields["junk"].kind == "ignore"
    assert "is slto. Allowed in one word: slot, dense, " in refused(**with_fields(age="slto"))
    assert "Did you mean slot?" in refused(**with_fields(age="slto"))


def test_glob_changes_built_in_fields() -> None:
    fields = data(fields={"I*": {"transform": "bucket", "buckets": 50}, "C?": "ignore", "label": {}}).fields
    assert fields["I*"].buckets == 50
    assert "fields.I14 comes from column I14, which does not exist. Did you mean I4?" in refused(
        fields={"I14": "log1p"}
    )
    assert "which does not exist" in refused(fields={"X*": "log1p"})
    assert "is given for a glob" in refused(fields={"I*": {"column": "I1"}})
    assert data(fields={"I13_ids": {"kind": "slot", "column": "I13", "slot": 0}}).fields["I13_ids"].slot == 0


def test_glob_without_matching_fields_is_rejected() -> None:
    assert "fields.C* is a glob. Allowed only for formats with built-in fields" in refused(
        **with_fields(**{"C*": "slot"})
    )
    # A column may be named so; the field is not.
    assert "fields.price[usd] is a glob." in refused(**with_fields(**{"price[usd]": "log1p"}))
    priced = data(**with_fields(price={"transform": "log1p", "column": "price[usd]"}))
    assert priced.fields["price"].column == "price[usd]"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"kind": "slot", "transform": "log1p"}, "transform is given, but the kind is slot. Allowed only for kind: dense."),
        ({"kind": "dense", "separator": "|"}, "separator is given, but the kind is dense."),
        ({"kind": "dense", "multi": True}, "multi is given, but the kind is dense."),
        ({"kind": "time", "encoding": "feasign"}, "encoding is given, but the kind is time."),
        ({"kind": "dense", "slot": 3}, "slot is given, but the kind is dense. Allowed only for kind: slot or dense with transform: bucket."),
        ({"kind": "slot", "positive": "yes"}, "positive is given, but the kind is slot."),
        ({"positive": ["yes"]}, "fields.f.positive is given, but the kind is slot."),
        ({"kind": "slot", "time_format": "%Y"}, "time_format is given, but the kind is slot."),
        ({"kind": "dense", "buckets": 5}, "buckets is 5, but the transform is not given."),
        ({"transform": "log1p", "buckets": 5}, "buckets is 5, but the transform is log1p. Set transform: bucket, or remove buckets."),
        ({"separator": "|", "multi": False}, "multi is false, but a separator is given."),
        ({"transform": "bucket", "buckets": 1}, "buckets"),
        ({"transform": "bucket", "buckets": 1001}, "buckets"),
        ({"separator": "||"}, "separator"),
        ({"slot": 2**64}, "slot"),
        ({"slot": -1}, "slot"),
        ({"kind": "time", "time_format": "%Q"}, "time_format"),
        ({"kind": "time", "time_format": "now"}, "time_format"),
    ],
)  # fmt: skip
def test_field_keys_of_another_kind_are_rejected(field: dict[str, Any], words: str) -> None:
    assert words in refused(**with_fields(f=field))


def test_field_keys_of_its_kind_are_accepted() -> None:
    fields = data(
        **with_fields(
            tags={"separator": "|"},
            size={"transform": "bucket", "buckets": 1000, "slot": 2**64 - 1},
            when={"kind": "time", "time_format": "%d/%b/%Y:%H:%M:%S %z"},
            w="weight",
        )
    ).fields
    assert fields["size"].slot == 2**64 - 1


@pytest.mark.parametrize("name", ["label", "weight", "impression", "click", "event_hour"])
def test_reserved_field_names_are_rejected(name: str) -> None:
    fields = {"clicked": "label", "x": "slot", name: "log1p"}
    words = refused(format="csv", fields=fields)
    assert f"fields.{name} is a dense field with a name that is reserved in every dataset." in words
    assert f"Give it another name and set column: {name}." in words
    renamed = {"clicked": "label", "x": "slot", "other": {"kind": "slot", "column": name}}
    assert data(format="parquet", fields=renamed).fields["other"].column == name


@pytest.mark.parametrize(
    "source", [{"format": f} for f in ("csv", "parquet", "recordio", "tfrecord")] + [{"reader": "r.py"}]
)
def test_formats_without_built_in_fields_need_a_label_and_a_feature(source: dict[str, str]) -> None:
    words = refused(**source)
    assert "fields has no label" in words
    assert "fields has no slot and no dense field" in words
    assert "has no slot and no dense" in refused(**source, fields={"click": "label", "x": "ignore"})
    assert data(**source, fields={"click": "label", "x": {}}).fields["x"].kind is None


@pytest.mark.parametrize(
    ("source", "fields", "words"),
    [
        ("criteo", {"label": "ignore"}, "fields.label sets label to ignore, which leaves no label. Remove it."),
        ("criteo", {"*": "slot"}, "fields.* sets label to slot, which leaves no label. Narrow the glob, or add label: label."),
        ("criteo", {"*": "slot"}, "fields.* makes label a slot field, but that name is reserved in every dataset. Narrow the glob, or declare label by name."),
        ("criteo", {"l*": "slot"}, "fields.l* makes label a slot field"),
        ("criteo", {"C*": "label"}, "fields has 27 fields of kind label: label, C1, C2, C3, C4 and 22 more. Allowed: one."),
        ("criteo", {"clicked": {"kind": "label", "column": "label"}}, "fields has 2 fields of kind label: label, clicked."),
        ("criteo", {"I*": "weight"}, "fields has 13 fields of kind weight: I1, I2, I3, I4, I5 and 8 more."),
        ("criteo", {"[IC]*": "ignore"}, "fields has no slot and no dense field"),
        ("criteo", {"label": "label", "*": "ignore"}, "fields has no slot and no dense field"),
        ("criteo", {"C*": {"positive": "yes"}}, "fields.C*.positive is given, but the kind is slot."),
        ("paddlerec", {"click": "ignore"}, "fields.click sets click to ignore, which leaves no label. Remove it."),
        ("paddlerec", {"c*": "slot"}, "fields.c* makes click a slot field, but that name is reserved in every dataset."),
        ("paddlerec", {"y": {"kind": "label", "column": "5"}, "click": "ignore"}, "fields.y makes y a label, but 5 is a slot. Allowed: the name of a token."),
        ("paddlerec", {"dense_1": {"separator": "|"}}, "fields.dense_1.separator is given, but the kind is dense."),
        ("slots", {"clicked": {"kind": "label", "column": "7"}}, "fields.clicked makes clicked a label, but a line of slots begins with show, click. Remove it, or name all values before the first slot: columns: [show, click, 7]."),
        ("slots", {"click": "slot"}, "fields.click is a slot field with a name that is reserved in every dataset."),
    ],
)  # fmt: skip
def test_globs_that_leave_no_label_or_several_are_rejected(
    source: str, fields: dict[str, Any], words: str
) -> None:
    assert words in refused(format=source, fields=fields)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("criteo", {"*": "slot", "label": "label"}),
        ("criteo", {"label": "label", "*": "slot"}),  # a name counts more than a glob, wherever it stands
        ("criteo", {"*": "ignore", "l*": "label", "C7": "slot"}),
        ("criteo", {"label": {"positive": "yes"}, "I?": "bucket"}),
        ("criteo", {"label": "ignore", "y": {"kind": "label", "column": "label"}}),
        ("paddlerec", {"click": "label", "dense_*": "log1p", "7": "ignore"}),
        ("paddlerec", {"click": "ignore", "y": {"kind": "label", "column": "click"}}),
        ("slots", {"*": {"multi": False}, "3": "ignore"}),
    ],
)
def test_globs_that_leave_one_label_are_accepted(source: str, fields: dict[str, Any]) -> None:
    assert set(data(format=source, fields=fields).fields) == set(fields)


@pytest.mark.parametrize("kind", ["label", "weight", "time"])
def test_at_most_one_label_weight_and_time(kind: str) -> None:
    fields = {"click": "label", "x": "slot", "a": kind, "b": kind}
    assert f"fields of kind {kind}:" in refused(format="csv", fields=fields)


# ── the rest ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["ads", "a", "0-b", "a--b"])
def test_names(name: str) -> None:
    assert Config.model_validate({"name": name, "data": {"train": "a"}}).name == name


@pytest.mark.parametrize("name", ["", "Ads", "-a", "a-", "a_b", "a b", "ä", "a\n"])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"name": name, "data": {"train": "a"}})


def test_auc_gate_never_passes_a_constant() -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"data": {"train": "a"}, "gate": {"auc": 0.5}})


@pytest.mark.parametrize(
    "name",
    ["key", "secret", "AWS_SECRET_ACCESS_KEY", "token", "sas_token", "password", "passwd", "pwd", "api_key", "apiKey",
     "auth", "Authorization", "client_secret", "account_key", "private_key", "credentials", "connection_string"],
)  # fmt: skip
def test_secret_names_are_recognized(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    ["anon", "endpoint_url", "region_name", "host", "port", "user", "use_ssl", "monkey", "author", "project"],
)
def test_harmless_names_are_not_secrets(name: str) -> None:
    assert not looks_secret(name)


def test_a_donefile_with_a_slash_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "clickline.yaml"
    for written, wanted in (
        ("_SUCCESS", "_SUCCESS"),
        ("logs/donefile/base.txt", str(tmp_path / "logs/donefile/base.txt")),
        ("s3://logs/donefile.txt", "s3://logs/donefile.txt"),
    ):
        file.write_text(f"data: {{train: rows.tsv, donefile: {written}}}\n")
        assert load_config(file).data.donefile == wanted


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{format: slots, columns: [id, show]}", "fields has no label, and this format has none of its own."),
        ("{format: criteo, columns: [a]}", "columns is given, but the format is criteo. Allowed only for format: csv or slots or paddlerec."),
        ("{format: slots, columns: [show, click], fields: {w: weight}}", "makes w a weight, but a line of slots begins with show, click."),
        ("{format: paddlerec, fields: {conversion: label}}", "fields has 2 fields of kind label: click, conversion."),
        ("{format: intel_tfrecord, fields: {I14: none}}", "comes from column I14, which does not exist."),
    ],
)  # fmt: skip
def test_columns_and_labels_of_line_formats(tmp_path: Path, data: str, words: str) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text(f"data: {data[:-1]}, train: rows}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert words in str(error.value)
