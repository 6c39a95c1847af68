"""The same options give the same bytes in every run, at any block size and thread count, on any processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

ROWS = 3000
FORMATS = ["criteo", "slots", "paddlerec", "csv"]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("format_name", FORMATS)
def test_bytes_depend_neither_on_the_run_nor_on_blocks_nor_on_threads(
    tmp_path: Path, format_name: str
) -> None:
    runs = [(None, None), (None, None), (7, 1), (1000, 3), (ROWS, 2)]
    found = []
    for n, (block_rows, threads) in enumerate(runs):
        options = SampleOptions(format=format_name, rows=ROWS, out=tmp_path / str(n), seed=5)
        generate(options, Progress(), block_rows=block_rows, threads=threads)
        found.append(digests(options.out))
    assert all(one == found[0] for one in found)
    assert len(found[0]) == (4 if format_name in ("criteo", "csv") else 5)


def test_hour_folders_do_not_depend_on_blocks(tmp_path: Path) -> None:
    for name, block_rows in (("a", 11), ("b", None)):
        options = SampleOptions(format="csv", rows=200, out=tmp_path / name, hours=3)
        generate(options, Progress(), block_rows=block_rows)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_truth_of_many_row_groups_does_not_depend_on_blocks(tmp_path: Path) -> None:
    for name, block_rows in (("a", 50_021), ("b", None)):
        options = SampleOptions(format="csv", rows=300_000, out=tmp_path / name, slots=1, dense=0)
        generate(options, Progress(), block_rows=block_rows)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_another_seed_gives_other_rows(tmp_path: Path) -> None:
    for seed in (0, 1):
        generate(SampleOptions(format="criteo", rows=ROWS, out=tmp_path / str(seed), seed=seed), Progress())
    first, second = ((tmp_path / str(seed) / "train.tsv").read_bytes().splitlines() for seed in (0, 1))
    assert not set(first) & set(second)


def test_the_rows_of_a_seed_never_change(tmp_path: Path) -> None:
    """Figures measured on a sample stay comparable over releases: a change here needs a good reason."""
    generate(SampleOptions(format="criteo", rows=ROWS, out=tmp_path, seed=7), Progress())
    logs = {name: digest for name, digest in digests(tmp_path).items() if name.endswith(".tsv")}
    assert logs == {
        "train.tsv": "d1c964b60ebdb19c9c03f8cb605e6cce4e805d91bcad288c92e3e9f7cad67355",
        "eval.tsv": "24a75e169b4a61659c794d3ae6b28f1d43e65235772e7637b789b47586136176",
    }


@pytest.mark.slow
def test_a_plain_processor_gives_the_same_bytes(tmp_path: Path) -> None:
    """Kernels compiled for a processor without AVX or FMA, where rounding would differ if it could."""
    script = (
        "import sys; from pathlib import Path; from clickline.progress import Progress;"
        "from clickline.data.sample.generate import SampleOptions, generate;"
        "generate(SampleOptions(format='csv', rows=20_000, out=Path(sys.argv[1])), Progress())"
    )
    plain = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    for name, environment in (("here", dict(os.environ)), ("plain", plain)):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], env=environment, check=True)
    assert digests(tmp_path / "here") == digests(tmp_path / "plain")
