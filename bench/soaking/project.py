"""The project of the soak: a config, hours of logs that arrive one after the other, and probes."""

from __future__ import annotations

import base64
import csv
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from clickline.client.attempts import PreparedRequest
from clickline.client.columnar import as_table
from clickline.client.grpc_codec import TfServingGrpcCodec
from clickline.client.http_codec import TfServingHttpCodec
from measure import free_ports

NAME = "ads"
SLOTS, DENSE = 8, 4
CARDINALITY = 30_000
EVICTION_HOURS = 6
FIRST_HOUR = 490896  # 2026-01-01T00 in hours since 1970
SHARDS, REPLICAS = 2, 2
LOOKUPS = [(shard, replica) for shard in range(SHARDS) for replica in range(REPLICAS)]
CONTEXT = tuple(f"C{n}" for n in range(1, 4))  # the user fields of a ranking; all others are candidate fields

Row = dict[str, Any]


def _yaml(ports: Ports) -> str:
    fields = ["click: label", "timestamp: time"]
    fields += [f"I{n}: log1p" for n in range(1, DENSE + 1)]
    fields += [f"C{n}: {{kind: slot, slot: {n}}}" for n in range(1, SLOTS + 1)]
    # Nothing is held out: held-out rows are trained after an hour's eviction and publication, and a naive count over the
    # logs cannot know which rows they are.
    return f"""
name: {NAME}
data:
  format: csv
  train: arrived/{{date}}/{{hour}}/*.csv
  dates: {{from: 20260101}}
  fields: {{{", ".join(fields)}}}
model: {{embedding_dim: 8, hidden: [64, 32]}}
train: {{embedding: {{learning_rate: 0.2}}, eviction: {{max_idle_hours: {EVICTION_HOURS}}}}}
follow: {{poll_interval: 0.5, holdout: 0}}
tracking: {{enabled: false}}
publish: {{shards: {SHARDS}, max_deltas: 4, keep_versions: 5}}
serve: {{grpc_port: {ports.grpc}, http_port: {ports.http}, metrics_port: {ports.metrics}, processes: 2, poll_interval: 0.5}}
studio: {{port: {ports.studio}}}
cache: {{dir: cache}}
home: home
"""


@dataclass(frozen=True)
class Ports:
    """Ports of the server of `up`, the studio, the predictor with lookup servers, and the lookup servers."""

    grpc: int
    http: int
    metrics: int
    studio: int
    predictor_grpc: int
    predictor_http: int
    predictor_metrics: int
    lookup: tuple[int, ...] = field(default=())
    lookup_metrics: tuple[int, ...] = field(default=())

    @classmethod
    def free(cls) -> Ports:
        found, n = free_ports(7 + 2 * len(LOOKUPS)), 7 + len(LOOKUPS)
        return cls(*found[:7], tuple(found[7:n]), tuple(found[n:]))


@dataclass(frozen=True)
class Probe:
    """A request and its rows."""

    ask: PreparedRequest[Any]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        assert self.ask.body is not None
        return {
            "where": self.ask.path,
            "headers": dict(self.ask.headers),
            "body": base64.b64encode(self.ask.body).decode(),
        }


class Project:
    """A folder with a config, the logs that have arrived, and those to come."""

    def __init__(self, folder: Path, hours: int, rows: int, seed: int) -> None:
        from clickline.data.sample.generate import SampleOptions, generate
        from clickline.progress import Progress

        self.folder = folder
        self.home = folder / "home"
        self.registry = self.home / "registry"
        self.ports = Ports.free()
        (folder / "clickline.yaml").write_text(_yaml(self.ports))
        coming = folder / "coming"
        options = SampleOptions(
            "csv", hours * rows, coming, hours, seed, slots=SLOTS, dense=DENSE, cardinality=CARDINALITY
        )
        generate(options, Progress())
        self._coming = sorted(coming.glob("2*/*"))
        self._random = random.Random(seed)
        self.arrived: list[Path] = []  # files in the order of the hours
        (folder / "arrived" / self._coming[0].parent.name).mkdir(parents=True)  # an existing, empty source

    def arrive(self) -> str:
        """Add the next hour, with its donefile last; returns its name."""
        hour = self._coming[len(self.arrived)]
        target = self.folder / "arrived" / hour.parent.name / hour.name
        target.mkdir(parents=True)
        shutil.copyfile(hour / "part-00000.csv", target / "part-00000.csv")
        (target / "donefile").touch()
        self.arrived.append(target / "part-00000.csv")
        return f"{hour.parent.name}/{hour.name}"

    @property
    def remaining(self) -> int:
        """The number of hours that have not arrived."""
        return len(self._coming) - len(self.arrived)

    def probes(self) -> dict[str, list[Probe]]:
        """Requests for each endpoint. Their rows are from the first hours, from later ones and from none: ids that are known,
        become known, are evicted, and never exist."""
        rows = self._rows(4)
        http, grpc = TfServingHttpCodec(NAME), TfServingGrpcCodec(NAME)
        found: dict[str, list[Probe]] = {"grpc": [], "http": [], "lookup": []}
        for number in range(8):
            one, many = (rows[number],), tuple(rows[8 + 24 * number : 32 + 24 * number])
            context = {name: rows[number][name] for name in CONTEXT}
            candidates = [
                {name: value for name, value in row.items() if name not in CONTEXT}
                for row in rows[200 + 50 * number : 250 + 50 * number]
            ]
            ranked = tuple(context | candidate for candidate in candidates)
            for protocol, endpoints in ((grpc, ("grpc", "lookup")), (http, ("http",))):
                endpoint_probes = [
                    Probe(protocol.predict(as_table(one), None), one),
                    Probe(protocol.predict(as_table(many), None), many),
                    Probe(protocol.rank(as_table([context]), as_table(candidates), None), ranked),
                ]
                for endpoint in endpoints:
                    found[endpoint] += endpoint_probes
        return found

    def _rows(self, hours: int) -> list[Row]:
        """Rows of hours across the whole run, shuffled, and some with unknown values."""
        step = max(1, len(self._coming) // hours)
        rows: list[Row] = []
        for hour in self._coming[::step][:hours]:
            with (hour / "part-00000.csv").open(newline="") as file:
                rows += [_request(line) for line in islice(csv.DictReader(file), 140)]
        never = {f"I{n}": 7.0 for n in range(1, DENSE + 1)} | {
            f"C{n}": f"never {n}" for n in range(1, SLOTS + 1)
        }
        rows += [never] * 40 + [{**row, "C1": "never"} for row in rows[:40]]
        self._random.shuffle(rows)
        assert len(rows) >= 600, len(rows)
        return rows


def _request(line: Mapping[str, str]) -> Row:
    """A log line as a client sends it: every field, including missing ones."""
    row: Row = {f"I{n}": float(line[f"I{n}"] or "nan") for n in range(1, DENSE + 1)}
    return row | {f"C{n}": line[f"C{n}"] for n in range(1, SLOTS + 1)}
