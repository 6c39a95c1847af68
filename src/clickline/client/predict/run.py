"""The predict stage: rows of logs go to a server, its scores are measured, and so is how long they take.

The latency of a request is the time around its call: from its bytes being ready to its scores being there. Making the
request is not in it. Requests/s and rows/s are those of the whole run, reading and making requests included.
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
from clickline.client.client import ProtocolName
from clickline.client.predict.elasticctr_columns import for_elasticctr
from clickline.client.predict.log_batches import Batch, Logs
from clickline.client.request import Ask
from clickline.config import Config
from clickline.data.input_blocks import Inputs, in_order, open_reader
from clickline.data.schema import Layout, layout
from clickline.data.slot_discovery import discover
from clickline.data.targets import unit_finder
from clickline.errors import ClicklineError, DataError
from clickline.evaluation.binary_metrics import Counts, Metrics
from clickline.evaluation.evaluator import BLOCK_ROWS
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.progress import Progress, usual
from clickline.records import RawColumn, SourceFile
from clickline.storage.file_cache import Cache
from clickline.storage.log_files import DateRange, resolve
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class Latency:
    """Of requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    highest: float


@dataclass(frozen=True)
class Iteration:
    """One request."""

    number: int  # from 1
    rows: int
    seconds: float
    accuracy: float | None  # None: its rows have no weight
    version: int | None


@dataclass(frozen=True)
class PredictResult:
    """What a server's scores are worth, and how fast they come."""

    address: str
    protocol: str
    model: str
    versions: Mapping[int | None, int]  # that answered, and how many requests each
    connections: int
    requests: int
    retried: int  # requests that were sent again
    metrics: Metrics
    best_auc: float | None  # of the true probabilities, which only a synthetic log comes with
    bad: Mapping[str, int]  # rows that were left out, by reason
    latency: Latency
    seconds: float  # of the whole run, without warming up

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
    authority: str | None = None,
    timeout: float = 10.0,
    told: Callable[[Iteration], None] = lambda iteration: None,
) -> PredictResult:
    """Send the rows of logs to a server, `batch` at a time, over some connections at once, and measure.

    `requests`: how many; the files are read over and over if need be. By default each row once. `warmup` further ones
    on each connection are not counted. Address, token and authority are those of the config's `serve` if not given.
    `told` is called for each request, in order.
    """
    progress = progress or usual()
    storage = storage_of(config)
    cache = Cache(Path(config.cache.dir), config.cache.size, storage)
    files = _files(config, storage, inputs, progress)
    tls = config.serve.tls
    options: dict[str, Any] = {
        "protocol": protocol,
        "model": model or config.name,
        "token": _token(token_file or config.serve.token_file),
        "tls": authority or (False if tls is None else tls.authority or tls.certificate),
        "timeout": timeout,
    }
    with ExitStack() as open_clients:
        clients = [
            open_clients.enter_context(Client(address or _own_address(config, protocol), **options))
            for _ in range(connections)
        ]
        logs = _logs(config, storage, cache, files, clients[0].metadata(), progress)
        columns = _columns_for(protocol, logs.features)
        if requests is None:
            progress.begin("predict", total_bytes=logs.inputs.text_bytes(progress))
        else:
            progress.begin("predict", total_rows=requests * batch)
        batches = logs.batches(batch, endless=requests is not None, progress=progress)
        first = next(batches)
        _warm(clients, clients[0].ask(columns(first)), warmup)
        began = time.perf_counter()
        measured = _Measured()
        for sent, (answer, seconds) in _answers(clients, columns, islice(chain([first], batches), requests)):
            progress.advance(rows=sent.rows)
            told(measured.add(sent, answer, seconds))
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
        None if requests is not None or logs.bad else _reachable_auc(files),
        dict(logs.bad),
        _latency(measured.seconds),
        seconds,
    )


# ── what is sent ───────────────────────────────────────────────────────────────────────────────


def _files(config: Config, storage: Storage, inputs: Sequence[str], progress: Progress) -> list[SourceFile]:
    data = config.data
    dates = data.eval_dates or data.dates
    days = None if dates is None else DateRange(dates.first, dates.last)
    return resolve(storage, inputs, days, data.donefile, 0 if dates is None else dates.wait, progress)


