"""The API as a document. Tests hold every route and every answer against it."""

from __future__ import annotations

from typing import Any

import clickline

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_WORDS: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": "number"}
_FIGURE: Schema = {"type": ["number", "null"]}
_WHOLE: Schema = {"type": "integer"}
_COUNT: Schema = {"type": ["integer", "null"]}
_YES: Schema = {"type": "boolean"}
_ANY: Schema = {}
_OBJECT: Schema = {"type": "object"}


def _object(_more: bool = False, **fields: Schema) -> Schema:
    """All of these fields; others only with `_more`."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": _more,
    }


def _list(of: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": of} | ({} if most is None else {"maxItems": most})


def _named(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_STATES = ["never", "starting", "running", "done", "stopped", "failed", "lost", "unknown"]
_PAIRS = _named({"type": "array", "items": _ANY, "minItems": 2, "maxItems": 2})
_GATE = _object(True, passed=_YES, reasons=_list(_TEXT))
_LEARNING = _named(_list(_FIGURE, 500))
_POINT = _object(
    at=_TEXT,
    qps=_NUMBER,
    rows_per_second=_NUMBER,
    p50_ms=_FIGURE,
    p99_ms=_FIGURE,
    errors_per_second=_NUMBER,
)
_ROW: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": ["string", "number", "null", "array"]},
}
_MOVED = _object(current=_WHOLE, sequence=_WHOLE, pinned=_YES, changed=_YES)
_ASKED_MOVE: Schema = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 500},
        "version": {"type": "integer", "minimum": 1},
    },
    "required": ["reason"],
}

_SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_TEXT),
    "Homes": _list(
        _object(id=_TEXT, name=_TEXT, home=_TEXT, config=_WORDS, state={"type": "string", "enum": _STATES})
    ),
    "Status": _object(
        True,
        name=_TEXT,
        now=_TEXT,
        note=_WORDS,
        state={"type": "string", "enum": _STATES},
        stage=_WORDS,
        stages=_named(_object(True, state=_TEXT, facts=_OBJECT)),
        work=_or_null(_OBJECT),
        metrics=_named(_NUMBER),
        health=_WORDS,
        versions=_OBJECT,
        cluster=_or_null(_OBJECT),
        processes=_list(_object(role=_TEXT, pid=_WHOLE)),
        error=_or_null(_object(True, kind=_TEXT, message=_TEXT)),
        studio=_or_null(_object(url=_TEXT, token_file=_WORDS)),
    ),
    "Runs": _list(
        _object(
            run=_TEXT,
            created=_WORDS,
            state={"type": "string", "enum": ["finished", "refused", "training", "stopped"]},
            auc=_FIGURE,
            logloss=_FIGURE,
            calibration=_FIGURE,
            step=_COUNT,
            epochs=_COUNT,
            gate=_or_null(_GATE),
            has_report=_YES,
        )
    ),
    "Run": _object(True, run=_object(True, name=_TEXT), learning=_or_null(_LEARNING)),
    "Curve": _LEARNING,
    "Versions": _object(
        current=_COUNT,
        pinned=_YES,
        previous=_COUNT,
        list=_list(
            _object(
                version=_WHOLE,
                table=_WORDS,
                parent=_COUNT,
                created=_WORDS,
                rows=_COUNT,
                tombstones=_COUNT,
                bytes=_COUNT,
                auc=_FIGURE,
                logloss=_FIGURE,
                calibration=_FIGURE,
                state=_list({"type": "string", "enum": ["current", "pinned", "damaged"]}),
            )
        ),
        moves=_list(
            _object(
                sequence=_WHOLE,
                version=_WHOLE,
                reason=_TEXT,
                at=_TEXT,
                pinned=_YES,
                by=_TEXT,
            ),
            100,
        ),
        error=_WORDS,
    ),
    "Difference": _object(
        versions=_list(_WHOLE, 2), contents=_PAIRS, measures=_PAIRS, features=_PAIRS, config=_PAIRS
    ),
    "Serving": _object(
        alive=_YES,
        reason=_WORDS,
        version=_COUNT,
        url=_TEXT,
        history=_list(_POINT, 300),
        totals=_object(requests=_WHOLE, errors=_WHOLE, rows=_WHOLE),
        slots=_list(_object(slot=_TEXT, lookups=_WHOLE, misses=_WHOLE, miss_rate=_FIGURE)),
        by_code=_named(_WHOLE),
        by_protocol=_named(_WHOLE),
    ),
    "Data": _object(
        dataset=_or_null(
            _object(
                id=_TEXT,
                rows=_WHOLE,
                clicks=_WHOLE,
                click_rate=_FIGURE,
                splits=_named(_object(True, rows=_WHOLE, clicks=_WHOLE, bad_rows=_WHOLE)),
                slots=_list(_object(True, name=_TEXT, distinct=_NUMBER, missing_rate=_NUMBER)),
            )
        ),
        hours=_list(
            _object(
                hour=_TEXT,
                state=_TEXT,
                rows=_COUNT,
                bad=_COUNT,
                auc=_FIGURE,
                logloss=_FIGURE,
                gate={"type": ["boolean", "null"]},
                version=_COUNT,
                seconds=_FIGURE,
                at=_WORDS,
                reason=_WORDS,
            ),
            1000,
        ),
        summary=_object(
            received=_WHOLE, learned=_WHOLE, waiting=_WHOLE, passed_over=_WHOLE, quarantined=_WHOLE
        ),
        quarantine=_list(_object(file=_TEXT, line=_WHOLE, reason=_TEXT, detail=_TEXT, text=_TEXT), 50),
    ),
    "Cluster": _or_null(_object(True, state=_TEXT, run=_TEXT, alive=_YES)),
    "Form": _object(
        fields=_list(
            _object(
                name=_TEXT,
                kind={"type": "string", "enum": ["slot", "dense"]},
                column=_TEXT,
                multi=_YES,
                top=_list(_ANY, 10),
                example=_ANY,
                fields=_list(_TEXT),
            )
        ),
        examples=_list(_ROW, 20),
        version=_COUNT,
        error=_WORDS,
    ),
    "Try": {
        "type": "object",
        "properties": {"rows": {**_list(_ROW, 50), "minItems": 1}, "explain": _YES},
        "required": ["rows"],
    },
    "Tried": _object(
        version=_COUNT,
        rows=_list(
            _object(
                probability=_NUMBER,
                previous=_or_null(_object(version=_WHOLE, probability=_NUMBER)),
                contributions=_list(_object(column=_TEXT, without=_NUMBER, change=_NUMBER)),
            )
        ),
        ranking=_list(_WHOLE),
        latency_ms=_NUMBER,
        note=_WORDS,
    ),
    "AskedMove": _ASKED_MOVE,
    "Moved": _MOVED,
    "Ticket": _object(ticket=_TEXT, seconds=_WHOLE),
}


def openapi() -> dict[str, Any]:
    """OpenAPI 3.1."""
    home = "/api/homes/{home}"
    run = f"{home}/runs/{{run}}"
    paths: dict[str, Any] = {
        "/api/openapi.json": _get("This document.", None),
        "/api/ticket": _post(
            "A pass for a minute, as ?ticket=…, for links and EventSource, where reading takes the token.",
            None,
            "Ticket",
        ),
        "/api/homes": _get("The homes that are shown.", "Homes"),
        f"{home}/status": _get("What `clickline status --json` tells.", "Status"),
        f"{home}/runs": _get("Trainings, the one at work last first.", "Runs"),
        run: _get("The report of a run, and its learning curve.", "Run"),
        f"{run}/report.html": _get("The report as a page.", "text/html"),
        f"{run}/curve": _get("The learning curve alone.", "Curve"),
        f"{home}/versions": _get("Versions and moves of the pointer, newest first.", "Versions"),
        f"{home}/versions/diff": _get(
            "What differs between two versions.", "Difference", _query("a"), _query("b")
        ),
        f"{home}/serving": _get("The live server, sampled once a second while anybody looks.", "Serving"),
        f"{home}/data": _get("The dataset, the hours oldest first, rows that were left out.", "Data"),
        f"{home}/cluster": _get("Training on a cluster; null where there is none.", "Cluster"),
        f"{home}/form": _get("What to try with: a field a raw column.", "Form"),
        f"{home}/try": _post("Ask the live server.", "Try", "Tried"),
        f"{home}/logs/{{stage}}": _get(
            "The last lines of a log.", "text/plain", _query("tail", required=False)
        ),
        f"{home}/events": _get(
            "Events: status, serving, and runs, versions, data when there is something new to fetch.",
            "text/event-stream",
        ),
    }
    for action, words in (
        ("rollback", "Make an earlier version current."),
        ("pin", "Make a version current and hold it."),
        ("unpin", "Let publishes move on."),
    ):
        paths[f"{home}/actions/{action}"] = _post(words, "AskedMove", "Moved", token=True)
    for path, methods in paths.items():
        inside = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        for about in methods.values():
            about["parameters"] = [*map(_in_path, inside), *about["parameters"]]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Clickline studio", "version": clickline.__version__},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(words: str, answer: str | None, *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(words, answer, list(parameters))}


def _post(words: str, body: str | None, answer: str, *, token: bool = False) -> dict[str, Any]:
    about = _operation(words, answer, [])
    if body is not None:
        about["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    if token:
        about["security"] = [{"token": []}]
    return {"post": about}


def _operation(words: str, answer: str | None, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    if answer is None:
        content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    elif "/" in answer:
        content = {answer: {"schema": _TEXT}}
    else:
        content = {"application/json": {"schema": _ref(answer)}}
    refused = {"description": "Why not.", "content": {"application/json": {"schema": _ref("Error")}}}
    return {
        "summary": words,
        "parameters": parameters,
        "responses": {"200": {"description": "As asked.", "content": content}, "default": refused},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _query(name: str, *, required: bool = True) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": {"type": "integer", "minimum": 0}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}
