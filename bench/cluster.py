"""Training on a single-machine cluster compared with local training, the cost of a step by role, and of a checkpoint.

python bench/cluster.py                     all parts, into docs/benchmarks.md
python bench/cluster.py speed costs cuts    some parts
python bench/cluster.py --try               a smoke test, printed only
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import Row, alternate, publish
from train import MILLION, ROWS, Contestant

CONFIG = """name: bench
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}
model: {name: wide_deep, embedding_dim: 9, hidden: [512, 256, 128, 32]}
"""
PARTS = ("read", "ask", "pull", "pool", "compute", "push", "sum", "learn")
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2))


class Training(Contestant):
    """A training run that runs steps on request."""

    def ask(self, line: str) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return dict(json.loads(self._answer()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it stops its cluster
        self._process.wait(60)


@contextmanager
def world(rows: int) -> Iterator[Path]:
    """A project with a prepared dataset, in a temporary folder."""
    home = Path(tempfile.mkdtemp(prefix="clickline-bench-"))
    try:
        (home / "clickline.yaml").write_text(CONFIG)
        clickline = [str(Path(sys.executable).with_name("clickline"))]
        for command in (["sample", "--format", "criteo", "--rows", str(rows), "--out", "data"], ["prepare"]):
            subprocess.run([*clickline, *command], cwd=home, check=True, capture_output=True)
        yield home
    finally:
        shutil.rmtree(home)


def training(home: Path, workers: int = 0, shards: int = 0, how: str = "sync") -> Training:
    if not workers:
        return Training("local", None, "train_rows.py", home, "local")
    title = f"cluster, {workers} workers + {shards} shards, {how}"
    return Training(title, None, "train_rows.py", home, "cluster", workers, shards, how)


def speed(home: Path, turns: int, seconds: float, write: bool) -> None:
    contestants = [training(home), training(home, 2, 2), training(home, 2, 2, "async")]
    try:
        for one in contestants:
            one.warm_up(seconds)
        best = alternate({one.title: one.turn for one in contestants}, turns)
    finally:
        for one in contestants:
            one.close()
    local = best["local"]
    rows = [
        Row(
            title, f"{MILLION / spent:,.0f} rows/s", f"{local / spent:.2f}", "" if title == "local" else "0.7"
        )
        for title, spent in best.items()
    ]
    publish(
        "cluster",
        "Training on a cluster of one machine",
        "Wide & Deep (26 slots, dim 9, 13 dense, 512-256-128-32, batch 4096) on a prepared dataset of 800,000 synthetic "
        f"Criteo rows, reading included; best of {turns} turns, taken in turns. `python bench/run.py cluster`",
        rows,
        "Ratios are to local mode, which has both cores for one process. The 2 workers have one thread each; shards, Ray's "
        "daemons and the driver share the same two cores.",
        write=write,
    )


def costs(home: Path, steps: int, write: bool) -> None:
    rows = []
    for workers, shards in SHAPES:
        one = training(home, workers, shards)
        try:
            one._run(steps // 2)
            before = one.ask("costs")
            took = one._run(steps)
            after = one.ask("costs")
        finally:
            one.close()
        count = after["step"] - before["step"]  # type: ignore[operator]
        spent = {
            part: sum(now[part] - old[part] for now, old in zip(after["seconds"], before["seconds"], strict=True))  # type: ignore[arg-type, index]
            / count / workers * 1000
            for part in PARTS
        }  # fmt: skip
        shown = ", ".join(f"{part} {ms:.1f}" for part, ms in spent.items())
        rows.append(Row(f"{workers} workers + {shards} shards", f"{took / steps * 1000:.0f} ms", shown))
        print(rows[-1], flush=True)
    publish(
        "cluster-costs",
        "Cost of a batch by workers and shards",
        f"Milliseconds for a batch of {ROWS} rows in sync mode, and how a worker spends them; all roles on the same 2 cores. "
        "`python bench/run.py cluster`",
        rows,
        "`ask` finds the distinct ids and sends them; `pull` and `sum` are waiting for shards and for the other workers; "
        "`push` sums gradients by id and sends them. With more processes than cores every part grows by waiting for a core.",
        write=write,
    )


def cuts(home: Path, steps: int, write: bool) -> None:
    one = training(home, 2, 2)
    try:
        one._run(steps // 2)
        plain = one._run(steps) / steps
        seen = one.ask(f"cut 4 {steps}")
        again = one._run(steps) / steps
    finally:
        one.close()
    each = seen["seconds"] / seen["steps"]  # type: ignore[operator]
    usual = min(plain, again)
    publish(
        "cluster-cuts",
        "Checkpoints of a running cluster",
        f"4 checkpoints in {steps} steps of 2 workers + 2 shards, each written to disk while training continues. "
        "`python bench/run.py cluster`",
        [
            Row("a step without checkpoints", f"{usual * 1000:.1f} ms"),
            Row("a step, including checkpoints", f"{each * 1000:.1f} ms", f"{usual / each:.2f}"),
            Row(
                "share of time that training is stalled",
                f"{seen['stalled'] / seen['seconds']:.2%}",  # type: ignore[operator]
                goal="< 5 %",
            ),
        ],
        f"A checkpoint every {each * steps / 4:.1f} s here; the default is every 5 minutes.",
        write=write,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--try", dest="tiny", action="store_true")
    arguments = parser.parse_args()
    chosen = arguments.parts or ["speed", "costs", "cuts"]
    tiny, write = arguments.tiny, not arguments.tiny
    with world(50_000 if tiny else MILLION) as home:
        if "speed" in chosen:
            speed(home, 1 if tiny else 5, 0.0 if tiny else 3.0, write)
        if "costs" in chosen:
            costs(home, 4 if tiny else 60, write)
        if "cuts" in chosen:
            cuts(home, 8 if tiny else 200, write)


if __name__ == "__main__":
    main()
