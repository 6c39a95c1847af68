"""data.config and slot.conf of ElasticCTR 2.0 are converted to a clickline.yaml, or refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_loading import load_draft

import clickline
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ConfigError
from clickline.importers.elasticrec import ControlOptions, elasticrec
from clickline.importers.run import valid_yaml
from clickline.progress import Progress

SHIPPED = """\
export HDFS_ADDRESS="hdfs://192.168.48.87:9000"
export HDFS_UGI="root,hunter2-of-hdfs"
export START_DATE_HR=20200401/00
export END_DATE_HR=20200401/03
export DATASET_PATH="/train_data"
export SPARSE_DIM="1000001"
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    Path("data.config").write_text(SHIPPED)
    Path("slot.conf").write_text("".join(f"{slot}\n" for slot in range(27)))
    return Path("data.config"), Path("slot.conf")


def test_shipped_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    result = load_draft(elasticrec(*files, Path()), tmp_path)
    data = result.config.data
    assert data.train == ("hdfs://192.168.48.87:9000/train_data/{date}/{hour}/*",) == data.eval
    assert data.dates is not None and (data.dates.first, data.dates.last) == ("20200401/00", "20200401/02")
    assert data.eval_dates is not None and data.eval_dates.first == data.eval_dates.last == "20200401/03"
    assert (data.format, data.modulo, data.slot_conf) == ("slots", 1000001, str(tmp_path / "slot.conf"))
    assert result.config.model.embedding_dim == 9 and result.config.model.hidden == (400, 400, 400)
    assert "from data.config:6 SPARSE_DIM" in result.comments


def test_password_is_reported_and_left_out(files: tuple[Path, Path], tmp_path: Path) -> None:
    address = "hdfs://someone:hunter2-of-url@namenode:9000"
    files[0].write_text(SHIPPED.replace("hdfs://192.168.48.87:9000", address))
    result = load_draft(elasticrec(*files, Path()), tmp_path)
    assert "hunter2" not in result.text and "someone" not in result.text
    assert result.config.data.train == ("hdfs://namenode:9000/train_data/{date}/{hour}/*",)
    assert "data.config:2 HDFS_UGI: contains a user and a password" in result.comments
    assert "storage.credentials_file" in result.comments


