"""Served scores equal evaluated ones: a real server gives log rows the scores that `evaluate` gave them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import clickline
from clickline.artifacts.checkpoint import find_checkpoint
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.features.encoder_kernels import xxh64
from clickline.models.model import open_checkpoint
from clickline.publishing.run import publish
from clickline.storage.storage import Storage
from servers.paddle_messages import V0_6, BrpcClient
from servers.waiting import free_ports

pytestmark = pytest.mark.slow

FIELDS = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]


@pytest.fixture(scope="module")
def published(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ads"
    shutil.copytree(trained, folder)
    publish(load_config(folder / "clickline.yaml"))
    return folder


@pytest.fixture(scope="module")
def ports(published: Path) -> Iterator[dict[str, int]]:
    """The ports of a server started by the CLI with the published version."""
    names = ("grpc_port", "http_port", "metrics_port", "brpc_port")
    given = dict(zip(names, free_ports(4), strict=True))
    settings = [word for name, port in given.items() for word in ("--set", f"serve.{name}={port}")]
    command = [
        Path(sys.executable).with_name("clickline"),
        "serve",
        "--json",
        "--set",
        "serve.processes=2",
        *settings,
    ]
    with (published / "serve.log").open("w") as log:
        process = subprocess.Popen(command, cwd=published, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            up = process.stdout.readline()
            assert up, (published / "serve.log").read_text()
            assert json.loads(up)["version"] == 1
            yield given
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            process.stdout.close()


@pytest.fixture(scope="module")
def rows(published: Path) -> list[dict[str, object]]:
    """The evaluation log as a client would send it."""
    lines = (published / "data" / "eval.tsv").read_text().splitlines()
    found: list[dict[str, object]] = []
    for line in lines:
        _, *values = line.split("\t")
        row: dict[str, object] = dict(zip(FIELDS, values, strict=True))
        for name in FIELDS[:13]:
            row[name] = float(str(row[name])) if row[name] else None
        found.append(row)
    return found


@pytest.fixture(scope="module")
def evaluated(published: Path) -> np.ndarray:
    """The checkpoint's own scores of the prepared eval rows."""
    config = load_config(published / "clickline.yaml")
    dataset = Dataset.current(Storage(), config.home)
    shards = dataset.splits["eval"].shards
    parts = [
        dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups("eval")
    ]
    return open_checkpoint(find_checkpoint(None, config.home), 2).score(concat_rows(parts))


@pytest.mark.parametrize("protocol", ["grpc", "http", "v2-grpc", "v2-http"])
def test_served_scores_equal_the_evaluated_ones(ports, rows, evaluated, protocol):
    port = ports["grpc_port" if protocol.endswith("grpc") else "http_port"]
    with clickline.Client(f"127.0.0.1:{port}", protocol=protocol) as client:
        found = [client.predict(rows[start : start + 400]) for start in range(0, len(rows), 400)]
        alone = [client.predict([row]).probability[0] for row in rows[:20]]
    served = np.concatenate([one.probability for one in found])
    assert {one.version for one in found} == {1}
    np.testing.assert_allclose(served, evaluated, rtol=0, atol=1e-6)
    np.testing.assert_allclose(alone, evaluated[:20], rtol=0, atol=1e-6)


def test_brpc_gives_the_scores_of_grpc(published, ports, rows, evaluated):
    """Feasigns and numbers by the config that `versions client-config` writes."""
    command = [Path(sys.executable).with_name("clickline"), "versions", "client-config", "1"]
    written = subprocess.run(command, cwd=published, capture_output=True, text=True, check=True).stdout
    numbers = written[: written.index("feed_var")].splitlines()[-1].removeprefix("#").split()
    names = re.findall(r'feed_var \{\n  name: "(\w+)"', written)
    assert names == [*(f"C{n}" for n in range(1, 27)), "dense_input"] and len(numbers) == 13
    request = V0_6["Request"](fetch_var_names=["logistic"])
    for row in rows[:400]:
        inst = request.insts.add()
        for name in names[:-1]:
            text = np.frombuffer(str(row[name]).encode(), dtype=np.uint8)
            feasign = int(np.uint64(xxh64(text, 0, text.size)).astype(np.int64))
            inst.tensor_array.add(elem_type=0, shape=[-1], int64_data=[feasign] if text.size else [])
        values = [np.nan if row[name] is None else row[name] for name in numbers]
        inst.tensor_array.add(elem_type=1, shape=[13], float_data=values)
    with BrpcClient(ports["brpc_port"]) as client:
        answer = V0_6["Response"].FromString(client.call(request.SerializeToString()))
    served = np.array(answer.outputs[0].insts[0].tensor_array[0].float_data, dtype=np.float32)
    with clickline.Client(f"127.0.0.1:{ports['grpc_port']}") as client:
        np.testing.assert_array_equal(served, client.predict(rows[:400]).probability)
    np.testing.assert_allclose(served, evaluated[:400], rtol=0, atol=1e-6)


def test_ranked_scores_equal_those_of_whole_rows(ports, rows):
    shared = FIELDS[:5] + FIELDS[13:25]
    context = {name: rows[0][name] for name in shared}
    candidates = [{name: row[name] for name in FIELDS if name not in shared} for row in rows[:100]]
    whole = [{**context, **candidate} for candidate in candidates]
    with clickline.Client(f"127.0.0.1:{ports['grpc_port']}") as client:
        wanted = client.predict(whole).probability
        ranked = client.rank(context, candidates)
        best = client.rank(context, candidates, top_k=7)
    np.testing.assert_allclose(ranked.scores, wanted, rtol=0, atol=1e-6)
    assert list(best.indices) == np.argsort(-ranked.scores, kind="stable")[:7].tolist()


@pytest.mark.parametrize("name", ["dense.onnx", "table-00001-of-00002.bin", "sample.npz"])
def test_damaged_version_is_refused_and_the_old_one_keeps_serving(published, ports, rows, name):
    config = load_config(published / "clickline.yaml")
    registry = registry_of(config)
    registry.move(1, "hold it", after=registry.current(), pinned=True)
    otherwise = load_config(published / "clickline.yaml", [f"publish.sample_rows={100 + len(name)}"])
    waiting = publish(otherwise, base=True).version
    path = Path(waiting.folder, name)
    whole = path.read_bytes()
    middle = len(whole) // 2
    log = published / "serve.log"
    with clickline.Client(f"127.0.0.1:{ports['grpc_port']}") as client:

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not condition():
                assert client.predict(rows[:3]).version in (1, waiting.number)
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.02)

        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        line = f'"version": {waiting.number}'
        count = log.read_text().count(line)
        registry.move(waiting.number, "go", after=registry.current())
        until(lambda: log.read_text().count(line) > count)
        assert client.predict(rows[:3]).version == 1
        path.write_bytes(whole)
        registry.move(1, "back", after=registry.current())
        registry.move(waiting.number, "fixed", after=registry.current())
        until(lambda: client.predict(rows[:3]).version == waiting.number)
        registry.move(1, "the next test begins here", after=registry.current())
        until(lambda: client.predict(rows[:3]).version == 1)
