"""The checks of `make soak`: they agree with a healthy system, and detect errors."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.features import Encoder
from clickline.pipeline.follow import follow
from clickline.progress import Progress
from clickline.records import RawRows, TextColumn
from clickline.scoring.open_scorer import open_scorer

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from soaking.load import Second, unexplained_errors
from soaking.project import EVICTION_HOURS, SLOTS, Project
from soaking.system import Death
from soaking.truth import Counters, Published, counters_of_checkpoint, counters_of_logs

HOURS = 10  # more than the eviction age of ids


class Enough(Exception):
    """All hours were trained."""


class Watcher(Progress):
    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        if name == "follow" and (facts or {}).get("hours_learned") == HOURS:
            raise Enough


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Ten hours that were trained and published, with deltas and tombstones."""
    project = Project(tmp_path_factory.mktemp("soaked"), HOURS, 600, seed=3)
    for _ in range(HOURS):
        project.arrive()
    settings = ["publish.keep_versions=20", "follow.poll_interval=0.01"]
    with pytest.raises(Enough):
        follow(load_config(project.folder / "clickline.yaml", settings), Watcher())
    return project


def _raw(rows: list[dict[str, Any]]) -> RawRows:
    """Rows as a log reader returns them."""
    columns = {}
    for name in rows[0]:
        texts = ["" if row[name] != row[name] else str(row[name]) for row in rows]
        ends_B = np.cumsum([len(text) for text in texts])
        starts_B = np.concatenate([[0], ends_B[:-1]])
        columns[name] = TextColumn(np.frombuffer("".join(texts).encode(), np.uint8), starts_B, ends_B)
    return RawRows(len(rows), columns, np.arange(len(rows)))


@pytest.mark.slow
def test_naive_scores_match_every_version_and_no_other_table(followed: Project, tmp_path: Path) -> None:
    config = load_config(followed.folder / "clickline.yaml")
    registry = registry_of(config)
    published = Published(followed.registry / "versions")
    rows = [dict(row) for probe in followed.probes()["grpc"] for row in probe.rows]
    kinds, tombstones = set(), 0
    for number in published.numbers():
        manifest = published.manifest(number)
        kinds.add(manifest["table"])
        tombstones += manifest["tombstones"]
        scorer = open_scorer(registry, registry.version(number), tmp_path, 1)
        try:
            encoded, faults = Encoder(scorer.features).encode(_raw(rows))
            assert faults == []
            found = scorer.score(encoded).probability_B
        finally:
            scorer.close()
        np.testing.assert_allclose(published.scores(number, rows), found, rtol=0, atol=1e-6)
    assert (kinds, tombstones > 0) == ({"base", "delta"}, True)

    # Changed bits in a table change the scores.
    last = published.numbers()[-1]
    copy = tmp_path / "versions"
    shutil.copytree(followed.registry / "versions", copy)
    for path in (copy / f"{last:09d}").glob("table-*.bin"):
        content = bytearray(path.read_bytes())
        content[64:4096] = bytes(
            byte ^ 1 if place % 4 == 2 else byte for place, byte in enumerate(content[64:4096])
        )
        path.write_bytes(content)
    assert np.abs(Published(copy).scores(last, rows) - published.scores(last, rows)).max() > 1e-5


@pytest.mark.slow
def test_counters_of_the_logs_match_the_checkpoint(followed: Project) -> None:
    newest = max((followed.home / "runs/follow").glob("step-*"))
    found = counters_of_checkpoint(newest)
    counted = counters_of_logs(followed.arrived, SLOTS, EVICTION_HOURS)
    assert found.differences(counted) == 0
    published = Published(followed.registry / "versions")
    assert np.array_equal(published.ids(published.numbers()[-1]), counted.ids_N)
    # An hour twice, an hour missing, or no eviction: each is detected.
    assert found.differences(
        counters_of_logs([*followed.arrived, followed.arrived[-1]], SLOTS, EVICTION_HOURS)
    )
    assert found.differences(counters_of_logs(followed.arrived[1:], SLOTS, HOURS))
    assert found.differences(counters_of_logs(followed.arrived, SLOTS, HOURS))


