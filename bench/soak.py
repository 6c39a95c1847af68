"""Runs the whole system under load for some minutes while its processes are killed, and checks every result.

    python bench/soak.py                    ten minutes, printed
    python bench/soak.py --minutes 60       longer
    python bench/soak.py --seed 7           repeats the same hours, probes and order of kills
    python bench/soak.py --write            writes the figures to docs/benchmarks.md

Hours of synthetic logs arrive continuously; `clickline up --follow` trains on them, publishes and serves, and beside it a
predictor uses lookup servers. Clients send requests to both at 70 % of the peak that was measured at the beginning, while
training runs. Each minute a process of one role is killed. Every answer is compared with the expected scores of its
version, every error must be explained by a killed process, memory must not grow, and at the end every counter must equal
a count over the logs. Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from measure import Row, publish
from soaking.load import Load, Second, percentiles, unexplained_errors
from soaking.project import EVICTION_HOURS, FIRST_HOUR, SLOTS, Project
from soaking.system import ROLES, Death, System, until
from soaking.truth import Published, counters_of_checkpoint, counters_of_logs

SHARE = 0.7  # of the peak
ROWS = 10_000  # per hour
PERIOD = 15.0  # seconds between two hours
WARM, PEAK = 8.0, 20.0  # seconds of the closed loop
CALM = 40.0  # seconds at the end without a kill
LAST = 120.0  # seconds that each of the last hours may take
RECOVERY = 120.0  # seconds that a role may take to recover
AROUND = 5.0  # seconds after a kill that count as its effect
TOLERANCE = 2e-6  # of a score: float32 against double
GROWN, SPARED = 1.10, 16 << 20  # a process may grow by this factor, plus this many bytes


@dataclass
class Recorded:
    """What the soak recorded while it ran."""

    peak: dict[str, float]
    began: float = 0.0  # of the open loop
    ended: float = 0.0
    max_trainers: int = 0


class Soak:
    """The soak run: a loop that polls ten times a second."""

    def __init__(self, folder: Path, minutes: float, seed: int, roles: Sequence[str], every: float) -> None:
        self.seconds = 60 * minutes
        self.roles, self.every = roles, every
        self.random = random.Random(seed)
        hours = int((self.seconds + 120) / PERIOD) + 2
        self.project = Project(folder, hours, ROWS, seed)
        self.probes = self.project.probes()
        self.system = System(self.project, random.Random(seed + 1))
        self.versions = folder / "versions"
        self.versions.mkdir()
        self.deaths: list[Death] = []
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self.wrong: list[str] = []
        self.recorded = Recorded({})
        self._load: Load | None = None
        self.busy = os.getloadavg()[0]  # before the start, from other processes
        self._began = time.monotonic()
        self._next_hour = self._next_look = self._next_line = 0.0
        self._open: list[Death] = []  # not recovered yet
        self._deck: list[str] = []

    @property
    def load(self) -> Load:
        assert self._load is not None
        return self._load

    # ── the run ────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        self.system.restart_ended()
        self.project.arrive()
        self._next_hour = time.monotonic() + PERIOD
        if not until(self._is_ready, 240):
            raise RuntimeError(
                f"the system did not start:\n{(self.project.folder / 'up.log').read_text()[-3000:]}"
            )
        self._log("all servers answer; measuring the peak")
        began = time.monotonic()
        self._load = Load(self.project.folder, self.project.ports, self.probes)
        self._run_until(until=began + WARM + PEAK)
        self.recorded.peak = {endpoint: self.load.rate(endpoint, began + WARM) for endpoint in self.probes}
        rates = {endpoint: SHARE * peak for endpoint, peak in self.recorded.peak.items()}
        self._log(
            f"peak {sum(self.recorded.peak.values()):,.0f} requests/s, from now on {sum(rates.values()):,.0f}"
        )
        self.load.open(rates)
        self.recorded.began = time.monotonic()
        end = began + self.seconds
        minute = self.recorded.began + 5
        while minute < end - CALM:
            self._run_until(until=min(end, minute + self.random.uniform(0, 0.4 * self.every)))
            self._kill(self._next_role())
            minute += self.every
            self._run_until(until=min(end, minute))
        self._run_until(until=end)
        self.recorded.ended = time.monotonic()
        self._log("the clients stop; training on the last hours")
        self.load.stop()
        progress_at, trained = time.monotonic(), self._hours_trained()
        while trained < len(self.project.arrived) and time.monotonic() < progress_at + LAST:
            self._look(arrivals=False)
            time.sleep(0.1)
            if self._hours_trained() > trained:
                progress_at, trained = time.monotonic(), self._hours_trained()
        self._look(arrivals=False)
        for death in self._open:
            self.wrong.append(
                f"{death.role} had not recovered {time.monotonic() - death.at:.0f} s after it was killed"
            )
        self.system.end()

    def close(self) -> None:
        """Kill everything that was started, however the run ended."""
        if self._load is not None:
            self._load.kill()
        self.system.kill_all()

    def _is_ready(self) -> bool:
        self._look(arrivals=True)
        return self._hours_trained() > 0 and self.system.ready()

    def _next_role(self) -> str:
        """Choose the next role; each comes once before any is repeated."""
        if not self._deck:
            self._deck = list(self.roles)
            self.random.shuffle(self._deck)
        return self._deck.pop()

    def _kill(self, role: str) -> None:
        deadline = time.monotonic() + 30
        while (death := self.system.kill(role)) is None:
            if time.monotonic() > deadline:
                self._log(f"no {role} could be killed for 30 s")
                return
            self._look(arrivals=True)
            time.sleep(0.02)
        self.deaths.append(death)
        self._open.append(death)
        self._log(f"killed {role}, pid {death.pid}")

    def _run_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._look(arrivals=True)
            time.sleep(0.1)

    def _look(self, *, arrivals: bool) -> None:
        now = time.monotonic()
        self.system.restart_ended()
        if arrivals and now >= self._next_hour and self.project.remaining:
            self.project.arrive()
            self._next_hour = now + PERIOD
        self._keep_versions()
        for death in list(self._open):
            if self.system.recovered(death):
                death.recovered = time.monotonic() - death.at
                self._open.remove(death)
                self._log(f"{death.role} recovered after {death.recovered:.1f} s")
        if now >= self._next_look:
            self._next_look = now + 3
            for who, size in self.system.rss().items():
                self.memory[who].append((now, size))
            self.recorded.max_trainers = max(self.recorded.max_trainers, self.system.trainers())
        if now >= self._next_line and self._load is not None:
            self._next_line = now + 5
            self._live_line()

    def _keep_versions(self) -> None:
        """Keep links to all versions: the system removes old ones, but the checks need them."""
        for manifest in (self.project.registry / "versions").glob("*/manifest.json"):
            target = self.versions / manifest.parent.name
            if not target.exists():
                target.mkdir()
                for file in manifest.parent.iterdir():
                    os.link(file, target / file.name)

    def _hours_trained(self) -> int:
        return len(list((self.project.home / "follow/hours").glob("*.json")))

    def _log(self, message: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {message}", flush=True)

    def _live_line(self) -> None:
        last = [seconds[-1] for seconds in self.load.seconds.values() if seconds]
        answered = sum(one.counts.get("answered", 0) for one in last)
        _, p99, _ = percentiles(last)
        newest = max((answer.version for answer in self.load.answers.values()), default=0)
        memory = sum(size for size in self.system.rss().values()) / 2**30
        self._log(
            f"{answered:5,} answers/s, p99 {p99 * 1e3:5.1f} ms, version {newest}, hours {self._hours_trained()} of "
            f"{len(self.project.arrived)}, killed {len(self.deaths)}, errors {len(self.load.errors)}, {memory:.1f} GiB"
        )

    # ── checks ─────────────────────────────────────────────────────────────────────────────────

    def check(self) -> list[Row]:
        """Run all checks after the run; failures go to `wrong`."""
        self.wrong += self.system.problems
        rows = [*self._check_rates(), *self._check_answers(), *self._check_errors(), *self._check_memory()]
        return [*rows, *self._check_counters()]

    def _check_rates(self) -> list[Row]:
        asked_for = SHARE * sum(self.recorded.peak.values())
        took = self.recorded.ended - self.recorded.began
        counts: Counter[str] = Counter()
        opened: list[Second] = []
        for seconds in self.load.seconds.values():
            mine = [second for second in seconds if second.since >= self.recorded.began]
            opened += mine
            for second in mine:
                counts.update({key: value for key, value in second.counts.items() if key != "under way"})
        around = [
            s for s in opened if any(death.at - 1 <= s.since <= death.at + AROUND for death in self.deaths)
        ]
        quiet = [s for s in opened if s not in around]
        rows = [
            Row(
                "peak, closed loop of 8 connections, with training beside it",
                f"{sum(self.recorded.peak.values()):,.0f} requests/s",
            ),
            Row(
                "sent and answered, open loop",
                f"{asked_for:,.0f} and {counts['answered'] / took:,.0f} requests/s",
                f"{counts['answered']:,} answers",
            ),
            Row(
                "not sent: an endpoint was down, or five seconds late",
                f"{counts['given up']:,}",
                f"{counts['given up'] / max(1, counts['asked'] + counts['given up']):.2%}",
            ),
        ]
        for name, seconds in (("quiet", quiet), (f"in the {AROUND:.0f} s after kills", around)):
            p50, p99, count = percentiles(seconds)
            rows.append(
                Row(
                    f"latency, {name}",
                    f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms",
                    f"{count:,} answers",
                )
            )
        return rows

    def _check_answers(self) -> list[Row]:
        """Compare every answer with the naive scores of its version."""
        versions = Published(self.versions)
        known = versions.numbers()
        answers = self.load.answers
        rows = list(
            {
                json.dumps(row): row
                for probes in self.probes.values()
                for probe in probes
                for row in probe.rows
            }.values()
        )
        place = {json.dumps(row): n for n, row in enumerate(rows)}
        places = {
            endpoint: [np.array([place[json.dumps(row)] for row in probe.rows]) for probe in probes]
            for endpoint, probes in self.probes.items()
        }
        expected = {
            number: versions.scores(number, rows)
            for number in sorted({a.version for a in answers.values()} & set(known))
        }
        wrong, mixed, largest, apart = 0, 0, 0.0, 0.0
        by_rows: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)
        for number, answer in answers.items():
            where = places[answer.endpoint][answer.probe]
            truth = expected.get(answer.version)
            if truth is None or answer.scores_B.shape != where.shape:
                wrong += self.load.counts[number]
                self.wrong.append(
                    f"{answer.endpoint}: {answer.scores_B.size} scores of version {answer.version}, which is not known"
                )
                continue
            difference_B = np.abs(answer.scores_B - truth[where])
            largest = max(largest, float(difference_B.max()))
            by_rows[answer.version, where.tobytes()].append(answer.scores_B)
            if difference_B.max() > TOLERANCE:
                others = [
                    n
                    for n, scores in expected.items()
                    if np.abs(answer.scores_B - scores[where]).max() <= TOLERANCE
                ]
                rowwise = np.array(
                    [np.abs(answer.scores_B - scores[where]) <= TOLERANCE for scores in expected.values()]
                ).any(axis=0)
                wrong += self.load.counts[number]
                mixed += self.load.counts[number] if rowwise.all() and not others else 0
                self.wrong.append(
                    f"{answer.endpoint}, probe {answer.probe}: {self.load.counts[number]} answers of version {answer.version} are wrong by up to "
                    f"{difference_B.max():.2g} in {int((difference_B > TOLERANCE).sum())} of {where.size} rows"
                    + (f"; they are those of version {others[0]}" if others else "")
                )
        for several in by_rows.values():
            apart = max(apart, max(float(np.abs(one - several[0]).max()) for one in several))
        if self.load.broken:
            self.wrong.append(f"an answer could not be read: {self.load.broken}")
        numbers = sorted(expected)
        changed = [
            float((np.abs(expected[a] - expected[b]) > 10 * TOLERANCE).mean()) for a, b in pairwise(numbers)
        ]
        if changed and min(changed) < 0.5:
            self.wrong.append(
                f"two versions differ in {min(changed):.0%} of the rows only: a mix of them would not be detected"
            )
        kinds = Counter(versions.manifest(number)["table"] for number in known)
        hours = Counter(versions.manifest(number)["model"].get("hour") for number in known)
        twice = sum(count - 1 for count in hours.values())
        total = sum(self.load.counts.values())
        return [
            Row(
                "versions published",
                f"{len(known)}: {kinds['base']} bases, {kinds['delta']} deltas",
                f"{twice} of an hour that had one",
            ),
            Row(
                "versions that answered",
                f"{len(numbers)}",
                f"a switch every {(self.recorded.ended - self.recorded.began) / max(1, len(numbers)):.0f} s",
            ),
            Row(
                "answers checked against the naive scorer",
                f"{total:,}; largest difference {largest:.1g}",
                f"{len(answers):,} distinct",
                "all",
            ),
            Row("wrong answers", f"{wrong}", "", "0"),
            Row("answers that mix versions", f"{mixed}", "", "0"),
            Row(
                "gRPC, HTTP and the predictor with lookup servers apart",
                f"{apart:.1g}",
                "",
                f"≤ {TOLERANCE:g}",
            ),
        ]

    def _check_errors(self) -> list[Row]:
        (self.project.folder / "errors.json").write_text(json.dumps(self.load.errors, indent=1))
        left = unexplained_errors(self.load.errors, self.load.seconds, self.deaths)
        self.wrong += [f"an error that no kill explains: {one}" for one in left]
        rows = []
        for role in ROLES:
            mine = [death for death in self.deaths if death.role == role]
            times = [death.recovered for death in mine if death.recovered is not None]
            if not mine:
                continue
            rows.append(
                Row(
                    f"killed: {role}",
                    f"{len(mine)} times; recovered after {statistics.median(times):.1f} s, at most {max(times):.1f} s"
                    if times
                    else f"{len(mine)} times",
                    f"{sum(death.errors for death in mine)} requests lost, {sum(death.refused for death in mine)} connections refused",
                )
            )
            for death in mine:
                if death.recovered is None:
                    continue
                there = death.at + death.recovered
                disturbed = max(
                    other.at for other in self.deaths if other.at <= there
                )  # by its own kill, or a later one
                if there - disturbed > RECOVERY:
                    self.wrong.append(f"{role} took {death.recovered:.0f} s to recover")
        if self.recorded.max_trainers > 1:
            self.wrong.append(f"{self.recorded.max_trainers} trainers at once")
        return [
            *rows,
            Row("errors not explained by a kill", f"{len(left)}", f"of {len(self.load.errors)} errors", "0"),
        ]

    def _check_memory(self) -> list[Row]:
        rows = []
        for role in ROLES:
            growth = []
            for (mine, pid), samples in self.memory.items():
                warm = [size for at, size in samples if at >= samples[0][0] + 60]
                if mine != role or len(warm) < 30:  # a minute and a half
                    continue
                quarter = len(warm) // 4
                first, last = (statistics.median(part) for part in (warm[:quarter], warm[-quarter:]))
                growth.append((first, last))
                if last > GROWN * first + SPARED:
                    self.wrong.append(
                        f"{role}, pid {pid}: {first / 2**20:.0f} MiB grew to {last / 2**20:.0f} MiB"
                    )
            if growth:
                first, last = max(growth, key=lambda one: one[1] / one[0])
                rows.append(
                    Row(
                        f"memory: {role}",
                        f"{first / 2**20:.0f} MiB, at the end {last / 2**20:.0f} MiB",
                        f"{last / first:.2f}x",
                        "flat",
                    )
                )
        return rows

    def _check_counters(self) -> list[Row]:
        home, arrived = self.project.home, self.project.arrived
        records = [json.loads(path.read_text()) for path in sorted((home / "follow/hours").glob("*.json"))]
        lines = [len(path.read_text().splitlines()) - 1 for path in arrived]
        exact_rows = [(record["state"], record.get("rows")) for record in records] == [
            ("learned", count) for count in lines
        ]
        newest = max((home / "runs/follow").glob("step-*/manifest.json"))
        trained_hours: list[list[int]] = json.loads(newest.read_text())["hourly"]["trained_hours"]
        once = trained_hours == [[FIRST_HOUR, FIRST_HOUR + len(arrived)]]
        counted = counters_of_logs(arrived, SLOTS, EVICTION_HOURS)
        found = counters_of_checkpoint(newest.parent)
        differing = found.differences(counted)
        versions = Published(self.versions)
        last = versions.numbers()[-1]
        missing = int(np.setxor1d(versions.ids(last), counted.ids_N).size)
        for fine, message in (
            (exact_rows, "the records of the hours do not have the row counts of the logs"),
            (once, f"the checkpoint was trained on {trained_hours}, but {len(arrived)} hours have arrived"),
            (not differing, f"{differing} ids have other counters in the checkpoint than in the logs"),
            (not missing, f"{missing} ids are in version {last} or in the logs, not in both"),
        ):
            if not fine:
                self.wrong.append(message)
        yes = {True: "yes", False: "NO"}
        return [
            Row("hours trained, each once", f"{len(records)} of {len(arrived)}", yes[once], "yes"),
            Row(
                "rows trained",
                f"{sum(record.get('rows', 0) for record in records):,} of {sum(lines):,}",
                yes[exact_rows],
                "yes",
            ),
            Row(
                "ids whose impressions, clicks and hour equal those of the logs",
                f"{counted.ids_N.size - differing:,} of {counted.ids_N.size:,}",
                yes[not differing],
                "yes",
            ),
            Row(f"ids of the last version, {last}", f"{versions.ids(last).size:,}", yes[not missing], "yes"),
        ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--seed", type=int, default=None, help="repeat the run with this seed")
    arguments.add_argument(
        "--roles", nargs="+", choices=list(ROLES), default=list(ROLES), help="roles to kill"
    )
    arguments.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    arguments.add_argument("--folder", type=Path, default=None, help="an empty folder, which is kept")
    arguments.add_argument("--write", action="store_true", help="write the figures to docs/benchmarks.md")
    chosen = arguments.parse_args()
    if chosen.minutes < 2:
        arguments.error("--minutes must be at least 2")
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    with tempfile.TemporaryDirectory(prefix="clickline-soak-") as temporary:
        folder = Path(temporary) if chosen.folder is None else chosen.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {seed}, {chosen.minutes:g} minutes, in {folder}", flush=True)
        one = Soak(folder, chosen.minutes, seed, chosen.roles, chosen.every)
        sys.exit(soak(one, chosen.minutes, seed, write=chosen.write))


def soak(one: Soak, minutes: float, seed: int, *, write: bool) -> int:
    """Run the soak and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        one.run()
        rows = one.check()
    finally:
        one.close()
    publish(
        "soak",
        "Soak of the whole system",
        f"`python bench/soak.py --minutes {minutes:g} --seed {seed} --write`. An hour of {ROWS:,} rows arrives every {PERIOD:g} s and is "
        "trained and published by `clickline up --follow`, which serves it in two processes; a predictor of one process uses four "
        f"lookup servers. Clients send both, over gRPC and HTTP, requests of 1 and 24 rows and rankings of 50 candidates, at {SHARE:.0%} of "
        "the peak. Each minute one process is killed with SIGKILL. All on the same 2 cores as the clients; the load average before "
        f"it started was {one.busy:.1f}.",
        rows,
        "A request is lost when its process is killed under it. Connections are refused while a whole endpoint is down, which happens when "
        "its parent was killed: with another replica behind a load balancer clients would not notice. A trainer has recovered when "
        "it has trained the next hour, which has to arrive first. Memory is that of the process of the role that grew most, a minute after "
        "it started and at the end of its life. Latencies and recovery times are those of a machine as busy as the load "
        "average shows; everything else must hold on any machine.",
        write=write and not one.wrong,
    )
    for message in one.wrong[:50]:
        print(f"FAILED: {message}", flush=True)
    print(
        "all checks passed" if not one.wrong else f"{len(one.wrong)} checks failed; seed {seed}",
        flush=True,
    )
    return 1 if one.wrong else 0


if __name__ == "__main__":
    main()
