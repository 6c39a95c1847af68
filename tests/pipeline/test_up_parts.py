"""Parts of `up`: messages between processes, the state folder, and logs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clickline import errors
from clickline.config import Config, load_config
from clickline.errors import ClicklineError, ConfigError, Mistake, RequestRefused
from clickline.pipeline import stage_logs
from clickline.pipeline.endpoint import endpoint_of
from clickline.pipeline.ipc import ProgressSender, error_from_json, error_to_json, replay
from clickline.pipeline.run_state import RunState
from clickline.pipeline.stage_logs import LogReader, LogWriter
from clickline.pipeline.status_text import duration, stage_summary
from clickline.pipeline.up_folder import UpFolder
from clickline.processes import Process
from clickline.progress import Progress


class Recorder(Progress):
    """Records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def begin(self, title, *, total_bytes=None, total_rows=None):
        self.calls.append(("begin", title, total_bytes, total_rows))

    def advance(self, *, rows=0, size=0):
        self.calls.append(("advance", rows, size))

    def note(self, figures):
        self.calls.append(("note", figures))

    def end(self):
        self.calls.append(("end",))

    def stage(self, name, state, facts=None):
        self.calls.append(("stage", name, state, facts))

    def log(self, message):
        self.calls.append(("say", message))


# ── messages between processes─────────────────────────────────────────────────────────────────────


def across(make_calls) -> Recorder:
    """The calls that the parent replays for the calls of a child."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        make_calls(ProgressSender(theirs))
        theirs.shutdown(socket.SHUT_WR)
        recorder = Recorder()
        with ours.makefile("rb") as lines:
            for line in lines:
                replay(json.loads(line), recorder)
    return recorder


def test_progress_calls_are_replayed_unchanged():
    def make_calls(sender: ProgressSender) -> None:
        sender.stage("train", "running")
        sender.begin("train epoch 1", total_rows=100)
        sender.advance(rows=10, size=3)
        sender.note("loss 0.5")
        sender.advance(rows=20)
        sender.end()
        sender.stage("train", "done", {"auc": np.float32(0.5), "steps": np.int64(7), "path": Path("a")})
        sender.log("two\nlines, ünd")

    assert across(make_calls).calls == [
        ("stage", "train", "running", {}),
        ("begin", "train epoch 1", None, 100),
        ("advance", 10, 3),
        ("note", "loss 0.5"),
        ("advance", 20, 0),
        ("end",),
        ("stage", "train", "done", {"auc": 0.5, "steps": 7, "path": "a"}),
        ("say", "two\nlines, ünd"),
    ]


def test_progress_messages_are_throttled_without_losing_rows():
    def make_calls(sender: ProgressSender) -> None:
        sender.begin("train")
        threads = [
            threading.Thread(target=lambda: [sender.advance(rows=1, size=2) for _ in range(20_000)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sender.end()

    advances = [call for call in across(make_calls).calls if call[0] == "advance"]
    assert sum(call[1] for call in advances) == 80_000
    assert sum(call[2] for call in advances) == 160_000
    assert len(advances) < 200


@pytest.mark.parametrize("name", [name for name, found in vars(errors).items() if isinstance(found, type)])
def test_errors_survive_the_round_trip(name):
    kind = getattr(errors, name)
    if not (isinstance(kind, type) and issubclass(kind, ClicklineError)):
        return
    if kind is ConfigError:
        error = ConfigError([Mistake("f", 3, "a.b", "is wrong.", "Fix it."), Mistake("", 0, "x", "is", "y")])
    elif kind is RequestRefused:
        error = RequestRefused("invalid", "no")
    else:
        error = kind("what was found")
    again = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert str(again) == str(error)
    assert type(again) is (ClicklineError if kind is RequestRefused else kind)
    assert getattr(again, "mistakes", None) == getattr(error, "mistakes", None)


CONFIG = """
data:
  train: '{date}/{hour}/*.tsv'
  dates: {from: 20260101, wait: 2h}
  eval: [a.tsv, 'c [1]/*.tsv']
  fields: {I3: zscore, I4: {transform: bucket, buckets: 4}}
