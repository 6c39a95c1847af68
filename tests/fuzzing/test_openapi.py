"""Schemathesis sends the REST APIs valid and invalid requests: every answer must conform to their OpenAPI documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fuzz.manifests import make_version
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service import Service, command
from studio_world import configure, opened

from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EVENTS = "events"  # an endless stream


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`clickline serve` with a version whose network is a sum."""
    folder = tmp_path_factory.mktemp("server")
    registry = folder / ".clickline" / "registry"
    make_version(registry / "versions" / "000000001")
    Registry(Storage(), str(registry)).move(1, "first", after=None)
    with command(folder) as service:
        service.wait_up()
        yield service


def call_all(document: str, examples: int, **call: Any) -> None:
    """Call every operation with valid and invalid requests."""
    schema = schemathesis.openapi.from_url(document, **call)
    asked = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith(EVENTS):
            continue
        _ask(operation, schemathesis.GenerationMode.POSITIVE, examples, call)
        if operation.method == "post":
            _ask(operation, schemathesis.GenerationMode.NEGATIVE, examples, call)
        asked.add(operation.path)
    left_out = {path for path in httpx.get(document, **call).json()["paths"] if path not in asked}
    assert all(path.endswith((EVENTS, "/openapi.json")) for path in left_out) and asked


def _ask(operation: Any, mode: Any, examples: int, call: dict[str, Any]) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None, database=None)
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(timeout=30, **call)
        case.validate_response(response, checks=CHECKS)

    with suppress(Unsatisfiable):  # this operation has no requests of this mode
        ask()


def test_openapi_document_has_the_fields_of_the_model(server: Service) -> None:
    answer = httpx.get(server.url("/openapi.json"))
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert document["openapi"] == "3.1.0"
    row = document["components"]["schemas"]["Row"]["properties"]
    assert row["I1"] == {"type": ["number", "null"]}
    assert set(row) == {"I1", "C1", "C2"} and "array" in str(row["C2"]) and "array" not in str(row["C1"])
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    asked = httpx.post(
        server.url("/v1/models/ctr:predict"), json={"instances": [{"I1": 1, "C2": ["a", "b"]}]}
    )
    whole = {**document["components"]["schemas"]["Predictions"], "components": document["components"]}
    Draft202012Validator(whole).validate(asked.json())
    assert httpx.post(server.url("/openapi.json")).status_code == 405


@pytest.mark.slow
def test_model_server_conforms_to_its_openapi_document(server: Service) -> None:
    before = server.workers()
    call_all(server.url("/openapi.json"), 5)
    assert server.workers() == before and not server.log("unexpected")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio") / "ads"
    configure(folder)
    (folder / ".clickline" / "runs" / "a").mkdir(parents=True)
    (folder / ".clickline" / "runs" / "a" / "report.json").write_text('{"evaluation": {"auc": 0.7}}')
    return folder


def _ask_studio(home: Path, examples: int) -> None:
    with opened("-c", "clickline.yaml", cwd=home) as studio:
        call_all(f"{studio.url.rstrip('/')}/api/openapi.json", examples, headers=studio.bearer)


@pytest.mark.slow
def test_studio_conforms_to_its_openapi_document(home: Path) -> None:
    _ask_studio(home, 2)


@pytest.mark.soak
def test_both_apis_with_more_examples(server: Service, home: Path) -> None:
    call_all(server.url("/openapi.json"), 500)
    _ask_studio(home, 200)
