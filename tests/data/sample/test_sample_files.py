"""Files on disk: layout, no partial files, bounded memory, invalid options."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ConfigError, StorageError
from clickline.progress import Progress


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class InterruptedAt(Progress):
    """Simulates Ctrl-C right after the n-th block was written."""

    def __init__(self, block: int) -> None:
        self.left = block

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Watched(Progress):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows = self.size = 0

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.calls.append(f"begin {title}")

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.rows += rows
        self.size += size

    def end(self) -> None:
        self.calls.append("end")


def test_train_and_eval_files_and_report(tmp_path: Path) -> None:
    watched = Watched()
    report = generate(SampleOptions(format="criteo", rows=5000, out=tmp_path / "new" / "s"), watched)
    assert sorted(tree(tmp_path / "new" / "s")) == [
        "eval.truth.parquet",
        "eval.tsv",
        "train.truth.parquet",
        "train.tsv",
    ]
    assert [file.name for file in report.files] == ["train.tsv", "eval.tsv"]
    assert (report.train_rows, report.eval_rows) == (4000, 1000)
    labels = [line[:1] for file in report.files for line in file.read_text().splitlines()]
    assert report.click_rate == labels.count("1") / 5000
    assert report.seconds > 0
    assert watched.calls == ["begin sample", "end"]
    assert watched.rows == 5000
    assert watched.size == sum(file.stat().st_size for file in report.files)


def test_hour_folders_with_donefiles(tmp_path: Path) -> None:
    report = generate(SampleOptions(format="slots", rows=1003, out=tmp_path, hours=26), Progress())
    hours = [f"20260101/{h:02d}" for h in range(24)] + ["20260102/00", "20260102/01"]
    logs = [tmp_path / hour / "part-00000.txt" for hour in hours]
    assert report.files == [*logs, tmp_path / "slot.conf"]
    counts = [len(log.read_text().splitlines()) for log in logs]
    assert sum(counts) == 1003
    assert set(counts) == {38, 39}
    assert (report.train_rows, report.eval_rows) == (1003 - counts[-1], counts[-1])
    for hour, log, count in zip(hours, logs, counts, strict=True):
        assert (log.parent / "donefile").read_bytes() == b""
        assert sorted(p.name for p in log.parent.iterdir()) == ["donefile", "part-00000.txt"]
        truth = pq.read_table(tmp_path / "truth" / f"{hour.replace('/', '-')}.parquet")
        assert truth["label"].to_pylist() == [int(line[2]) for line in log.read_text().splitlines()]
        assert truth.num_rows == count


def test_timestamps_are_within_their_hour(tmp_path: Path) -> None:
    generate(SampleOptions(format="csv", rows=50, out=tmp_path, hours=2, slots=2, dense=1), Progress())
    for hour in (0, 1):
        _, *lines = (tmp_path / "20260101" / f"{hour:02d}" / "part-00000.csv").read_text().splitlines()
        begin = 1767225600 + 3600 * hour
        assert [int(line.split(",")[1]) for line in lines] == list(range(begin, begin + 3600, 144))


def test_running_again_overwrites(tmp_path: Path) -> None:
    for seed in (1, 2):
        generate(SampleOptions(format="csv", rows=300, out=tmp_path / "twice", seed=seed), Progress())
    generate(SampleOptions(format="csv", rows=300, out=tmp_path / "once", seed=2), Progress())
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")


def test_fewer_hours_remove_those_of_an_earlier_sample(tmp_path: Path) -> None:
    generate(SampleOptions(format="csv", rows=300, out=tmp_path / "twice", hours=30), Progress())
    foreign = tmp_path / "twice" / "20260201" / "00" / "part-00000.csv"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours: no truth beside it")
    generate(SampleOptions(format="criteo", rows=300, out=tmp_path / "twice", hours=2), Progress())
    generate(SampleOptions(format="criteo", rows=300, out=tmp_path / "once", hours=2), Progress())
    assert foreign.read_text().startswith("not ours")
    foreign.unlink()
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")


@pytest.mark.parametrize("block", [1, 8, 10])
def test_interrupted_sample_leaves_no_file(tmp_path: Path, block: int) -> None:
    options = SampleOptions(format="slots", rows=1000, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        generate(options, InterruptedAt(block), block_rows=100)
    assert tree(tmp_path) == {}


def test_an_interrupted_run_keeps_the_earlier_sample(tmp_path: Path) -> None:
    generate(SampleOptions(format="criteo", rows=1000, out=tmp_path, seed=1), Progress())
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        generate(
            SampleOptions(format="criteo", rows=1000, out=tmp_path, seed=2), InterruptedAt(9), block_rows=100
        )
    assert tree(tmp_path) == before


def test_interrupted_hour_has_no_donefile_and_running_again_completes_it(tmp_path: Path) -> None:
    options = SampleOptions(format="criteo", rows=400, out=tmp_path / "cut", hours=4)
    generate(options, Progress())
    with pytest.raises(KeyboardInterrupt):
        generate(options, InterruptedAt(5), block_rows=50)  # in the middle of the third hour
    assert sorted(tree(options.out)) == [
        "20260101/00/donefile",
        "20260101/00/part-00000.tsv",
        "20260101/01/donefile",
        "20260101/01/part-00000.tsv",
        "truth/20260101-00.parquet",
        "truth/20260101-01.parquet",
    ]
    generate(options, Progress())
    generate(SampleOptions(format="criteo", rows=400, out=tmp_path / "whole", hours=4), Progress())
    assert tree(options.out) == tree(tmp_path / "whole")


ENDLESS = """
import sys
from pathlib import Path
from clickline.progress import Progress
from clickline.data.sample.generate import SampleOptions, generate

