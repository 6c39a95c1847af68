"""The OpenAPI document of the studio's API, generated from its endpoints. Tests check every response against it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
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


def _object(fields: Schema, *, more: bool = False) -> Schema:
    """An object with all of these fields: one or several names with their schema. Others are allowed only with
    `more`."""
    properties = {name: schema for names, schema in fields.items() for name in names.split()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": more,
    }


def _list(of: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": of} | ({} if most is None else {"maxItems": most})


def _named(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_STATE = _enum("never", "starting", "running", "done", "stopped", "failed", "lost", "unknown")
_PAIRS = _named({"type": "array", "items": _ANY, "minItems": 2, "maxItems": 2})
_CURVE = _named(_list(_NUMBER_OR_NULL, 500))
_METRICS: Schema = {"auc logloss calibration": _NUMBER_OR_NULL}
_ROW: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": ["string", "number", "null", "array"]},
}

_GATE = _object({"passed": _BOOLEAN, "reasons": _list(_TEXT)}, more=True)
_RUN = _object(
    {
        "run": _TEXT,
        "created": _TEXT_OR_NULL,
        "state": _enum("finished", "refused", "training", "stopped"),
        **_METRICS,
        "step epochs": _INTEGER_OR_NULL,
        "gate": _or_null(_GATE),
        "has_report": _BOOLEAN,
    }
)
_VERSION = _object(
    {
        "version": _INTEGER,
        "table created": _TEXT_OR_NULL,
        "parent rows tombstones bytes": _INTEGER_OR_NULL,
        **_METRICS,
        "state": _list(_enum("current", "pinned", "damaged")),
    }
)
_MOVE = _object({"sequence version": _INTEGER, "reason at by": _TEXT, "pinned": _BOOLEAN})
_POINT = _object(
    {"at": _TEXT, "qps rows_per_second errors_per_second": _NUMBER, "p50_ms p99_ms": _NUMBER_OR_NULL}
)
_DATASET = _object(
    {
        "id": _TEXT,
        "rows clicks": _INTEGER,
        "click_rate": _NUMBER_OR_NULL,
        "splits": _named(_object({"rows clicks bad_rows": _INTEGER}, more=True)),
        "slots": _list(_object({"name": _TEXT, "distinct missing_rate": _NUMBER}, more=True)),
    }
)
_HOUR = _object(
    {
        "hour state": _TEXT,
        "rows bad version": _INTEGER_OR_NULL,
        "auc logloss seconds": _NUMBER_OR_NULL,
        "gate": {"type": ["boolean", "null"]},
        "at reason": _TEXT_OR_NULL,
    }
)
_FIELD = _object(
    {
        "name column": _TEXT,
        "kind": _enum("slot", "dense"),
        "multi": _BOOLEAN,
        "top": _list(_ANY, 10),
        "example": _ANY,
        "fields": _list(_TEXT),
    }
)
_SCORED_ROW = _object(
    {
        "probability": _NUMBER,
        "previous": _or_null(_object({"version": _INTEGER, "probability": _NUMBER})),
        "contributions": _list(_object({"column": _TEXT, "without change": _NUMBER})),
    }
)

_SCHEMAS: dict[str, Schema] = {
    "Document": _OBJECT,
    "Error": _object({"error": _TEXT}),
    "Homes": _list(_object({"id name home": _TEXT, "config": _TEXT_OR_NULL, "state": _STATE})),
    "Status": _object(
        {
            "name now": _TEXT,
            "note stage health": _TEXT_OR_NULL,
            "state": _STATE,
            "stages": _named(_object({"state": _TEXT, "facts": _OBJECT}, more=True)),
            "work cluster": _or_null(_OBJECT),
            "metrics": _named(_NUMBER),
            "versions": _OBJECT,
            "processes": _list(_object({"role": _TEXT, "pid": _INTEGER})),
            "error": _or_null(_object({"kind message": _TEXT}, more=True)),
            "studio": _or_null(_object({"url": _TEXT, "token_file": _TEXT_OR_NULL})),
        },
        more=True,
    ),
    "Runs": _list(_RUN),
    "Run": _object({"run": _object({"name": _TEXT}, more=True), "learning": _or_null(_CURVE)}, more=True),
    "Curve": _CURVE,
    "Versions": _object(
        {
            "current previous": _INTEGER_OR_NULL,
            "pinned": _BOOLEAN,
            "list": _list(_VERSION),
            "moves": _list(_MOVE, 100),
            "error": _TEXT_OR_NULL,
        }
    ),
    "Difference": _object({"versions": _list(_INTEGER, 2), "contents measures features config": _PAIRS}),
    "Serving": _object(
        {
            "alive": _BOOLEAN,
            "reason": _TEXT_OR_NULL,
            "version": _INTEGER_OR_NULL,
            "url": _TEXT,
            "history": _list(_POINT, 300),
            "totals": _object({"requests errors rows": _INTEGER}),
            "slots": _list(
                _object({"slot": _TEXT, "lookups misses": _INTEGER, "miss_rate": _NUMBER_OR_NULL})
            ),
            "by_code by_protocol": _named(_INTEGER),
        }
    ),
    "Data": _object(
        {
            "dataset": _or_null(_DATASET),
            "hours": _list(_HOUR, 1000),
            "summary": _object({"received learned waiting passed_over quarantined": _INTEGER}),
            "quarantine": _list(_object({"file reason detail text": _TEXT, "line": _INTEGER}), 50),
        }
    ),
    "Cluster": _or_null(_object({"state run": _TEXT, "alive": _BOOLEAN}, more=True)),
    "Form": _object(
        {
            "fields": _list(_FIELD),
            "examples": _list(_ROW, 20),
            "version": _INTEGER_OR_NULL,
            "error": _TEXT_OR_NULL,
        }
    ),
    "Try": {
        "type": "object",
        "properties": {"rows": {**_list(_ROW, 50), "minItems": 1}, "explain": _BOOLEAN},
        "required": ["rows"],
    },
    "Tried": _object(
        {
            "version": _INTEGER_OR_NULL,
            "rows": _list(_SCORED_ROW),
            "ranking": _list(_INTEGER),
            "latency_ms": _NUMBER,
            "note": _TEXT_OR_NULL,
        }
    ),
    "MoveRequest": {
        "type": "object",
        "properties": {
            "reason": {"type": "string", "maxLength": 500},
            "version": {"type": "integer", "minimum": 1},
        },
        "required": ["reason"],
    },
    "Moved": _object({"current sequence": _INTEGER, "pinned changed": _BOOLEAN}),
    "Ticket": _object({"ticket": _TEXT, "seconds": _INTEGER}),
}


@dataclass(frozen=True)
class ApiRoute:
    """One route of the API: how it is described, and what answers it."""

    method: str
    path: str
    response: str  # the name of its schema, or a media type
    summary: str
    handler: Callable[..., Awaitable[Any]]
    body: str | None = None  # the name of its schema
    query: Mapping[str, bool] = field(default_factory=dict)  # numbers by name, and whether they are required
    token: bool = False


def openapi(endpoints: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the endpoints."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Clickline studio", "version": clickline.__version__},
        "paths": {one.path: {one.method.lower(): _operation(one)} for one in endpoints},
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: ApiRoute) -> dict[str, Any]:
    is_text = endpoint.response.startswith("text/")
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ] + [
        {"name": name, "in": "query", "required": required, "schema": {"type": "integer", "minimum": 0}}
        for name, required in endpoint.query.items()
    ]
    content = {endpoint.response: {"schema": _TEXT}} if is_text else _json(endpoint.response)
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {"description": "The reason.", "content": _json("Error")},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.body)}
    if endpoint.token:
        operation["security"] = [{"token": []}]
    return operation


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
