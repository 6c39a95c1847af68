"""Our HTTP/2 beside grpc.aio: the same queue, decoding, network and encoding behind both, in one process each.

python bench/http2.py          measured in turns, into docs/benchmarks.md
python bench/http2.py --try    very short turns and printed only, as a smoke test
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import uvloop

from clickline.config import load_config
from clickline.serving.auth import BearerAuth
from clickline.serving.dataplane import Dataplane
from clickline.serving.grpc_methods import GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS
from clickline.serving.grpc_server import GrpcServer
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.request import Limits
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics
from clickline.serving.version_loading import open_version
from measure import Row, free_ports, publish
from published import Live, predict_body
from serve import CONNECTIONS, PREDICT, REQUESTS, TRY, Server, Size, send, traffic_to

ROWS = (1, 100)
GOAL = 1.25  # ours stays only if it is this much faster with both
REAL = Size(
    turns=9, seconds=2.0, first=0.0, write=True
)  # many short turns: other load affects neighbours alike
STACKS = {"ours": "our HTTP/2 (serving/http2)", "aio": f"grpc.aio {grpc.__version__}"}


async def run_server(stack: str, config_file: Path, port: int) -> None:
    """Serve the current version through one of the stacks until SIGTERM."""
    config = load_config(config_file, [f"serve.grpc_port={port}"])
    log = ServerLog("bench")
    versions = OpenVersions(("ads",), lambda scorer: scorer.close())
    folder = next(path.parent for path in config_file.parent.rglob("dense.onnx"))
    versions.add(open_version([folder], config.serve, config_file.parent / f"work-{stack}"))
    versions.switch(versions.open()[0].scorer.number)
    plane = Dataplane(versions, log, queue=config.serve.queue_size)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    if stack == "ours":
        auth, metrics = BearerAuth(None), RequestMetrics()
        ours = GrpcServer(GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS, plane, auth, config.serve, metrics, log)
        await ours.start()
        await stopping.wait()
        await ours.stop(1.0)
        return
    endpoint, limits = GRPC_ENDPOINTS[PREDICT.path], Limits()

    class Methods(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(predict) if call.method == PREDICT.path else None

    async def predict(body: bytes, context: Any) -> bytes:
        return (await plane.answer(endpoint(body, limits), None)).body

    server = grpc.aio.server(handlers=[Methods()])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await stopping.wait()
    await server.stop(1.0)


def measure(size: Size) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        live = Live(Path(name), 100_000)
        live.publish()
        bodies = {rows: [predict_body(rows, live.values, seed) for seed in range(REQUESTS)] for rows in ROWS}
        servers = {}
        for one, port in zip(STACKS, free_ports(len(STACKS)), strict=True):
            folder = Path(name, f"log-{one}")
            folder.mkdir()
            command = [sys.executable, __file__, "--server", one, live.folder / "clickline.yaml", port]
            servers[one] = Server(STACKS[one], "", port, folder, command)
            stack.callback(servers[one].stop)
            servers[one].wait_until(lambda port=port: PREDICT.ask(port, bodies[1][0]))
        table = []
        for rows in ROWS:
            turns: dict[str, list[tuple[float, float]]] = {one: [] for one in servers}
            traffic = {one: traffic_to(PREDICT, server.port, bodies[rows]) for one, server in servers.items()}
            for turn in range(-1, size.turns):  # the first one is a warm-up
                for one, server in servers.items():
                    done = send(server, traffic[one], size.seconds, CONNECTIONS)
                    if turn >= 0:
                        turns[one].append((done.rate, done.server / done.rate * 1e3))
                    print(
                        f"  {turn + 1}/{size.turns} {STACKS[one]}, {rows} rows: {done.rate:,.0f} requests/s",
                        flush=True,
                    )
            faster = [ours[0] / other[0] for ours, other in zip(turns["ours"], turns["aio"], strict=True)]
            cheaper = [other[1] / ours[1] for ours, other in zip(turns["ours"], turns["aio"], strict=True)]
            for one, measured in turns.items():
                rate, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
                ratio, goal = "", ""
                if one == "ours":
                    ratio = f"{statistics.median(faster):.2f}x the requests, {statistics.median(cheaper):.2f}x fewer CPU seconds"
                    goal = f"≥ {GOAL}x"
                what = f"{STACKS[one]}, {rows} row{'s' if rows > 1 else ''} a request"
                table.append(Row(what, f"{rate:,.0f} requests/s; {cpu:.3f} ms of CPU time each", ratio, goal))
        publish(
            "http2",
            "gRPC: our HTTP/2 beside grpc.aio",
            f"`python bench/http2.py` (TensorFlow Serving's Predict with raw fields; Wide & Deep of `bench/serve.py`; one "
            f"process each on uvloop, {CONNECTIONS} connections with one request in flight; medians of {size.turns} turns "
            f"of {size.seconds:g} s, the two in turn; load average before it: {load:.1f}).",
            table,
            "Both answer through the same `Dataplane`: queue, lease, decoding, network, encoding. The ratios are medians of "
            "the ratios of neighbouring turns.",
            write=size.write,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", action="store_true", dest="only_try")
    parser.add_argument("--server", nargs=3)
    arguments = parser.parse_args()
    if arguments.server is not None:
        which, file, at = arguments.server
        uvloop.run(run_server(which, Path(file), int(at)))
        sys.exit()
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that every server is stopped too
    measure(TRY if arguments.only_try else REAL)
