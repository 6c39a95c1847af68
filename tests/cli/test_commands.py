"""Each command as users run it: what it prints where, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from clickline_process import SCRIPT, environment, run

GOOD = "data: {train: data/train.tsv, eval: data/eval.tsv}\n"


def write(folder: Path, text: str = GOOD) -> Path:
    file = folder / "clickline.yaml"
    file.write_text(text)
    return file


# ── init and check ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preset", ["criteo", "slots", "csv"])
def test_init_output_passes_check(tmp_path: Path, preset: str) -> None:
    done = run("init", "project", "--preset", preset, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote project/clickline.yaml (preset {preset})\nnext: cd project && ")
    checked = run("check", cwd=tmp_path / "project")
    assert (checked.returncode, checked.stderr) == (0, "")
    lines = checked.stdout.splitlines()
    assert lines[0] == "clickline.yaml: no mistakes"
    assert f"note: data.train: {tmp_path}/project/data/train." in lines[1]
    assert lines[1].endswith("matches no file yet.")


def test_init_does_not_overwrite_without_force(tmp_path: Path) -> None:
    file = write(tmp_path)
    done = run("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "clickline.yaml already exists. Name another folder, or overwrite it with --force.\n"
    )
    assert file.read_text() == GOOD
    assert run("init", "--force", cwd=tmp_path).returncode == 0
    assert "format: criteo" in file.read_text()


def test_check_reports_every_mistake_and_exits_2(tmp_path: Path) -> None:
    write(
        tmp_path, "data:\n  trian: a\n  max_bad_ratio: 2\ntrain: {epochs: 0}\nzzz: 1\nserve: {http_port: x}\n"
    )
    done = run("check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line.split(" is ")[0] for line in lines] == [
        "clickline.yaml:2 data.trian",
        "clickline.yaml:3 data.max_bad_ratio",
        "clickline.yaml:4 train.epochs",
        "clickline.yaml:5 zzz",
        "clickline.yaml:6 serve.http_port",
    ]


def test_check_json_is_one_document(tmp_path: Path) -> None:
    write(tmp_path, "data: {train: a}\n")
    done = run("check", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert document["mistakes"] == []
    assert document["notes"][-1] == "data.eval is not set: the model will not be evaluated."

    bad = run("check", "--json", "--set", "data.max_bad_ratio=2", cwd=tmp_path)
    error = json.loads(bad.stdout)["error"]
    assert bad.returncode == 2
    assert error["kind"] == "ConfigError"
    assert error["mistakes"] == [
        {
            "file": "--set",
            "line": 0,
            "key": "data.max_bad_ratio",
            "problem": "is 2. Allowed: a number from 0 to 1.",
            "remedy": "Correct it, or remove it to get the default, 0.01.",
        }
    ]
    assert bad.stderr.startswith("--set data.max_bad_ratio is 2.")


def test_check_notes_patterns_without_files(tmp_path: Path) -> None:
    (tmp_path / "20240101" / "00").mkdir(parents=True)
    (tmp_path / "20240101" / "00" / "part-0").touch()
    text = "data: {train: '{date}/{hour}/*', dates: {from: 20240101, to: 20240101}, eval: 'no*'}\n"
    (tmp_path / "other.yaml").write_text(text)
    done = run("check", "-c", "other.yaml", cwd=tmp_path)
    assert done.stdout == f"other.yaml: no mistakes\nnote: data.eval: {tmp_path}/no* matches no file yet.\n"


def test_check_finds_data_in_a_folder_with_glob_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a[1] b*"
    folder.mkdir()
    (folder / "day 1.tsv").touch()
    write(folder, "data: {train: '*.tsv', eval: '*.gz'}\n")
    done = run("check", cwd=folder)
    assert (
        done.stdout == f"clickline.yaml: no mistakes\nnote: data.eval: {folder}/*.gz matches no file yet.\n"
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("gate: {auc: 0.6}", "gate.auc needs"),
        ("gate: {auc: 0.6, calibration: 0.1}", "gate.auc and gate.calibration need"),
        ("gate: {vs_current: 0.0}", "gate.vs_current needs"),
        ("train: {early_stopping: {patience: 1}}", "train.early_stopping needs"),
    ],
)
def test_check_rejects_a_gate_without_eval_rows(tmp_path: Path, asked: str, named: str) -> None:
    write(tmp_path, f"data: {{train: data/train.tsv}}\n{asked}\n")
    done = run("check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"clickline.yaml data.eval is not set, but {named} metrics, which are measured on it. "
        "Set it, or remove what needs it.\n"
    )
    write(tmp_path, f"data: {{train: data/train.tsv, eval: data/eval.tsv}}\n{asked}\n")
    assert run("check", cwd=tmp_path).returncode == 0


def test_check_notes_that_a_gate_without_eval_rows_is_only_for_follow(tmp_path: Path) -> None:
    write(tmp_path, "data: {train: '{date}/{hour}/*', dates: {from: 20240101}}\ngate: {auc: 0.6}\n")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0
    assert "note: data.eval is not set, but gate.auc needs metrics" in done.stdout
    assert "`up --follow` evaluates on held-out rows instead (follow.holdout).\n" in done.stdout
    write(
        tmp_path,
        "data: {train: '{date}/{hour}/*', dates: {from: 20240101, to: 20240102}}\ngate: {auc: 0.6}\n",
    )
    assert run("check", cwd=tmp_path).returncode == 2  # what is there is trained before anything is followed


@pytest.mark.parametrize(
    ("train", "eval_", "said"),
    [
        ("a.tsv", "a.tsv", "its only file is also in data.train ("),
        ("'*.tsv'", "[b.tsv, c.txt]", "1 of its 2 files are also in data.train ("),
        ("a.tsv", "link.tsv", "its only file is also in data.train ("),
        ("a.tsv", "b.tsv", None),
    ],
)
def test_check_notes_files_in_both_train_and_eval(
    tmp_path: Path, train: str, eval_: str, said: str | None
) -> None:
    for name in ("a.tsv", "b.tsv", "c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link.tsv").symlink_to("a.tsv")
    write(tmp_path, f"data: {{train: {train}, eval: {eval_}}}\n")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0
    assert ("say nothing about new rows" in done.stdout) == (said is not None)
    assert said is None or f"note: data.eval: {said}" in done.stdout


def test_check_distinguishes_hours_of_one_pattern(tmp_path: Path) -> None:
    for hour in ("00", "01", "02"):
        (tmp_path / "20240101" / hour).mkdir(parents=True)
        for name in ("part-0", "donefile"):
            (tmp_path / "20240101" / hour / name).touch()
    text = (
        "data: {{train: '{{date}}/{{hour}}/*', dates: {{from: 20240101/00, to: 20240101/{0}}},\n"
        "       eval: '{{date}}/{{hour}}/*', eval_dates: {{from: 20240101/02, to: 20240101/02}}}}\n"
    )
    write(tmp_path, text.format("01"))
    assert run("check", cwd=tmp_path).stdout == "clickline.yaml: no mistakes\n"
    write(tmp_path, text.format("02"))
    done = run("check", cwd=tmp_path)
    assert f"its only file is also in data.train ({tmp_path}/20240101/02/part-0)" in done.stdout


def test_check_checks_the_columns_of_the_first_file(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "donefile").touch()
    (tmp_path / "00" / "part.csv").write_text("clicked,city\n1,Oslo\n")
    text = "data: {{format: csv, train: '*/*', fields: {{clicked: label, {0}: slot}}}}\n"
    write(tmp_path, text.format("city"))
    assert run("check", cwd=tmp_path).stdout.startswith("clickline.yaml: no mistakes\n")
    write(tmp_path, text.format("citty"))
    done = run("check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert (
        "00/part.csv has no column 'citty'; its columns are clicked, city; did you mean 'city'?"
        in done.stderr
    )


def test_check_without_a_config_points_to_init(tmp_path: Path) -> None:
    done = run("check", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "clickline.yaml does not exist. Name it with -c, or run `clickline init` to write one.\n"
    )


def test_check_schema_prints_json_without_a_config(tmp_path: Path) -> None:
    done = run("check", "--schema", cwd=tmp_path)
    assert done.returncode == 0
    assert "batch_size" in json.loads(done.stdout)["$defs"]["TrainSection"]["properties"]


# ── errors ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chekc"], "clickline: No such command 'chekc'."),
        (["check", "--jsno"], "clickline check: No such option: --jsno"),
        (
            ["sample", "--format", "cvs"],
            "clickline sample: Invalid value for '--format': 'cvs' is not one of",
        ),
        (
            ["sample", "--rows", "many"],
            "clickline sample: Invalid value for '--rows': it should be a valid integer. See",
        ),
        (["cache"], "clickline cache: Missing command."),
        (
            ["data", "warm"],
            "clickline: No such command 'data'. It is now `clickline cache`: status, prefetch, clear.",
        ),
        (["init", "--preset", "x"], "clickline init: Invalid value for '--preset'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words)
    assert done.stderr.endswith(" --help`.\n")
    assert len(done.stderr.splitlines()) == 1
    error = json.loads(run(*arguments, "--json", cwd=tmp_path).stdout)["error"]
    assert error["kind"] == "UsageError"


def test_all_wrong_sample_options_are_reported(tmp_path: Path) -> None:
    done = run("sample", "--rows", "1", "--seed", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2
    assert "--rows is 1." in done.stderr


@pytest.mark.slow
def test_missing_data_is_exit_4_without_traceback(tmp_path: Path) -> None:
    write(tmp_path)
    done = run("prepare", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert "data/train.tsv matches no file" in done.stderr
    assert "Traceback" not in done.stderr
    shown = run("prepare", "--debug", cwd=tmp_path)
    assert shown.returncode == 4
    assert "Traceback" in shown.stderr
    assert "SourceNotFound" in run("--debug", "prepare", cwd=tmp_path).stderr
    document = json.loads(run("prepare", "--json", cwd=tmp_path).stdout)
    assert document["error"]["kind"] == "SourceNotFound"


def test_os_error_is_not_reported_as_a_bug(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("init", "file/project", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "file/project: Not a directory\n"


def test_unexpected_exception_is_reported_as_a_bug(tmp_path: Path) -> None:
    """An error at a known place: reading the preset raises."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.resources\n"
        "def files(package): raise LookupError('first line\\nsecond line')\n"
        "importlib.resources.files = files\n"
    )
    done = run("init", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "this is a bug in Clickline: LookupError: first line (run the same command with --debug to see the traceback)\n"
    )
    shown = run("init", "--debug", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "Traceback" in shown.stderr
    assert "second line" in shown.stderr


@pytest.mark.parametrize("arguments", [["check", "--schema"], ["--help"], ["check", "--json"]])
def test_closed_output_pipe_is_not_an_error(tmp_path: Path, arguments: list[str]) -> None:
    """As with `| head`, which closes the pipe early."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd=tmp_path,
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert done.returncode in (1, 2)
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr


# ── sample, prepare, data ──────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_sample_prepare_and_cache_status(tmp_path: Path) -> None:
    run("init", cwd=tmp_path)
    made = run("sample", "--rows", "2000", "--out", "data", cwd=tmp_path)
    assert made.returncode == 0
    assert "train rows           1,600\n" in made.stdout
    assert "best achievable AUC  0." in made.stdout
    # No terminal: plain lines, none of a bar's escape codes.
    assert made.stderr.startswith("sample: started\n")
    assert "2,000 rows" in made.stderr
    assert "\x1b" not in made.stderr + made.stdout

    prepared = run("prepare", "--json", cwd=tmp_path)
    document = json.loads(prepared.stdout)
    assert (prepared.returncode, document["train_rows"], document["eval_rows"]) == (0, 1600, 400)
    assert (document["bad_rows"], document["reused"]) == (0, False)
    assert Path(document["dataset"], "manifest.json").is_file()

    again = run("prepare", "-q", cwd=tmp_path)
    assert again.returncode == 0
    assert "(up to date)" in again.stdout
    assert "train     1,600 rows in 1 shard" in again.stdout

    status = run("cache", "status", cwd=tmp_path)
    lines = status.stdout.splitlines()
    assert lines[0].split("   ")[0] == "NAME"
    assert [line.split()[0] for line in lines[1:]] == ["train", "eval"]
    assert all(line.split()[-2:] == ["Local", "-"] for line in lines[1:])  # a local file has no age
    (only,) = json.loads(run("cache", "status", "eval", "--json", cwd=tmp_path).stdout)
    assert (only["name"], only["files"], only["phase"]) == ("eval", 1, "Local")
    assert run("cache", "prefetch", "-q", cwd=tmp_path).returncode == 0
    assert run("cache", "clear", cwd=tmp_path).stdout == "removed 0 copies, 0 B\n"


@pytest.mark.slow
def test_sample_json_is_one_document_without_progress(tmp_path: Path) -> None:
    done = run("sample", "--format", "slots", "--rows", "500", "--hours", "2", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert document["train_rows"] + document["eval_rows"] == 500
    assert all((tmp_path / file).is_file() for file in document["files"])
    quiet = run("sample", "--rows", "500", "-q", cwd=tmp_path)
    assert (quiet.returncode, quiet.stderr) == (0, "")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A folder behind a real HTTP server."""
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(b"x" * 5000)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_remote_data_is_prefetched_and_cleared(tmp_path: Path, web: str) -> None:
    write(tmp_path, f"data: {{train: '{web}/a.tsv'}}\ncache: {{dir: cache, size: 1MiB}}\n")

    def status() -> list[str]:
        return run("cache", "status", cwd=tmp_path).stdout.splitlines()[1].split()

    assert status() == ["train", "0/1", "4.9", "KiB", "0", "B", "1.0", "MiB", "NotCached", "-"]
    warmed = run("cache", "prefetch", cwd=tmp_path)
    assert warmed.returncode == 0
    assert f"fetching {web}/a.tsv: started, 4.9 KiB to read\n" in warmed.stderr
    assert warmed.stdout.splitlines()[1].split()[8] == "Ready"
    assert (status()[1], status()[4:6]) == ("1/1", ["4.9", "KiB"])
    assert json.loads(run("cache", "clear", "train", "--json", cwd=tmp_path).stdout) == {
        "files": 1,
        "bytes": 5000,
        "in_use": 0,
    }
    assert status()[-2:] == ["NotCached", "-"]


@pytest.mark.slow
def test_check_checks_the_files_that_the_config_names(tmp_path: Path) -> None:
    write(tmp_path, "data: {format: slots, train: a.txt, slot_conf: slot.conf}\n")
    (tmp_path / "slot.conf").write_text("1\none\n1\n")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "slot.conf:2 'one' is not a slot number" in done.stderr
    assert "slot.conf:3 slot 1 is already listed in line 1" in done.stderr
    (tmp_path / "slot.conf").write_text("no slots at all\n" * 500)
    assert len(run("check", cwd=tmp_path).stderr.splitlines()) == 11
    write(tmp_path, "data: {reader: r.py, train: a.txt, fields: {y: label, u: slot}}\n")
    (tmp_path / "r.py").write_text("def read(path):\n    yield (\n")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "r.py:2" in done.stderr


def test_h_is_help(tmp_path: Path) -> None:
    assert run("-h", cwd=tmp_path).stdout == run("--help", cwd=tmp_path).stdout
    assert run("prepare", "-h", cwd=tmp_path).returncode == 0
