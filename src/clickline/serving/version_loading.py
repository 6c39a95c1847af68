"""Opens a version for serving: loads it, scores its stored sample, and compares the scores."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from clickline.artifacts.version import VersionManifest, read_version_manifest
from clickline.config.sections import LookupSection, ServeSection
from clickline.errors import StorageError
from clickline.scoring.lookup_pool import LookupPool, client_tls
from clickline.scoring.remote_rows import RemoteRows
from clickline.scoring.scorer import Scorer
from clickline.serving.auth import read_token
from clickline.serving.open_versions import ScorerLike
from clickline.storage.storage import Storage

Load = Callable[[Sequence[Path], ServeSection, Path], ScorerLike]
"""Opens the version in these folders, base first; the last argument is a folder that all workers share while the
version is used. Raises if the scores of its stored sample differ from the stored scores."""

_log = logging.getLogger(__name__)  # handled by ServerLog
_LOG_AFTER_SECONDS = 3.0  # of waiting for lookup servers before it is logged
_REPLICA_SECONDS = 30.0  # for lookup servers to load a version, before it is retried later


def open_version(folders: Sequence[Path], serve: ServeSection, work: Path) -> ScorerLike:
    manifest = read_version_manifest(Storage(), str(folders[-1]))
    if serve.lookup is None:
        scorer = Scorer.open(manifest, folders, threads=serve.threads, work=work)
    else:
        scorer = Scorer(manifest, folders[-1], _remote_rows(serve, serve.lookup, manifest), serve.threads)
    try:
        scorer.check_sample()
    except BaseException:
        scorer.close()
        raise
    return scorer


def _remote_rows(serve: ServeSection, lookup: LookupSection, version: VersionManifest) -> RemoteRows:
    """Return the version's rows on lookup servers, once all reachable ones have it."""
    authority = None if serve.tls is None else serve.tls.ca
    lookups = _pool(
        lookup.shards,
        lookup.timeout_ms,
        lookup.hedge_after_ms,
        serve.token_file,
        serve.tls is not None,
        authority,
    )
    readiness = lookups.ready(version.number, _LOG_AFTER_SECONDS)
    if not readiness.ready or readiness.pending:
        _log.warning("version %d waits for lookup servers: %s", version.number, readiness)
        readiness = lookups.ready(version.number, _REPLICA_SECONDS)
    if not readiness.ready:
        raise StorageError(f"the lookup servers do not have version {version.number}: {readiness}")
    return RemoteRows.for_version(lookups, version, missing=lookup.on_missing_shard, cache=lookup.cache_rows)


@cache
def _pool(
    shards: tuple[tuple[str, ...], ...],
    timeout: int,
    hedge: int,
    token_file: str | None,
    tls: bool,
    authority: str | None,
) -> LookupPool:
    """Return the pool that all versions of a process share."""
    pool = LookupPool(
        shards,
        timeout=timeout / 1000,
        hedge=hedge / 1000,
        token=read_token(token_file),
        tls=client_tls(authority) if tls else None,
    )
    _pools.append(pool)
    return pool


_pools: list[LookupPool] = []


def remote_counts() -> dict[str, int]:
    """Counts of this process about its lookup servers; empty if it uses none."""
    counts: Counter[str] = Counter()
    for pool in _pools:
        counts.update(vars(pool.stats))
    return dict(counts)