train: {eviction: {}, calibration: {}, early_stopping: {}, batch_size: 7, checkpoint_every: 1h}
serve: {batching: {}, lookup: {shards: [['127.0.0.1:1']]}}
follow: {max_table_memory: 2GiB}
storage: {options: {s3: {anon: true}}}
publish: {registry: 's3://bucket/ads'}
"""


def test_child_gets_the_config_of_its_parent(tmp_path):
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "clickline.yaml")
    sent = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True)))
    assert Config.model_validate(sent) == config


# ── the folder ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> UpFolder:
    (tmp_path / "clickline.yaml").write_text("data: {train: a.tsv}\n")
    return UpFolder(load_config(tmp_path / "clickline.yaml"))


def test_held_lock_means_running_and_free_lock_means_lost(folder):
    assert folder.read().state == "never"
    lock = folder.acquire("up")
    own = Process.from_pid(os.getpid())
    assert own is not None
    assert (folder.read().state, folder.read().holder) == ("starting", own)
    document = {"state": "running", "pid": own.pid, "born": own.born, "stage": "train", "processes": []}
    folder.write_state(document)
    run = folder.read()
    assert (run.state, run.stage, run.holder) == ("running", "train", own)
    with pytest.raises(ClicklineError, match=r"is running for .*, pid \d+, stage train\. `clickline status`"):
        folder.acquire("up")
    os.close(lock)
    assert (folder.read().state, folder.read().stage) == ("lost", "train")
    folder.write_state({**document, "state": "stopped"})
    assert folder.read().state == "stopped"


def test_damaged_state_file_is_ignored(folder):
    os.close(folder.acquire("up"))
    (folder.path / "state.json").write_text('{"state": "run')
    assert folder.read().state == "never"


def test_speed_of_a_stage_is_that_of_its_longest_work():
    state = RunState()
    state.stage("train", "running")
    for rows, seconds in ((1000, 0.3), (9000, 0.25)):  # training; field importance
        state.begin("work")
        state.advance(rows=rows)
        time.sleep(seconds)
        state.end()
    state.stage("train", "done")
    assert 2000 < state.to_json()["stages"]["train"]["rows_per_second"] <= 1000 / 0.3


# ── logs ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def log_writer(folder: UpFolder, monkeypatch: pytest.MonkeyPatch) -> LogWriter:
    folder.logs.mkdir(parents=True)
    monkeypatch.setattr(stage_logs, "MAX_BYTES", 4096)
    return LogWriter(folder.logs, RunState())


def test_logs_are_merged_by_time_and_rotated(folder, log_writer):
    for number in range(1000):
        log_writer.write("train" if number % 3 else "serve", f"line {number}\nand more")
    sizes = {path.name: path.stat().st_size for path in folder.logs.iterdir()}
    assert set(sizes) == {"train.log", "train.log.1", "serve.log", "serve.log.1"}
    assert max(sizes.values()) < 4096 + 100
    reader = LogReader(folder.logs)
    assert [line.text for line in reader.last(4)] == ["line 998", "and more", "line 999", "and more"]
    far = reader.last(150)  # further back than the newest file of a stage
    assert len(far) == 150
    assert [line.at for line in far] == sorted(line.at for line in far)
    assert reader.last(0) == []
    reader.close()


def test_log_follow_survives_rotation_and_new_stages(folder, log_writer):
    log_writer.write("prepare", "before")
    over = threading.Event()

    def write() -> None:
        for number in range(600):
            log_writer.write(("prepare", "train", "serve")[number // 200], f"{number}")
            if number % 20 == 0:
                time.sleep(0.01)  # the reader polls; a file must not be rotated twice between two polls
        over.set()

    reader = LogReader(folder.logs)
    assert [line.text for line in reader.last(10)] == ["before"]
    monkeypatched = stage_logs._POLL_SECONDS
    stage_logs._POLL_SECONDS = 0.005
    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [line.text for line in reader.follow(over.is_set)]
    finally:
        stage_logs._POLL_SECONDS = monkeypatched
        writer.join()
        reader.close()
    assert found == [str(number) for number in range(600)]


def test_full_disk_drops_log_lines_only(folder, tmp_path):
    gone = LogWriter(tmp_path / "not there", RunState())
    gone.write("train", "lost")
    gone.close()


# ── text ───────────────────────────────────────────────────────────────────────────────────────


def test_summary_of_follow():
    facts = {
        "state": "waiting",
        "hour": "20260101/05",
        "late": True,
        "hours_learned": 5,
        "last": {"hour": "20260101/04", "rows": 1000, "progressive": {"auc": 0.7}, "version": 3},
    }
    assert stage_summary("follow", {"state": "running", "facts": facts}) == (
        "waiting for 20260101/05 (late); 5 hours trained; last 20260101/04: 1,000 rows, AUC 0.7000, version 3"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1 min 01 s"), (7260, "2 h 01 min"), (200_000, "2 d 7 h")],
)
def test_duration_formats(seconds, text):
    assert duration(seconds) == text


def test_curl_command_is_quoted(tmp_path):
    (tmp_path / "clickline.yaml").write_text(
        "name: ads\ndata: {train: a.tsv}\nserve: {host: '::', allow_unauthenticated: true}\n"
    )
    where = endpoint_of(load_config(tmp_path / "clickline.yaml"), {"C1": "it's"})
    assert (where.grpc, where.http) == ("[::]:8500", "http://[::]:8501")
    shown = subprocess.run(
        ["bash", "-c", where.curl.replace("curl", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == "http://[::1]:8501/v1/models/ads:predict"
    assert json.loads(shown[2]) == {"instances": [{"C1": "it's"}]}