class Announced(Progress):
    def advance(self, *, rows=0, size=0):
        print("writing", flush=True)

try:
    generate(SampleOptions(format="criteo", rows=10**9, out=Path(sys.argv[1])), Announced())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_in_a_real_process_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert list(tmp_path.glob(".train.tsv.partial"))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130
    assert tree(tmp_path) == {}


MEASURED = """
import resource, sys
from pathlib import Path
from clickline.progress import Progress
from clickline.data.sample.generate import SampleOptions, generate
generate(SampleOptions(format="csv", rows=int(sys.argv[2]), out=Path(sys.argv[1])), Progress())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    def peak_kib(rows: int) -> int:
        command = [sys.executable, "-c", MEASURED, str(tmp_path), str(rows)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    peak_kib(1000)  # compiles, where no cache of kernels is there yet
    assert peak_kib(2_000_000) < peak_kib(200_000) + 64 * 1024  # the log itself is 0.5 GB


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write the sample under .*file/sub.*choose another --out"):
        generate(SampleOptions(format="csv", rows=100, out=tmp_path / "file" / "sub"), Progress())


FULL = """
import resource, sys
from pathlib import Path
from clickline.errors import StorageError
from clickline.progress import Progress
from clickline.data.sample.generate import SampleOptions, generate
out = Path(sys.argv[1])
generate(SampleOptions(format="criteo", rows=100, out=out / "small"), Progress())
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    generate(SampleOptions(format="criteo", rows=100_000, out=out / "large"), Progress())
except StorageError as error:
    print(error)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_no_file(tmp_path: Path) -> None:
    # a limit on the size of the child's files stands for the full disk
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "cannot write the sample under" in said
    assert "File too large" in said
    assert tree(tmp_path / "large") == {}


def mistakes(**changes: object) -> list[str]:
    values: dict[str, object] = {"format": "csv", "rows": 100, "out": Path("absent"), **changes}
    with pytest.raises(ConfigError) as caught:
        generate(SampleOptions(**values), Progress())  # type: ignore[arg-type]
    assert all((mistake.file, mistake.line) == ("sample", 0) for mistake in caught.value.mistakes)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "tsv"}, "sample --format is 'tsv'. Choose one of criteo, slots, paddlerec, csv."),
        ({"rows": 0}, "sample --rows is 0. Give a number from 2 to 1000000000000."),
        (
            {"rows": 3},
            "sample --rows is 3: with --eval-share 0.2 no row is left for eval. "
            "Raise --rows or move --eval-share towards 0.5.",
        ),
        (
            {"rows": 5, "hours": 6},
            "sample --rows is 5, fewer than the 6 hours. "
            "Raise --rows or lower --hours: every hour needs a row.",
        ),
        ({"hours": 0}, "sample --hours is 0. Give a number from 1 to 8760."),
        ({"seed": -1}, "sample --seed is -1. Give a number from 0 to 9223372036854775807."),
        ({"cardinality": 9}, "sample --cardinality is 9. Give a number from 10 to 100000000."),
        ({"slots": 0}, "sample --slots is 0. Give a number from 1 to 1000."),
        ({"dense": -1}, "sample --dense is -1. Give a number from 0 to 1000."),
        ({"eval_share": 1.0}, "sample --eval-share is 1.0. Give a number between 0 and 1, such as 0.2."),
        (
            {"format": "criteo", "slots": 25},
            "sample --slots is 25; a criteo line has exactly 26 slots. "
            "Leave it out, or choose --format slots, paddlerec or csv.",
        ),
        (
            {"format": "criteo", "dense": 12},
            "sample --dense is 12; a criteo line has exactly 13 dense fields. "
            "Leave it out, or choose --format slots, paddlerec or csv.",
        ),
        (
            {"format": "paddlerec", "dense": 14},
            "sample --dense is 14; paddlerec scales are known for 13 dense fields. "
            "Give a number from 0 to 13, or choose --format slots or csv.",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(changes: dict[str, object], message: str) -> None:
    assert mistakes(**changes) == [message]


def test_all_mistakes_are_reported_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    found = mistakes(
        format="criteo", rows=-5, out=tmp_path / "new", slots=3, dense=2, eval_share=2.0, seed=-1
    )
    assert [line.split()[1] for line in found] == ["--rows", "--eval-share", "--seed", "--slots", "--dense"]
    assert not (tmp_path / "new").exists()


def test_a_file_as_output_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert mistakes(out=tmp_path / "file") == [
        f"sample --out is {tmp_path}/file, which is a file. Name a folder; it is created if it does not exist."
    ]


def test_a_sample_with_one_label_only_has_no_best_auc(tmp_path: Path) -> None:
    report = generate(SampleOptions(format="csv", rows=5, out=tmp_path), Progress())
    assert report.eval_rows == 1
    assert report.best_auc is None


def test_logs_that_sample_did_not_write_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("my own log\n")
    with pytest.raises(
        ConfigError, match=r"would overwrite .*train\.tsv, which `clickline sample` did not write"
    ):
        generate(SampleOptions(format="criteo", rows=100, out=tmp_path), Progress())
    assert (tmp_path / "train.tsv").read_text() == "my own log\n"
