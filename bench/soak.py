"""The whole system for some minutes under load while its processes are killed: nothing may come out wrong.

    python bench/soak.py                    ten minutes, printed
    python bench/soak.py --minutes 60       longer
    python bench/soak.py --seed 7           the same hours, probes and order of kills again
    python bench/soak.py --write            the figures go to docs/benchmarks.md

Hours of synthetic logs arrive all the time; `clickline up --follow` learns, publishes and serves them, beside it a
predictor asks lookup servers. Clients ask both at 70 % of the peak that was measured at the beginning, with learning
beside them. Each minute a process of one role is killed. Every answer is compared with what the version it names
must say, every error must be of a killed process, memory must not grow, and at the end every counter must be what a
count over the logs says. Ends with 1 when anything is not so.
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
from typing import Any

import numpy as np

from measure import Row, publish
from soaking.load import Load, Second, blamed, percentiles
from soaking.project import EVICTION_HOURS, FIRST_HOUR, SLOTS, Project
from soaking.system import ROLES, Death, System, until
from soaking.truth import Published, counters_of_checkpoint, counters_of_logs

SHARE = 0.7  # of the peak
ROWS = 10_000  # an hour
PERIOD = 15.0  # seconds between two hours
WARM, PEAK = 8.0, 20.0  # seconds of the closed loop
CALM = 40.0  # seconds at the end without a kill
LAST = 120.0  # seconds that any of the last hours may take
RECOVERY = 120.0  # seconds that a role may take to be there again
AROUND = 5.0  # seconds after a kill that count as around it
TOLERANCE = 2e-6  # of a score: float32 beside double
GROWN, SPARED = 1.10, 16 << 20  # a process may have so many times its memory, and so many bytes more


@dataclass
class Seen:
    """What the soak has noted while it ran."""

    peak: dict[str, float]
    began: float = 0.0  # of the open loop
    ended: float = 0.0
    most_learners: int = 0


class Soak:
    """The run, as one loop that looks ten times a second."""

    def __init__(self, folder: Path, minutes: float, seed: int, roles: Sequence[str], every: float) -> None:
        self.seconds = 60 * minutes
        self.roles, self.every = roles, every
        self.random = random.Random(seed)
        hours = int((self.seconds + 120) / PERIOD) + 2
        self.project = Project(folder, hours, ROWS, seed)
        self.probes = self.project.probes()
        self.system = System(self.project, random.Random(seed + 1))
        self.kept = folder / "versions"
        self.kept.mkdir()
        self.deaths: list[Death] = []
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self.wrong: list[str] = []
        self.seen = Seen({})
        self._load: Load | None = None
        self.busy = os.getloadavg()[0]  # with what others do
        self._began = time.monotonic()
        self._next_hour = self._next_look = self._next_line = 0.0
        self._open: list[Death] = []  # that were not recovered from
        self._deck: list[str] = []

    @property
    def load(self) -> Load:
        assert self._load is not None
        return self._load

    # ── the run ────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        self.system.tend()
        self.project.arrive()
        self._next_hour = time.monotonic() + PERIOD
        if not until(self._is_ready, 240):
            raise RuntimeError(
                f"the system did not come up:\n{(self.project.folder / 'up.log').read_text()[-3000:]}"
            )
        self._say("everything answers; measuring the peak")
        began = time.monotonic()
        self._load = Load(self.project.folder, self.project.ports, self.probes)
        self._go_on(until=began + WARM + PEAK)
        self.seen.peak = {door: self.load.rate(door, began + WARM) for door in self.probes}
        rates = {door: SHARE * peak for door, peak in self.seen.peak.items()}
        self._say(
            f"peak {sum(self.seen.peak.values()):,.0f} requests/s, from now on {sum(rates.values()):,.0f}"
        )
        self.load.open(rates)
        self.seen.began = time.monotonic()
        end = began + self.seconds
        minute = self.seen.began + 5
        while minute < end - CALM:
            self._go_on(until=min(end, minute + self.random.uniform(0, 0.4 * self.every)))
            self._kill(self._next_role())
            minute += self.every
            self._go_on(until=min(end, minute))
        self._go_on(until=end)
        self.seen.ended = time.monotonic()
        self._say("the clients stop; the last hours are learned")
        self.load.stop()
        heard, learned = time.monotonic(), self._learned()
        while learned < len(self.project.arrived) and time.monotonic() < heard + LAST:
            self._look(arrivals=False)
            time.sleep(0.1)
            if self._learned() > learned:
                heard, learned = time.monotonic(), self._learned()
        self._look(arrivals=False)
        for death in self._open:
            self.wrong.append(
                f"{death.role} was not there again {time.monotonic() - death.at:.0f} s after it was killed"
            )
        self.system.end()

    def close(self) -> None:
        """Nothing that was started is left, however it ended."""
        if self._load is not None:
            self._load.kill()
        self.system.kill_all()

    def _is_ready(self) -> bool:
        self._look(arrivals=True)
        return self._learned() > 0 and self.system.ready()

    def _next_role(self) -> str:
        """Each role comes once before any comes again."""
        if not self._deck:
            self._deck = list(self.roles)
            self.random.shuffle(self._deck)
        return self._deck.pop()

    def _kill(self, role: str) -> None:
        deadline = time.monotonic() + 30
        while (death := self.system.kill(role)) is None:
            if time.monotonic() > deadline:
                self._say(f"no {role} could be killed for 30 s")
                return
            self._look(arrivals=True)
            time.sleep(0.02)
        self.deaths.append(death)
        self._open.append(death)
        self._say(f"killed {role}, pid {death.pid}")

    def _go_on(self, until: float) -> None:
        while time.monotonic() < until:
            self._look(arrivals=True)
            time.sleep(0.1)

    def _look(self, *, arrivals: bool) -> None:
        now = time.monotonic()
        self.system.tend()
        if arrivals and now >= self._next_hour and self.project.left:
            self.project.arrive()
            self._next_hour = now + PERIOD
        self._keep_versions()
        for death in list(self._open):
            if self.system.recovered(death):
                death.recovered = time.monotonic() - death.at
                self._open.remove(death)
                self._say(f"{death.role} is there again after {death.recovered:.1f} s")
        if now >= self._next_look:
            self._next_look = now + 3
            for who, size in self.system.rss().items():
                self.memory[who].append((now, size))
            self.seen.most_learners = max(self.seen.most_learners, self.system.learners())
        if now >= self._next_line and self._load is not None:
            self._next_line = now + 5
            self._live_line()

    def _keep_versions(self) -> None:
        """Old versions are removed by the system; what they say is needed to the end."""
        for manifest in (self.project.registry / "versions").glob("*/manifest.json"):
            target = self.kept / manifest.parent.name
            if not target.exists():
                target.mkdir()
                for file in manifest.parent.iterdir():
                    os.link(file, target / file.name)

    def _learned(self) -> int:
        return len(list((self.project.home / "follow/hours").glob("*.json")))

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {words}", flush=True)

    def _live_line(self) -> None:
        last = [seconds[-1] for seconds in self.load.seconds.values() if seconds]
        answered = sum(one.counts.get("answered", 0) for one in last)
        _, p99, _ = percentiles(last)
        newest = max((answer.version for answer in self.load.answers.values()), default=0)
        memory = sum(size for size in self.system.rss().values()) / 2**30
        self._say(
            f"{answered:5,} answers/s, p99 {p99 * 1e3:5.1f} ms, version {newest}, hours {self._learned()} of "
            f"{len(self.project.arrived)}, killed {len(self.deaths)}, errors {len(self.load.errors)}, {memory:.1f} GiB"
        )

    # ── what must be so ────────────────────────────────────────────────────────────────────────

    def check(self) -> list[Row]:
        """Everything that can be known afterwards; what is wrong goes to `wrong`."""
        self.wrong += self.system.troubles
        rows = [*self._check_rates(), *self._check_answers(), *self._check_errors(), *self._check_memory()]
        return [*rows, *self._check_counters()]

    def _check_rates(self) -> list[Row]:
        asked_for = SHARE * sum(self.seen.peak.values())
        took = self.seen.ended - self.seen.began
        counts: Counter[str] = Counter()
        opened: list[Second] = []
        for seconds in self.load.seconds.values():
            mine = [second for second in seconds if second.since >= self.seen.began]
            opened += mine
            for second in mine:
                counts.update({key: value for key, value in second.counts.items() if key != "under way"})
        around = [
            s for s in opened if any(death.at - 1 <= s.since <= death.at + AROUND for death in self.deaths)
        ]
        quiet = [s for s in opened if s not in around]
        rows = [
            Row(
                "peak, closed loop of 8 connections, learning beside it",
                f"{sum(self.seen.peak.values()):,.0f} requests/s",
            ),
            Row(
                "asked and answered, open loop",
                f"{asked_for:,.0f} and {counts['answered'] / took:,.0f} requests/s",
                f"{counts['answered']:,} answers",
            ),
            Row(
                "not sent: a door was closed, or five seconds late",
                f"{counts['given up']:,}",
                f"{counts['given up'] / max(1, counts['asked'] + counts['given up']):.2%}",
            ),
        ]
        for name, seconds in (("quiet", quiet), (f"in the {AROUND:.0f} s after kills", around)):
            p50, p99, count = percentiles(seconds)
            rows.append(
                Row(
                    f"time of an answer, {name}",
                    f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms",
                    f"{count:,} answers",
                )
            )
        return rows

    def _check_answers(self) -> list[Row]:
        """Every answer beside the naive scores of the version it names."""
        versions = Published(self.kept)
        known = versions.numbers()
        said = self.load.answers
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
            door: [np.array([place[json.dumps(row)] for row in probe.rows]) for probe in probes]
            for door, probes in self.probes.items()
        }
        expected = {
            number: versions.scores(number, rows)
            for number in sorted({a.version for a in said.values()} & set(known))
        }
        wrong, mixed, largest, apart = 0, 0, 0.0, 0.0
        by_rows: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)
        for number, answer in said.items():
            where = places[answer.door][answer.probe]
            truth = expected.get(answer.version)
            if truth is None or answer.scores_B.shape != where.shape:
                wrong += self.load.counts[number]
                self.wrong.append(
                    f"{answer.door}: {answer.scores_B.size} scores of version {answer.version}, which is not known"
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
                    f"{answer.door}, probe {answer.probe}: {self.load.counts[number]} answers of version {answer.version} are wrong by up to "
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
                f"two versions differ in {min(changed):.0%} of the rows only: a mix of them would not be seen"
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
                f"a switch every {(self.seen.ended - self.seen.began) / max(1, len(numbers)):.0f} s",
            ),
            Row(
                "answers checked against the naive scorer",
                f"{total:,}; largest difference {largest:.1g}",
                f"{len(said):,} distinct",
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
        left = blamed(self.load.errors, self.load.seconds, self.deaths)
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
                    f"{len(mine)} times; there again after {statistics.median(times):.1f} s, at most {max(times):.1f} s"
                    if times
                    else f"{len(mine)} times",
                    f"{sum(death.errors for death in mine)} requests lost, {sum(death.refused for death in mine)} connections refused",
                )
            )
            for death in mine:
                if death.recovered is None:
                    continue
                there = death.at + death.recovered
                disturbed = max(other.at for other in self.deaths if other.at <= there)  # by itself, or again
                if there - disturbed > RECOVERY:
                    self.wrong.append(f"{role} took {death.recovered:.0f} s to be there again")
        if self.seen.most_learners > 1:
            self.wrong.append(f"{self.seen.most_learners} learners at once")
        return [
            *rows,
            Row("errors that no kill explains", f"{len(left)}", f"of {len(self.load.errors)} errors", "0"),
        ]

    def _check_memory(self) -> list[Row]:
        rows = []
        for role in ROLES:
            told = []
            for (mine, pid), samples in self.memory.items():
                warm = [size for at, size in samples if at >= samples[0][0] + 60]
                if mine != role or len(warm) < 30:  # a minute and a half
                    continue
                quarter = len(warm) // 4
                first, last = (statistics.median(part) for part in (warm[:quarter], warm[-quarter:]))
                told.append((first, last))
                if last > GROWN * first + SPARED:
                    self.wrong.append(
                        f"{role}, pid {pid}: {first / 2**20:.0f} MiB have become {last / 2**20:.0f} MiB"
                    )
            if told:
                first, last = max(told, key=lambda one: one[1] / one[0])
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
        body: dict[str, Any] = json.loads(newest.read_text())
        once = body["learned"] == [[FIRST_HOUR, FIRST_HOUR + len(arrived)]]
        counted = counters_of_logs(arrived, SLOTS, EVICTION_HOURS)
        found = counters_of_checkpoint(newest.parent)
        differing = found.differences(counted)
        versions = Published(self.kept)
        last = versions.numbers()[-1]
        missing = int(np.setxor1d(versions.ids(last), counted.ids_N).size)
        for fine, words in (
            (exact_rows, "the hours' records do not have the rows of the logs"),
            (once, f"the checkpoint has learned {body['learned']}, {len(arrived)} hours have arrived"),
            (not differing, f"{differing} ids have other counters in the checkpoint than in the logs"),
            (not missing, f"{missing} ids are in version {last} or in the logs, not in both"),
        ):
            if not fine:
                self.wrong.append(words)
        yes = {True: "yes", False: "NO"}
        return [
            Row("hours learned, each once", f"{len(records)} of {len(arrived)}", yes[once], "yes"),
            Row(
                "rows learned",
                f"{sum(record.get('rows', 0) for record in records):,} of {sum(lines):,}",
                yes[exact_rows],
                "yes",
            ),
            Row(
                "ids whose shows, clicks and hour are those of the logs",
                f"{counted.ids_N.size - differing:,} of {counted.ids_N.size:,}",
                yes[not differing],
                "yes",
            ),
            Row(f"ids of the last version, {last}", f"{versions.ids(last).size:,}", yes[not missing], "yes"),
        ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--seed", type=int, default=None, help="of a run that is to be repeated")
    arguments.add_argument(
        "--roles", nargs="+", choices=list(ROLES), default=list(ROLES), help="that are killed"
    )
    arguments.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    arguments.add_argument("--folder", type=Path, default=None, help="an empty one, which stays")
    arguments.add_argument("--write", action="store_true", help="the figures into docs/benchmarks.md")
    chosen = arguments.parse_args()
    if chosen.minutes < 2:
        arguments.error("--minutes: at least 2, or there is nothing to see")
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    with tempfile.TemporaryDirectory(prefix="clickline-soak-") as temporary:
        folder = Path(temporary) if chosen.folder is None else chosen.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {seed}, {chosen.minutes:g} minutes, in {folder}", flush=True)
        one = Soak(folder, chosen.minutes, seed, chosen.roles, chosen.every)
        sys.exit(soak(one, chosen.minutes, seed, write=chosen.write))


def soak(one: Soak, minutes: float, seed: int, *, write: bool) -> int:
    """How it ended: 0 for well."""
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
        "learned and published by `clickline up --follow`, which serves it in two processes; a predictor of one process asks four "
        f"lookup servers. Clients ask both over gRPC and HTTP, requests of 1 and 24 rows and rankings of 50 candidates, at {SHARE:.0%} of "
        "the peak. Each minute one process is killed by SIGKILL. All on the same 2 cores as the clients; the load average before "
        f"it began was {one.busy:.1f}.",
        rows,
        "A request is lost when its process is killed under it. Connections are refused while a whole endpoint is gone, which is when "
        "its parent was killed: with one more replica behind a load balancer clients would not see that. A learner is there again when "
        "the next hour is learned, which has to arrive first. Memory is that of a process of the role which grew most, a minute after "
        "it began and at the end of its life. Times, and how soon a role is there again, are those of a machine as busy as the load "
        "average says; everything else must hold on any.",
        write=write and not one.wrong,
    )
    for words in one.wrong[:50]:
        print(f"WRONG: {words}", flush=True)
    print(
        "all is as it must be" if not one.wrong else f"{len(one.wrong)} things are wrong; seed {seed}",
        flush=True,
    )
    return 1 if one.wrong else 0


if __name__ == "__main__":
    main()
