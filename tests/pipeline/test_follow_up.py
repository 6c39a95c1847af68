"""`clickline up --follow` as a user runs it: hours arrive, training is killed in every stage, and no request fails."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hour_world import HourWorld, same_model
from up_home import Home, eventually

import clickline
from clickline.errors import ClicklineError
from servers.waiting import free_serve_ports

pytestmark = pytest.mark.slow

HOURS = 6
KILL_POINTS = [  # each in the second hour that its learner takes up
    ("clickline.data.prepare.dataset_builder", "finish_dataset", 2, False),
    ("clickline.training.hourly_trainer:HourlyTrainer", "_train_batch", 20, False),
    ("clickline.artifacts.version:Draft", "commit", 2, False),
    ("clickline.artifacts.registry:Registry", "move", 2, True),
    ("clickline.artifacts.checkpoint", "write_manifest", 2, False),
]


@pytest.fixture
def home(world: HourWorld) -> Iterator[Home]:
    kill_points = world.folder / "kill_points"
    kill_points.write_text("\n".join(json.dumps(point) for point in KILL_POINTS))
    path = Path(__file__).parent / "kill_points"
    made = Home(world.folder, {"PYTHONPATH": str(path), "CLICKLINE_KILL_POINTS": str(kill_points)})
    made.up = world.home / "up"
    made.configure(serve={**free_serve_ports(), "processes": 1, "drain_timeout": 3, "poll_interval": 0.2})
    yield made
    assert made.end() == [], "processes were left behind"


class Asking:
    """A client that asks without a pause and without a second try, from the first answer on."""

    def __init__(self, address: str) -> None:
        self.versions: Counter[int] = Counter()
        self.failures: list[str] = []
        self._over = threading.Event()
        self._client = clickline.Client(address, retries=0, timeout=10.0)
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        row = {"I1": 3.0, "I2": 5.0, "C1": "a", "C2": "b", "C3": "c", "C4": "d"}
        while not self._over.is_set():
            try:
                self.versions[self._client.predict([row]).version] += 1
            except ClicklineError as error:
                if self.versions:
                    self.failures.append(str(error))
            self._over.wait(0.005)

    @contextmanager
    def all_the_time(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(30)
            self._client.close()


@pytest.mark.soak  # `make test` has it without the endpoint: test_follow_killed.py
def test_endpoint_answers_while_training_is_killed_in_every_stage(
    world: HourWorld, home: Home, tmp_path: Path, made: Path
):
    (world.folder / "arrived" / "20260101").mkdir(parents=True)
    process = home.start("up", "--follow", "--json")
    home.until_up(process)
    asking = Asking(home.state["stages"]["serve"]["facts"]["grpc"])
    with asking.all_the_time():
        for hour in range(HOURS):
            world.arrive(hour)
            label = f"20260101/{hour:02d}"
            eventually(lambda label=label: label in [record["hour"] for record in world.records()], 80)
            home.note_processes()
            eventually(lambda: asking.versions)
        newest = world.records()[-1]["version"]
        eventually(lambda: asking.versions[newest])
    assert asking.failures == []
    assert process.poll() is None
    assert (world.folder / "kill_points").read_text() == ""

    records = world.records()
    assert [(record["state"], record["rows"]) for record in records] == [("learned", 1500)] * HOURS
    assert set(asking.versions) <= {record["version"] for record in records}
    code, out, _ = home.run("status", "--json")
    assert code == 0
    status = json.loads(out)
    facts = status["stages"]["follow"]["facts"]
    assert facts["hours_learned"] == HOURS
    assert facts["last"]["hour"] == f"20260101/{HOURS - 1:02d}"
    assert (facts["state"], facts["hour"]) == ("waiting", f"20260101/{HOURS:02d}")
    assert status["metrics"]["auc"] == records[-1]["progressive"]["auc"]
    assert status["versions"]["current"] == newest
    said = home.output(process)[1]
    assert said.count("training ended by signal 9 (SIGKILL)") == len(KILL_POINTS)

    code, out, _ = home.run("down")
    assert (code, "stopped " in out) == (0, True)
    assert home.none_left(1)
    assert process.wait(10) == 0

    calm = HourWorld(tmp_path / "calm", made)
    calm.arrive(*range(HOURS))
    calm.follow(HOURS)
    same_model(calm, world)
    assert [record["progressive"] for record in calm.records()] == [
        record["progressive"] for record in records
    ]
