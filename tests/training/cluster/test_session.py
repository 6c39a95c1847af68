"""The connection to Ray: its own, only on this machine and behind a token; another's, checked before it is used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clickline.distributed.ray_map import ray_map
from clickline.distributed.session import RaySession, open_session
from clickline.errors import ClusterError, ConfigError, Mistake
from clickline.progress import Progress

CONNECT = """
import sys
from pathlib import Path
from clickline.distributed.session import open_session
from clickline.errors import ClusterError
from clickline.progress import Progress
try:
    with open_session(sys.argv[1], home=Path(sys.argv[2]), progress=Progress()) as opened:
        print("connected", sum(node.alive for node in opened.nodes()))
except ClusterError as error:
    print("refused", error)
"""


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def connect(address: str, home: Path, **environment: str) -> str:
    """What another process gets that connects."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, address, str(home)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout or done.stderr


def listening(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


# ── one of our own ─────────────────────────────────────────────────────────────────────────────


def test_session_reports_nodes_and_cpus(ray_session: RaySession) -> None:
    (node,) = ray_session.nodes()
    assert node.alive and node.cpus == 4 and node.memory > 1 << 28
    assert node.id == ray_session.node_id
    assert ray_session.cpus() == 4
    assert 0 <= ray_session.free_cpus() <= 4
    assert not ray_session.lost()


def test_existing_connection_is_reused_and_left_open(ray_session: RaySession, tmp_path: Path) -> None:
    with open_session("somewhere:1", home=tmp_path, progress=Progress()) as second:
        assert second.address == ray_session.address
    assert not ray_session.lost()
    assert list(tmp_path.iterdir()) == []  # the mark that nodes looked for is gone


def test_signal_handlers_are_kept(ray_session: RaySession) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_embedded_cluster_listens_only_on_this_machine(ray_session: RaySession) -> None:
    raylet = _raylet()
    own = {os.getpid(), raylet, *_children(os.getpid()), *_children(raylet)}
    inodes = {link for process in own for link in _sockets(process)}
    heard = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A" and inode in inodes:
                heard.append(local.rpartition(":")[0])
    assert len(heard) >= 4
    assert set(heard) <= {"0100007F", "0000000000000000FFFF00000100007F"}


def _raylet() -> int:
    (found,) = [child for child in _children(os.getpid()) if b"raylet/raylet" in _title(child)]
    return found


def _title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _sockets(process: int) -> list[str]:
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return []
    return [link[8:-1] for link in links if link.startswith("socket:[")]


@pytest.fixture(scope="module")
def pieces_by_value(ray_session: RaySession) -> Iterator[None]:
    """Functions of this module go to Ray's processes as they are: those cannot import a test."""
    from ray import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


# ── pieces of work ─────────────────────────────────────────────────────────────────────────────


def _square(shared: int, piece: int) -> int:
    return shared + piece * piece


def _fail(shared: None, piece: int) -> None:
    raise ConfigError([Mistake("clickline.yaml", 3, "data.train", f"is {piece}.", "Mend it.")])


def _bug(shared: None, piece: int) -> None:
    raise ZeroDivisionError(f"piece {piece}")


def _die(folder: str, piece: int) -> int:
    """Kills its own process, the first times that a file in the folder asks for."""
    for left in sorted(Path(folder).glob(f"{piece}-*")):
        left.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


@pytest.mark.usefixtures("pieces_by_value")
def test_results_come_in_order_and_pieces_are_taken_lazily(ray_session: RaySession) -> None:
    taken: list[int] = []

    def pieces() -> Iterator[int]:
        for piece in range(12):
            taken.append(piece)
            yield piece

    given = 0
    for result in ray_map(ray_session, _square, 1, pieces(), max_pending=3, in_order=True):
        assert result == 1 + given * given
        given += 1
        assert len(taken) - given < 3
    assert given == 12
    assert sorted(ray_map(ray_session, _square, 0, range(5), max_pending=2)) == [0, 1, 4, 9, 16]
    assert list(ray_map(ray_session, _square, 0, [], max_pending=2)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("pieces_by_value")
def test_piece_is_retried_when_its_process_dies(ray_session: RaySession, tmp_path: Path) -> None:
    for name in ("1-a", "1-b", "2-a"):
        (tmp_path / name).touch()
    assert list(ray_map(ray_session, _die, str(tmp_path), range(4), max_pending=2, in_order=True)) == [
        0,
        1,
        2,
        3,
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("pieces_by_value")
def test_piece_that_kills_three_processes_is_given_up(ray_session: RaySession, tmp_path: Path) -> None:
    for name in ("1-a", "1-b", "1-c", "1-d"):
        (tmp_path / name).touch()
    with pytest.raises(ClusterError, match="died 3 times on the same piece"):
        list(ray_map(ray_session, _die, str(tmp_path), range(4), max_pending=2))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("pieces_by_value")
def test_error_of_the_function_is_raised_unchanged(ray_session: RaySession) -> None:
    with pytest.raises(ConfigError) as told:
        list(ray_map(ray_session, _fail, None, [7, 8], max_pending=1))
    assert str(told.value) == "clickline.yaml:3 data.train is 7. Mend it."
    assert told.value.mistakes[0].line == 3
    with pytest.raises(ZeroDivisionError, match="piece 7"):
        list(ray_map(ray_session, _bug, None, [7, 8], max_pending=1))


# ── another's ──────────────────────────────────────────────────────────────────────────────────


def ask(address: str, token: str) -> str:
    """What a client of Ray's own gets from the head."""
    program = (
        "import sys; from ray._raylet import GcsClient; print(GcsClient(sys.argv[1]).cluster_id.is_nil())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, address],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_client_with_a_wrong_token_is_refused(ray_session: RaySession) -> None:
    own = os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").read_text().strip()
    assert ask(ray_session.address, own) == "False\n"
    assert "InvalidAuthToken" in ask(ray_session.address, "f" * 64)


def test_missing_token_is_an_error_that_says_where_to_put_it(ray_session: RaySession, tmp_path: Path) -> None:
    told = connect(ray_session.address, tmp_path, HOME=str(tmp_path))
    assert told.startswith("refused") and "RAY_AUTH_TOKEN_PATH" in told


def test_address_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        told = connect(f"127.0.0.1:{taken.getsockname()[1]}", tmp_path, RAY_AUTH_TOKEN="a" * 64)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # What was started last may be gone, and the file that names it is not.
        last = connect("auto", tmp_path, RAY_AUTH_TOKEN="a" * 64, RAY_ADDRESS=address)
    assert told.startswith("refused no Ray cluster answers at 127.0.0.1:")
    assert last.startswith(f"refused no Ray cluster answers at {address}")
    assert "auto or host:port" in connect("ray://127.0.0.1:10001", tmp_path, RAY_AUTH_TOKEN="a" * 64)
    assert "auto or host:port" in connect("127.0.0.1", tmp_path, RAY_AUTH_TOKEN="a" * 64)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "nodes"), [("127.0.0.1", "1"), ("127.0.0.2", "2")])
def test_existing_cluster_is_used_and_left_running(host: str, nodes: str, tmp_path: Path) -> None:
    """To a cluster elsewhere, as that at 127.0.0.2 is to a process at 127.0.0.1, it comes with a node of its own."""
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    short = tempfile.mkdtemp(prefix="clickline-ray-")  # paths of sockets have at most 107 bytes
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    head = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"),
            *("--num-cpus=1", "--object-store-memory=100000000", "--include-dashboard=false"),
            *(f"--node-ip-address={host}", f"--temp-dir={short}", "--disable-usage-stats"),
        ],
        env={**os.environ, **token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    workers: list[int] = []
    try:
        until(lambda: listening(port, host))
        answers: list[str] = []

        def connected() -> bool:  # the port is there some time before the node is
            answers.append(connect(f"{host}:{port}", tmp_path / "home", **token))
            return answers[-1].startswith("connected")

        until(connected, 90)
        assert answers[-1].split() == ["connected", nodes]
        assert head.poll() is None and listening(port, host)
        assert list((tmp_path / "home").iterdir()) == []
        workers = [own for child in _children(head.pid) for own in _children(child)]
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(short, ignore_errors=True)
    until(lambda: not any(_title(worker).startswith(b"ray::IDLE") for worker in workers), 60)


LOSE = """
import os, signal, sys, time
from pathlib import Path
from clickline.distributed.session import open_session
from clickline.progress import Progress
import ray
from ray._private import worker
class Role:
    def here(self): return True
for part in ("raylet", "gcs_server"):
    with open_session(None, cpus=1, home=None, progress=Progress()) as opened:
        assert not opened.lost()
        role = ray.remote(num_cpus=0)(Role).remote()
        assert ray.get(role.here.remote()) and opened.has_place(role)
        os.kill(worker._global_node.all_processes[part][0].process.pid, signal.SIGKILL)
        began = time.monotonic()
        while not opened.lost():
            assert time.monotonic() - began < 5
        told = opened.cpus(), opened.free_cpus(), opened.has_place(role), opened.has_left(role)
        assert part == "raylet" or told == (1.0, 0.0, False, False)  # and not for ever, as Ray itself would ask
with open_session(None, cpus=1, home=None, progress=Progress()) as opened:
    print("went on", opened.cpus())
"""


@pytest.mark.faults
def test_lost_node_or_head_is_detected_at_once_and_a_new_session_can_start() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOSE], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "went on 1.0\n", done.stderr
    assert done.stderr == ""
