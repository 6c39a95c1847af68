"""The soak's view of the clients: their process, and all events that it reported."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clickline.client.attempts import RawResponse
from soaking.project import Ports, Probe
from soaking.system import Death

_CONNECTIONS = {"grpc": (16, 4), "http": (8, 2), "lookup": (8, 2)}  # of the open and of the closed loop
_WINDOW = 3.0  # seconds after a death until its last client notices
_NOTICE = 0.5  # seconds after a reset until its client has read it
_SLACK = 2.0  # seconds after a recovery until the last client notices


@dataclass(frozen=True)
class Answer:
    """An answer that was received once or many times with the same bytes."""

    endpoint: str
    probe: int
    version: int
    scores_B: np.ndarray


@dataclass(frozen=True)
class Second:
    """Counts of an endpoint between two times of the monotonic clock."""

    since: float
    until: float
    counts: Mapping[str, int]
    times: Sequence[int]  # in units of 10 µs


class Load:
    """Sends requests until it is stopped."""

    def __init__(self, folder: Path, ports: Ports, probes: Mapping[str, Sequence[Probe]]) -> None:
        where = {
            "grpc": (ports.grpc, "grpc"),
            "http": (ports.http, "http"),
            "lookup": (ports.predictor_grpc, "grpc"),
        }
        job = [
            {
                "name": endpoint,
                "port": where[endpoint][0],
                "kind": where[endpoint][1],
                "connections": _CONNECTIONS[endpoint][0],
                "closed": _CONNECTIONS[endpoint][1],
                "requests": [probe.to_json() for probe in sent],
            }
            for endpoint, sent in probes.items()
        ]
        (folder / "load.json").write_text(json.dumps(job))
        self._probes = probes
        self.seconds: dict[str, list[Second]] = {endpoint: [] for endpoint in probes}
        self.errors: list[dict[str, Any]] = []
        self.answers: dict[int, Answer] = {}
        self.counts: Counter[int] = Counter()
        self.broken = ""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("clients.py")), str(folder / "load.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if "second" in event:
                for endpoint, counts in event["endpoints"].items():
                    times = counts.pop("times")
                    self.seconds[endpoint].append(Second(*event["second"], counts, times))
            elif "error" in event:
                self.errors.append(event)
            elif "counts" in event:
                self.counts = Counter({int(number): count for number, count in event["counts"]})
            else:
                self._answered(event)

    def _answered(self, event: Mapping[str, Any]) -> None:
        probe = self._probes[event["endpoint"]][event["ask"]]
        reply = RawResponse(
            base64.b64decode(event["body"]),
            {"clickline-version": event["version"]} if event["version"] else {},
        )
        try:
            decoded = probe.ask.decode(reply)
            scores_B = decoded.scores if hasattr(decoded, "scores") else decoded.probability
            version = 0 if decoded.version is None else int(decoded.version)
            self.answers[event["answer"]] = Answer(
                event["endpoint"], event["ask"], version, np.asarray(scores_B, np.float64)
            )
        except Exception as error:  # noqa: BLE001 - an answer that cannot be decoded counts as wrong
            self.broken = f"{event['endpoint']}, probe {event['ask']}: {type(error).__name__}: {error}"
            self.answers[event["answer"]] = Answer(event["endpoint"], event["ask"], -1, np.zeros(0))

    def rate(self, endpoint: str, since: float) -> float:
        """Answers per second since then."""
        found = [second for second in self.seconds[endpoint] if second.since >= since]
        took = sum(second.until - second.since for second in found)
        return sum(second.counts.get("answered", 0) for second in found) / took if took else 0.0

    def open(self, rates: Mapping[str, float]) -> None:
        self._send({"rates": dict(rates)})

    def stop(self) -> None:
        self._send({"stop": True})
        self.process.wait(60)
        self._thread.join(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()


def unexplained_errors(
    errors: Iterable[Mapping[str, Any]], seconds: Mapping[str, Sequence[Second]], deaths: Sequence[Death]
) -> list[str]:
    """Attribute each error and each refused connection to the death that explains it; returns the unexplained ones.

    An error is explained by the death of the process that the client was connected to; a refused connection by one that
    takes its endpoint down until it recovers. A process that has lost its parent finishes its requests, so that explains
    no errors."""
    unexplained = []
    for error in errors:
        for death in deaths:
            connected = error["port"] in death.ports and -0.1 <= error["at"] - death.at <= _WINDOW
            if connected or _never_accepted(error, death):
                death.errors += 1
                break
        else:
            unexplained.append(f"{error['endpoint']} at {error['at']:.1f}: {error['error']}")
    for endpoint, event in seconds.items():
        for second in event:
            count = second.counts.get("refused", 0)
            if not count:
                continue
            for death in deaths:
                if _takes_down(death, endpoint, second.since, second.until):
                    death.refused += count
                    break
            else:
                unexplained.append(f"{endpoint} at {second.since:.1f}: {count} connections refused")
    return unexplained


def _never_accepted(error: Mapping[str, Any], death: Death) -> bool:
    """Whether a client connected to a process between its kill and its end: the kernel still queues the connection, and
    resets it when it closes the listening socket. Another process on the same port answers, and never resets."""
    return (
        error["reset"]
        and error["endpoint"] in death.endpoints
        and death.at <= error["opened"] <= death.gone
        and error["at"] <= death.gone + _NOTICE
    )


def _takes_down(death: Death, endpoint: str, since: float, until: float) -> bool:
    """Whether a death may have taken an endpoint down between two times."""
    recovered = float("inf") if death.recovered is None else death.at + death.recovered + _SLACK
    return endpoint in death.closed and until >= death.at and since <= recovered


def percentiles(seconds: Iterable[Second]) -> tuple[float, float, int]:
    """p50 and p99 in seconds, and the number of answers."""
    times = [time for second in seconds for time in second.times]
    if not times:
        return float("nan"), float("nan"), 0
    p50, p99 = np.percentile(times, (50, 99)) / 1e5
    return float(p50), float(p99), len(times)
