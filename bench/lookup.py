"""The lookup server beside Redis: 2,600 keys a request, rows of 40 bytes, the same number of clients.

python bench/lookup.py          1 M rows, 1, 2 and 4 clients; writes docs/benchmarks.md
python bench/lookup.py --try    a short run, printed only
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import (
    PrecisionCost,
    VersionManifest,
    VersionModel,
    VersionNetwork,
    VersionSample,
)
from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.serving import (
    GatherBatch,
    PartShape,
    RowBlock,
    ServingTable,
    gather_plan,
    write_shards,
)
from clickline.embedding.serving.packed_rows import mix_ids
from clickline.records import SlotIds
from clickline.scoring.lookup_pool import LookupPool
from clickline.scoring.remote_rows import RemoteRows
from clickline.scoring.scorer import RowSource
from clickline.storage.storage import Storage
from clickline.wire.lookup_frames import HEADER, answer_bytes, hello, lookup_keys_at, write_lookup_header
from measure import Row, publish

ROWS, KEYS, DIM = 1_000_000, 2600, 9
PARTS = (PartShape(DIM, True),)
WIDTH = 4 + 4 * DIM  # bytes of a row
REQUESTS = 32  # requests that a client sends in turn
SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: different numbers give different ids


@dataclass(frozen=True)
class Rate:
    """Throughput and latency of a server."""

    keys: float  # per second, all clients together
    p50: float  # seconds of a request
    p99: float


def ids_of(rows: int) -> np.ndarray:
    return np.arange(1, rows + 1, dtype=np.uint64) * SPREAD


def wanted(rows: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, rows + 1, KEYS).astype(np.uint64) * SPREAD for _ in range(REQUESTS)]


@contextmanager
def table(rows: int, shards: int = 1) -> Iterator[Path]:
    """Create a folder whose registry has one version with this many rows."""
    with tempfile.TemporaryDirectory(prefix="bench-lookup-") as name:
        folder = Path(name)
        registry = Registry(Storage(), str(folder / "registry"))
        ids = ids_of(rows)
        ids = ids[np.argsort(mix_ids(ids))]
        rng = np.random.default_rng(0)
        block = RowBlock(
            0,
            ids,
            rng.standard_normal(rows, dtype=np.float32),
            rng.standard_normal((rows, DIM), dtype=np.float32),
            np.zeros(rows, dtype=np.bool_),
        )
        with registry.draft() as draft:
            write_shards(draft.folder, PARTS, "fp32", shards, [block])
            version = draft.commit(manifest(rows, shards))
        registry.move(version.number, "bench", after=None)
        (folder / "clickline.yaml").write_text("data: {train: [nothing.tsv]}\n")
        yield folder


def manifest(rows: int, shards: int) -> VersionManifest:
    """The manifest of a version that has a table and no network."""
    return VersionManifest(
        number=0, created="", parent=None, table="base", rows=rows, tombstones=0, table_precision="fp32",
        dense_precision="fp32", shards=shards, parts=PARTS, slots=(), features={"dense": [], "slots": []},
        network=VersionNetwork("lr", None, (), False), width=0, logit_shift=0.0, calibration=None,
        model=VersionModel("bench", 1), config="", report=None, sample=VersionSample(0), cost=PrecisionCost(), files={},
    )  # fmt: skip


@contextmanager
def lookup_server(folder: Path, shard: int = 0) -> Iterator[tuple[str, int]]:
    """Start `clickline lookup` on the registry of `table`; yields host and port."""
    command = (
        "from pathlib import Path; import sys; from clickline.cli.lookup import JsonOptions, lookup; "
        "lookup(JsonOptions(Path(sys.argv[2]), sys.argv[3:], True), int(sys.argv[1]), 0)"
    )
    settings = {"home": folder, "cache.dir": folder / "cache", "serve.metrics_port": free_port()}
    arguments = [
        str(shard),
        str(folder / "clickline.yaml"),
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            output = ""
            for line in server.stdout:
                output += line
                if line == "}\n":
                    break
            host, _, port = json.loads(output)["address"].rpartition(":")
            yield host, int(port)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)


@contextmanager
def redis_server(rows: int = ROWS) -> Iterator[tuple[str, int]]:
    """Start a real Redis with the same number of rows; yields host and port."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            connection = connect("127.0.0.1", port)
            row = os.urandom(WIDTH)
            ids = ids_of(rows)
            for first in range(0, rows, 10_000):
                piece = ids[first : first + 10_000]
                parts = [b"MSET"]
                for id in piece.tolist():
                    parts += [struct.pack("<Q", id), row]
                connection.sendall(resp(parts))
                assert receive(connection, bytearray(5), 5) == 5
            connection.close()
            yield "127.0.0.1", port
        finally:
            server.terminate()
            server.wait(20)


