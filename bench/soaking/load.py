"""The clients as the soak sees them: a process that asks, and all that it told."""

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

from clickline.client.request import RawResponse
from soaking.project import Ports, Probe
from soaking.system import Death

_CONNECTIONS = {"grpc": (16, 4), "http": (8, 2), "lookup": (8, 2)}  # of the open and of the closed loop
_WINDOW = 3.0  # seconds after a death until its last client has noticed
_NOTICE = 0.5  # seconds after a reset until its client has read it
_SLACK = 2.0  # seconds between a role that is there again and the last client that has noticed


@dataclass(frozen=True)
class Answer:
    """What was said, once or many times in the same bytes."""

    door: str
    probe: int
    version: int
    scores_B: np.ndarray


@dataclass(frozen=True)
class Second:
    """What a door did between two moments of the monotonic clock."""

    since: float
    until: float
    counts: Mapping[str, int]
    times: Sequence[int]  # in units of 10 µs


class Load:
    """Asks until it is stopped."""

    def __init__(self, folder: Path, ports: Ports, probes: Mapping[str, Sequence[Probe]]) -> None:
        where = {
            "grpc": (ports.grpc, "grpc"),
            "http": (ports.http, "http"),
            "lookup": (ports.predictor_grpc, "grpc"),
        }
        job = [
            {
                "name": door,
                "port": where[door][0],
                "kind": where[door][1],
                "connections": _CONNECTIONS[door][0],
                "closed": _CONNECTIONS[door][1],
                "asks": [probe.to_json() for probe in asked],
            }
            for door, asked in probes.items()
        ]
        (folder / "load.json").write_text(json.dumps(job))
        self._probes = probes
        self.seconds: dict[str, list[Second]] = {door: [] for door in probes}
        self.errors: list[dict[str, Any]] = []
        self.answers: dict[int, Answer] = {}
        self.counts: Counter[int] = Counter()
        self.broken = ""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("asking.py")), str(folder / "load.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if "second" in told:
                for door, counts in told["doors"].items():
                    times = counts.pop("times")
                    self.seconds[door].append(Second(*told["second"], counts, times))
            elif "error" in told:
                self.errors.append(told)
            elif "counts" in told:
                self.counts = Counter({int(number): count for number, count in told["counts"]})
            else:
                self._answered(told)

    def _answered(self, told: Mapping[str, Any]) -> None:
        probe = self._probes[told["door"]][told["ask"]]
        reply = RawResponse(
            base64.b64decode(told["body"]), {"clickline-version": told["version"]} if told["version"] else {}
        )
        try:
            said = probe.ask.decode(reply)
            scores_B = said.scores if hasattr(said, "scores") else said.probability
            version = 0 if said.version is None else int(said.version)
            self.answers[told["answer"]] = Answer(
                told["door"], told["ask"], version, np.asarray(scores_B, np.float64)
            )
        except Exception as error:  # noqa: BLE001 - whatever is wrong with an answer, it is one that is wrong
            self.broken = f"{told['door']}, probe {told['ask']}: {type(error).__name__}: {error}"
            self.answers[told["answer"]] = Answer(told["door"], told["ask"], -1, np.zeros(0))

    def rate(self, door: str, since: float) -> float:
        """Answers a second since then."""
        found = [second for second in self.seconds[door] if second.since >= since]
        took = sum(second.until - second.since for second in found)
        return sum(second.counts.get("answered", 0) for second in found) / took if took else 0.0

    def open(self, rates: Mapping[str, float]) -> None:
        self._say({"rates": dict(rates)})

    def stop(self) -> None:
        self._say({"stop": True})
        self.process.wait(60)
        self._thread.join(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _say(self, command: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()


def blamed(
    errors: Iterable[Mapping[str, Any]], seconds: Mapping[str, Sequence[Second]], deaths: Sequence[Death]
) -> list[str]:
    """Count each error and each refused connection at the death that explains it; returns those that none does.

    An error is explained by the death of the process that the client was connected to; a refused connection by one
    that closes its door until it is there again. What has lost its parent lets its requests end: no error is due to
    that."""
    left = []
    for error in errors:
        for death in deaths:
            connected = error["port"] in death.ports and -0.1 <= error["at"] - death.at <= _WINDOW
            if connected or _never_accepted(error, death):
                death.errors += 1
                break
        else:
            left.append(f"{error['door']} at {error['at']:.1f}: {error['error']}")
    for door, told in seconds.items():
        for second in told:
            count = second.counts.get("refused", 0)
            if not count:
                continue
            for death in deaths:
                if _closes(death, door, second.since, second.until):
                    death.refused += count
                    break
            else:
                left.append(f"{door} at {second.since:.1f}: {count} connections refused")
    return left


def _never_accepted(error: Mapping[str, Any], death: Death) -> bool:
    """Whether a client connected to a process between its kill and its end: the kernel still queues the connection, and
    resets it when it closes the listening socket. Another process on the same port answers, and never resets."""
    return (
        error["reset"]
        and error["door"] in death.endpoints
        and death.at <= error["opened"] <= death.gone
        and error["at"] <= death.gone + _NOTICE
    )


def _closes(death: Death, door: str, since: float, until: float) -> bool:
    """Whether a death may have closed a door between two moments."""
    recovered = float("inf") if death.recovered is None else death.at + death.recovered + _SLACK
    return door in death.closed and until >= death.at and since <= recovered


def percentiles(seconds: Iterable[Second]) -> tuple[float, float, int]:
    """p50 and p99 in seconds, and how many there were."""
    times = [time for second in seconds for time in second.times]
    if not times:
        return float("nan"), float("nan"), 0
    p50, p99 = np.percentile(times, (50, 99)) / 1e5
    return float(p50), float(p99), len(times)
