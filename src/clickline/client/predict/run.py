"""The predict stage: sends rows of logs to a server, and measures the quality and latency of its scores.

The latency of a request is the time from its bytes being ready to its scores being received, without encoding the
request. Requests/s and rows/s are those of the whole run, including reading and encoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clickline.artifacts.from_config import storage_of
from clickline.client import Client, ModelInfo, Prediction
from clickline.client.attempts import PreparedRequest, ServerAddress
from clickline.client.client import ProtocolName
from clickline.client.predict.elasticctr_columns import to_elasticctr_columns
from clickline.client.predict.log_batches import Batch, read_batches
from clickline.config import Config
from clickline.data.input_blocks import files_from_config, map_in_order
from clickline.data.labelled_reader import LabelledLogs
from clickline.data.schema import build_schema
from clickline.data.slot_discovery import discover_slots
from clickline.errors import ClicklineError, DataError
from clickline.evaluation.binary_metrics import MetricCounts, Metrics
from clickline.evaluation.evaluator import BLOCK_ROWS
from clickline.features import FeatureSpec
from clickline.machine import connect_host
from clickline.progress import Progress, default_progress
from clickline.records import RawColumn, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class Latency:
    """The latency of requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    highest: float


@dataclass(frozen=True)
class RequestResult:
    """Measurements of one request."""

    number: int  # from 1
    rows: int
    seconds: float
    accuracy: float | None  # None: its rows have zero weight
    version: int | None


@dataclass(frozen=True)
class PredictResult:
    """The quality and speed of a server's scores."""

    address: str
    protocol: str
    model: str
    versions: Mapping[int | None, int]  # that answered, with their number of requests
    connections: int
    requests: int
    retried: int  # requests that were sent again
    metrics: Metrics
    best_auc: float | None  # of the true probabilities, known only for synthetic logs
    bad: Mapping[str, int]  # skipped rows, by reason
    latency: Latency
    seconds: float  # of the whole run, without warm-up

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def rows_per_second(self) -> float:
        return self.metrics.rows / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "versions": {str(version): count for version, count in self.versions.items()},
            "requests_per_second": self.requests_per_second,
            "rows_per_second": self.rows_per_second,
        }


def predict(
    config: Config,
    progress: Progress | None = None,
    *,
    inputs: Sequence[str],
    batch: int = 512,
    requests: int | None = None,
    warmup: int = 10,
    address: str | None = None,
    protocol: ProtocolName = "grpc",
    connections: int = 1,
    model: str | None = None,
    token_file: str | None = None,
    ca: str | None = None,
    timeout: float = 10.0,
    on_request: Callable[[RequestResult], None] = lambda request: None,
) -> PredictResult:
    """Send the rows of logs to a server, `batch` at a time, over several connections, and measure the answers.

    `requests`: their number, by default each row once; the files are read repeatedly if needed. `warmup` more requests
    per connection are not measured. Address, token and CA file default to those of the config's `serve`.
    `on_request` is called for each request, in order.
    """
    progress = progress or default_progress()
    storage = storage_of(config)
    cache = FileCache(Path(config.cache.dir), config.cache.size, storage)
    files = files_from_config(
        config.data, inputs, config.data.eval_dates or config.data.dates, storage, progress
    )
    tls = config.serve.tls
    options: dict[str, Any] = {
        "protocol": protocol,
        "model": model or config.name,
        "token": _token(token_file or config.serve.token_file),
        "tls": ca or (False if tls is None else tls.ca or tls.certificate),
        "timeout": timeout,
    }
    with ExitStack() as open_clients:
        clients = [
            open_clients.enter_context(Client(address or _default_address(config, protocol), **options))
            for _ in range(connections)
        ]
        logs = _open_logs(config, storage, cache, files, clients[0].metadata(), progress)
        columns = _columns_for(protocol, logs.reader.features)
        if requests is None:
            progress.begin("predict", total_bytes=logs.inputs.uncompressed_bytes(progress))
        else:
            progress.begin("predict", total_rows=requests * batch)
        batches = read_batches(logs, batch, endless=requests is not None, progress=progress)
        first = next(batches)
        _warm_up(clients, clients[0].prepare(columns(first)), warmup)
        began = time.perf_counter()
        measured = _Measurement()
        for sent, (answer, seconds) in _send_all(clients, columns, islice(chain([first], batches), requests)):
            progress.advance(rows=sent.rows)
            on_request(measured.add(sent, answer, seconds))
        seconds = time.perf_counter() - began
        progress.end()
    return PredictResult(
        str(clients[0].address),
        protocol,
        options["model"],
        dict(measured.versions),
        connections,
        len(measured.seconds),
        sum(client.retried for client in clients),
        measured.metrics(),
        None if requests is not None or logs.bad else _best_auc(files),
        dict(logs.bad),
        _latency(measured.seconds),
        seconds,
    )


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


def _open_logs(
    config: Config,
    storage: Storage,
    cache: FileCache,
    files: list[SourceFile],
    served: ModelInfo,
    progress: Progress,
) -> LabelledLogs:
    """Open the files, read as configured, with the fields that the server's model uses."""
    data = config.data
    dense = discover_slots(data, files, cache, storage, progress, slots=False).dense
    schema = build_schema(
        data, [int(name) for name in served.inputs if name.isascii() and name.isdigit()], dense
    )
    unknown = [name for name in served.inputs if name not in schema.features.columns]
    if unknown:
        raise DataError(
            f"the server's model uses {', '.join(unknown[:5])}{' and others' if len(unknown) > 5 else ''}, which the "
            "logs of this config do not have. Use the config that the model was trained with, or check data.format."
        )
    needed = replace(schema, features=_without_statistics(schema.features, served))
    return LabelledLogs.open(data, files, needed, cache, storage)


