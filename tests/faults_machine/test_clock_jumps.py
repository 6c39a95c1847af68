"""A clock that jumps by a day, forward and back: times that are shown are wrong, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from faulty_machine import DAY, Machine
from hour_world import HourWorld, make_hours, same_model
from service import Service, command
from up_home import Home, home_of_doubles

import clickline
from clickline.artifacts.checkpoint import find_checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.registry import Registry
from clickline.config import Config, load_config
from clickline.embedding.serving import ServingTable
from clickline.errors import StorageError
from clickline.publishing.run import publish
from clickline.storage.storage import Storage
from clickline.studio.runs_view import RunsView
from servers.serving import QuietHandler, served
from servers.waiting import eventually
from version_manifests import IMPORT, version_manifest


def test_preloaded_library_shifts_the_clock_of_a_process(machine: Machine) -> None:
    machine.set_clock(-DAY)
    code = "import time, datetime; print(time.time(), datetime.datetime.now(datetime.UTC).timestamp())"
    environment = {**os.environ, **machine.environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    for told in map(float, done.stdout.split()):
        assert abs(told + DAY - time.time()) < 600


# ── what runs ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def home(tmp_path: Path, machine: Machine) -> Iterator[Home]:
    """`up` with doubles of the stages, on a machine whose clock we have."""
    with home_of_doubles(tmp_path / "ads", machine.environment) as made:
        yield made


@pytest.mark.slow
def test_status_and_down_work_with_a_wrong_clock(home: Home, machine: Machine) -> None:
    process = home.start("up", "--follow")
    home.until_up(process)
    pid = home.pid("follow")
    for wrong in (DAY, -DAY):
        machine.set_clock(wrong)
        code, out, _ = home.run("status", "--json")
        found = json.loads(out)
        assert (code, found["state"]) == (0, "running")
        code, out, _ = home.run("status")
        told = re.match(r"ads: following since \S+ \S+ UTC \(([^)]*) ago\), pid (\d+)", out)
        assert code == 0 and told is not None, out
        assert (told[1] == "0.0 s") == (wrong < 0) and int(told[2]) == process.pid
        code, _, err = home.run("up")
        assert code == 1 and str(process.pid) in err  # there is one run a home
    assert home.pid("follow") == pid
    code, _, err = home.run("down")
    assert code == 0, err
    assert home.none_left()


# ── hours ──────────────────────────────────────────────────────────────────────────────────────

# Counts the looks for an hour, so that a test knows that one was taken since.
COUNTED = """
from clickline.pipeline import follow as following
real = following.hour_is_complete
def counted(*arguments):
    with open({file!r}, "ab") as looks:
        looks.write(b".")
    return real(*arguments)
following.hour_is_complete = counted
"""


@pytest.mark.slow
def test_clock_jump_makes_no_hour_late(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hours(tmp_path, 3, 1000)
    calm = HourWorld(tmp_path / "calm", tmp_path)
    calm.arrive(0, 1, 2)
    calm.follow(3)
    hit = HourWorld(tmp_path / "hit", tmp_path)
    hit.arrive(0)
    looks = tmp_path / "looks"
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    process = hit.start(
        3,
        COUNTED.format(file=str(looks)),
        "follow.missing_after=600",
        "follow.on_missing_hour=skip",
        "follow.poll_interval=0.02",
    )
    try:
        for hour, wrong in ((1, DAY), (2, -DAY)):
            eventually(lambda wanted=hour: len(hit.records()) == wanted, 120)
            machine.set_clock(wrong)
            seen = looks.stat().st_size
            eventually(lambda before=seen: looks.stat().st_size > before + 5)
            assert len(hit.records()) == hour
            hit.arrive(hour)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert [record["state"] for record in hit.records()] == ["learned"] * 3
    same_model(calm, hit)


# ── serving ────────────────────────────────────────────────────────────────────────────────────


def ask(service: Service) -> int:
    """The version that answers, within a deadline that is sent to the server."""
    reply = httpx.post(
        service.url("/v1/models/ctr:predict"),
        json={"instances": [{}]},
        headers={"grpc-timeout": "20S"},
        timeout=30,
    )
    assert reply.status_code == 200, reply.text
    return int(reply.headers["clickline-version"])


@pytest.mark.slow
def test_server_answers_and_switches_versions_with_a_wrong_clock(
    project: Path, config: Config, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(config)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    with command(project) as service:
        assert service.wait_up()["version"] == 1
        workers = service.workers()
        for version, wrong in ((2, DAY), (3, -DAY)):
            machine.set_clock(wrong)
            assert ask(service) == version - 1
            publish(load_config(project / "clickline.yaml", [f"publish.sample_rows={version}"]))
            eventually(lambda wanted=version: ask(service) == wanted)
            age = service.metrics()["clickline_version_age_seconds"]
            assert abs(age - wrong) < 600  # two clocks disagree, and that is all
        assert service.workers() == workers
        assert not service.log("a worker died") and service.admin("/readyz").status_code == 200


# ── the registry ───────────────────────────────────────────────────────────────────────────────

DRAFTS = (
    IMPORT
    + """
