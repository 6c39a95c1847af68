"""Opens a version so that it can answer: load, score its stored sample, compare."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import read_manifest
from clickline.artifacts.version import VERSION_FORMAT
from clickline.config.sections import LookupSection, ServeSection
from clickline.errors import StorageError
from clickline.scoring.lookup_pool import LookupPool, client_tls
from clickline.scoring.remote_rows import RemoteRows
from clickline.scoring.scorer import Scorer
from clickline.serving.auth import read_token
from clickline.serving.open_versions import ScorerLike
from clickline.storage.storage import Storage

Load = Callable[[Sequence[Path], ServeSection, Path], ScorerLike]
"""Opens the version whose files lie in these folders, base first; the last argument is a folder that the workers
share for as long as the version is used. Raises if it does not give its stored sample the stored scores."""

_log = logging.getLogger(__name__)  # the service's own log hears it
_SAY_SECONDS = 3.0  # after which it is said that lookup servers are waited for
_REPLICA_SECONDS = 30.0  # for lookup servers that answer to load a version, before it is tried again later


def open_version(folders: Sequence[Path], serve: ServeSection, work: Path) -> ScorerLike:
    body = read_manifest(Storage(), str(folders[-1]), "version", VERSION_FORMAT)
    if serve.lookup is None:
        scorer = Scorer.open(body, folders, threads=serve.threads, work=work)
    else:
        scorer = Scorer(body, folders[-1], _remote_rows(serve, serve.lookup, body), serve.threads)
    try:
        scorer.check_sample()
    except BaseException:
        scorer.close()
        raise
    return scorer


def _remote_rows(serve: ServeSection, lookup: LookupSection, body: Mapping[str, Any]) -> RemoteRows:
    """The version's rows on lookup servers, once all of them that answer have it."""
    authority = None if serve.tls is None else serve.tls.authority
    lookups = _pool(
        lookup.shards, lookup.timeout, lookup.hedge, serve.token_file, serve.tls is not None, authority
    )
    readiness = lookups.ready(body["number"], _SAY_SECONDS)
    if not readiness.ready or readiness.late:
        _log.warning("version %d waits for lookup servers: %s", body["number"], readiness)
        readiness = lookups.ready(body["number"], _REPLICA_SECONDS)
    if not readiness.ready:
        raise StorageError(f"the lookup servers do not have version {body['number']}: {readiness}")
    return RemoteRows.of_version(lookups, body, missing=lookup.missing, cache=lookup.cache)


@cache
def _pool(
    shards: tuple[tuple[str, ...], ...],
    timeout: int,
    hedge: int,
    token_file: str | None,
    tls: bool,
    authority: str | None,
) -> LookupPool:
    """One for all versions of a process."""
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
    """What this process counted of its lookup servers since it began; empty without any."""
    counts: Counter[str] = Counter()
    for pool in _pools:
        counts.update(vars(pool.stats))
    return dict(counts)
