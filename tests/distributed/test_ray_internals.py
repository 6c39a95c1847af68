"""What we use of Ray outside its public API, with the Ray that is installed; `make ray-versions` runs it with two."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clickline
from clickline.distributed import ray_internals
from clickline.distributed.session import RaySession, open_session
from clickline.progress import Progress

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
PACKAGE = Path(clickline.__file__).parent
SECONDS = 5.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RaySession]:
    with open_session(None, cpus=2, home=None, progress=Progress()) as opened:
        yield opened


def start_actor(cpus: int) -> Any:
    class Locator:  # local, so that Ray sends its code
        def node(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

    return ray.remote(num_cpus=cpus)(Locator).remote()


def test_installed_ray_is_the_one_that_this_run_is_for() -> None:
    assert ray.__version__ == os.environ.get("CLICKLINE_TEST_RAY", ray.__version__)


def test_no_other_module_imports_private_modules_of_ray() -> None:
    private = ("ray._", "ray.core", "ray.scripts", "ray.includes", "ray.gcs")
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if path.name != "ray_internals.py":
                assert not any(name.startswith(private) for name in names), f"{path}:{names}"


def test_nodes_are_those_of_the_public_api(cluster: RaySession) -> None:
    (node,), (public,) = ray_internals.cluster_nodes(SECONDS), ray.nodes()
    assert (node.id, node.alive, node.cpus) == (public["NodeID"], public["Alive"], public["Resources"]["CPU"])
    assert node.memory == int(public["Resources"]["memory"])
    assert node.daemon == (public["NodeManagerAddress"], public["NodeManagerPort"])
    assert ray_internals.cluster_nodes(SECONDS, cluster.address) == [node]


def test_cluster_listens_on_this_machine_only(cluster: RaySession) -> None:
    (node,) = ray_internals.cluster_nodes(SECONDS)
    assert cluster.address.startswith("127.0.0.1:") and node.daemon[0] == "127.0.0.1"


def test_free_resources_shrink_by_what_an_actor_reserves(cluster: RaySession) -> None:
    cpus = cluster.cpus()  # not 2 if a test before this one has left its cluster open for the whole process
    assert [node["CPU"] for node in ray_internals.free_resources(SECONDS)] == [cpus]
    actor = start_actor(1)
    ray.get(actor.node.remote())
    until = time.monotonic() + 30
    while [node.get("CPU") for node in ray_internals.free_resources(SECONDS)] != [cpus - 1]:
        assert time.monotonic() < until
        time.sleep(0.1)
    ray.kill(actor)


def test_actor_has_an_address_once_it_has_a_process(cluster: RaySession) -> None:
    actor = start_actor(0)
    own = ray.get(actor.node.remote())
    address = ray_internals.actor_address(actor, SECONDS)
    assert address is not None and address.node_id == own and address.port > 0
    waiting = start_actor(3)  # more than the cluster has
    address = ray_internals.actor_address(waiting, SECONDS)
    assert address is None or address.port == 0
    ray.kill(actor)
    ray.kill(waiting)


def test_started_processes_are_those_of_the_cluster(cluster: RaySession) -> None:
    started = ray_internals.started_processes()
    assert started is not None
    processes, logs = started
    names = {Path(f"/proc/{process.pid}/exe").readlink().name for process in processes}
    assert {"gcs_server", "raylet"} <= names and all(process.poll() is None for process in processes)
    assert any(logs.glob("gcs_server*"))


def run(program: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ended.stdout.strip()


def test_token_is_found_where_it_was_put_and_after_it_was_put_there(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from clickline.distributed.ray_internals import has_auth_token\n"
        "before = has_auth_token()\n"
        "os.environ['RAY_AUTH_TOKEN'] = 'a' * 64\n"
        "print(before, has_auth_token())\n"
    )
    assert run(program, RAY_AUTH_MODE="token", HOME=str(tmp_path)) == "False True"
    file = tmp_path / "token"
    file.write_text("b" * 64)
    assert run(program, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file)) == "True True"


def test_running_cluster_is_the_one_that_a_variable_names() -> None:
    program = "from clickline.distributed.ray_internals import running_cluster; print(running_cluster())"
    assert run(program, RAY_ADDRESS="127.0.0.1:1") == "127.0.0.1:1"


def test_command_is_that_of_ray() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ray_internals.RAY_COMMAND, "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ray.__version__ in ended.stdout
