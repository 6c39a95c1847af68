"""`prepare` on a cluster builds the same bytes as on one machine, whichever processes die meanwhile."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickline.config import Config, load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.distributed.session import RaySession, open_session
from clickline.errors import DataError, TooManyBadRows
from clickline.progress import Progress

pytestmark = pytest.mark.slow

CONFIG = """
home: {home}
data:
  train: [data/train.tsv, data/more.tsv.gz, data/empty.tsv, data/headed.tsv]
  eval: data/eval.tsv
  shard_size: 256KiB
  max_bad_ratio: 0.1
  fields: {{I3: zscore, I4: {{transform: bucket, buckets: 4}}, I5: minmax}}
cache: {{dir: cache}}
train: {{mode: {mode}}}
cluster: {{address: {address}}}
tracking: {{enabled: false}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RaySession]:
    """A connected Ray cluster with two CPUs for the tests of this module."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    with open_session(None, cpus=2, home=None, progress=Progress()) as opened:
        yield opened


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain, compressed, empty and headed files, with bad rows in them."""
    folder = tmp_path_factory.mktemp("logs")
    options = SampleOptions(format="criteo", rows=60_000, out=folder / "data", seed=3, cardinality=2000)
    generate(options, Progress())
    lines = (folder / "data" / "train.tsv").read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[7] = b"1\tno such row\n"
    lines[middle - 1] = b"7\tbad label" + b"\t" * 38 + b"\n"
    (folder / "data" / "train.tsv").write_bytes(b"".join(lines[:middle]))
    (folder / "data" / "more.tsv.gz").write_bytes(
        gzip.compress(b"".join(lines[middle : middle + 1000]), mtime=0)
    )
    (folder / "data" / "empty.tsv").write_bytes(b"")
    header = "\t".join(["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]).encode()
    rest = [b"\xef\xbb\xbf" + header + b"\n", *lines[middle + 1000 :]]
    (folder / "data" / "headed.tsv").write_bytes(b"".join(rest))
    return folder


def config_of(folder: Path, home: str, mode: str = "local", address: str = "null") -> Config:
    path = folder / f"{home}.yaml"
    path.write_text(CONFIG.format(home=home, mode=mode, address=address))
    return load_config(path)


def content(home: Path) -> dict[str, bytes]:
    """Every file, without the parts of the config that differ: home, mode and address."""
    return {
        str(file.relative_to(home)): file.read_bytes()
        for file in sorted(home.rglob("*"))
        if file.is_file() and file.name != "resolved.yaml"
    }


@pytest.fixture(scope="module")
def expected(logs: Path) -> dict[str, bytes]:
    config = config_of(logs, "alone")
    found = prepare(config, Progress())
    assert found.bad_rows == 2
    assert len(list(Path(found.dataset.folder).glob("train-*.parquet"))) > 5
    return content(Path(config.home))


def workers() -> list[int]:
    """The Ray processes that are building a shard."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if title.startswith(b"ray::_work") and _is_ours(parent):
                found.append(int(folder.name))
    return found


def _is_ours(raylet: int) -> bool:
    try:
        return int(Path(f"/proc/{raylet}/stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()
    except OSError:
        return False


def test_the_same_bytes_as_on_one_machine(
    cluster: RaySession, logs: Path, expected: dict[str, bytes]
) -> None:
    config = config_of(logs, "spread", "cluster", cluster.address)
    found = prepare(config, Progress())
    assert not found.reused
    assert content(Path(config.home)) == expected
    assert prepare(config, Progress()).reused


def test_killed_worker_processes_do_not_change_the_result(
    cluster: RaySession, logs: Path, expected: dict[str, bytes]
) -> None:
    config = config_of(logs, "killed", "cluster", cluster.address)
    over = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while (
            len(killed) < 2 and not over.is_set()
        ):  # a third could strike the same piece, which is given up then
            begun = any(Path(config.home).rglob("work/train-*.json"))
            for process in workers()[:1]:
                if begun and process not in killed:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
            over.wait(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        prepare(config, Progress())
    finally:
        over.set()
        killer.join()
    assert len(killed) == 2
    assert content(Path(config.home)) == expected


class _Interrupted(Progress):
    """Stops the driver when some shards are finished."""

    def __init__(self, shards: int) -> None:
        self.left = shards
        self.title = ""

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.title = title

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.left -= self.title == "prepare train"
        if self.left == 0:
            raise KeyboardInterrupt


def test_it_resumes_from_shards_of_either_executor(
    cluster: RaySession, logs: Path, expected: dict[str, bytes]
) -> None:
    config = config_of(logs, "resumed", "cluster", cluster.address)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, _Interrupted(4))
    notes = {file: file.stat().st_mtime_ns for file in Path(config.home).rglob("work/train-*.json")}
    assert len(notes) >= 4
    shards = {file: file.stat().st_mtime_ns for file in Path(config.home).rglob("train-*.parquet")}
    again = config_of(logs, "resumed")  # the rest on this machine alone
    prepare(again, Progress())
    assert content(Path(again.home)) == expected
    kept = [file for file, changed in shards.items() if file.stat().st_mtime_ns == changed]
    assert len(kept) >= len(notes)


def test_a_data_error_is_reported_as_on_one_machine(cluster: RaySession, logs: Path, tmp_path: Path) -> None:
    shutil.copytree(logs / "data", tmp_path / "data")
    (tmp_path / "data" / "train.tsv").write_bytes(b"no row\n" * 3000)
    config = config_of(tmp_path, "bad", "cluster", cluster.address)
    with pytest.raises(TooManyBadRows, match=r"3,000 wrong column count") as on_cluster:
        prepare(config, Progress())
    with pytest.raises(TooManyBadRows) as alone:
        prepare(config_of(tmp_path, "bad"), Progress())
    assert str(on_cluster.value) == str(alone.value)


def test_a_file_that_changes_between_plan_and_reading_is_refused(
    cluster: RaySession, logs: Path, tmp_path: Path
) -> None:
    shutil.copytree(logs / "data", tmp_path / "data")
    config = config_of(tmp_path, "changed", "cluster", cluster.address)

    class Changes(Progress):
        def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
            if title == "prepare train":  # after it was measured
                with (tmp_path / "data" / "headed.tsv").open("ab") as file:
                    file.write(b"1\n")

    with pytest.raises(DataError, match=r"headed\.tsv changed while it was read"):
        prepare(config, Changes())
    assert not list(Path(config.home).rglob("manifest.json"))
