"""The OpenAPI document of the studio's API. Tests check every route and response against it."""

from __future__ import annotations

from typing import Any

import clickline

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": "number"}
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
_INTEGER: Schema = {"type": "integer"}
_INTEGER_OR_NULL: Schema = {"type": ["integer", "null"]}
_BOOLEAN: Schema = {"type": "boolean"}
_ANY: Schema = {}
_OBJECT: Schema = {"type": "object"}


def _object(_more: bool = False, **fields: Schema) -> Schema:
    """An object with all of these fields; others are allowed only with `_more`."""
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
_GATE = _object(True, passed=_BOOLEAN, reasons=_list(_TEXT))
_LEARNING = _named(_list(_NUMBER_OR_NULL, 500))
_POINT = _object(
    at=_TEXT,
    qps=_NUMBER,
    rows_per_second=_NUMBER,
    p50_ms=_NUMBER_OR_NULL,
    p99_ms=_NUMBER_OR_NULL,
    errors_per_second=_NUMBER,
)
_ROW: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": ["string", "number", "null", "array"]},
}
_MOVED = _object(current=_INTEGER, sequence=_INTEGER, pinned=_BOOLEAN, changed=_BOOLEAN)
_MOVE_REQUEST: Schema = {
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
        _object(
            id=_TEXT, name=_TEXT, home=_TEXT, config=_TEXT_OR_NULL, state={"type": "string", "enum": _STATES}
        )
    ),
    "Status": _object(
        True,
        name=_TEXT,
        now=_TEXT,
        note=_TEXT_OR_NULL,
        state={"type": "string", "enum": _STATES},
        stage=_TEXT_OR_NULL,
        stages=_named(_object(True, state=_TEXT, facts=_OBJECT)),
        work=_or_null(_OBJECT),
        metrics=_named(_NUMBER),
        health=_TEXT_OR_NULL,
        versions=_OBJECT,
        cluster=_or_null(_OBJECT),
        processes=_list(_object(role=_TEXT, pid=_INTEGER)),
        error=_or_null(_object(True, kind=_TEXT, message=_TEXT)),
        studio=_or_null(_object(url=_TEXT, token_file=_TEXT_OR_NULL)),
    ),
    "Runs": _list(
        _object(
            run=_TEXT,
            created=_TEXT_OR_NULL,
            state={"type": "string", "enum": ["finished", "refused", "training", "stopped"]},
            auc=_NUMBER_OR_NULL,
            logloss=_NUMBER_OR_NULL,
            calibration=_NUMBER_OR_NULL,
            step=_INTEGER_OR_NULL,
            epochs=_INTEGER_OR_NULL,
            gate=_or_null(_GATE),
            has_report=_BOOLEAN,
        )
    ),
    "Run": _object(True, run=_object(True, name=_TEXT), learning=_or_null(_LEARNING)),
    "Curve": _LEARNING,
    "Versions": _object(
        current=_INTEGER_OR_NULL,
        pinned=_BOOLEAN,
        previous=_INTEGER_OR_NULL,
        list=_list(
            _object(
                version=_INTEGER,
                table=_TEXT_OR_NULL,
                parent=_INTEGER_OR_NULL,
                created=_TEXT_OR_NULL,
                rows=_INTEGER_OR_NULL,
                tombstones=_INTEGER_OR_NULL,
                bytes=_INTEGER_OR_NULL,
                auc=_NUMBER_OR_NULL,
                logloss=_NUMBER_OR_NULL,
                calibration=_NUMBER_OR_NULL,
                state=_list({"type": "string", "enum": ["current", "pinned", "damaged"]}),
            )
        ),
        moves=_list(
            _object(
                sequence=_INTEGER,
                version=_INTEGER,
                reason=_TEXT,
                at=_TEXT,
                pinned=_BOOLEAN,
                by=_TEXT,
            ),
            100,
        ),
        error=_TEXT_OR_NULL,
    ),
    "Difference": _object(
        versions=_list(_INTEGER, 2), contents=_PAIRS, measures=_PAIRS, features=_PAIRS, config=_PAIRS
    ),
    "Serving": _object(
        alive=_BOOLEAN,
        reason=_TEXT_OR_NULL,
        version=_INTEGER_OR_NULL,
        url=_TEXT,
        history=_list(_POINT, 300),
        totals=_object(requests=_INTEGER, errors=_INTEGER, rows=_INTEGER),
        slots=_list(_object(slot=_TEXT, lookups=_INTEGER, misses=_INTEGER, miss_rate=_NUMBER_OR_NULL)),
        by_code=_named(_INTEGER),
        by_protocol=_named(_INTEGER),
    ),
    "Data": _object(
        dataset=_or_null(
            _object(
                id=_TEXT,
                rows=_INTEGER,
                clicks=_INTEGER,
                click_rate=_NUMBER_OR_NULL,
                splits=_named(_object(True, rows=_INTEGER, clicks=_INTEGER, bad_rows=_INTEGER)),
                slots=_list(_object(True, name=_TEXT, distinct=_NUMBER, missing_rate=_NUMBER)),
            )
        ),
        hours=_list(
            _object(
                hour=_TEXT,
                state=_TEXT,
                rows=_INTEGER_OR_NULL,
                bad=_INTEGER_OR_NULL,
                auc=_NUMBER_OR_NULL,
                logloss=_NUMBER_OR_NULL,
                gate={"type": ["boolean", "null"]},
                version=_INTEGER_OR_NULL,
                seconds=_NUMBER_OR_NULL,
                at=_TEXT_OR_NULL,
                reason=_TEXT_OR_NULL,
            ),
            1000,
        ),
        summary=_object(
            received=_INTEGER, learned=_INTEGER, waiting=_INTEGER, passed_over=_INTEGER, quarantined=_INTEGER
        ),
        quarantine=_list(_object(file=_TEXT, line=_INTEGER, reason=_TEXT, detail=_TEXT, text=_TEXT), 50),
    ),
    "Cluster": _or_null(_object(True, state=_TEXT, run=_TEXT, alive=_BOOLEAN)),
    "Form": _object(
        fields=_list(
            _object(
                name=_TEXT,
                kind={"type": "string", "enum": ["slot", "dense"]},
                column=_TEXT,
                multi=_BOOLEAN,
                top=_list(_ANY, 10),
                example=_ANY,
                fields=_list(_TEXT),
            )
        ),
        examples=_list(_ROW, 20),
        version=_INTEGER_OR_NULL,
        error=_TEXT_OR_NULL,
    ),
    "Try": {
        "type": "object",
        "properties": {"rows": {**_list(_ROW, 50), "minItems": 1}, "explain": _BOOLEAN},
        "required": ["rows"],
    },
    "Tried": _object(
        version=_INTEGER_OR_NULL,
        rows=_list(
            _object(
                probability=_NUMBER,
                previous=_or_null(_object(version=_INTEGER, probability=_NUMBER)),
                contributions=_list(_object(column=_TEXT, without=_NUMBER, change=_NUMBER)),
            )
        ),
        ranking=_list(_INTEGER),
        latency_ms=_NUMBER,
        note=_TEXT_OR_NULL,
    ),
    "AskedMove": _MOVE_REQUEST,
    "Moved": _MOVED,
    "Ticket": _object(ticket=_TEXT, seconds=_INTEGER),
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    home = "/api/homes/{home}"
    run = f"{home}/runs/{{run}}"
    paths: dict[str, Any] = {
        "/api/openapi.json": _get("This document.", None),
        "/api/ticket": _post(
            "A pass of one minute, as ?ticket=…, for links and EventSource if reading needs the token.",
            None,
            "Ticket",
        ),
        "/api/homes": _get("All homes.", "Homes"),
        f"{home}/status": _get("The document of `clickline status --json`.", "Status"),
        f"{home}/runs": _get("Training runs, most recently active first.", "Runs"),
        run: _get("The report of a run with its learning curve.", "Run"),
        f"{run}/report.html": _get("The HTML report of a run.", "text/html"),
        f"{run}/curve": _get("The learning curve of a run.", "Curve"),
        f"{home}/versions": _get("Versions and history, newest first.", "Versions"),
        f"{home}/versions/diff": _get(
            "The differences between two versions.", "Difference", _query("a"), _query("b")
        ),
        f"{home}/serving": _get(
            "Metrics of the live server, scraped once a second while someone watches.", "Serving"
        ),
        f"{home}/data": _get("The dataset, the hours oldest first, and quarantined rows.", "Data"),
        f"{home}/cluster": _get("Training on a cluster; null if there is none.", "Cluster"),
        f"{home}/form": _get("The fields and example rows of the playground.", "Form"),
        f"{home}/try": _post("Score rows with the live server.", "Try", "Tried"),
        f"{home}/logs/{{stage}}": _get(
            "The last lines of a log.", "text/plain", _query("tail", required=False)
        ),
        f"{home}/events": _get(
            "Events: status, serving, and runs, versions, data when they have changed.",
            "text/event-stream",
        ),
    }
    for action, summary in (
        ("rollback", "Make an earlier version current."),
        ("promote", "Make a newer version current."),
        ("pin", "Make a version current and keep it current."),
        ("unpin", "Let publishing change the current version again."),
    ):
        paths[f"{home}/actions/{action}"] = _post(summary, "AskedMove", "Moved", token=True)
    for path, methods in paths.items():
        inside = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        for operation in methods.values():
            operation["parameters"] = [*map(_in_path, inside), *operation["parameters"]]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Clickline studio", "version": clickline.__version__},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(summary: str, answer: str | None, *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(summary, answer, list(parameters))}


def _post(summary: str, body: str | None, answer: str, *, token: bool = False) -> dict[str, Any]:
    operation = _operation(summary, answer, [])
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    if token:
        operation["security"] = [{"token": []}]
    return {"post": operation}


def _operation(summary: str, answer: str | None, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    if answer is None:
        content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    elif "/" in answer:
        content = {answer: {"schema": _TEXT}}
    else:
        content = {"application/json": {"schema": _ref(answer)}}
    error = {"description": "The reason.", "content": {"application/json": {"schema": _ref("Error")}}}
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "Success.", "content": content}, "default": error},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _query(name: str, *, required: bool = True) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": {"type": "integer", "minimum": 0}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}
