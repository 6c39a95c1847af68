"""Small files of real rows in their original layouts, from prepare to scores over the network."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from live_server import SCRIPT, Live, serving

import clickline
from clickline.client import Client
from clickline.client.predict.run import predict
from clickline.config import load_config

pytestmark = pytest.mark.slow

SMALL = {
    "cache": {"dir": "cache"},
    "model": {"embedding_dim": 4, "hidden": [8]},
    "train": {"batch_size": 32},
    "tracking": {"enabled": False},
}
CRITEO_COLUMNS = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]


def published(folder: Path, document: dict[str, Any]) -> dict[str, float]:
    """Prepare, train, publish; what the version is measured at on the rows themselves."""
    (folder / "clickline.yaml").write_text(yaml.safe_dump(document))
    config = load_config(folder / "clickline.yaml")
    assert not clickline.prepare(config).dataset.splits["train"].report["bad"]
    clickline.train(config)
    assert clickline.publish(config).version.number == 1
    measured = clickline.evaluate(config, model="current", data=list(config.data.train)).evaluation
    return dict(measured.total.to_json())


def check_answers(live: Live, wanted: dict[str, float], rows: int) -> None:
    """Every row is answered over gRPC and HTTP, and the answers match the evaluation."""
    for protocol in ("grpc", "http"):
        address = live.address(protocol)
        inputs = list(live.config.data.train)
        found = predict(live.config, inputs=inputs, warmup=0, address=address, protocol=protocol)  # type: ignore[arg-type]
        told = found.metrics.to_json()
        assert (told["rows"], found.bad, found.versions.keys()) == (rows, {}, {1})
        for name in ("auc", "logloss", "accuracy", "calibration"):
            assert told[name] == pytest.approx(wanted[name], abs=1e-6), name


def test_criteo_with_header_and_unlabelled_rows(tmp_path: Path, real_data: Path) -> None:
    data = {"format": "criteo", "train": str(real_data / "criteo_200_header.csv")}
    wanted = published(tmp_path, {"data": data, **SMALL})
    with gzip.open(real_data / "criteo_18k_unlabelled.tsv.gz", "rt") as lines:
        cells = [line.rstrip("\n").split("\t") for line in lines]
    rows = [
        {name: (float(cell) if name[0] == "I" else cell) for name, cell in zip(CRITEO_COLUMNS, row, strict=True) if cell}
        for row in cells
    ]  # fmt: skip
    assert len(rows) == 18_181
    with serving(tmp_path) as live:
        check_answers(live, wanted, 200)
        scores = {}
        for protocol in ("grpc", "http"):
            with Client(live.address(protocol), protocol=protocol, model="ads", timeout=60) as client:  # type: ignore[arg-type]
                answers = [
                    client.predict(rows[at : at + 4096]).probability for at in range(0, len(rows), 4096)
                ]
            scores[protocol] = np.concatenate(answers)
    assert scores["grpc"].shape == (18_181,)
    assert ((scores["grpc"] > 0) & (scores["grpc"] < 1)).all()
    assert len(np.unique(scores["grpc"])) > 10_000
    np.testing.assert_allclose(scores["http"], scores["grpc"], atol=1e-6)


def imported(settings: Path, slots: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT, "import", "elasticrec", settings, slots]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_elasticctr_with_its_own_configs(tmp_path: Path, real_data: Path) -> None:
    conf = real_data / "elasticctr_slot.conf"
    done = imported(real_data / "elasticctr_data.config", conf, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "elasticctr_data.config:1 HDFS_ADDRESS is computed by the shell" in done.stderr
    settings = (real_data / "elasticctr_data.config").read_text()
    (tmp_path / "data.config").write_text(settings.replace("${IP}", "namenode"))  # as the message asks
    done = imported(tmp_path / "data.config", conf, tmp_path)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load((tmp_path / "clickline.yaml").read_text())
    assert (document["data"]["format"], document["data"]["modulo"]) == ("slots", 1_000_001)
    # Its rows stand in a file here, not in the hours of a store.
    rows = {"train": str(real_data / "elasticctr_100_slots.txt")}
    kept = {name: document["data"][name] for name in ("format", "modulo", "slot_conf")}
    wanted = published(tmp_path, document | SMALL | {"data": kept | rows})
    with serving(tmp_path) as live:
        check_answers(live, wanted, 100)


@pytest.mark.parametrize(
    ("name", "layout", "rows"), [("paddlerec_80.txt", "paddlerec", 80), ("paddlerec_slot_dnn_10.txt", "slots", 10)]
)  # fmt: skip
def test_paddlerec_flow(tmp_path: Path, real_data: Path, name: str, layout: str, rows: int) -> None:
    data = {"format": layout, "train": str(real_data / name)}
    wanted = published(tmp_path, {"data": data, **SMALL})
    with serving(tmp_path) as live:
        check_answers(live, wanted, rows)
