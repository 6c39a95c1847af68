"""A config.yaml of PaddleRec becomes a clickline.yaml, or a message with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from imported import imported

from clickline.errors import ConfigError
from clickline.importers.paddlerec import paddlerec
from clickline.importers.run import checked

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


def test_the_tutorials_config(source: Path, tmp_path: Path) -> None:
    made = imported(paddlerec(source, Path()), tmp_path)
    config = made.config
    assert config.data.train == ("/mnt/criteo/slot_train_data_full/*",) and config.data.eval is not None
    assert config.data.eval == (str(tmp_path / "data" / "test" / "*"),)
    assert (config.train.batch_size, config.train.epochs, config.train.seed) == (4096, 4, 12345)
    assert (config.model.name, config.model.embedding_dim) == ("wide_deep", 9)
    assert config.model.hidden == (512, 256, 128, 32)
    assert config.data.fields["dense_*"].transform == "log1p"
    assert (config.train.mode, config.train.sync) == ("cluster", False)
    assert (config.train.learning_rate, config.train.embedding.learning_rate) == (0.001, 0.001)
    assert config.train.embedding.optimizer == "adam"
    assert "from wide_deep/config.yaml:8 runner.epochs" in made.said
    for key in ("use_gpu", "print_interval", "infer_end_epoch", "save_inference_feed_varnames"):
        assert f" runner.{key}: " in made.said


def test_every_key_of_the_source_is_somewhere(source: Path, tmp_path: Path) -> None:
    made = imported(paddlerec(source, Path()), tmp_path)
    for number, line in enumerate(TUTORIAL.splitlines(), 1):
        name, colon, value = line.split("#")[0].strip().partition(":")
        if colon and value.strip():
            assert f"config.yaml:{number} " in made.said, name


@pytest.mark.parametrize(
    ("folder", "network", "said"),
    [
        ("dcn", "dcn_v2", "(its folder)"),
        ("logistic_regression", "lr", "(its folder)"),
        ("unheard_of", "wide_deep", "the file does not name its network"),
    ],
)
def test_the_network_goes_by_the_folder(
    source: Path, tmp_path: Path, folder: str, network: str, said: str
) -> None:
    made = imported(paddlerec(source.rename(_made(tmp_path / folder) / "config.yaml"), Path()), tmp_path)
    assert made.config.model.name == network and said in made.said


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_accessor_of_the_streaming_trainer(source: Path, tmp_path: Path) -> None:
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
    made = imported(paddlerec(source, Path()), tmp_path)
    eviction = made.config.train.eviction
    assert made.config.train.admission.shows == 10 and eviction is not None
    assert (eviction.decay, eviction.threshold, eviction.hours_unseen) == (0.98, 0.8, 720)
    assert (eviction.click_weight, eviction.nonclick_weight) == (1.0, 0.1)
    assert "base_threshold: there is none" in made.said and "table_name: there is none" in made.said
    assert made.config.data.train == ("/mnt/criteo/slot_train_data_full/{date}/{hour}/*",)
    assert made.config.data.dates is not None and made.config.data.dates.last == "20210103"
    assert (made.config.data.donefile, made.config.follow.poll) == ("done", 10.0)


def test_unknown_keys_and_secrets(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "hunter2")
    text = TUTORIAL.replace("/mnt/criteo/slot_train_data_full", "s3://key:hunter2@bucket/rows")
    text = text.replace("  seed: 12345\n", "  data_donefile: ${PLANTED}\n")
    source.write_text(text + "mine:\n  password: hunter2\n  list: [1, {a: hunter2}]\n")
    made = imported(paddlerec(source, Path()), tmp_path)
    assert "hunter2" not in made.text
    assert made.config.data.train == ("s3://bucket/rows/*",)
    assert made.config.data.donefile == "${PLANTED}"
    assert "its password was left out" in made.said
    for key in ("password", "list"):
        assert f" mine.{key}: is not a key that this import knows." in made.said


def test_names_that_try_to_break_out_of_their_comment(source: Path, tmp_path: Path) -> None:
    source.write_text(TUTORIAL + '"evil\\nname: broken\\u2028home: /evil\\x85#": 1\n')
    made = imported(paddlerec(source, Path()), tmp_path)
    assert made.config.name == "ads" and made.config.home == str(tmp_path / ".clickline")
    assert "evil\\nname: broken\\u2028home: /evil\\x85#" in made.said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runner:\n\ttrain: 1\n", "config.yaml:2 is not YAML"),
        ("runner: [1, 2]\n", "config.yaml:1 runner is not a group of keys."),
        ("- 1\n", "has no group `runner:`. Allowed: the config of a model of PaddleRec."),
        ("", "has no group `runner:`"),
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
        (BOMB, "holds more than 20000 values"),
    ],
)
def test_malformed(source: Path, tmp_path: Path, text: str, message: str) -> None:
    source.write_text(text)
    with pytest.raises(ConfigError) as caught:
        checked(paddlerec(source, Path()), tmp_path)
    assert message in str(caught.value)