def _logs(
    config: Config,
    storage: Storage,
    cache: Cache,
    files: list[SourceFile],
    served: ModelInfo,
    progress: Progress,
) -> Logs:
    """The files, read as the config says, for the fields that the server's model takes."""
    data = config.data
    dense = 0
    if data.format == "paddlerec":
        dense = discover(data.format, files, cache, storage, cores(), progress, slots=False).dense
    own = layout(data, [int(name) for name in served.inputs if name.isascii() and name.isdigit()], dense)
    absent = [name for name in served.inputs if name not in own.features.columns]
    if absent:
        raise DataError(
            f"the server's model takes {', '.join(absent[:5])}{' and others' if len(absent) > 5 else ''}, which "
            "logs of this config do not have. Use the config that the model was trained with, or check data.format."
        )
    features = _without_statistics(own.features, served)
    needed = Layout(features, own.targets, dense)
    find_unit = unit_finder(own.targets, features.missing)
    inputs = Inputs(files, open_reader(data, needed), cache, storage, find_unit)
    return Logs(inputs, features, own.targets, data.max_bad)


def _without_statistics(features: FeatureSpec, served: ModelInfo) -> FeatureSpec:
    """The fields of the server's model, each with a transform that takes the same values and needs no statistics."""
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
        return lambda batch: for_elasticctr(batch.columns, features, batch.rows)
    return lambda batch: batch.columns  # as they are: the server encodes


# ── to whom ────────────────────────────────────────────────────────────────────────────────────


def _own_address(config: Config, protocol: ProtocolName) -> str:
    serve = config.serve
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(serve.host, serve.host)
    port = serve.grpc_port if protocol.endswith("grpc") else serve.http_port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


def _warm(clients: Sequence[Client], ask: Ask[Prediction], times: int) -> None:
    def send(client: Client) -> None:
        for _ in range(times):
            client.send(ask)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(send, clients))


def _answers(
    clients: Sequence[Client], columns: Callable[[Batch], Mapping[str, RawColumn]], batches: Iterator[Batch]
) -> Iterator[tuple[Batch, tuple[Prediction, float]]]:
    """Every batch with its answer and the seconds that took, in order; as many on their way as there are clients."""
    idle: SimpleQueue[Client] = SimpleQueue()
    for client in clients:
        idle.put(client)

    def send(number: int, batch: Batch) -> tuple[Prediction, float]:
        client = idle.get()
        try:
            ask = client.ask(columns(batch))
            began = time.perf_counter()
            answer = client.send(ask)
            seconds = time.perf_counter() - began
        finally:
            idle.put(client)
        if answer.probability.size != batch.rows:
            raise ClicklineError(
                f"{client.address} answered {answer.probability.size} scores to {batch.rows} rows. Is it a "
                "clickline server?"
            )
        return answer, seconds

    return in_order(send, batches, len(clients))


# ── what came back ─────────────────────────────────────────────────────────────────────────────


class _Measured:
    """Counts answers. Rows are measured in the blocks that `evaluate` measures them in, to the same figures."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.versions: Counter[int | None] = Counter()
        self._counts = Counts()
        self._waiting: list[tuple[NDArray[np.float32], ...]] = []
        self._rows = 0

    def add(self, sent: Batch, answer: Prediction, seconds: float) -> Iteration:
        self.seconds.append(seconds)
        self.versions[answer.version] += 1
        self._waiting.append((sent.label_B, sent.weight_B, answer.probability))
        self._rows += sent.rows
        while self._rows >= BLOCK_ROWS:
            self._count(BLOCK_ROWS)
        return Iteration(
            len(self.seconds), sent.rows, seconds, _accuracy(sent, answer.probability), answer.version
        )

    def metrics(self) -> Metrics:
        if self._rows:
            self._count(self._rows)
        return self._counts.metrics()

    def _count(self, rows: int) -> None:
        whole = [np.concatenate(column) for column in zip(*self._waiting, strict=True)]
        self._counts.add(*(column[:rows] for column in whole))
        self._waiting = [tuple(column[rows:] for column in whole)]
        self._rows -= rows


def _reachable_auc(files: Sequence[SourceFile]) -> float | None:
    """The AUC of the probabilities that `clickline sample` drew the clicks with; None for any other log."""
    counts = Counts()
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
    shows = float(sent.weight_B.sum())
    right_B = np.where(probability_B >= 0.5, sent.label_B, 1 - sent.label_B)
    return float((right_B * sent.weight_B).sum()) / shows if shows > 0 else None


def _latency(seconds: Sequence[float]) -> Latency:
    p50, p90, p99, p999 = np.percentile(seconds, [50, 90, 99, 99.9]).tolist()
    return Latency(sum(seconds) / len(seconds), p50, p90, p99, p999, max(seconds))
