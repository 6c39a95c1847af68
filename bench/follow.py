"""Follow mode: 200 hours of drifting data, and the time until an hour is served.

python bench/follow.py               both parts, into docs/benchmarks.md and docs/images/follow.svg
python bench/follow.py hours         one part, printed only: hours or freshness
python bench/follow.py --try         a smoke test with few hours, printed only
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure import ROOT, Row, free_ports, publish

IMAGE = ROOT / "docs" / "images" / "follow.svg"
FIRST_HOUR = 490_896  # 2026-01-01T00 in hours since 1970
DAY = 24
SLOTS, DENSE, CARDINALITY = 8, 4, 10_000
MEMORY = "6MiB"

YAML = """
name: ads
data:
  format: csv
  train: logs/{date}/{hour}/*.csv
  dates: {from: 20260101}
  fields: FIELDS
model: {embedding_dim: 8, hidden: [64, 32]}
train: {eviction: {max_idle_hours: 24}}
follow: {poll_interval: 0.05, max_table_memory: MEMORY}
tracking: {enabled: false}
cache: {dir: cache}
home: home
"""
FIELDS = {
    "click": "label",
    "timestamp": "time",
    **{f"I{n}": "log1p" for n in range(1, DENSE + 1)},
    **{f"B{n}": {"column": f"I{n}", "transform": "bucket"} for n in range(1, DENSE + 1)},
    **{f"C{n}": "slot" for n in range(1, SLOTS + 1)},
}


@dataclass(frozen=True)
class Size:
    """The size of a benchmark: real, or a smoke test."""

    hours: int
    rows: int  # per hour
    fresh_hours: int
    fresh_rows: int


REAL = Size(200, 10_000, 7, 100_000)
TRY = Size(30, 2_000, 2, 5_000)


# ── 200 hours ──────────────────────────────────────────────────────────────────────────────────


def make_project(folder: Path, hours: int, rows: int, seed: int = 0) -> None:
    """Generate hours with their true probabilities, and a config to follow them."""
    from clickline.data.sample.generate import SampleOptions, generate
    from clickline.progress import Progress

    options = SampleOptions(
        "csv", hours * rows, folder / "logs", hours, seed, slots=SLOTS, dense=DENSE, cardinality=CARDINALITY
    )
    generate(options, Progress())
    (folder / "clickline.yaml").write_text(
        YAML.replace("FIELDS", json.dumps(FIELDS)).replace("MEMORY", MEMORY)
    )


def follow_all(folder: Path, hours: int, overrides: Sequence[str]) -> None:
    """Follow all hours in this process. Its memory after each hour is written to memory.json, the model after the first
    day to frozen/."""
    from clickline.config import load_config
    from clickline.pipeline.follow import follow
    from clickline.progress import Progress

    class Stop(Exception):
        pass

    memory: list[int] = []
    trained: set[str] = set()

    class Watcher(Progress):
        def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
            last = None if facts is None else facts.get("last")
            if name != "follow" or not last or last["hour"] in trained:
                return
            trained.add(last["hour"])
            memory.append(resident_bytes())
            if len(memory) == DAY:
                newest = max((folder / "home/runs/follow").glob("step-*"))
                shutil.copytree(newest, folder / "frozen" / newest.name)
            if len(memory) == hours:
                raise Stop

    with suppress(Stop):
        follow(load_config(folder / "clickline.yaml", overrides), Watcher())
    (folder / "memory.json").write_text(json.dumps(memory))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@dataclass(frozen=True)
class FollowResult:
    """Results of the hours, one value per hour."""

    live_H: np.ndarray  # AUC of the model before it was trained on the hour
    frozen_H: np.ndarray  # AUC of the model after the first day; NaN before
    best_H: np.ndarray  # AUC of the true probabilities
    resident_H: np.ndarray  # bytes of the process
    records: list[dict[str, Any]]

    def seconds(self) -> float:
        return statistics.median(record["seconds"] for record in self.records[DAY:])


def run_hours(folder: Path, hours: int, *overrides: str) -> FollowResult:
    """Follow the hours of a project; then score them with the frozen model and with the true probabilities."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import follow; "
    code += f"follow.follow_all(follow.Path({str(folder)!r}), {hours}, {list(overrides)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
    records = [json.loads(path.read_text()) for path in sorted((folder / "home/follow/hours").glob("*.json"))]
    assert len(records) == hours, records[-1]
    return FollowResult(
        np.array([record["progressive"]["auc"] for record in records]),
        frozen_aucs(folder, hours),
        best_aucs(folder, hours),
        np.array(json.loads((folder / "memory.json").read_text())),
        records,
    )


def frozen_aucs(folder: Path, hours: int) -> np.ndarray:
    from clickline.artifacts.checkpoint import latest_checkpoint
    from clickline.config import load_config
    from clickline.data.prepare.hour_dataset import prepare_hour, prune_hours
    from clickline.evaluation.evaluator import evaluate_rows
    from clickline.models.model import open_checkpoint
    from clickline.progress import Progress

    config = load_config(folder / "clickline.yaml", [f"home={folder / 'home-frozen'}"])
    checkpoint = latest_checkpoint(folder / "frozen")
    assert checkpoint is not None
    model = open_checkpoint(checkpoint, 2)
    aucs_H = np.full(hours, np.nan)
    for hour in range(DAY, hours):
        data = prepare_hour(config, FIRST_HOUR + hour, model.features, Progress()).dataset
        rows = (
            data.read(Path(data.folder, data.splits["train"].shards[shard].file), [group])
            for shard, group, _ in data.row_groups("train")
        )
        aucs_H[hour] = evaluate_rows(model.score, rows).total.auc
        prune_hours(config, ())
    return aucs_H


def best_aucs(folder: Path, hours: int) -> np.ndarray:
    """AUC of the true probabilities, which no model can exceed."""
    import pyarrow.parquet as pq

    from clickline.evaluation.binary_metrics import MetricCounts

    aucs = []
    for path in sorted((folder / "logs/truth").glob("*.parquet"))[:hours]:
        truth = pq.read_table(path)
        clicks_B = truth["label"].to_numpy().astype(np.float32)
        counts = MetricCounts()
        counts.add(clicks_B, np.ones_like(clicks_B), truth["p"].to_numpy())
        aucs.append(counts.metrics().auc)
    return np.array(aucs)


def report_hours(result: FollowResult, bound: str) -> list[Row]:
    hours = len(result.records)
    rows = []
    last = min(2 * DAY, hours - DAY)
    for name, part in (("day 2", slice(DAY, 2 * DAY)), (f"the last {last} hours", slice(-last, None))):
        live, frozen, best = (
            float(line[part].mean()) for line in (result.live_H, result.frozen_H, result.best_H)
        )
        rows += [
            Row(f"{name}: best reachable", f"AUC {best:.4f}"),
            Row(
                f"{name}: the model that follows",
                f"AUC {live:.4f}",
                f"{(live - 0.5) / (best - 0.5):.0%} of the way from chance to the best",
            ),
            Row(
                f"{name}: frozen after day 1",
                f"AUC {frozen:.4f}",
                f"{(frozen - 0.5) / (best - 0.5):.0%}; {live - frozen:.4f} below the one that follows",
            ),
        ]
    peak = max(record["memory"] for record in result.records)
    evicted = sum(record["evicted"] for record in result.records)
    day, end = (result.resident_H[at] / 2**20 for at in (DAY - 1, -1))
    ids = [result.records[at]["ids"] for at in (DAY - 1, -1)]
    rows += [
        Row("sparse tables, most after any hour", f"{peak / 2**20:.1f} MiB", "", f"≤ {bound}"),
        Row("ids after a day, at the end", f"{ids[0]:,}, {ids[1]:,}; {evicted:,} evicted"),
        Row(
            "memory of the process after a day, at the end",
            f"{day:.0f} MiB, {end:.0f} MiB",
            f"{end / day:.2f}x",
            "flat",
        ),
        Row(
            f"an hour of {result.records[0]['rows']:,} rows: prepared, scored, trained, evaluated, published",
            f"{result.seconds():.2f} s (median)",
        ),
    ]
    return rows


# ── freshness ──────────────────────────────────────────────────────────────────────────────────

FRESH_YAML = """
name: ads
data: {format: criteo, train: "logs/{date}/{hour}/*.tsv", dates: {from: 20260101}}
gate: {auc: 0.6}
tracking: {enabled: false}
serve: {grpc_port: GRPC, http_port: HTTP, metrics_port: METRICS}
cache: {dir: cache}
home: home
"""


def freshness(folder: Path, hours: int, rows: int) -> list[float]:
    """Seconds from the donefile of an hour to the first response by its version, for each hour but the first. Runs
    `clickline up --follow` with its defaults and a client that polls continuously."""
    import clickline
    from clickline.data.sample.generate import SampleOptions, generate
    from clickline.progress import Progress

    generate(SampleOptions("criteo", hours * rows, folder / "coming", hours), Progress())
    ports = dict(zip(("GRPC", "HTTP", "METRICS"), map(str, free_ports(3)), strict=True))
    text = FRESH_YAML
    for name, port in ports.items():
        text = text.replace(name, port)
    (folder / "clickline.yaml").write_text(text)
    source = sorted((folder / "coming").glob("2*/*"))
    line = (source[-1] / "part-00000.tsv").read_text().partition("\n")[0].split("\t")[1:]
    row = {
        **{f"I{n + 1}": float(value or "nan") for n, value in enumerate(line[:13])},
        **{f"C{n + 1}": value for n, value in enumerate(line[13:])},
    }
    (folder / "logs" / source[0].parent.name).mkdir(parents=True)  # the source exists and is still empty
    program = Path(sys.executable).with_name("clickline")
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([program, "up", "--follow"], cwd=folder, stdout=log, stderr=log)
    seconds: list[float] = []
    try:
        with clickline.Client(f"127.0.0.1:{ports['GRPC']}") as client:
            for number, hour in enumerate(source, start=1):
                time.sleep(random.uniform(0, 5))  # at a random time between two polls
                began = arrive(hour, folder / "logs" / hour.parent.name / hour.name)
                deadline = began + 180
                while served_version(client, row) < number:
                    if up.poll() is not None or time.time() > deadline:
                        raise RuntimeError(f"no version {number}:\n{(folder / 'up.log').read_text()[-3000:]}")
                    time.sleep(0.02)
                seconds.append(time.time() - began)
                print(f"  hour {number} of {hours}: {seconds[-1]:.1f} s", flush=True)
    finally:
        up.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            up.wait(60)
        up.kill()
        up.wait()
    return seconds[1:]