def test_difference_in_one_id_is_found() -> None:
    ids, ones = np.array([1, 2], np.uint64), np.ones(2)
    one = Counters(ids, ones, ones, ones.astype(np.int64))
    assert one.differences(one) == 0
    assert one.differences(Counters(ids, np.array([1.0, 2.0]), ones, ones.astype(np.int64))) == 1


def _death(role: str, closed: tuple[str, ...], recovered: float | None) -> Death:
    return Death(role, 1, 100.0, frozenset({4000}), closed, recovered=recovered)


def _error(at: float, port: int) -> dict[str, Any]:
    return {
        "error": "the server closed the connection",
        "endpoint": "grpc",
        "at": at,
        "sent": at - 0.01,
        "port": port,
        "opened": at - 1.0,
        "reset": False,
    }


def test_error_is_explained_only_by_the_death_of_its_own_process() -> None:
    death = _death("worker", (), 3.0)
    assert unexplained_errors([_error(100.1, 4000)], {}, [death]) == []
    assert death.errors == 1
    for stranger in (_error(100.1, 4001), _error(99.0, 4000), _error(110.0, 4000)):
        assert len(unexplained_errors([stranger], {}, [_death("worker", (), 3.0)])) == 1
    # The death of a parent does not explain errors of its workers, which finish their requests.
    assert len(unexplained_errors([_error(101.0, 4001)], {}, [_death("serve", ("grpc",), 8.0)])) == 1


def test_reset_connection_is_explained_between_the_kill_and_the_end_of_its_process() -> None:
    """Only for new clients of a process that is being torn down, at an endpoint that it served."""
    reset = {**_error(100.25, 4001), "opened": 100.1, "reset": True}

    def unexplained(**changes: Any) -> int:
        death = _death("worker", (), 3.0)
        death.endpoints, death.gone = frozenset({"grpc"}), 100.2
        errors = unexplained_errors([{**reset, **changes}], {}, [death])
        assert death.errors == 1 - len(errors)
        return len(errors)

    assert unexplained() == 0
    assert unexplained(reset=False) == 1  # an error response
    assert unexplained(endpoint="http") == 1  # the process did not listen there
    assert unexplained(opened=99.9) == 1  # connected to another process before
    assert unexplained(opened=100.21) == 1  # its sockets were closed by then
    assert unexplained(at=101.0) == 1  # too late to be caused by it


def test_kernel_connects_clients_of_a_killed_process_until_its_memory_is_freed() -> None:
    """The assumption of the rule above, with a real process."""
    program = (
        "import mmap, socket, time; server = socket.create_server(('127.0.0.1', 0)); "
        "memory = mmap.mmap(-1, 400 << 20); memory[:] = b'1' * len(memory); "
        "print(server.getsockname()[1], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        process.kill()
        clients = []
        while True:
            try:
                clients.append(socket.create_connection(address, timeout=10))
            except ConnectionRefusedError:
                break
            time.sleep(0.001)  # fewer than the kernel queues
        assert clients
        for client in clients:
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)


def test_refused_connection_is_explained_while_the_endpoint_is_down() -> None:
    def refused(at: float) -> dict[str, list[Second]]:
        return {"grpc": [Second(at, at + 1, {"refused": 5}, [])]}

    death = _death("serve", ("grpc",), 8.0)
    assert unexplained_errors([], refused(105.0), [death]) == []
    assert death.refused == 5
    assert len(unexplained_errors([], refused(98.0), [_death("serve", ("grpc",), 8.0)])) == 1
    assert len(unexplained_errors([], refused(115.0), [_death("serve", ("grpc",), 8.0)])) == 1
    assert len(unexplained_errors([], refused(105.0), [_death("worker", (), 8.0)])) == 1
