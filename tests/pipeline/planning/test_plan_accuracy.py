"""Accuracy of plans: memory and disk within 20 %, the time of an epoch within 30 %.

`pytest tests/pipeline/planning/test_plan_accuracy.py -s` prints the rows of the table in docs/planning.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from accuracy import Comparison, compare

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
data: {{format: {format}, train: data/train.{ending}, eval: data/eval.{ending}}}
cache: {{dir: cache}}
gate: {{extra_epochs: 0}}
tracking: {{enabled: false}}
"""


def project(folder: Path, options: SampleOptions) -> Path:
    generate(options, Progress())
    ending = {"criteo": "tsv", "slots": "txt"}[options.format]
    file = folder / "clickline.yaml"
    file.write_text(CONFIG.format(format=options.format, ending=ending))
    return file


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300,000 rows, 200,000 ids."""
    folder = tmp_path_factory.mktemp("criteo")
    return project(folder, SampleOptions("criteo", 300_000, folder / "data"))


@pytest.fixture(scope="module")
def many_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400,000 rows, half a million ids."""
    folder = tmp_path_factory.mktemp("many")
    return project(folder, SampleOptions("criteo", 400_000, folder / "data", seed=1, cardinality=3_000_000))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120,000 rows in slots, some of which hold several ids: those of the next row too."""
    folder = tmp_path_factory.mktemp("several")
    file = project(folder, SampleOptions("slots", 120_000, folder / "data", seed=2))
    for log in ("train.txt", "eval.txt"):
        lines = (folder / "data" / log).read_text().splitlines()
        more = [" ".join(line.split()[4:10]) for line in [*lines[1:], lines[0]]]
        (folder / "data" / log).write_text(
            "".join(f"{line} {other}\n" for line, other in zip(lines, more, strict=True))
        )
    return file


def told(name: str, found: Comparison) -> Comparison:
    sys.stdout.write(f"\n| {name} | {found} |\n")
    return found


def check(found: Comparison, *, counted: bool) -> None:
    """`counted`: rows and ids were known, not told from a sample."""
    near = 0.03 if counted else 0.2
    assert found.rows == pytest.approx(1, abs=0.03)
    assert found.ids == pytest.approx(1, abs=near)
    assert found.admitted == pytest.approx(1, abs=max(near, 0.06))
    assert found.tables == pytest.approx(1, abs=0.2)
    assert found.checkpoint == pytest.approx(1, abs=0.2)
    assert found.version == pytest.approx(1, abs=0.2)


def test_criteo(criteo: Path, tmp_path: Path) -> None:
    found = told("criteo, 300k rows", compare(criteo, [f"home={tmp_path}"], pairs=4))
    check(found, counted=True)
    assert found.peak == pytest.approx(1, abs=0.2)
    assert found.learn is not None
    assert 0.7 <= found.learn <= 1.3


@pytest.mark.soak  # as the others, for other data
def test_slots_with_several_ids(several: Path, tmp_path: Path) -> None:
    settings = ["model.embedding_dim=16", "train.embedding.optimizer=adam", "publish.table_precision=fp16"]
    found = told(
        "slots, several ids, dim 16, adam, fp16", compare(several, [*settings, f"home={tmp_path}"], pairs=4)
    )
    check(found, counted=True)
    assert found.peak == pytest.approx(1, abs=0.2)
    assert found.learn is not None
    assert 0.7 <= found.learn <= 1.3


@pytest.mark.soak  # as the others, for other data
def test_many_ids_in_small_rows(many_ids: Path, tmp_path: Path) -> None:
    settings = ["model.embedding_dim=4", "train.embedding.optimizer=rowwise_adagrad", "publish.shards=4"]
    found = told(
        "criteo, 400k rows, dim 4, rowwise_adagrad", compare(many_ids, [*settings, f"home={tmp_path}"])
    )
    check(found, counted=True)
    assert found.peak == pytest.approx(1, abs=0.2)


@pytest.mark.soak  # as the others, for other data
def test_admission_and_checkpoints_on_the_way(many_ids: Path, tmp_path: Path) -> None:
    settings = [
        "train.admission.min_impressions=2",
        "train.checkpoint_steps=40",
        "publish.table_precision=int8",
    ]
    found = told(
        "criteo, 400k rows, shows 2, checkpoints", compare(many_ids, [*settings, f"home={tmp_path}"])
    )
    check(found, counted=True)
    assert found.peak == pytest.approx(1, abs=0.2)


@pytest.mark.soak  # as the others, for other data
def test_plan_from_a_twelfth_of_the_raw_logs(many_ids: Path, tmp_path: Path) -> None:
    found = told(
        "criteo, 400k rows, 6 MiB of the raw logs",
        compare(many_ids, [f"home={tmp_path}"], prepared=False, sample_bytes=6 << 20),
    )
    check(found, counted=False)
    assert found.peak == pytest.approx(1, abs=0.2)


@pytest.mark.soak  # as the others, for other data
def test_memory_without_a_probe_is_close(criteo: Path, tmp_path: Path) -> None:
    found = told("criteo, 300k rows, no probe", compare(criteo, [f"home={tmp_path}"], probe=False))
    check(found, counted=True)
    assert found.peak == pytest.approx(1, abs=0.3)
