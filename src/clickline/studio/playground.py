"""The playground: rows that a user types are scored by the live server, and their scores are explained.

The contribution of a column is how much the probability changes when the column is missing; these variants are sent in
the same request as the rows. The scores of the previous version are computed in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version
from clickline.client import AsyncClient
from clickline.config import Config
from clickline.errors import ClicklineError, RequestRefused
from clickline.machine import connect_host
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.scorer import Scorer
from clickline.serving.auth import read_token
from clickline.serving.ports import address
from clickline.serving.protocols.json_rows import rows_from_objects
from clickline.serving.protocols.request import Limits
from clickline.studio.example_rows import form_fields, rows_of_logs
from clickline.studio.home_view import HomeView, SlowAnswer
from clickline.studio.serving_view import trusted_certificates

MAX_ROWS = 50
_EXAMPLES = 20
_OPEN_VERSIONS = 2  # kept for the next request: their tables are mapped, not in memory
_PREVIOUS_SECONDS = 4.0  # how long a response waits for the previous version to be opened
_MISSING: tuple[object, ...] = (None, "", [])

Row = Mapping[str, Any]


class Playground:
    """The playground of one home."""

    def __init__(self, config: Config, view: HomeView) -> None:
        self._config = config
        self._view = view
        self._scorers: OrderedDict[tuple[int, str], Scorer] = OrderedDict()
        self._form: tuple[object, dict[str, Any]] = (None, {})

    # ── the form ───────────────────────────────────────────────────────────────────────────────

    async def form(self) -> dict[str, Any]:
        """A field for each raw column of the current version, and example rows."""
        try:
            return await self._view.run_once("form", self._make_form)
        except (ClicklineError, OSError) as error:
            return {"fields": [], "examples": [], "version": None, "error": str(error)}

    def _make_form(self) -> dict[str, Any]:
        registry = self._view.versions.registry
        move = registry.current()
        if move is None:
            raise ClicklineError("there is no current version yet, and the form is built from it.")
        if self._form[0] != move:
            features = registry.version(move.version).manifest.feature_spec
            examples = rows_of_logs(self._config, features, _EXAMPLES)
            fields = form_fields(features, Path(self._config.home), examples)
            invented = [
                {field["column"]: field["example"] for field in fields if field["example"] is not None}
            ]
            form = {"fields": fields, "examples": examples or invented, "version": move.version}
            self._form = (move, {**form, "error": None})
        return self._form[1]

    # ── the scores ─────────────────────────────────────────────────────────────────────────────

    async def predict(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Score the rows of a request, and explain the scores if it says so."""
        rows = _checked(request)
        variants = [
            (n, column)
            for n, row in enumerate(rows)
            if request.get("explain")
            for column, value in row.items()
            if value not in _MISSING
        ]
        without = [_without(rows[n], column) for n, column in variants]
        began = time.perf_counter()
        async with self._client() as client:
            prepared = client.prepare([*rows, *without])
            began = time.perf_counter()
            answer = await client.send(prepared)
        latency = time.perf_counter() - began
        scores = [float(score) for score in answer.probability]
        contributions: list[list[dict[str, Any]]] = [[] for _ in rows]
        for (n, column), score in zip(variants, scores[len(rows) :], strict=True):
            change = scores[n] - score
            contributions[n].append({"column": column, "without": score, "change": change})
        for one in contributions:
            one.sort(key=lambda entry: -abs(entry["change"]))
        previous, note = await self._previous_scores(answer.version, rows)
        return {
            "version": answer.version,
            "rows": [
                {
                    "probability": scores[n],
                    "previous": None
                    if previous is None
                    else {"version": previous[0], "probability": previous[1][n]},
                    "contributions": contributions[n],
                }
                for n in range(len(rows))
            ],
            "ranking": sorted(range(len(rows)), key=lambda n: -scores[n]),
            "latency_ms": 1000 * latency,
            "note": note,
        }

    def close(self) -> None:
        while self._scorers:
            self._scorers.popitem()[1].close()

    def _client(self) -> AsyncClient:
        serve = self._config.serve
        return AsyncClient(
            address(connect_host(serve.host), serve.http_port),
            protocol="http",
            model=self._config.name,
            token=read_token(serve.token_file),
            tls=serve.tls is not None and trusted_certificates(self._config),
            retries=0,
        )

    # ── scores of the previous version ─────────────────────────────────────────────────────────

    async def _previous_scores(
        self, live: int | None, rows: Sequence[Row]
    ) -> tuple[tuple[int, list[float]] | None, str | None]:
        """Its number and scores; or why there are none."""
        try:
            version = await self._view.run_once("previous", lambda: self._previous(live), _PREVIOUS_SECONDS)
            if version is None:
                return None, "there is no previous version"
            key = f"open version {version.number}"
            scorer = await self._view.run_once(key, lambda: self._open(version), _PREVIOUS_SECONDS)
            return (version.number, await asyncio.to_thread(_scored, scorer, rows)), None
        except SlowAnswer:
            return None, "the previous version is still being opened: try again in a moment"
        except (ClicklineError, OSError) as error:
            return None, f"the previous version cannot be used: {error}"

    def _previous(self, live: int | None) -> Version | None:
        registry = self._view.versions.registry
        move = registry.current()
        if move is None:
            return None
        trail = [*move.before, move.version]
        earlier = trail[: trail.index(live)] if live in trail else move.before  # a server may lag behind
        return registry.version(earlier[-1]) if earlier else None

    def _open(self, version: Version) -> Scorer:
        key = (version.number, version.created)
        scorer = self._scorers.get(key)
        if scorer is None:
            scorer = self._open_scorer(self._view.versions.registry, version)
            self._scorers[key] = scorer
            while len(self._scorers) > _OPEN_VERSIONS:
                # A request may still use it; its files are unmapped when the last one is done.
                self._scorers.popitem(last=False)
        self._scorers.move_to_end(key)
        return scorer

    def _open_scorer(self, registry: Registry, version: Version) -> Scorer:
        return open_scorer(registry, version, Path(self._config.cache.dir), threads=1)


def _scored(scorer: Scorer, rows: Sequence[Row]) -> list[float]:
    """Score rows as the server does, through the same JSON decoder. Columns unknown to the version are dropped."""
    known = [{name: value for name, value in row.items() if name in scorer.columns} for row in rows]
    decoded = rows_from_objects(scorer, known, "rows", Limits())
    return [float(score) for score in scorer.predict(decoded).probability_B]


def _without(row: Row, column: str) -> Row:
    return {name: value for name, value in row.items() if name != column}


def _checked(request: Mapping[str, Any]) -> list[Row]:
    rows = request.get("rows")
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ROWS:
        raise RequestRefused("invalid", f"rows is not a list of 1 to {MAX_ROWS} rows.")
    for row in rows:
        if not isinstance(row, dict) or not row:
            raise RequestRefused("invalid", "a row is not an object of columns and values, or it is empty.")
        for column, value in row.items():
            if not all(_is_plain(one) for one in (value if isinstance(value, list) else [value])):
                raise RequestRefused(
                    "invalid", f"{column[:80]} is not a text, number, null, or a list of these."
                )
    return rows


def _is_plain(value: Any) -> bool:
    return value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
