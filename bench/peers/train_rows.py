"""A training run on a prepared dataset, local or on its own cluster, that runs steps on request.

python train_rows.py HOME local
python train_rows.py HOME cluster WORKERS SHARDS sync|async
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clickline import load_config
from clickline.artifacts.dataset import Dataset
from clickline.models.from_config import expected_train_rows, plan_of
from clickline.models.model import Model
from clickline.progress import Progress
from clickline.storage.storage import Storage
from clickline.training.batches import Batches, Position
from clickline.training.train_step import TrainStep

BATCH = 4096
EPOCHS = 1000  # nobody gets there

home, mode, *rest = sys.argv[1:]
config = load_config(
    Path(home, "clickline.yaml"), overrides=[f"train.epochs={EPOCHS}", f"train.batch_size={BATCH}"]
)
dataset = Dataset.current(Storage(), config.home)
split = dataset.splits["train"]
plan = plan_of(
    config, dataset.features, expected_train_rows(config.train, split.rows, split.report["clicks"])
)
settings = {"batch_size": BATCH, "seed": 0, "time_ordered": False, "held_out": 0.0, "negative_sampling": 1.0}


def local() -> Iterator[None]:
    train_step = TrainStep(Model.build(dataset.features, plan, 2))
    batches = Batches(dataset, **settings)
    for epoch in range(EPOCHS):
        for rows, _ in batches.epoch(Position(epoch)):
            train_step.run(train_step.prepare(rows))
            yield


def answer(document: Any) -> None:
    print(json.dumps(document), flush=True)


if mode == "local":
    steps = local()
    next(steps)
    print("ready" + json.dumps({}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            next(steps)
        answer(time.perf_counter() - began)
else:
    from threading import Thread

    from clickline.artifacts.checkpoint import begin_checkpoint
    from clickline.training.cluster.driver import Driver
    from clickline.training.cluster.job import TrainingJob
    from clickline.training.cluster.policy import PolicyRules

    workers, shards, how = int(rest[0]), int(rest[1]), rest[2]
    model = Model.build(dataset.features, plan, 1)
    train_step = TrainStep(model)
    run = Path(config.home, "runs", f"bench-{workers}-{shards}-{how}")
    job = TrainingJob(
        home=Path(config.home), run=run, address=None, dataset=dataset.folder, batches=settings, plan=plan,
        tables=plan.tables(model.tables.wide_optimizer is not None), model_file=None, sync=how == "sync", max_staleness=8,
        scale_lr_by_staleness=False, rules=PolicyRules(workers, workers), shards=shards, worker_cpus=max(1.0, 2 / workers),
        worker_memory=None, shard_cpus=0, shard_memory=None, eviction=None, total_rows=0,
    )  # fmt: skip
    driver = Driver(job, Progress(), lambda figures: None)
    target = 20

    def pauses() -> Iterator[None]:
        for epoch in range(EPOCHS):
            for _ in driver.train_epoch(Position(epoch), None, lambda step: step >= target):
                yield

    driver.begin((), train_step.dense.state(), 0, 0)
    running = pauses()
    next(running)
    print("ready" + json.dumps({}), flush=True)
    for line in sys.stdin:
        if line.strip() == "costs":
            group = driver._group
            reports = [group.worker_result(one, one.actor.report.remote()) for one in group.started_workers()]
            answer({"step": driver.step, "seconds": [report.seconds for report in reports]})
            continue
        if line.startswith("cut"):  # so many cuts, as training makes them, in so many steps
            _, cuts, count = line.split()
            first, stalled = driver.step, 0.0
            began = time.perf_counter()
            for number in range(1, int(cuts) + 1):
                target = first + int(count) * number // int(cuts)
                next(running)
                paused = time.perf_counter()
                folder = begin_checkpoint(run, driver.step)
                driver.dense_state()
                parts = driver.begin_snapshots(folder, 0.2)
                stalled += time.perf_counter() - paused
                Thread(target=driver.await_snapshots, args=(parts,)).start()
            seconds = time.perf_counter() - began
            answer({"seconds": seconds, "stalled": stalled, "steps": driver.step - first})
            continue
        target, first = driver.step + int(line), driver.step
        began = time.perf_counter()
        next(running)
        answer((time.perf_counter() - began) * int(line) / (driver.step - first))
    driver.close("done")