def resp(parts: Sequence[bytes]) -> bytes:
    """A Redis command."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def lookups(rows: int, client: int) -> tuple[list[bytes], int]:
    """Our requests, and the size of each answer."""
    frames = []
    for n, ids in enumerate(wanted(rows, client)):
        frame = np.empty(lookup_keys_at(1) + 8 * KEYS, dtype=np.uint8)
        write_lookup_header(frame, 0, n, 1, [KEYS])
        frame[lookup_keys_at(1) :] = ids.view(np.uint8)
        frames.append(frame.tobytes())
    return frames, HEADER.size + answer_bytes([KEYS], [WIDTH])


def mgets(rows: int, client: int) -> tuple[list[bytes], int]:
    """Redis's requests, and the size of each answer."""
    frames = [
        resp([b"MGET", *(struct.pack("<Q", id) for id in ids.tolist())]) for ids in wanted(rows, client)
    ]
    return frames, len(b"*%d\r\n" % KEYS) + KEYS * (WIDTH + len(b"$%d\r\n\r\n" % WIDTH))


def rate(
    address: tuple[str, int], rows: int, clients: int, seconds: float, *, handshake: bool, requests=lookups
) -> Rate:
    """Each client is a process that sends a request, waits for the whole answer, and sends the next. Both servers get the
    same client, which does not read the content of answers."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for client in range(clients):
            pid = os.fork()
            if pid == 0:
                try:
                    _client(
                        address, requests(rows, client), seconds, handshake, Path(folder, f"{client}.npy")
                    )
                finally:
                    os._exit(0)
            processes.append(pid)
        for pid in processes:
            os.waitpid(pid, 0)
        times = [np.load(Path(folder, f"{client}.npy")) for client in range(clients)]
    return Rate(
        sum(KEYS * one.size / one.sum() for one in times),
        float(np.median(np.concatenate(times))),
        float(np.quantile(np.concatenate(times), 0.99)),
    )


def _client(
    address: tuple[str, int], requests: tuple[list[bytes], int], seconds: float, handshake: bool, result: Path
) -> None:
    frames, size = requests
    connection = connect(*address)
    room = bytearray(size)
    if handshake:
        connection.sendall(hello(None))
        receive(connection, room, HEADER.size)
        receive(connection, room, HEADER.unpack_from(room)[0])
    times = []
    until = time.perf_counter() + seconds + 0.3
    warm = time.perf_counter() + 0.3
    n = 0
    while (began := time.perf_counter()) < until:
        connection.sendall(frames[n % REQUESTS])
        if receive(connection, room, size) != size:
            raise RuntimeError("the server closed the connection")
        if began > warm:
            times.append(time.perf_counter() - began)
        n += 1
    np.save(result, np.array(times))


def connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((host, port))
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, room: bytearray, size: int) -> int:
    view, have = memoryview(room), 0
    while have < size:
        count = connection.recv_into(view[have:size])
        if not count:
            break
        have += count
    return have


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(
    rows: int = ROWS, seconds: float = 3.0, clients: Sequence[int] = (1, 2, 4), turns: int = 3
) -> list[Row]:
    """Measure both servers in turns; the best of each."""
    lines = []
    with table(rows) as folder, lookup_server(folder) as ours, redis_server(rows) as theirs:
        for count in clients:
            best: dict[str, Rate] = {}
            for _ in range(turns):
                for name, got in (
                    ("ours", rate(ours, rows, count, seconds, handshake=True)),
                    ("redis", rate(theirs, rows, count, seconds, handshake=False, requests=mgets)),
                ):
                    if name not in best or got.keys > best[name].keys:
                        best[name] = got
            of = f"{count} client{'s' if count > 1 else ''}"
            for name, title in (("redis", "Redis MGET"), ("ours", "clickline lookup")):
                got = best[name]
                figure = (
                    f"{got.keys / 1e6:.1f} M keys/s, p50 {got.p50 * 1e3:.2f} ms, p99 {got.p99 * 1e3:.2f} ms"
                )
                ratio = f"{got.keys / best['redis'].keys:.1f}x" if name == "ours" else ""
                lines.append(Row(f"{title}, {of}", figure, ratio, "≥ 15x" if name == "ours" else ""))
    return lines


def gathers(rows: int = ROWS, seconds: float = 2.0) -> list[Row]:
    """The gather of a predictor for 100 candidates with 26 slots: from mapped files, from two lookup servers, and with a
    cache of hot rows. Ids are skewed as in logs; about half are distinct."""
    rng = np.random.default_rng(1)
    plan = gather_plan(PARTS, [(0, DIM * s, "sum", 0.0, [0.0] * DIM) for s in range(26)])
    batches = []
    for _ in range(200):
        numbers = (rows * rng.random((26, 100)) ** 6).astype(np.uint64) + np.uint64(1)
        batches.append(to_jagged([SlotIds(numbers[s] * SPREAD) for s in range(26)], 100))
    inputs_BI, wide_B = np.empty((100, 26 * DIM), np.float32), np.empty(100, np.float32)
    misses_S = np.zeros(26, np.int64)

    def seconds_a_call(source: RowSource) -> float:
        for bags in batches:
            source.gather(GatherBatch(plan, bags, inputs_BI, wide_B, misses_S))
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            source.gather(GatherBatch(plan, batches[len(times) % len(batches)], inputs_BI, wide_B, misses_S))
            times.append(time.perf_counter() - began)
        return float(np.median(times))

    with table(rows, 2) as folder, lookup_server(folder, 0) as first, lookup_server(folder, 1) as second:
        local = ServingTable.open([next(Path(folder, "registry", "versions").iterdir())])
        shards = [[f"{host}:{port}"] for host, port in (first, second)]
        with LookupPool(shards, timeout=5) as lookups:
            took = {"mapped files": seconds_a_call(local)}
            for name, cache in (
                ("two lookup servers", 0),
                (f"the same, {rows // 10:,} hot rows kept", rows // 10),
            ):
                remote = RemoteRows(lookups, 1, PARTS, "fp32", missing="unavailable", cache=cache)
                before = dataclasses.replace(lookups.stats)
                took[name] = seconds_a_call(remote)
            hits = (lookups.stats.cache_hits - before.cache_hits) / (
                lookups.stats.cache_lookups - before.cache_lookups
            )
    plain = took["two lookup servers"]
    return [
        Row(
            f"100 candidates, {name}",
            f"{one * 1e3:.2f} ms" + (f", {hits:.0%} of the distinct ids" if "kept" in name else ""),
            f"{plain / one:.1f}x" if one != plain else "",
        )
        for name, one in took.items()
    ]


def main() -> None:
    short = "--try" in sys.argv
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed")
    rows = [*compare(200_000, 1.0, turns=1), *gathers(200_000, 1.0)] if short else [*compare(), *gathers()]
    publish(
        "lookup",
        "Lookup server",
        f"`python bench/lookup.py` ({ROWS:,} rows of {WIDTH} bytes, {KEYS:,} keys a request drawn uniformly; a client is a "
        "process with one connection and sends the next request after the whole answer; best of 3 runs in turns).",
        rows,
        "Clients and server share the machine's cores. The client is the same code for both and does not read the rows.",
        write=not short,
    )


if __name__ == "__main__":
    main()