def arrive(source: Path, target: Path) -> float:
    """Let an hour arrive; returns the time when it was complete."""
    target.mkdir(parents=True)
    for file in source.glob("part-*"):
        file.rename(target / file.name)
    (target / "donefile").touch()
    return time.time()


def served_version(client: Any, row: Mapping[str, Any]) -> int:
    """The version that serves; 0 if none does yet."""
    from clickline.errors import ClicklineError

    try:
        return int(client.predict([row]).version)
    except ClicklineError:
        return 0


def report_freshness(seconds: Sequence[float], rows: int) -> list[Row]:
    return [
        Row(
            f"an hour of {rows:,} rows: donefile to the first response by its version",
            f"{statistics.median(seconds):.1f} s (median of {len(seconds)}), longest {max(seconds):.1f} s",
            "",
            "≤ 30 s",
        )
    ]


# ── the plot ───────────────────────────────────────────────────────────────────────────────────

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44
COLOURS = {"best reachable": "#8a8f98", "follows": "#2a9d57", "frozen after day 1": "#d9622b"}
WINDOW = 6


def moving_average(values_H: np.ndarray) -> np.ndarray:
    """The moving average over six hours."""
    return np.array([values_H[max(0, h - WINDOW + 1) : h + 1].mean() for h in range(values_H.size)])


