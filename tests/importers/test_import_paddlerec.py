"""PaddleRec's config.yaml is converted to a clickline.yaml, or refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_loading import load_draft

from clickline.errors import ConfigError
from clickline.importers.paddlerec import paddlerec
from clickline.importers.run import valid_yaml

TUTORIAL = """\
# global settings
runner:
  train_data_dir: "/mnt/criteo/slot_train_data_full"
  train_reader_path: "criteo_reader" # importlib format
  use_gpu: False
  use_auc: True
  train_batch_size: 4096
  epochs: 4
  print_interval: 10
  #model_init_path: "output_model/0"
  model_save_path: "output_model_all_wide_deep"
  test_data_dir: "../data/test"
  infer_reader_path: "criteo_reader"
  infer_batch_size: 512
  infer_load_path: "output_model_all_wide_deep"
  infer_start_epoch: 3
  infer_end_epoch: 4
  use_inference: False
  save_inference_feed_varnames: ["C1","C2","dense_input"]
  save_inference_fetch_varnames: ["sigmoid_0.tmp_0"]
  use_fleet: True
  seed: 12345

hyper_parameters:
  optimizer:
    class: Adam
    learning_rate: 0.001
    strategy: async
  sparse_inputs_slots: 27
  sparse_feature_number: 1000001
  sparse_feature_dim: 9
  dense_input_dim: 13
  fc_sizes: [512, 256, 128, 32]
  distributed_embedding: 0
"""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("wide_deep/config.yaml")
    file.parent.mkdir()
    file.write_text(TUTORIAL)
    return file


def test_tutorial_config(source: Path, tmp_path: Path) -> None:
    result = load_draft(paddlerec(source, Path()), tmp_path)
    config = result.config
    assert config.data.train == ("/mnt/criteo/slot_train_data_full/*",) and config.data.eval is not None
    assert config.data.eval == (str(tmp_path / "data" / "test" / "*"),)
    assert (config.train.batch_size, config.train.epochs, config.train.seed) == (4096, 4, 12345)
    assert (config.model.name, config.model.embedding_dim) == ("wide_deep", 9)
    assert config.model.hidden == (512, 256, 128, 32)
    assert config.data.fields["dense_*"].transform == "log1p"
    assert (config.train.mode, config.train.sync) == ("cluster", False)
    assert (config.train.learning_rate, config.train.embedding.learning_rate) == (0.001, 0.001)
    assert config.train.embedding.optimizer == "adam"
    assert "from wide_deep/config.yaml:8 runner.epochs" in result.comments
    for key in ("use_gpu", "print_interval", "infer_end_epoch", "save_inference_feed_varnames"):
        assert f" runner.{key}: " in result.comments


def test_every_key_is_imported_or_listed(source: Path, tmp_path: Path) -> None:
    result = load_draft(paddlerec(source, Path()), tmp_path)
    for number, line in enumerate(TUTORIAL.splitlines(), 1):
        name, colon, value = line.split("#")[0].strip().partition(":")
        if colon and value.strip():
            assert f"config.yaml:{number} " in result.comments, name


@pytest.mark.parametrize(
    ("folder", "network", "said"),
    [
        ("dcn", "dcn_v2", "(its folder)"),
        ("logistic_regression", "lr", "(its folder)"),
        ("unheard_of", "wide_deep", "the file does not name its network"),
    ],
)
def test_network_is_recognized_by_the_folder(
    source: Path, tmp_path: Path, folder: str, network: str, said: str
) -> None:
    result = load_draft(
        paddlerec(source.rename(_new_folder(tmp_path / folder) / "config.yaml"), Path()), tmp_path
    )
    assert result.config.model.name == network and said in result.comments


def _new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_accessor_of_the_streaming_trainer(source: Path, tmp_path: Path) -> None:
    more = """
table_parameters:
  embedding:
    table_name: MemorySparseTable
    accessor:
      embedx_threshold: 10
      ctr_accessor_param:
        nonclk_coeff: 0.1
        click_coeff: 1.0
        base_threshold: 1.5
        show_click_decay_rate: 0.98
        delete_threshold: 0.8
        delete_after_unseen_days: 30
