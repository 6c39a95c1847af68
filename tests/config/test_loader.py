"""Loading clickline.yaml: every mistake in it is reported at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clickline.config import Config, json_schema, load_config, resolved
from clickline.config.renamed_keys import RENAMED_KEYS, RENAMED_VALUES
from clickline.config.yaml_tree import parse
from clickline.errors import ConfigError, Mistake, SourceNotFound
from clickline.storage.log_files import DateRange, resolve_files
from clickline.storage.storage import Storage

Load = Callable[..., Config]
Mistakes = Callable[..., list[Mistake]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str, *overrides: str) -> Config:
        file = tmp_path / "clickline.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, overrides)

    return load


@pytest.fixture
def mistakes(load: Load, tmp_path: Path) -> Mistakes:
    def mistakes(text: str, *overrides: str) -> list[Mistake]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        for mistake in caught.value.mistakes:
            assert "Input should" not in str(mistake)
            assert "\n" not in str(mistake)
            assert mistake.remedy
            assert mistake.file in (str(tmp_path / "clickline.yaml"), "--set")
        return caught.value.mistakes

    return mistakes


MINIMAL = "data: {train: a.tsv}\n"


def places(found: list[Mistake]) -> list[tuple[int, str]]:
    return [(m.line, m.key) for m in found]


# ── all at once ────────────────────────────────────────────────────────────────────────────────


def test_five_mistakes_are_five_lines_with_line_key_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clickline.yaml").write_text(
        "name: ads\n"
        "data:\n"
        "  format: cvs\n"
        "  train: data/*.csv\n"
        "model:\n"
        "  embeding_dim: 9\n"
        "train:\n"
        "  batch_size: -4\n"
        "gate: {auc: 74}\n"
        "serve:\n"
        "  http_port: 8500\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert str(caught.value).splitlines() == [
        "clickline.yaml:3 data.format is cvs. Allowed: criteo, slots, paddlerec, csv, parquet, recordio, "
        "tfrecord, intel_tfrecord. Did you mean csv?",
        "clickline.yaml:6 model.embeding_dim is not a known key. Did you mean embedding_dim?",
        "clickline.yaml:8 train.batch_size is -4. Allowed: auto, or a whole number of rows of at least 1. "
        "Correct it, or remove it to get the default, auto.",
        "clickline.yaml:9 gate.auc is 74. Allowed: a number above 0.5 and up to 1, or null. Correct it.",
        "clickline.yaml:10 serve.grpc_port is 8500, and so is http_port. Allowed: different ports. "
        "Change one of them.",
    ]


def test_invalid_key_does_not_hide_contradicting_keys(mistakes: Mistakes) -> None:
    found = mistakes("data:\n  train: a\n  max_bad_ratio: 2\n  modulo: 7\n  eval: 'b/{hour}'\n")
    assert places(found) == [
        (1, "data.eval_dates"),
        (3, "data.max_bad_ratio"),
        (4, "data.modulo"),
        (5, "data.eval"),
    ]


def test_unreadable_key_causes_no_second_mistake(mistakes: Mistakes) -> None:
    # csv or not, nobody knows, so nothing is said about delimiter and fields.
    assert places(mistakes("data:\n  format: cvs\n  train: a\n  delimiter: ';'\n")) == [(2, "data.format")]
    assert places(mistakes("data:\n  format: ${NO_SUCH_VAR}\n  train: a\n  delimiter: ';'\n")) == [
        (2, "data.format")
    ]
    assert places(mistakes("data:\n  trian: a\n")) == [(2, "data.trian")]


def test_union_branches_report_one_mistake(mistakes: Mistakes) -> None:
    (found,) = mistakes(
        "data:\n  train: a\n  fields:\n    I1:\n      transform: bucket\n      buckets: many\n"
    )
    assert (found.line, found.key) == (6, "data.fields.I1.buckets")
    assert found.problem == "is many. Allowed: log2, or a whole number of quantiles from 2 to 1000, or null."


def test_mistake_in_a_list_names_the_item(mistakes: Mistakes) -> None:
    found = mistakes(MINIMAL + "model:\n  hidden:\n  - 512\n  - 0\n  - x\n")
    assert places(found) == [(5, "model.hidden[1]"), (6, "model.hidden[2]")]
    assert found[0].problem == "is 0. Allowed: a whole number of at least 1."


# ── the file ───────────────────────────────────────────────────────────────────────────────────


def test_missing_config_file_points_to_init(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\. Name it with -c, or run `clickline init`"):
        load_config(tmp_path / "clickline.yaml")


def test_folder_as_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\. Name a readable file"):
        load_config(tmp_path)


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"name: a\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=re.escape("c.yaml:2 is not UTF-8 text. Save the file as UTF-8.")):
        load_config(file)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(file).data.train == (str(tmp_path / "a.tsv"),)


def test_oversized_file_is_rejected_without_parsing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"1\t2\n" * 300_000)
    with pytest.raises(ConfigError, match=r"is larger than 1048576 bytes\. Name a config with -c, not data"):
        load_config(file)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "{}\n"])
def test_empty_file_lacks_only_keys_without_default(mistakes: Mistakes, text: str) -> None:
    (found,) = mistakes(text)
    assert (found.key, found.problem) == ("data.train", "is missing.")
    assert "data/train.tsv" in found.remedy


@pytest.mark.parametrize(
    ("text", "what"), [("- a\n", "a list"), ("hello\n", "hello"), ("[]", "an empty list")]
)
def test_file_that_is_not_a_mapping_is_an_error(mistakes: Mistakes, text: str, what: str) -> None:
    (found,) = mistakes(text)
    assert found.problem.startswith(f"is {what}. Allowed: a group of keys (name, data, ")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name: a\ndata:\n\ttrain: b\n", 3, "Indent with spaces, not with tabs."),
        ("name: a\n  data: b\n", 2, "mapping values are not allowed here"),
        ("name: a\ndata: {train: [a, b}\n", 2, "expected ',' or ']'"),
        ("name: a\ndata:\n  train: *.tsv\n", 3, "quote a text"),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document"),
        ("name: a\nhome: \x01\n", 2, "contains the character '\\x01', which YAML does not allow."),
        ('name: "\\U00110000"\n', 0, "an escaped character that does not exist"),
        ("[" * 5000, 0, "is nested more than 30 levels deep"),
        ("a: " + "[" * 40 + "]" * 40, 0, "is nested more than 30 levels deep"),
        ("a: &a [*a]", 0, "is nested more than 30 levels deep"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(mistakes: Mistakes, text: str, line: int, words: str) -> None:
    (found,) = mistakes(text)
    assert found.line == line
    assert words in str(found)


def test_alias_expansion_is_bounded(mistakes: Mistakes) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n"
        for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    )
    (found,) = mistakes(bomb)
    assert "more than 20000 values" in found.problem


def test_many_values_without_aliases_are_accepted() -> None:
    found: list[Mistake] = []
    items = parse(f"[{', '.join(['a'] * 25_000)}]", "clickline.yaml", found).value
    assert found == []
    assert items is not None
    assert len(items) == 25_000


def test_duplicate_key_is_an_error(mistakes: Mistakes) -> None:
    (found,) = mistakes(MINIMAL + "train:\n  epochs: 1\n  epochs: 2\n")
    assert (found.line, found.key, found.problem) == (
        4,
        "train.epochs",
        "is given twice, first in line 3.",
    )


def test_yaml_tags_are_rejected(mistakes: Mistakes, tmp_path: Path) -> None:
    (found,) = mistakes(f"{MINIMAL}name: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n")[:1]
    assert "Allowed: no tags." in found.problem
    assert not (tmp_path / "made").exists()


def test_list_as_key_is_an_error(mistakes: Mistakes) -> None:
    assert places(mistakes(MINIMAL + "? [a, b]\n: c\n")) == [(2, "")]


def test_section_may_be_empty_but_not_a_scalar(load: Load, mistakes: Mistakes) -> None:
    assert load(MINIMAL + "gate:\n").gate.extra_epochs == 3
    (found,) = mistakes(MINIMAL + "gate: 0.7\n")
    assert found.problem == (
        "is 0.7. Allowed: a group of keys (auc, logloss, accuracy, calibration, vs_current, extra_epochs)."
    )


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("trian: {}\n", "trian", "Did you mean train?"),
        ("train: {batch_sise: 1}\n", "train.batch_sise", "Did you mean batch_size?"),
        ("batch_size: 1\n", "batch_size", "Did you mean train.batch_size?"),
        (
            "publish: {zzz: 1}\n",
            "publish.zzz",
            "Allowed here: registry, shards, table_precision, dense_precision, max_deltas, keep_versions, sample_rows, signing_key_file.",
        ),
        (
            "zzzz: 1\n",
            "zzzz",
            "Allowed here: name, data, cache, storage, model, train, tracking, gate, publish, serve, follow, studio, cluster, deploy, home.",
        ),
    ],
)
def test_unknown_key_suggests_the_nearest_one(mistakes: Mistakes, text: str, key: str, remedy: str) -> None:
    (found,) = mistakes(MINIMAL + text)
    assert (found.line, found.key, found.problem, found.remedy) == (2, key, "is not a known key.", remedy)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_renamed_key_is_an_error_that_names_the_new_key(mistakes: Mistakes, old: str, new: str) -> None:
    *groups, key = old.split(".")
    text = (
        "".join(f"{'  ' * depth}{group}:\n" for depth, group in enumerate(groups))
        + f"{'  ' * len(groups)}{key}: 1\n"
    )
    for found in (mistakes(text), mistakes(MINIMAL, f"{old}=1")):
        (renamed,) = [m for m in found if m.key == old]
        assert (renamed.problem, renamed.remedy) == (f"was renamed to {new}.", f"Write {new} instead.")
    found = mistakes(MINIMAL, f"{new}=1", "name=NO")
    assert not [m for m in found if "not a known key" in m.problem]


@pytest.mark.parametrize(("place", "new"), RENAMED_VALUES.items())
def test_renamed_value_is_an_error_that_names_the_new_value(
    mistakes: Mistakes, load: Load, place: tuple[str, str], new: str
) -> None:
    key, old = place
    (found,) = mistakes(MINIMAL, f"{key}={old}")
    assert (found.key, found.remedy) == (key, f"Did you mean {new}?")
    load(MINIMAL, f"{key}={new}")


def test_renamed_key_hides_complaints_about_the_new_one(mistakes: Mistakes) -> None:
    (found,) = mistakes(MINIMAL + "serve: {host: 0.0.0.0, open: true}\n")
    assert found.key == "serve.open"


def test_unknown_keys_in_fields_and_dates_are_reported(mistakes: Mistakes) -> None:
    found = mistakes(
        "data:\n  train: '{date}'\n  fields:\n    C1: {kin: slot}\n  dates: {from: 20240101, too: 20240102}\n"
    )
    assert [(m.line, m.key) for m in found] == [
        (4, "data.fields.C1.kin"),
        (5, "data.dates.too"),
    ]
    assert found[0].remedy == "Did you mean kind?"
    assert found[1].remedy == "Did you mean to?"


# ── values are typed by the schema, not by YAML ────────────────────────────────────────────────


def test_yaml_typed_words_stay_texts(load: Load) -> None:
    config = load(
        "data:\n  format: csv\n  train: a\n  header: no\n  columns: [no, 010, 1e3, 2024-01-01, click]\n"
        "  missing: [off, 0x1F]\n  fields: {click: label, no: slot}\n"
    )
    assert config.data.columns == ("no", "010", "1e3", "2024-01-01", "click")
    assert config.data.missing == ("off", "0x1F")
    assert config.data.header is False
    assert config.data.fields["no"].kind == "slot"


def test_storage_options_are_typed_by_yaml(load: Load) -> None:
    config = load(MINIMAL + "storage: {options: {s3: {anon: true, retries: 5, region: '7', x: {y: 0.5}}}}\n")
    assert config.storage.options == {"s3": {"anon": True, "retries": 5, "region": "7", "x": {"y": 0.5}}}


# ── the environment ────────────────────────────────────────────────────────────────────────────


def test_variables_are_expanded_and_typed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CL_PORT", "9001")
    monkeypatch.setenv("CL_BUCKET", "logs")
    monkeypatch.setenv("CL_EMPTY", "")
    config = load(
        "data:\n"
        "  train: s3://${CL_BUCKET}/${CL_DAY:-a}/x-${CL_EMPTY}.tsv\n"
        "  eval: ${CL_EVAL:-null}\n"
        "  max_bad_ratio: ${CL_EMPTY:-0.5}\n"
        "  donefile: '${CL_DONE:-}$${x}$y'\n"
        "serve:\n  http_port: ${CL_PORT}\n"
    )
    assert config.data.train == ("s3://logs/a/x-.tsv",)
    assert config.data.eval is None
    assert config.data.max_bad_ratio == 0.5
    assert config.data.donefile == "${x}$y"
    assert config.serve.http_port == 9001


def test_variable_default_may_contain_a_pattern(load: Load) -> None:
    text = "data:\n  train: ${CL_NO_SUCH:-s3://b/{date}/x}\n  dates: {from: 20240101, to: 20240101}\n"
    assert load(text).data.train == ("s3://b/{date}/x",)


def test_unset_variable_is_an_error(mistakes: Mistakes) -> None:
    (found,) = mistakes(MINIMAL + "serve:\n  http_port: ${CL_NO_SUCH}\n")
    assert str(found).endswith(
        ":3 serve.http_port uses the environment variable CL_NO_SUCH, which is not set. "
        "Set CL_NO_SUCH, or give a default: ${CL_NO_SUCH:-value}."
    )


@pytest.mark.parametrize("text", ["${", "${}", "${1a}", "a${b c}"])
def test_incomplete_variable_is_an_error(mistakes: Mistakes, text: str) -> None:
    (found,) = mistakes(f"{MINIMAL}home: '{text}'\n")
    assert found.problem == "contains a ${ without a variable name."
    assert "$${ is a literal ${" in found.remedy


# ── paths ──────────────────────────────────────────────────────────────────────────────────────


def test_paths_are_relative_to_the_file_not_to_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "r.py").touch()
    (folder / "m.py").touch()
    (folder / "keys.yaml").touch()
    (folder / "c.yaml").write_text(
        "data: {reader: r.py, train: ['d/*.tsv', /abs/x, ~/y, s3://b/z*], eval: ../e.tsv,\n"
        "       fields: {click: label, city: slot}}\n"
        "model: {file: m.py}\nstorage: {credentials_file: keys.yaml}\ncache: {dir: cache}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config("project/c.yaml")
    assert config.data.reader == f"{folder}/r.py"
    assert config.data.train == (f"{folder}/d/*.tsv", "/abs/x", "/home/someone/y", "s3://b/z*")
    assert config.data.eval == (f"{folder}/../e.tsv",)
    assert config.model.file == f"{folder}/m.py"
    assert config.storage.credentials_file == f"{folder}/keys.yaml"
    assert config.cache.dir == f"{folder}/cache"
    assert config.home == f"{folder}/.clickline"


@pytest.mark.parametrize("name", ["a[1] b*", "a{c}", "{date} of {hour}", "{", "[{]}", "a}{b?"])
@pytest.mark.parametrize("train", ["*.csv", "day 1.csv", "{date}/*.csv", "*[2].csv"])
def test_glob_characters_in_the_project_folder_are_literal(tmp_path: Path, train: str, name: str) -> None:
    folder = tmp_path / name
    (folder / "20240101").mkdir(parents=True)
    (tmp_path / "a1 bb").mkdir()
    for name in ("day 1.csv", "day 2.csv", "20240101/1.csv", "20240101/donefile", "../a1 bb/day 3.csv"):
        (folder / name).write_bytes(b"")
    dates = "dates: {from: 20240101, to: 20240101}, " if "{" in train else ""
    text = (
        f"data: {{format: csv, train: '{train}', {dates}eval: absent/*.csv, fields: {{y: label, x: slot}}}}\n"
    )
    (folder / "clickline.yaml").write_text(text)
    config = load_config(folder / "clickline.yaml")
    (tmp_path / "resolved.yaml").write_text(resolved(config))
    assert load_config(tmp_path / "resolved.yaml") == config

    span = DateRange("20240101", "20240101") if dates else None
    found = resolve_files(Storage(), config.data.train, span, "donefile")
    expected = {
        "*.csv": ["day 1.csv", "day 2.csv"],
        "day 1.csv": ["day 1.csv"],
        "{date}/*.csv": ["20240101/1.csv"],
        "*[2].csv": ["day 2.csv"],
    }
    assert [file.uri for file in found] == [f"{folder}/{name}" for name in expected[train]]
    with pytest.raises(SourceNotFound) as caught:
        resolve_files(Storage(), config.data.eval or ())
    assert str(caught.value).startswith(
        f"{folder}/absent/*.csv matches no file. The nearest existing folder is {folder}, in it: 20240101, "
    )


def test_glob_characters_in_the_home_folder_are_literal(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/[x]")
    config = load("data: {train: [~/*.tsv, '[ab]/~.tsv'], slot_conf: ~/s, format: slots}\n")
    assert config.data.train[0] == "/home/[[]x]/*.tsv"
    assert config.data.train[1].endswith("/[ab]/~.tsv")
    assert config.data.slot_conf == "/home/[x]/s"


def test_home_may_be_a_uri_but_cache_may_not(load: Load, mistakes: Mistakes) -> None:
    assert load(MINIMAL + "home: s3://bucket/clickline\n").home == "s3://bucket/clickline"
    (found,) = mistakes(MINIMAL + "cache: {dir: s3://bucket/cache}\n")
    assert (found.key, "a path on this machine" in found.problem) == ("cache.dir", True)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data:\n  reader: no.py\n  train: a\n  fields: {c: label, d: slot}\n", "data.reader"),
        (MINIMAL + "model:\n  file: no.py\n", "model.file"),
        (MINIMAL + "storage:\n  credentials_file: no.yaml\n", "storage.credentials_file"),
    ],
)
def test_files_named_by_the_config_must_exist(mistakes: Mistakes, text: str, key: str) -> None:
    (found,) = mistakes(text)
    assert found.key == key
    assert found.line > 1
    assert "which does not exist. Create it, or correct the path." in str(found)


# ── --set ──────────────────────────────────────────────────────────────────────────────────────


def test_overrides_take_precedence_and_are_typed_by_the_schema(load: Load) -> None:
    config = load(
        "name: ads\ndata: {train: a, eval: b}\n",
        "name=123",
        "data.eval=null",
        "data.donefile=a=b",
        "data.max_bad_ratio=0.25",
        "train.epochs=3",
        "model.hidden=[8, 4]",
        "gate={auc: 0.7, extra_epochs: 2}",
        "gate.extra_epochs=3",
        "data.fields.I1.transform=bucket",
        "data.fields.C1=ignore",
        "data.shard_size=2MiB",
        "storage.options.s3.anon=true",
    )
    assert config.name == "123"
    assert config.data.eval is None
    assert config.data.donefile == "a=b"
    assert (config.data.max_bad_ratio, config.train.epochs) == (0.25, 3)
    assert config.model.hidden == (8, 4)
    assert (config.gate.auc, config.gate.extra_epochs) == (0.7, 3)
    assert config.data.fields["I1"].buckets == "log2"
    assert config.data.fields["C1"].kind == "ignore"
    assert config.data.shard_size == 2 * 2**20
    assert config.storage.options == {"s3": {"anon": True}}


def test_override_can_fix_the_file(load: Load) -> None:
    assert load("data: {train: a, max_bad_ratio: 7}\n", "data.max_bad_ratio=0.1").data.max_bad_ratio == 0.1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_bad_ratio=7", "--set data.max_bad_ratio is 7. Allowed: a number from 0 to 1."),
        ("data.max_bod=7", "--set data.max_bod is not a known key. Did you mean max_bad_ratio?"),
        ("epochs=2", "--set epochs is not a known key. Did you mean train.epochs?"),
        ("train.epochs", "--set train.epochs is not of the form section.key=value."),
        ("=3", "--set is not of the form section.key=value. Write --set section.key=value."),
        ("train..epochs=3", "--set train..epochs is not of the form section.key=value."),
        ("data.train.0=x", "--set data.train.0 cannot be set: data.train is one value, not a group of keys."),
        ("model.hidden=[8, x]", "--set model.hidden[1] is x. Allowed: a whole number of at least 1."),
        ("model.hidden=[8", "--set model.hidden is not YAML:"),
        ("train.mode=clustre", "Did you mean cluster?"),
        ("name=null", "--set name is null. Allowed: lower-case letters, digits and inner hyphens."),
    ],
)
def test_invalid_override_is_reported_as_set(mistakes: Mistakes, override: str, said: str) -> None:
    (found,) = mistakes(MINIMAL, override)
    assert (found.file, found.line) == ("--set", 0)
    assert said in str(found)


# ── secrets ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        "{s3: {key: HUSH}}",
        "{s3: {secret: HUSH}}",
        "{s3: {client_kwargs: {aws_access_key_id: HUSH}}}",
        "{gs: {token: HUSH}}",
        "{abfs: {account_key: HUSH}}",
        "{abfs: {connection_string: HUSH}}",
        "{webhdfs: {password: HUSH}}",
        "{https: {headers: {Authorization: HUSH}}}",
        "{s3: {endpoint_url: 'http://me:HUSH@host'}}",
        "{s3: {accessKey: HUSH}}",
    ],
)
def test_secrets_are_rejected_and_never_printed(mistakes: Mistakes, options: str) -> None:
    (found,) = mistakes(f"{MINIMAL}storage:\n  options: {options}\n")
    assert "looks like a secret" in found.problem
    assert "environment or the file named by storage.credentials_file" in found.remedy
    assert "HUSH" not in str(found)


@pytest.mark.parametrize(
    "uri",
    [
        "https://me:HUSH@host/x",
        "https://host/x?X-Amz-Signature=HUSH",
        "https://h/x?a=1&token=HUSH",
        "https://h/x?sig=HUSH",
    ],
)
def test_uri_with_a_password_is_rejected_and_not_printed(mistakes: Mistakes, uri: str) -> None:
    for text in (f"data: {{train: '{uri}'}}", f"{MINIMAL}home: '{uri}'"):
        (found,) = mistakes(text)
        assert "contains a password or a signature" in found.problem
        assert "HUSH" not in str(found)


def test_storage_options_without_secrets_are_allowed(load: Load) -> None:
    options = "{s3: {anon: true, endpoint_url: 'http://localhost:9000', client_kwargs: {region_name: a}}}"
    assert load(f"{MINIMAL}storage: {{options: {options}}}\n").storage.options["s3"]["anon"] is True


def test_secret_variable_in_the_wrong_place_is_not_printed(
    mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CL_SECRET_KEY", "HUSH")
    (found,) = mistakes(MINIMAL + "train: {epochs: '${CL_SECRET_KEY}'}\n")
    assert "HUSH" not in str(found)
    assert "has an invalid value. Allowed: a whole number" in found.problem


# ── what comes out ─────────────────────────────────────────────────────────────────────────────


def test_resolved_config_loads_to_the_same_config(load: Load, tmp_path: Path) -> None:
    config = load(
        "data:\n  format: csv\n  train: [a.csv, 's3://b/{date}/{hour}/*']\n"
        "  dates: {from: 20240101, to: 20240102/03, wait: 30m}\n  delimiter: ';'\n  missing: ['null', '-']\n"
        "  fields: {click: {kind: label, positive: 'yes'}, age: log1p, I2: {transform: bucket, buckets: 9},\n"
        "           t: {kind: time, time_format: '%Y-%m-%d'},\n"
        "           tags: {separator: '|', slot: 18446744073709551615}}\n"
        "storage: {options: {s3: {x: '$${A}', n: 5}}}\nhome: 'a$${b'\n"
    )
    text = resolved(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "resolved.yaml").write_text(text)
    again = load_config(elsewhere / "resolved.yaml")
    assert again == config
    assert resolved(again) == text
    assert config.data.dates is not None
    assert (config.data.dates.first, config.data.dates.last) == ("20240101", "20240102/03")
    assert config.data.dates.wait == 1800


def test_config_is_frozen(load: Load) -> None:
    config = load(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 2  # type: ignore[misc]


def test_json_schema_accepts_what_the_loader_accepts(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with moto")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = {
        "data": {
            "train": "a",
            "shard_size": "1MiB",
            "fields": {"I*": "log1p", "C1": {"kind": "slot"}},
            "dates": {"from": 20240101, "to": "20240102/03"},
        },
        "serve": {"http_port": "${PORT:-8501}"},
        "train": {"mode": "${MODE}"},
    }
    assert list(validator.iter_errors(good)) == []
    for bad in (
        {"data": {"trian": "a"}},
        {"data": {}},
        {"data": {"train": "a", "format": "cvs"}},
        {"data": {"train": "a"}, "train": {"batch_size": 0}},
        {"data": {"train": "a", "fields": {"x": "slto"}}},
    ):
        assert list(validator.iter_errors(bad)), bad


# ── nothing but ConfigError ────────────────────────────────────────────────────────────────────

_KEYS = st.sampled_from(
    [
        "name",
        "data",
        "model",
        "train",
        "gate",
        "storage",
        "serve",
        "format",
        "fields",
        "dates",
        "from",
        "to",
        "I*",
        "kind",
        "transform",
        "buckets",
        "options",
        "s3",
        "key",
        "hidden",
        "shard_size",
        "header",
        "wait",
    ]
)
_WORDS = st.sampled_from(
    [
        "",
        "null",
        "csv",
        "criteo",
        "slot",
        "log1p",
        "-1",
        "1e400",
        "20240230",
        "20240101/25",
        "{date}",
        "${",
        "${HOME}",
        "~nobody/x",
        "nan",
        ".inf",
        "yes",
        "a\\0b",
        "s3://a:b@c",
        "*a",
        "&a",
        "- -",
        "!!int x",
        "9" * 5000 + "TB",
        "\ud7ff",
    ]
)
_VALUES = st.recursive(
    _WORDS | st.text(max_size=8) | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=4), below, max_size=4)
    ),
    max_leaves=12,
)


def assert_loads_or_tells(file: Path, overrides: list[str]) -> None:
    try:
        config = load_config(file, overrides)
    except ConfigError as error:
        mistakes = error.mistakes
    else:
        resolved(config)
        return
    assert mistakes
    assert all(mistake.problem and mistake.remedy for mistake in mistakes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=200) | _VALUES.map(lambda tree: str(tree)), st.lists(st.text(max_size=20), max_size=2)
)
@example('"\\ud800": 1', [])
@example('data: {train: "\\ud800"}', [])
@example("data: {fields: {a: {slot: " + "9" * 5000 + "}}}", [])
@example("data: {train: a, shard_size: " + "9" * 400 + "TB}", [])
@example("data: {train: '\\0'}\nmodel: {file: \"\\0\"}", [])
@example("data: {train: ~nobody/x}", [])
@example("2024-99-99: 1", ["storage.options.s3.x=2024-99-99", "data.train=\x00"])
@example("? \n: 1", ["a=[" * 2000])
@example("data: {fields: {1: slot, ~: slot, true: slot}}", ["data.fields.=1"])
def test_any_text_raises_only_config_errors(tmp_path: Path, text: str, overrides: list[str]) -> None:
    file = tmp_path / "any.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_loads_or_tells(file, overrides)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_KEYS, _VALUES, max_size=5))
def test_any_tree_raises_only_config_errors(tmp_path: Path, tree: dict[str, object]) -> None:
    import yaml

    file = tmp_path / "any.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8", errors="surrogatepass")
    assert_loads_or_tells(file, [])


@pytest.mark.parametrize("key", ["a", "l", "al", "all"])
def test_unknown_top_level_key_is_always_rejected(mistakes: Mistakes, key: str) -> None:
    (found,) = mistakes(f"{MINIMAL}{key}: 5\n")
    assert found.problem == "is not a known key."


@pytest.mark.parametrize("sign", ["'\"'", '"\\n"', "a", "7"])
def test_impossible_delimiter_is_rejected(mistakes: Mistakes, sign: str) -> None:
    (found,) = mistakes(f"data: {{train: x, format: csv, delimiter: {sign}, fields: {{y: label, u: slot}}}}")
    assert found.key == "data.delimiter"


def test_unknown_placeholder_is_rejected(mistakes: Mistakes) -> None:
    (found,) = mistakes("data: {train: 'odd/{a,b}.tsv'}")
    assert "contains {a,b}. Allowed in braces: {date} and {hour}." in found.problem
    assert "Write a literal brace as [{]." in found.remedy


def test_invalid_field_does_not_hide_contradictions_of_other_fields(mistakes: Mistakes) -> None:
    text = (
        "data:\n  train: x\n  format: csv\n  fields:\n    y: label\n    z: label\n    weight: slot\n"
        "    t: {kind: slot, separator: '|', multi: false}\n    u: {kind: dense, buckets: 5}\n"
    )
    found = mistakes(text)
    assert {m.key for m in found} == {
        "data.fields",
        "data.fields.weight",
        "data.fields.t.multi",
        "data.fields.u.buckets",
    }
