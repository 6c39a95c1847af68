"""Registries with synthetic tables, and lookup servers for them: in this process, or as real processes."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from clickline.artifacts.registry import Registry
from clickline.embedding.jagged_ids import JaggedIds, to_jagged
from clickline.embedding.serving import (
    GatherBatch,
    GatherPlan,
    PartShape,
    RowBlock,
    ServingTable,
    gather_plan,
    write_shards,
)
from clickline.embedding.serving.packed_rows import mix_ids
from clickline.records import SlotIds
from clickline.serving.json_log import JsonLog
from clickline.serving.lookup.lookup_server import LookupServer
from clickline.serving.lookup.lookup_versions import ShardVersion, ShardVersions
from clickline.storage.storage import Storage
from servers.waiting import eventually
from version_manifests import version_manifest

PARTS = (PartShape(9, True), PartShape(4, True))
SLOTS = ((0, "sum", False), (0, "mean", True), (1, "max", True), (1, "sum", False))  # part, pooling, several
VOCABULARY = 400  # ids of a slot; three quarters have rows
COMMAND = (str(Path(sys.executable).parent / "clickline"), "lookup")


# ── tables ─────────────────────────────────────────────────────────────────────────────────────


def ids_of_part(part: int) -> np.ndarray:
    slots = [s for s, slot in enumerate(SLOTS) if slot[0] == part]
    ids = np.concatenate([np.arange(VOCABULARY * 3 // 4) + (s << 20) for s in slots]).astype(np.uint64)
    ids *= np.uint64(0xD1342543DE82EF95)
    return ids[np.argsort(mix_ids(ids))]


def random_blocks(seed: int) -> Iterator[RowBlock]:
    """Random rows of all parts."""
    rng = np.random.default_rng(seed)
    for part, shape in enumerate(PARTS):
        ids = ids_of_part(part)
        wide, vector = rng.standard_normal(ids.size), rng.standard_normal((ids.size, shape.dim))
        yield RowBlock(
            part, ids, wide.astype(np.float32), vector.astype(np.float32), np.zeros(ids.size, dtype=np.bool_)
        )


def random_delta(seed: int) -> Iterator[RowBlock]:
    """A delta: some rows changed, some deleted."""
    rng = np.random.default_rng(seed)
    for block in random_blocks(seed):
        chosen = block.select(rng.random(block.ids_N.size) < 0.2)
        yield RowBlock(
            chosen.part, chosen.ids_N, chosen.wide_N, chosen.vector_ND, rng.random(chosen.ids_N.size) < 0.3
        )


def constant_blocks(value: float) -> Iterator[RowBlock]:
    """Rows whose weights are all `value`, which identifies the version of an answer."""
    for part, shape in enumerate(PARTS):
        ids = ids_of_part(part)
        wide, vector = np.full(ids.size, value), np.full((ids.size, shape.dim), value)
        yield RowBlock(
            part, ids, wide.astype(np.float32), vector.astype(np.float32), np.zeros(ids.size, dtype=np.bool_)
        )


def publish(
    registry: Registry,
    blocks: Iterator[RowBlock],
    *,
    shards: int = 2,
    precision: str = "fp32",
    parent: int | None = None,
    current: bool = True,
) -> int:
    """Publish a version that has only a table."""
    with registry.draft(parent) as draft:
        write_shards(draft.folder, PARTS, precision, shards, blocks)  # type: ignore[arg-type]
        version = draft.commit(
            version_manifest(
                parent,
                shards=shards,
                table_precision=precision,
                parts=[{"dim": part.dim, "wide": part.wide} for part in PARTS],
            )
        )
    if current:
        registry.move(version.number, "test", after=registry.current())
    return version.number


def registry_in(folder: Path) -> Registry:
    return Registry(Storage(), str(folder / "registry"))


def opened(registry: Registry, number: int, shards: Sequence[int] | None = None) -> ServingTable:
    folders = [Path(one.folder) for one in registry.chain(registry.version(number))]
    return ServingTable.open(folders, shards=shards)


# ── calls ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Call:
    """A batch for `gather`."""

    plan: GatherPlan
    bags: JaggedIds
    rows: int

    def gather(self, source: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs_BI = np.full((self.rows, self.plan.width), np.nan, dtype=np.float32)
        wide_B = np.full(self.rows, np.nan, dtype=np.float32)
        misses_S = np.zeros(self.plan.slots, dtype=np.int64)
        source.gather(GatherBatch(self.plan, self.bags, inputs_BI, wide_B, misses_S))
        return inputs_BI, wide_B, misses_S


def call(seed: int, rows: int = 100, default: float = 0.5, known: bool = False) -> Call:
    """A batch of random ids, most of them repeated; `known`: all of them have rows."""
    rng = np.random.default_rng(seed)
    highest = VOCABULARY * 3 // 4 if known else VOCABULARY
    slots, columns, column = [], [], 0
    for s, (part, pooling, several) in enumerate(SLOTS):
        counts = rng.integers(1 if known else 0, 5, rows) if several else np.ones(rows, dtype=np.int64)
        ids = (rng.integers(0, highest, counts.sum()) + (s << 20)).astype(np.uint64)
        ids *= np.uint64(0xD1342543DE82EF95)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) if several else None
        slots.append(SlotIds(ids, offsets))
        dim = PARTS[part].dim
        columns.append((part, column, pooling, default, [default * (j + 1) for j in range(dim)]))
        column += dim
    return Call(gather_plan(PARTS, columns), to_jagged(slots, rows), rows)


def assert_same(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))  # to the bit


# ── servers in this process ────────────────────────────────────────────────────────────────────


@dataclass
class InProcessServer:
    """A server in threads of this process: real sockets, with access to its internals."""

    server: LookupServer
    versions: ShardVersions
    address: str


@contextmanager
def in_process_server(
    shard: int, tables: Mapping[int, ServingTable], **options: Any
) -> Iterator[InProcessServer]:
    versions = ShardVersions(shard)
    versions.open = {number: ShardVersion(number, one) for number, one in tables.items()}
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = LookupServer(versions, listening, JsonLog(f"lookup, shard {shard}"), **options)
    server.start()
    try:
        yield InProcessServer(server, versions, f"127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.stop(5)
        eventually(lambda: not server.connections)


@contextmanager
def in_process_servers(
    registry: Registry, numbers: Sequence[int], shards: int = 2, replicas: int = 1, **options: Any
) -> Iterator[list[list[InProcessServer]]]:
    with ExitStack() as stack:
        yield [
            [
                stack.enter_context(
                    in_process_server(shard, {n: opened(registry, n, [shard]) for n in numbers}, **options)
                )
                for _ in range(replicas)
            ]
            for shard in range(shards)
        ]


def addresses(servers: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[server.address for server in replicas] for replicas in servers]


# ── real servers ───────────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """`clickline lookup` in its own process."""

    folder: Path
    shard: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[str] | None = None
    up: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    metrics_port: int = field(default_factory=free_port)

    def start(self) -> None:
        """Start the process; `wait` waits until it listens."""
        config = self.folder / "clickline.yaml"
        config.write_text(yaml.safe_dump({"data": {"train": ["nothing.tsv"]}}))
        settings = {
            "home": self.folder,
            "cache.dir": self.folder / "cache",
            "serve.poll_interval": 0.05,
            "serve.metrics_port": self.metrics_port,
            "publish.registry": self.folder / "registry",
            **self.settings,
        }
        arguments = ["--shard", str(self.shard), "--port", str(self.port), "--json", "-c", str(config)]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read_log, args=(self.process,), daemon=True).start()

    def wait(self) -> Server:
        assert self.process is not None and self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            if line == "}\n":
                break
        self.up = json.loads(text or "{}")
        assert "address" in self.up, f"it did not start: {self.up}"
        self.port = int(self.up["address"].rpartition(":")[2])
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int | None:
        """Kill the process if it runs, and return the exit code."""
        process = self.process
        if process is None:
            return None
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        code = process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
        self.process = None
        return code

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                try:
                    self.log.append(json.loads(line))
                except ValueError:
                    self.log.append({"event": "?", "message": line})


@contextmanager
def fleet(
    folder: Path, shards: int = 2, replicas: int = 2, settings: Mapping[str, Any] | None = None
) -> Iterator[list[list[Server]]]:
    """Start real servers for all shards."""
    servers = [[Server(folder, shard, settings or {}) for _ in range(replicas)] for shard in range(shards)]
    every = [server for replicas_ in servers for server in replicas_]
    try:
        for server in every:
            server.start()
        for server in every:
            server.wait()
        yield servers
    finally:
        for server in every:
            server.end()


# ── TLS ────────────────────────────────────────────────────────────────────────────────────────


def certificate_in(folder: Path, host: str | None = None) -> tuple[Path, Path]:
    """Create a self-signed certificate for a host, by default 127.0.0.1, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address("127.0.0.1")) if host is None else x509.DNSName(host)]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file