"""
    stream = "  start_day: 20210101\n  end_day: 20210103\n  data_donefile: done\n  data_sleep_second: 10\n"
    text = TUTORIAL.replace("  seed: 12345\n", f"{stream}  split_interval: 60\n")
    source.write_text(text + more)
    result = load_draft(paddlerec(source, Path()), tmp_path)
    eviction = result.config.train.eviction
    assert result.config.train.admission.min_impressions == 10 and eviction is not None
    assert (eviction.decay, eviction.threshold, eviction.max_idle_hours) == (0.98, 0.8, 720)
    assert (eviction.click_weight, eviction.nonclick_weight) == (1.0, 0.1)
    assert (
        "base_threshold: none: train.admission" in result.comments and "table_name: none" in result.comments
    )
    assert result.config.data.train == ("/mnt/criteo/slot_train_data_full/{date}/{hour}00/*",)
    assert result.config.data.dates is not None and result.config.data.dates.last == "20210103"
    assert (result.config.data.donefile, result.config.follow.poll_interval) == ("done", 10.0)


def test_unknown_keys_are_listed_and_secrets_left_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "hunter2")
    text = TUTORIAL.replace("/mnt/criteo/slot_train_data_full", "s3://key:hunter2@bucket/rows")
    text = text.replace("  seed: 12345\n", "  data_donefile: ${PLANTED}\n")
    source.write_text(text + "mine:\n  password: hunter2\n  list: [1, {a: hunter2}]\n")
    result = load_draft(paddlerec(source, Path()), tmp_path)
    assert "hunter2" not in result.text
    assert result.config.data.train == ("s3://bucket/rows/*",)
    assert result.config.data.donefile == "${PLANTED}"
    assert "its password was left out" in result.comments
    for key in ("password", "list"):
        assert f" mine.{key}: is a key that the importer does not know." in result.comments


def test_key_names_cannot_break_out_of_their_comment(source: Path, tmp_path: Path) -> None:
    source.write_text(TUTORIAL + '"evil\\nname: broken\\u2028home: /evil\\x85#": 1\n')
    result = load_draft(paddlerec(source, Path()), tmp_path)
    assert result.config.name == "ads" and result.config.home == str(tmp_path / ".clickline")
    assert "evil\\nname: broken\\u2028home: /evil\\x85#" in result.comments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runner:\n\ttrain: 1\n", "config.yaml:2 is not YAML"),
        ("runner: [1, 2]\n", "config.yaml:1 runner is not a mapping."),
        ("- 1\n", "has no section `runner:`. Allowed: the config of a PaddleRec model."),
        ("", "has no section `runner:`"),
        ("runner:\n  epochs: 1\n", "config.yaml runner.train_data_dir is missing."),
        ("runner:\n  train_data_dir: 5\n", "config.yaml:2 runner.train_data_dir is not a folder."),
        (
            TUTORIAL.replace("epochs: 4", "epochs: none"),
            "config.yaml:8 runner.epochs would become train.epochs, which is none. Allowed: a whole number",
        ),
        (
            TUTORIAL.replace("class: Adam", "class: Lamb"),
            "hyper_parameters.optimizer.class would become train.embedding.optimizer, which is lamb. Allowed: sgd",
        ),
        (
            TUTORIAL.replace("epochs: 4", "epochs: 4\n  epochs: 5"),
            "config.yaml:9 runner.epochs is given twice",
        ),
        (TUTORIAL + "x: !!python/object/apply:os.system [id]\n", "has the tag"),
        (BOMB, "contains more than 20000 values"),
    ],
)
def test_malformed_config_is_refused(source: Path, tmp_path: Path, text: str, message: str) -> None:
    source.write_text(text)
    with pytest.raises(ConfigError) as caught:
        valid_yaml(paddlerec(source, Path()), tmp_path)
    assert message in str(caught.value)


def test_passes_of_minutes_are_the_folders_of_an_hour(source: Path, tmp_path: Path) -> None:
    stream = "  start_day: 20210101\n  end_day: 20210103\n"
    source.write_text(TUTORIAL.replace("  seed: 12345\n", f"{stream}  split_interval: 30\n"))
    result = load_draft(paddlerec(source, Path()), tmp_path)
    folder = "/mnt/criteo/slot_train_data_full/{date}/{hour}"
    assert result.config.data.train == (f"{folder}00/*", f"{folder}30/*")
    source.write_text(TUTORIAL.replace("  seed: 12345\n", stream))
    assert len(load_draft(paddlerec(source, Path()), tmp_path).config.data.train) == 12  # PaddleRec's default
    source.write_text(TUTORIAL.replace("  seed: 12345\n", f"{stream}  split_interval: 90\n"))
    with pytest.raises(ConfigError, match=r"runner.split_interval is 90\. Allowed: a number of minutes"):
        paddlerec(source, Path())


def test_the_folder_of_a_model_decides_the_layout_of_its_rows(source: Path, tmp_path: Path) -> None:
    for model in ("slot_dnn", "esmm"):
        Path(model).mkdir()
        Path(model, "config.yaml").write_text(TUTORIAL)
    result = load_draft(paddlerec(Path("slot_dnn/config.yaml"), Path()), tmp_path)
    assert (result.config.data.format, result.config.data.fields) == ("slots", {})
    result = load_draft(paddlerec(Path("esmm/config.yaml"), Path()), tmp_path)
    data = result.config.data
    assert (data.format, data.columns) == ("paddlerec", ("sample", "click", "conversion"))
    assert {field.kind for field in data.fields.values()} == {"slot"} and "150_14" in data.fields
    assert "{conversion: label, click: weight}" in result.comments
