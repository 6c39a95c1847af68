"""Ranking requests with changing fields: few ONNX sessions, and the same scores as full rows."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import clickline
from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.publishing.run import publish
from clickline.scoring import scorer as scoring
from clickline.scoring.onnx_network import OnnxNetwork
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.scorer import Scorer
from clickline.serving.protocols.ranking_http import Rank
from clickline.serving.protocols.request import Limits
from clickline.serving.protocols.tfserving_http import Predict

FIELDS = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
CANDIDATES = FIELDS[13:29]  # C1 to C16
CONTEXT = [name for name in FIELDS if name not in CANDIDATES]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def published(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank") / "ads"
    shutil.copytree(trained, folder)
    publish(load_config(folder / "clickline.yaml"))
    return folder


@pytest.fixture
def scorer(published: Path) -> Iterator[Scorer]:
    config = load_config(published / "clickline.yaml")
    registry = registry_of(config)
    found = open_scorer(registry, registry.version(1), Path(config.cache.dir), 1)
    with closing(found):
        yield found


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of candidate inputs of each session that was created."""
    created: list[int] = []
    split = OnnxNetwork.split

    def counted(self: OnnxNetwork, own: Any, shared: Any) -> Any:
        created.append(len(own))
        return split(self, own, shared)

    monkeypatch.setattr(OnnxNetwork, "split", counted)
    return created


@pytest.fixture(scope="module")
def rows(published: Path) -> list[Row]:
    found = []
    for line in (published / "data" / "eval.tsv").read_text().splitlines()[:40]:
        row: Row = dict(zip(FIELDS, line.split("\t")[1:], strict=True))
        found.append(row | {name: float(row[name]) if row[name] else None for name in FIELDS[:13]})
    return found


def rank(scorer: Scorer, context: Row, candidates: list[Row]) -> np.ndarray:
    body = orjson.dumps({"context": context, "candidates": candidates})
    call = Rank(body, {}, Limits()).decode(scorer)
    assert call.context is not None
    return scorer.rank(call.context, call.rows).probability_B


def predict(scorer: Scorer, rows: list[Row]) -> np.ndarray:
    call = Predict(orjson.dumps({"instances": rows}), {}, Limits()).decode(scorer)
    return scorer.predict(call.rows).probability_B


def check(scorer: Scorer, rows: list[Row], own: list[str], shared: list[str]) -> None:
    context = {name: rows[0][name] for name in shared}
    candidates = [{name: row[name] for name in own} for row in rows]
    expected_B = predict(scorer, [{**context, **candidate} for candidate in candidates])
    np.testing.assert_allclose(rank(scorer, context, candidates), expected_B, rtol=0, atol=1e-6)


def test_changing_field_sets_do_not_create_sessions(
    scorer: Scorer, sessions: list[int], rows: list[Row]
) -> None:
    generator = random.Random(5)
    for _ in range(200):
        own = generator.sample(FIELDS, generator.randint(1, 30))
        check(scorer, rows[:5], own, generator.sample(sorted(set(FIELDS) - set(own)), 5))
    assert len(sessions) <= scoring._MAX_SPLITS
    assert len(scorer._request_counts) <= scoring._MAX_COUNTED


def test_candidates_with_fewer_fields_share_a_session(
    scorer: Scorer, sessions: list[int], rows: list[Row]
) -> None:
    check(scorer, rows, CANDIDATES, CONTEXT)
    generator = random.Random(6)
    for _ in range(100):
        own = generator.sample(CANDIDATES, generator.randint(0, len(CANDIDATES) - 1))
        shared = generator.sample(CONTEXT, generator.randint(0, len(CONTEXT)))
        check(scorer, rows[:5], own or CANDIDATES[:1], shared)
    assert len(sessions) == 1


def test_frequent_split_replaces_the_least_used(scorer: Scorer, sessions: list[int], rows: list[Row]) -> None:
    for n in range(scoring._MAX_SPLITS):  # none of these serves the requests of another
        own, others = FIELDS[n : n + 1], [*FIELDS[:n], *FIELDS[n + 1 :]]
        check(scorer, rows[:3], own, others)
    assert len(sessions) == scoring._MAX_SPLITS
    for _ in range(scoring._SPLIT_REQUESTS - 1):
        check(scorer, rows[:3], CANDIDATES, CONTEXT)
    assert len(sessions) == scoring._MAX_SPLITS
    for _ in range(3):
        check(scorer, rows[:3], CANDIDATES, CONTEXT)
    assert len(sessions) == scoring._MAX_SPLITS + 1
    assert len(scorer._splits) == scoring._MAX_SPLITS


def test_formerly_frequent_split_is_replaced_after_decay(
    scorer: Scorer, sessions: list[int], rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_DECAY_REQUESTS", 64)
    for n in range(scoring._MAX_SPLITS):
        check(scorer, rows[:3], FIELDS[n : n + 1], [*FIELDS[:n], *FIELDS[n + 1 :]])
    for split in scorer._splits:
        split.requests = 1_000_000
    context = {name: rows[0][name] for name in CONTEXT}
    candidates = [{name: row[name] for name in CANDIDATES} for row in rows[:3]]
    for _ in range(21 * scoring._DECAY_REQUESTS):  # halved 20 times, a million is 0
        rank(scorer, context, candidates)
    assert len(sessions) == scoring._MAX_SPLITS + 1


@pytest.mark.slow
def test_multi_valued_context_field_is_repeated_for_every_candidate(
    published: Path, rows: list[Row], tmp_path: Path
) -> None:
    shutil.copytree(published / "data", tmp_path / "data")
    text = (published / "clickline.yaml").read_text()
    (tmp_path / "clickline.yaml").write_text(
        text.replace("fields: {", "fields: {C25: {multi: true}, C26: {multi: true}, ")
    )
    config = load_config(tmp_path / "clickline.yaml")
    for stage in (clickline.prepare, clickline.train, publish):
        stage(config)
    registry = registry_of(config)
    shared = [name for name in FIELDS if name not in ("C1", "C25")]
    context = {name: rows[1][name] for name in shared} | {"C26": [row["C26"] for row in rows[:7]]}
    candidates = [{"C1": row["C1"], "C25": [row["C25"], rows[0]["C25"]]} for row in rows]
    with closing(open_scorer(registry, registry.version(1), Path(config.cache.dir), 1)) as scorer:
        expected_B = predict(scorer, [{**context, **candidate} for candidate in candidates])
        split_B = rank(scorer, context, candidates)
        scorer._splits = tuple(
            scorer._make_split(np.zeros(len(FIELDS), dtype=bool)) for _ in range(scoring._MAX_SPLITS)
        )
        unsplit_B = rank(scorer, context, candidates)
    np.testing.assert_allclose(split_B, expected_B, rtol=0, atol=1e-6)
    np.testing.assert_allclose(unsplit_B, expected_B, rtol=0, atol=1e-6)
