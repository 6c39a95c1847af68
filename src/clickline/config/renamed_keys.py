"""Keys of clickline.yaml that had another name before 0.1.0: using one is an error that names the new key."""

from __future__ import annotations

_SCHEDULE = {"warmup": "warmup_steps", "floor": "min_lr_ratio", "every": "step_size", "drop": "gamma"}

RENAMED_KEYS: dict[str, str] = {
    "data.max_bad": "data.max_bad_ratio",
    "storage.credentials": "storage.credentials_file",
    "train.shards": "train.embedding_servers",
    "train.staleness": "train.max_staleness",
    "train.staleness_rate": "train.scale_lr_by_staleness",
    "train.early_stop": "train.early_stopping",
    "train.calibration.share": "train.calibration.holdout",
    "train.admission.shows": "train.admission.min_impressions",
    "train.eviction.hours_unseen": "train.eviction.max_idle_hours",
    **{
        f"{section}.{old}": f"{section}.{new}"
        for section in ("train.schedule", "train.embedding.schedule")
        for old, new in _SCHEDULE.items()
    },
    "cluster.crashes": "cluster.max_failures",
    "cluster.shard": "cluster.embedding_server",
    "gate.retries": "gate.extra_epochs",
    "publish.precision": "publish.table_precision",
    "publish.dense": "publish.dense_precision",
    "publish.deltas": "publish.max_deltas",
    "publish.keep": "publish.keep_versions",
    "publish.sample": "publish.sample_rows",
    "serve.open": "serve.allow_unauthenticated",
    "serve.queue": "serve.queue_size",
    "serve.drain": "serve.drain_timeout",
    "serve.poll": "serve.poll_interval",
    "serve.batching.wait": "serve.batching.max_wait_ms",
    "serve.lookup.timeout": "serve.lookup.timeout_ms",
    "serve.lookup.hedge": "serve.lookup.hedge_after_ms",
    "serve.lookup.missing": "serve.lookup.on_missing_shard",
    "serve.lookup.cache": "serve.lookup.cache_rows",
    "serve.tls.authority": "serve.tls.ca",
    "studio.tls.authority": "studio.tls.ca",
    "follow.poll": "follow.poll_interval",
    "follow.late": "follow.missing_after",
    "follow.missing": "follow.on_missing_hour",
    "follow.corrupt": "follow.on_corrupt_hour",
    "follow.rate": "follow.lr_scale",
    "follow.memory": "follow.max_table_memory",
}
"""Old key to new key."""

RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("train.schedule.kind", "settle"): "linear_tail",
    ("train.embedding.schedule.kind", "settle"): "linear_tail",
}
"""A key and its old value to the new value."""