import sys
from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage
registry = Registry(Storage(), sys.argv[1])
with registry.draft() as draft:
    (draft.folder / "dense.onnx").write_bytes(b"network")
    print("begun", flush=True)
    sys.stdin.readline()
    version = draft.commit(version_manifest())
registry.move(version.number, "made", after=registry.current())
print(version.number, version.created, flush=True)
"""
)


@pytest.mark.parametrize("wrong", [DAY, -DAY])
def test_versions_are_ordered_by_number_and_active_drafts_stay(
    tmp_path: Path, machine: Machine, wrong: int
) -> None:
    registry = Registry(Storage(), str(tmp_path / "registry"))
    machine.set_clock(wrong)
    publisher = subprocess.Popen(
        [sys.executable, "-c", DRAFTS, registry.uri],
        env={**os.environ, **machine.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert publisher.stdout is not None and publisher.stdout.readline() == "begun\n"
        registry.gc(1)  # by our clock the draft is a day old, or of tomorrow
        out, _ = publisher.communicate("go\n", timeout=60)
    finally:
        publisher.kill()
        publisher.wait()
    assert publisher.returncode == 0
    assert out.startswith("1 ")
    with registry.draft() as draft:
        (draft.folder / "dense.onnx").write_bytes(b"network")
        version = draft.commit(version_manifest())
    registry.move(version.number, "made", after=registry.current())
    current = registry.current()
    assert version.number == 2 and current is not None and current.version == 2
    assert (registry.version(1).created > version.created) == (wrong > 0)
    registry.gc(1)
    assert registry.numbers()[-1] == 2


# ── files that a clock ahead has left ──────────────────────────────────────────────────────────


def tomorrow(path: Path) -> None:
    """As if it had been written while the clock was a day ahead."""
    os.utime(path, (time.time() + DAY, time.time() + DAY))


def test_run_trained_last_is_published_after_the_clock_went_back(project: Path, config: Config) -> None:
    for manifest in project.glob(".clickline/runs/*/step-*/manifest.json"):
        tomorrow(manifest)
    trained = clickline.train(load_config(project / "clickline.yaml", ["train.epochs=2"])).checkpoint
    assert find_checkpoint(None, config.home).folder == trained.folder
    before = clickline.train(config).checkpoint  # it is up to date, and meant again
    assert find_checkpoint(None, config.home).folder == before.folder != trained.folder


def test_merged_deltas_in_use_stay_although_others_look_newer(project: Path, tmp_path: Path) -> None:
    for sample in (256, 100, 101):
        version = publish(load_config(project / "clickline.yaml", [f"publish.sample_rows={sample}"])).version
    registry = registry_of(load_config(project / "clickline.yaml"))
    folders = [Path(one.folder) for one in registry.chain(version)]
    assert len(folders) == 3
    work = tmp_path / "work"
    for number in range(5):
        (work / f"overlay-{number}").mkdir(parents=True)
        tomorrow(work / f"overlay-{number}")
    tables = ServingTable.open(folders, work=work)
    tables.close()
    assert len(list(work.iterdir())) >= 4


def test_studio_does_not_take_a_file_from_the_future_for_active_training(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "0123456789ab"
    run.mkdir(parents=True)
    (run / "curve.json").write_text('{"step": [10], "loss": [0.6], "auc": [0.6]}')
    (told,) = RunsView(tmp_path).list({"state": "never"})
    assert told["state"] == "training"
    tomorrow(run / "curve.json")
    (told,) = RunsView(tmp_path).list({"state": "never"})
    assert told["state"] == "stopped"


# ── stores that compare clocks ─────────────────────────────────────────────────────────────────


def test_refused_access_mentions_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to HEAD has no words: a wrong clock looks like wrong credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    class Skewed(QuietHandler):
        """As Amazon words it."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.answer(
                403,
                b"<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time and the "
                b"current time is too large.</Message></Error>",
                Content_Type="application/xml",
            )

    with served(Skewed) as port:
        options = {
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
        storage = Storage({"s3": options}, None)
        with pytest.raises(StorageError, match=r"s3://b/a: access was refused .* clock of this machine"):
            storage.read("s3://b/a")
        with pytest.raises(StorageError, match=r"current time is too large.* clock of this machine"):
            storage.list("s3://b/*")