def _without_statistics(features: FeatureSpec, served: ModelInfo) -> FeatureSpec:
    """The fields of the server's model, with transforms that accept the same values but need no statistics."""
    return replace(
        features,
        dense=tuple(
            replace(field, transform="none") for field in features.dense if field.column in served.inputs
        ),
        slots=tuple(
            replace(slot, source="log2" if slot.source == "quantiles" else slot.source)
            for slot in features.slots
            if slot.column in served.inputs
        ),
    )


def _columns_for(protocol: ProtocolName, features: FeatureSpec) -> Callable[[Batch], Mapping[str, RawColumn]]:
    if protocol == "elasticctr":
        return lambda batch: to_elasticctr_columns(batch.columns, features, batch.rows)
    return lambda batch: batch.columns  # unchanged: the server encodes


# ── the server ────────────────────────────────────────────────────────────────────────────────────


def _default_address(config: Config, protocol: ProtocolName) -> str:
    serve = config.serve
    port = serve.grpc_port if protocol.endswith("grpc") else serve.http_port
    return str(ServerAddress(connect_host(serve.host), port))


def _token(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        token = Path(file).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClicklineError(f"the token file {file} cannot be read: {error}.") from error
    if not token:
        raise ClicklineError(f"the first line of the token file {file} is empty. Put the token there.")
    return token


def _warm_up(clients: Sequence[Client], request: PreparedRequest[Prediction], times: int) -> None:
    def send(client: Client) -> None:
        for _ in range(times):
            client.send(request)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(send, clients))


def _send_all(
    clients: Sequence[Client], columns: Callable[[Batch], Mapping[str, RawColumn]], batches: Iterator[Batch]
) -> Iterator[tuple[Batch, tuple[Prediction, float]]]:
    """Every batch with its answer and latency, in order; one request per client is in flight."""
    idle: SimpleQueue[Client] = SimpleQueue()
    for client in clients:
        idle.put(client)

    def send(number: int, batch: Batch) -> tuple[Prediction, float]:
        client = idle.get()
        try:
            request = client.prepare(columns(batch))
            began = time.perf_counter()
            answer = client.send(request)
            seconds = time.perf_counter() - began
        finally:
            idle.put(client)
        if answer.probability.size != batch.rows:
            raise ClicklineError(
                f"{client.address} sent {answer.probability.size} scores for {batch.rows} rows. Is it a "
                "clickline server?"
            )
        return answer, seconds

    return map_in_order(send, batches, len(clients))


# ── measurements ──────────────────────────────────────────────────────────────────────────────────


class _Measurement:
    """Accumulates answers. Rows are counted in the same blocks as in `evaluate`, so the metrics are the same."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.versions: Counter[int | None] = Counter()
        self._counts = MetricCounts()
        self._pending: list[tuple[NDArray[np.float32], ...]] = []
        self._rows = 0

    def add(self, sent: Batch, answer: Prediction, seconds: float) -> RequestResult:
        self.seconds.append(seconds)
        self.versions[answer.version] += 1
        self._pending.append((sent.label_B, sent.weight_B, answer.probability))
        self._rows += sent.rows
        while self._rows >= BLOCK_ROWS:
            self._count(BLOCK_ROWS)
        return RequestResult(
            len(self.seconds), sent.rows, seconds, _accuracy(sent, answer.probability), answer.version
        )

    def metrics(self) -> Metrics:
        if self._rows:
            self._count(self._rows)
        return self._counts.metrics()

    def _count(self, rows: int) -> None:
        columns = [np.concatenate(column) for column in zip(*self._pending, strict=True)]
        self._counts.add(*(column[:rows] for column in columns))
        self._pending = [tuple(column[rows:] for column in columns)]
        self._rows -= rows


def _best_auc(files: Sequence[SourceFile]) -> float | None:
    """The AUC of the true probabilities from which `clickline sample` drew the clicks; None for other logs."""
    counts = MetricCounts()
    for file in files:
        log = Path(file.uri)
        truth = log.with_name(f"{log.stem}.truth.parquet")
        if not Storage.is_local(file.uri) or not truth.exists():
            return None
        table = pq.read_table(truth)
        label_B = table.column("label").to_numpy().astype(np.float32)
        counts.add(label_B, np.ones_like(label_B), table.column("p").to_numpy())
    return counts.metrics().auc


def _accuracy(sent: Batch, probability_B: NDArray[np.float32]) -> float | None:
    weight = float(sent.weight_B.sum())
    right_B = np.where(probability_B >= 0.5, sent.label_B, 1 - sent.label_B)
    return float((right_B * sent.weight_B).sum()) / weight if weight > 0 else None


def _latency(seconds: Sequence[float]) -> Latency:
    p50, p90, p99, p999 = np.percentile(seconds, [50, 90, 99, 99.9]).tolist()
    return Latency(sum(seconds) / len(seconds), p50, p90, p99, p999, max(seconds))