def test_unknown_key_is_listed_without_its_value(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[0].write_text(SHIPPED + "\n# mine\nexport API_TOKEN=hunter2-of-mine\nSPARSE_DIM=77 # smaller\n")
    result = load_draft(elasticrec(*files, Path()), tmp_path)
    assert (
        "data.config:9 API_TOKEN: is an ElasticCTR key that the importer does not know" in result.comments
        and "hunter2" not in result.text
    )
    assert result.config.data.modulo == 77
    assert "data.config:6 SPARSE_DIM: is overridden in line 10" in result.comments


def test_single_hour_and_open_end(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[0].write_text(SHIPPED.replace("20200401/03", "20200401/00"))
    one = load_draft(elasticrec(*files, Path()), tmp_path).config.data
    assert one.eval is None and one.dates is not None and one.dates.last == "20200401/00"
    files[0].write_text(SHIPPED.replace("export END_DATE_HR=20200401/03\n", ""))
    endless = load_draft(elasticrec(*files, Path()), tmp_path)
    assert endless.config.data.dates is not None and endless.config.data.dates.last is None
    assert "up --follow" in endless.comments
    files[0].write_text(SHIPPED.replace("20200401/00", "20200227").replace("20200401/03", "20200301"))
    days = load_draft(elasticrec(*files, Path()), tmp_path).config.data
    assert days.dates is not None and days.dates.last == "20200229"


def test_result_in_another_folder_names_the_same_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[0].write_text('START_DATE_HR=20200401/00\nDATASET_PATH="rows"\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    result = load_draft(elasticrec(*files, Path("deep/er")), tmp_path / "deep" / "er")
    assert result.config.data.slot_conf is not None
    assert Path(result.config.data.slot_conf).resolve() == tmp_path / "slot.conf"
    assert Path(result.config.data.train[0]).parents[2].resolve() == tmp_path / "rows"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "export HDFS_UGI root,hunter2",
            "data.config:7 begins with 'export HDFS_UGI', which is not an export.",
        ),
        ("rm -rf /tmp/hunter2", "data.config:7 begins with 'rm', which is not an export."),
        ("export SPARSE_DIM=$(touch pwned)", "data.config:7 SPARSE_DIM is computed by the shell"),
        ("export SPARSE_DIM=`touch pwned`", "data.config:7 SPARSE_DIM is computed by the shell"),
        ("export DATASET_PATH=$HOME/hunter2", "data.config:7 DATASET_PATH is computed by the shell"),
        ('export SPARSE_DIM="100', "data.config:7 SPARSE_DIM has an unclosed quote."),
        ("export SPARSE_DIM=1 2", "data.config:7 SPARSE_DIM has 2 words. Allowed: one."),
        (
            "export SPARSE_DIM=many",
            "data.config:7 SPARSE_DIM would become data.modulo, which is many. Allowed:",
        ),
        ("export SPARSE_DIM=0", "data.config:7 SPARSE_DIM would become data.modulo, which is 0. Allowed:"),
        (
            "export START_DATE_HR=2020-04-01",
            "data.config:7 START_DATE_HR is '2020-04-01'. Allowed: a valid YYYYMMDD/HH",
        ),
        ("export END_DATE_HR=20200231/00", "data.config:7 END_DATE_HR is '20200231/00'. Allowed:"),
        ("export DATASET_PATH=", "data.config:7 DATASET_PATH is missing or empty."),
        (
            "export HDFS_ADDRESS=10.0.0.1",
            "data.config:7 HDFS_ADDRESS is not an HDFS address. Allowed:",
        ),
        (
            "export DATASET_PATH='/a/{x}'",
            "data.config:7 DATASET_PATH would become data.train, which contains {x}.",
        ),
        ("\0", "data.config:7 contains a zero byte"),
        ("=\u2028name: evil", "data.config:7 begins with '=', which is not an export."),
    ],
)
def test_malformed_export_is_refused(
    files: tuple[Path, Path], tmp_path: Path, line: str, message: str
) -> None:
    files[0].write_text(f"{SHIPPED}{line}\n")
    with pytest.raises(ConfigError) as caught:
        valid_yaml(elasticrec(*files, Path()), tmp_path)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_malformed_slots_and_missing_files_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[1].write_text("1\n2\ntwo\n")
    with pytest.raises(ConfigError, match=r"slot.conf:3 'two' is not a slot number"):
        elasticrec(*files, Path())
    files[1].write_bytes(b"1\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"slot.conf:2 is not UTF-8 text"):
        elasticrec(*files, Path())
    files[1].write_bytes(b"1\n" * 2**20)
    with pytest.raises(ConfigError, match=r"slot.conf is larger than"):
        elasticrec(*files, Path())
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        elasticrec(Path("absent"), files[1], Path())
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        elasticrec(tmp_path, files[1], Path())


@pytest.mark.slow
def test_imported_config_reads_the_hours(files: tuple[Path, Path], tmp_path: Path) -> None:
    generate(SampleOptions(format="slots", rows=400, out=tmp_path / "rows", hours=3), Progress())
    files[0].write_text(
        "export START_DATE_HR=20260101/00\nexport END_DATE_HR=20260101/02\nexport DATASET_PATH=rows\n"
    )
    load_draft(elasticrec(files[0], Path("rows/slot.conf"), Path()), tmp_path)
    prepared = clickline.prepare(load_config(tmp_path / "clickline.yaml"))
    assert prepared.train_rows + prepared.eval_rows == 400 and prepared.eval_rows > 100


def test_options_of_the_control_script(files: tuple[Path, Path], tmp_path: Path) -> None:
    options = ControlOptions(cpu=4, mem=20, trainer=3, pserver=2, cube=5)
    result = load_draft(elasticrec(*files, Path(), options), tmp_path)
    train, deploy = result.config.train, result.config.deploy
    assert (train.mode, train.workers.min, train.embedding_servers) == ("cluster", 3, 2)
    assert (deploy.training.kind, result.config.publish.shards) == ("volcano", 5)
    assert deploy.serving.lookup is not None and deploy.serving.lookup.replicas == 1
    worker = deploy.resources.ray_worker
    assert (worker.cpu, worker.memory, worker.memory_limit) == ("4", "20Gi", "20Gi")
    assert "from elastic-control.sh -t" in result.comments
    assert load_draft(elasticrec(*files, Path()), tmp_path).config.train.mode == "local"
