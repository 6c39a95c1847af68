"""Serving: requests a second beside five model servers with the same network.

python bench/serve.py                          all parts, into docs/benchmarks.md
python bench/serve.py ranking single           those parts: ranking, single, batch, batching, latency, freshness
python bench/serve.py ranking --peers kserve   only beside those peers, printed only
python bench/serve.py --try                    very short turns and printed only, as a smoke test
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import numpy as np

import clickline
from clickline.wire.messages import PredictResponse
from measure import ROOT, Row, free_ports, publish
from peers.serving.load import write_bodies
from peers.serving.servers import PEERS, Endpoint, Peer, Server, start_peer
from published import Live, predict_body, rank_body

CORES = 2
SLOTS, DIM, DENSE, HIDDEN = 26, 9, 13, (512, 256, 128, 32)
WIDTH = SLOTS * DIM + DENSE
NETWORK = f"Wide & Deep, {SLOTS} slots, dim {DIM}, {DENSE} dense, {'-'.join(map(str, HIDDEN))}"
CANDIDATES, BATCH = 100, 512
CONNECTIONS = 8
PREDICT = Endpoint("grpc", "/tensorflow.serving.PredictionService/Predict")
DELTA_IDS = 100_000
OPEN_CONNECTIONS = 64  # of the open loop: more than are ever in flight, so that nothing waits in the client
REQUESTS = 32  # different ones, sent in turn
LOAD = ROOT / "bench" / "peers" / "serving" / "load.py"
BARE = ROOT / "bench" / "peers" / "serving" / "bare.py"

# Wide & Deep on Criteo in batches of 512, rows a second of one core, as published by IntelAI for its models.
INTEL_FP32, INTEL_INT8 = 10_800, 41_900


@dataclass(frozen=True)
class Size:
    """How much is measured: for real, or as a smoke test."""

    turns: int
    seconds: float  # of one turn of one contestant
    first: float  # seconds of warm-up load before the turns
    write: bool


REAL = Size(3, 4.0, 4.0, True)
TRY = Size(1, 0.5, 0.5, False)


# ── contestants ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Traffic:
    """Prepared requests, and the form of their answers."""

    kind: str  # grpc | http | raw
    call: Mapping[str, object]
    bodies: list[bytes]


@dataclass(frozen=True)
class Contestant:
    """A server under test; `traffic` returns requests with the given number of rows."""

    server: Server
    traffic: Callable[[int], Traffic]


def traffic_to(endpoint: Endpoint, port: int, bodies: list[bytes]) -> Traffic:
    """Requests to an endpoint; a real client sends the first one to measure the length of answers."""
    return Traffic(endpoint.kind, endpoint.call(len(endpoint.ask(port, bodies[0]))), bodies)


def ours(folder: Path, precision: str, *settings: str) -> Contestant:
    """`clickline serve` with the same network and a table of a million ids; it receives raw fields."""
    live = Live(folder, 1_000_000, f"publish.dense_precision={precision}")
    live.publish()
    server = serving(live, precision, *settings)
    rank = Endpoint("grpc", "/clickline.v1.Ranking/Rank")

    def traffic(rows: int) -> Traffic:
        endpoint, body = (rank, rank_body) if rows == CANDIDATES else (PREDICT, predict_body)
        return traffic_to(endpoint, server.port, [body(rows, live.values, seed) for seed in range(REQUESTS)])

    return Contestant(server, traffic)


def serving(live: Live, precision: str, *more: str) -> Server:
    """`clickline serve` in two processes, started and answering."""
    grpc_port, http_port, metrics_port = free_ports(3)
    serve = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port, "processes": CORES}
    chosen = [*(f"{key}={value}" for key, value in serve.items()), *more]
    settings = [word for one in chosen for word in ("--set", f"serve.{one}")]
    program = Path(sys.executable).with_name("clickline")
    command = [program, "serve", "-c", live.folder / "clickline.yaml", *settings]
    server = Server("Clickline", f"{clickline.__version__}, {precision}", grpc_port, live.folder, command)
    try:
        server.wait_until(lambda: PREDICT.ask(grpc_port, predict_body(1, live.values, 0)), 120)
    except BaseException:
        server.stop()
        raise
    return server


def rows_of_floats(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ready-made embeddings, which are sent to the peers."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, WIDTH)).astype(np.float32), rng.normal(size=rows).astype(np.float32)


def contestant(peer: Peer) -> Contestant:
    def traffic(rows: int) -> Traffic:
        bodies = [peer.protocol.encode(*rows_of_floats(rows, seed)) for seed in range(REQUESTS)]
        return traffic_to(peer.protocol.endpoint, peer.server.port, bodies)

    return Contestant(peer.server, traffic)


def export() -> bytes:
    """The network of all contestants; its weights depend only on the seed."""
    from clickline.models.network_spec import NetworkSpec
    from clickline.models.networks import build_network
    from clickline.models.onnx_export import export_onnx

    spec = NetworkSpec(dims=(DIM,) * SLOTS, dense=DENSE, hidden=HIDDEN)
    return export_onnx(build_network("wide_deep", spec, seed=0), spec)


# ── load ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Turn:
    """Measurements of one turn; times in seconds, CPU time in cores."""

    rate: float  # requests a second
    p50: float
    p99: float
    client: float
    server: float
    late: float = 0.0  # open loop: requests that could not be started when due


def send(
    server: Server,
    traffic: Traffic,
    seconds: float,
    connections: int,
    *,
    warm_up: float = 0.3,
    rate: float | None = None,
) -> Turn:
    """Run one turn in a separate load process."""
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder, "bodies")
        write_bodies(bodies, traffic.bodies)
        job = {
            "kind": traffic.kind, "port": server.port, "call": traffic.call, "bodies": str(bodies),
            "connections": connections, "seconds": seconds, "warm_up": warm_up, "rate": rate,
        }  # fmt: skip
        before = server.cpu_seconds()
        done = subprocess.run(
            [sys.executable, str(LOAD)], input=json.dumps(job), capture_output=True, text=True, check=False,
            timeout=seconds + warm_up + 60,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{server.name}: {done.stderr.strip()[-1500:]}")
    measured = json.loads(done.stdout)
    used = (server.cpu_seconds() - before) / (seconds + warm_up)
    return Turn(measured["rate"], measured["p50"], measured["p99"], measured["cpu"], used, measured["late"])


@dataclass
class Result:
    """The turns of one contestant with requests of `rows` rows, or why there are none."""

    name: str
    rows: int
    turns: list[Turn] = field(default_factory=list)
    failed: str = ""

    @property
    def best(self) -> Turn:
        return max(self.turns, key=lambda turn: turn.rate)

    @property
    def figure(self) -> str:
        if self.failed or not self.turns:
            return f"not measured: {(self.failed or 'no turn').splitlines()[0][:200]}"
        best = self.best
        return (
            f"{best.rate:,.0f} requests/s, {best.rate * self.rows:,.0f} rows/s; p50 {best.p50 * 1e3:.1f} ms, "
            f"p99 {best.p99 * 1e3:.1f} ms; cores: server {best.server:.2f}, client {best.client:.2f}"
        )


def compete(size: Size, contestants: Mapping[str, Contestant], rows: int) -> dict[str, Result]:
    """Measure all contestants in turns, one at a time."""
    results, ready = {}, {}
    for name, one in contestants.items():
        results[name] = Result(f"{one.server.name} ({one.server.version})", rows)
        try:
            ready[name] = one.traffic(rows)
            send(one.server, ready[name], size.first, CONNECTIONS)
        except (RuntimeError, OSError, grpc.RpcError) as error:
            results[name].failed = str(error)
    for turn in range(size.turns):
        for name, one in contestants.items():
            if results[name].failed:
                continue
            try:
                results[name].turns.append(send(one.server, ready[name], size.seconds, CONNECTIONS))
            except RuntimeError as error:
                results[name].failed = str(error)
            print(
                f"  {turn + 1}/{size.turns} {results[name].name}, {rows} rows: {results[name].figure}",
                flush=True,
            )
    return results


def bare(network: Path, rows: int, seconds: float) -> float:
    """Batches per second of the network in two processes, without a server."""
    command = [sys.executable, str(BARE), str(rows), str(seconds)]
    variables = {**os.environ, "SERVED_NETWORK": str(network)}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(CORES)
    ]
    try:
        return sum(float(one.communicate(timeout=seconds + 60)[0]) for one in running)
    finally:
        for one in running:
            one.kill()
            one.wait()


@contextmanager
def started(
    folder: Path, network: bytes, peers: Sequence[str]
) -> Iterator[tuple[dict[str, Contestant], dict[str, str]]]:
    """Start ours and the peers (an idle one uses no CPU time); yields them, and why some could not be started."""
    file = folder / "network.onnx"
    file.write_bytes(network)
    sent = rows_of_floats(CANDIDATES, seed=0)
    logit_B = logits(network, *sent)
    running: dict[str, Contestant] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name in ("ours", "ours, int8", *peers):
            print(f"  starting {name} …", flush=True)
            try:
                if name.startswith("ours"):
                    running[name] = ours(folder / name, "int8" if name.endswith("int8") else "fp32")
                else:
                    running[name] = contestant(start_peer(name, folder / name, file, *sent, logit_B))
            except (NotImplementedError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                missing[name] = str(error)
                print(f"  skipped: {error}", flush=True)
                continue
            stack.callback(running[name].server.stop)
        yield running, missing


def logits(network: bytes, inputs_BI: np.ndarray, wide_B: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logit"], {"inputs": inputs_BI, "wide": wide_B})[0])


# ── parts ──────────────────────────────────────────────────────────────────────────────────────


def requests(size: Size, parts: Sequence[str], peers: Sequence[str]) -> dict[str, dict[str, Result]]:
    """`ranking`, `single`, `batch` and `latency`, which share the servers. Returns the results of each."""
    beside = peers if {"ranking", "single"} & set(parts) else ()
    results: dict[str, dict[str, Result]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, network = Path(name), export()
        with started(folder, network, beside) as (running, missing):
            tables = partial(table, size, folder / "network.onnx", missing)
            if "ranking" in parts:
                results["ranking"] = compete(size, running, CANDIDATES)
                tables(
                    results["ranking"], "serve-ranking", f"Ranking: one user and {CANDIDATES} candidates a request", "≥ 3x",
                    "python bench/serve.py ranking",
                )  # fmt: skip
            if "single" in parts:
                results["single"] = compete(size, running, 1)
                tables(
                    results["single"], "serve-single", "Requests of one row", "≥ 2x", "python bench/serve.py single"
                )  # fmt: skip
            if "ours" in running:
                if "batch" in parts:
                    results["batch"] = batches(size, folder, running)
                if "batching" in parts:
                    results["batching"] = batching(size, folder, running["ours"])
                if "latency" in parts:
                    ranked = results.get("ranking") or compete(size, {"ours": running["ours"]}, CANDIDATES)
                    results["latency"] = {"ours": latency(size, running["ours"], ranked["ours"])}
    return results


def table(
    size: Size,
    network: Path,
    missing: Mapping[str, str],
    results: Mapping[str, Result],
    section: str,
    title: str,
    goal: str,
    command: str,
) -> None:
    """Ours first, then the peers from the fastest to the slowest."""
    measured = {name: result for name, result in results.items() if result.turns and not result.failed}
    mine = measured.get("ours")
    others = sorted(
        (result for name, result in measured.items() if not name.startswith("ours")),
        key=lambda one: -one.best.rate,
    )
    rows = []
    for result in (one for name, one in measured.items() if name.startswith("ours")):
        ratio = f"{result.best.rate / others[0].best.rate:.2f}x the best peer" if others else ""
        rows.append(Row(result.name, result.figure, ratio, goal))
    for result in others:
        share = f"{result.best.rate / others[0].best.rate:.2f} of the best peer"
        rows.append(
            Row(
                result.name,
                result.figure,
                f"ours is {mine.best.rate / result.best.rate:.2f}x" if mine else share,
            )
        )
    rows += [Row(result.name, result.figure) for result in results.values() if result.failed]
    rows += [Row(name, f"not measured: {why.splitlines()[0][:200]}") for name, why in missing.items()]
    count = next(iter(results.values())).rows if results else 0
    if count:
        limit = bare(network, count, max(0.3, size.seconds / 2))
        share = f"ours is {mine.best.rate / limit:.2f} of it" if mine else ""
        rows.append(
            Row(
                f"the network alone, {CORES} processes, no server",
                f"{limit:,.0f} batches/s, {limit * count:,.0f} rows/s",
                share,
            )
        )
    publish(
        section,
        title,
        f"`{command}` ({NETWORK}; ONNX Runtime, one thread a process; {CONNECTIONS} connections in one client process, each "
        f"with one request in flight; best of {size.turns} turns of {size.seconds:g} s, one server at a time, all in one run "
        f"on {CORES} cores).",
        rows,
        "Ours receives raw fields, encodes them and looks up their vectors; the peers receive the finished floats. All "
        "use the same network, and the logits of each were verified before it was measured. Each peer is called in the "
        "fastest documented way we found: MLServer, KServe and PyTriton over gRPC (Open Inference Protocol, raw contents; MLServer as one "
        "element of bytes, because it makes a list of every float tensor), BentoML and TorchServe over HTTP with plain bytes. "
        "PyTriton may batch queued requests. None writes a log line for each request. "
        "KServe serves gRPC from one process only; two processes on one port are not a feature of KServe, but show what two "
        "cores give it. The client implements HTTP/1.1 and HTTP/2 itself and sends prepared requests.",
        write=size.write,
    )


def batches(size: Size, folder: Path, running: Mapping[str, Contestant]) -> dict[str, Result]:
    """Requests of 512 rows, only ours, beside the figures that Intel published."""
    results = compete(size, {name: one for name, one in running.items() if name.startswith("ours")}, BATCH)
    limit = bare(folder / "network.onnx", BATCH, max(0.3, size.seconds / 2)) * BATCH / CORES
    rows = []
    for (name, result), published in zip(results.items(), (INTEL_FP32, INTEL_INT8), strict=False):
        precision = "int8" if name.endswith("int8") else "fp32"
        if not result.turns:
            rows.append(Row(f"{result.name}, {precision}", result.figure))
            continue
        rate = result.best.rate * BATCH / CORES
        ratio = f"{rate / published:.1f}x Intel's {published:,}"
        rows.append(Row(f"{result.name}, {precision}", f"{rate:,.0f} rows/s a core; {result.figure}", ratio))
    rows += [
        Row("the network alone, fp32, no server", f"{limit:,.0f} rows/s a core"),
        Row("published by IntelAI, fp32", f"{INTEL_FP32:,} rows/s a core"),
        Row("published by IntelAI, int8", f"{INTEL_INT8:,} rows/s a core"),
    ]
    publish(
        "serve-batch",
        f"Requests of {BATCH} rows",
        f"`python bench/serve.py batch` ({NETWORK}; {CONNECTIONS} connections; best of {size.turns} turns of {size.seconds:g} s; "
        f"a core is half of what the machine with {CORES} cores answered, client included).",
        rows,
        "Intel's figures are for its own Wide & Deep, its own machines and no server around it; they are given for comparison.",
        write=size.write,
    )
    return results


def batching(size: Size, folder: Path, alone: Contestant) -> dict[str, Result]:
    """Requests of one row, scored alone and in batches."""
    together = ours(folder / "batching", "fp32", "batching.rows=64", "batching.max_wait_ms=1")
    rows, results = [], {}
    try:
        for connections in (CONNECTIONS, OPEN_CONNECTIONS):
            for name, one in (("alone", alone), ("together", together)):
                traffic = one.traffic(1)
                send(one.server, traffic, size.first, connections)
                result = Result(name, 1)
                result.turns = [
                    send(one.server, traffic, size.seconds, connections) for _ in range(size.turns)
                ]
                results[f"{name}, {connections}"] = result
                rows.append(Row(f"scored {name}, {connections} connections", result.figure))
    finally:
        together.server.stop()
    publish(
        "serve-batching",
        "Batching of small requests",
        f"`python bench/serve.py batching` (`serve.batching: {{rows: 64, max_wait_ms: 1}}` beside none, requests of one row; best of "
        f"{size.turns} turns of {size.seconds:g} s).",
        rows,
        write=size.write,
    )
    return results


def latency(size: Size, mine: Contestant, ranked: Result) -> Result:
    """Ours at half of its peak: requests start at fixed times, whether or not others have been answered."""
    rate = ranked.best.rate / 2
    traffic = mine.traffic(CANDIDATES)
    result = Result(mine.server.name, CANDIDATES)
    for _ in range(size.turns):
        seconds = size.seconds * 2
        result.turns.append(send(mine.server, traffic, seconds, OPEN_CONNECTIONS, warm_up=0.5, rate=rate))
    p50 = statistics.median(turn.p50 for turn in result.turns)
    p99 = statistics.median(turn.p99 for turn in result.turns)
    late = max(turn.late for turn in result.turns)
    publish(
        "serve-latency",
        "Ranking at half the peak load",
        f"`python bench/serve.py ranking latency` ({CANDIDATES} candidates a request, open loop: {rate:,.0f} requests/s at fixed "
        f"moments, times from when a request was due; {OPEN_CONNECTIONS} connections; the middle of {size.turns} turns of "
        f"{size.seconds * 2:g} s).",
        [
            Row(mine.server.name, f"p99 {p99 * 1e3:.2f} ms", f"p50 {p50 * 1e3:.2f} ms", "p99 ≤ 10 ms"),
            Row("requests that could not be started when due", f"{late:.0f}", "", "0"),
        ],
        write=size.write,
    )
    return result


def freshness(size: Size) -> list[float]:
    """Time from publishing a trained model to the first answer by the new version."""
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        live = Live(Path(name))
        live.publish()
        server = serving(live, "fp32")
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                ask = channel.unary_unary(PREDICT.path)
                body = predict_body(1, live.values, 0)
                for delta in range(2 + 4 * size.turns):
                    live.touch(
                        np.random.default_rng(delta).integers(0, live.values, (SLOTS, DELTA_IDS // SLOTS))
                    )
                    began = time.perf_counter()
                    number = live.publish().version.number
                    published = time.perf_counter() - began
                    while (
                        PredictResponse.FromString(ask(body, timeout=10)).model_spec.version.value != number
                    ):
                        time.sleep(0.002)
                    seconds.append(time.perf_counter() - began)
                    print(
                        f"  delta {delta}: published in {published:.2f} s, answered in {seconds[-1]:.2f} s",
                        flush=True,
                    )
        finally:
            server.stop()
    counted = seconds[2:]
    publish(
        "serve-freshness",
        "From publish to the first answer",
        f"`python bench/serve.py freshness` (a table of a million ids, {DELTA_IDS:,} of them touched; publish in the process that "
        f"trains, the server polls every second; {len(counted)} deltas, one on the other).",
        [
            Row("middle", f"{statistics.median(counted):.2f} s", "", "≤ 2 s"),
            Row("longest", f"{max(counted):.2f} s", "", "≤ 2 s"),
        ],
        write=size.write,
    )
    return counted


PARTS = ("ranking", "single", "batch", "batching", "latency", "freshness")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; none: ''")
    parser.add_argument("--try", dest="only_try", action="store_true", help="smoke test, nothing is written")
    arguments = parser.parse_args()
    peers = [name for name in arguments.peers.split(",") if name]
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}; available: {', '.join(PARTS)}")
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"unknown peer {', '.join(unknown)}; available: {', '.join(PEERS)}")
    size = TRY if arguments.only_try else REAL
    if peers != list(PEERS):
        size = Size(size.turns, size.seconds, size.first, write=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that every server is stopped too
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # for the servers too
    parts = arguments.parts or PARTS
    print(f"serve: {', '.join(parts)}", flush=True)
    if set(parts) - {"freshness"}:
        requests(size, parts, peers)
    if "freshness" in parts:
        freshness(size)


if __name__ == "__main__":
    main()