def plot(result: FollowResult) -> str:
    """Three lines as SVG, in colours that are readable on white and on black."""
    hours = result.live_H.size
    lines = {
        "best reachable": moving_average(result.best_H),
        "follows": moving_average(result.live_H),
        "frozen after day 1": np.concatenate([np.full(DAY, np.nan), moving_average(result.frozen_H[DAY:])]),
    }
    # The first hours, before anything is trained, would compress the scale.
    first = WINDOW
    visible = np.concatenate([line[first:] for line in lines.values()])
    low = np.floor(np.nanmin(visible) * 50) / 50
    high = np.ceil(np.nanmax(visible) * 50) / 50

    def across(hour: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * hour / (hours - 1)

    def down(auc: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - auc) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#7d838c">',
        f"<title>AUC of {hours} hours, each scored before training</title>",
    ]
    for auc in np.arange(low, high + 1e-9, 0.02):
        y = f"{down(auc):.1f}"
        parts += [
            f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#7d838c" stroke-opacity=".3"/>',
            f'<text x="{LEFT - 8}" y="{down(auc) + 4:.1f}" text-anchor="end">{auc:.2f}</text>',
        ]
    for day in range(0, hours, DAY):
        x = f"{across(day):.1f}"
        parts += [
            f'<path d="M{x} {HEIGHT - BOTTOM}v5" stroke="#7d838c"/>',
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{day}</text>',
        ]
    parts += [
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#7d838c"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">hours followed</text>',
        f'<text x="8" y="{TOP - 22}">AUC, mean of {WINDOW} hours</text>',
    ]
    at = 230
    for name, line_H in lines.items():
        points = [
            f"{across(h):.1f} {down(line_H[h]):.1f}" for h in range(first, hours) if not np.isnan(line_H[h])
        ]
        parts += [
            f'<path d="M{"L".join(points)}" fill="none" stroke="{COLOURS[name]}" stroke-width="2" '
            'stroke-linejoin="round"/>',
            f'<path d="M{at} {TOP - 26}h24" stroke="{COLOURS[name]}" stroke-width="3"/>',
            f'<text x="{at + 30}" y="{TOP - 22}">{name}</text>',
        ]
        at += 175
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("parts", nargs="*", default=["hours", "freshness"])
    arguments.add_argument("--try", action="store_true", dest="only_try")
    chosen = arguments.parse_args()
    size = TRY if chosen.only_try else REAL
    parts = chosen.parts
    unknown = set(parts) - {"hours", "freshness"}
    if unknown:
        arguments.error(f"unknown part {', '.join(unknown)}: choose hours or freshness")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if "hours" in parts:
            world = Path(folder, "world")
            make_project(world, size.hours, size.rows)
            result = run_hours(world, size.hours)
            rows += report_hours(result, MEMORY)
            image = Path(tempfile.gettempdir(), "follow.svg") if chosen.only_try else IMAGE
            image.parent.mkdir(exist_ok=True)
            image.write_text(plot(result))
            print(f"drawn: {image}", flush=True)
        if "freshness" in parts:
            fresh = Path(folder, "fresh")
            fresh.mkdir()
            rows += report_freshness(freshness(fresh, size.fresh_hours, size.fresh_rows), size.fresh_rows)
    how = (
        f"`python bench/follow.py` ({size.hours} synthetic hours of {size.rows:,} rows, {SLOTS} slots of up to "
        f"{CARDINALITY:,} ids and {DENSE} dense fields; half of a slot's weights change every 12 hours, a fifth of the values "
        "of large slots are ids new in the last hours; each hour is scored before training). Freshness: "
        f"{size.fresh_rows:,} rows in the Criteo layout, `clickline up --follow` with default settings on the same "
        "machine as the client."
    )
    publish(
        "follow",
        "Continuous training",
        how,
        rows,
        "![AUC by hour](images/follow.svg)",
        write=not chosen.only_try and len(parts) == 2,
    )


if __name__ == "__main__":
    main()
