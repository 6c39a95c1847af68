"""The OpenAPI document of the HTTP port, at /openapi.json; its rows have the fields of the current version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.http_common import STATUS, json_response
from clickline.serving.protocols.request import OUTPUTS, Response, input_tensors

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_NUMBERS: Schema = {"type": "array", "items": _NUMBER}
_DATATYPES = ["BYTES", "BOOL", *(f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64))]
_DATATYPES += ["FP16", "FP32", "FP64"]


def document(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    """The OpenAPI 3.1 document. Before the first version is loaded a row may have any field."""
    current = versions.current
    paths: dict[str, Any] = {
        "/openapi.json": _get("This document.", {"type": "object"}),
        "/v2": _get("The server.", _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT))),
        "/v2/health/live": _get("Liveness of the process. Needs no token.", _object(live=_BOOLEAN)),
        "/v2/health/ready": _get_ready(
            "Whether a version is loaded. Needs no token.", _object(ready=_BOOLEAN)
        ),
        "/ElasticCTRPredictionService/inference": _post(
            "Scores of instances given by slots and feasigns.",
            "SlotInstances",
            "SlotPredictions",
            "SlotError",
        ),
    }
    for place in ("{model}", "{model}/versions/{version}"):
        paths |= {
            f"/v1/models/{place}": _get("State of the model's version.", _ref("ModelStatus")),
            f"/v1/models/{place}/metadata": _get(
                "Inputs and outputs, as in TensorFlow Serving.", {"type": "object"}
            ),
            f"/v1/models/{place}:predict": _post("Scores of rows.", "Predict", "Predictions"),
            f"/v1/models/{place}:rank": _post("Scores of candidates that share a context.", "Rank", "Ranked"),
            f"/v2/models/{place}": _get(
                "Inputs and outputs, as in the Open Inference Protocol.", _ref("ModelMetadata")
            ),
            f"/v2/models/{place}/ready": _get_ready(
                "Whether the model is loaded.", _object(name=_TEXT, ready=_BOOLEAN)
            ),
            f"/v2/models/{place}/infer": _post("Scores of tensors.", "Infer", "Inferred"),
        }
    names = {"schema": {"type": "string", "enum": list(versions.names)} if versions.names else _TEXT}
    numbers = {"schema": {"type": "integer", "minimum": 0}}
    for path, methods in paths.items():
        for operation in methods.values():
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, **schema}
                for name, schema in (("model", names), ("version", numbers))
                if f"{{{name}}}" in path
            ]
    return json_response(
        {
            "openapi": "3.1.0",
            "info": {"title": "Clickline model server", "version": version("clickline")},
            "paths": paths,
            "components": {
                "schemas": _schemas(None if current is None else current.scorer),
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"token": []}, {}],
        }
    )


def _schemas(model: ScorerLike | None) -> dict[str, Schema]:
    row, columns = _row(model)
    tensor = _object(
        {"data": {"type": "array"}, "parameters": {"type": "object"}},
        name=_TEXT,
        datatype={"type": "string", "enum": _DATATYPES},
        shape=_list({"type": "integer", "minimum": -1}),
    )
    slots = _object(
        slot_name={"type": ["string", "integer"]}, feasigns=_list({"type": ["integer", "string"]})
    )
    answers: dict[str, Any] = {
        name: {"type": "array", "items": _INTEGER if one.is_integer else _NUMBER}
        for name, one in OUTPUTS.items()
    }
    status = _object(version=_TEXT, state=_TEXT, status={"type": "object"})
    return {
        "Error": _object(error=_TEXT),
        "SlotError": _object(predictions=_list({}), err_code=_INTEGER, err_msg=_TEXT),
        "Row": row,
        "Columns": columns,
        "Predict": {
            "oneOf": [
                _object({"signature_name": _TEXT}, instances={**_list(_ref("Row")), "minItems": 1}),
                _object({"signature_name": _TEXT}, inputs=_ref("Columns")),
            ]
        },
        "Predictions": {
            "oneOf": [_object(predictions=_list(_object(**answers))), _object(outputs={"type": "object"})]
        },
        "Rank": _object(
            {"context": _ref("Row"), "top_k": {"type": "integer", "minimum": 1}},
            candidates={"oneOf": [{**_list(_ref("Row")), "minItems": 1}, _ref("Columns")]},
        ),
        "Ranked": _object({"indices": _list(_INTEGER)}, version=_INTEGER, scores=_NUMBERS),
        "Infer": _object(
            {
                "id": _TEXT,
                "parameters": {"type": "object"},
                "outputs": _list(_object({"parameters": {"type": "object"}}, name={"enum": list(OUTPUTS)})),
            },
            inputs={**_list(tensor), "minItems": 1},
        ),
        "Inferred": _object({"id": _TEXT}, model_name=_TEXT, model_version=_TEXT, outputs=_list(tensor)),
        "SlotInstances": _object(instances={**_list(_object(slots=_list(slots))), "minItems": 1}),
        "SlotPredictions": _object(
            predictions=_list(_object(prob0=_NUMBER, prob1=_NUMBER)), err_code=_INTEGER, err_msg=_TEXT
        ),
        "ModelStatus": _object(model_version_status=_list(status)),
        "ModelMetadata": _object(
            name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_list(tensor), outputs=_list(tensor)
        ),
    }


def _row(model: ScorerLike | None) -> tuple[Schema, Schema]:
    """Schemas of a row, and of rows as columns. No field is required: absent fields are missing values."""
    if model is None:
        return {"type": "object"}, {"type": "object", "additionalProperties": {"type": "array"}}
    fields: dict[str, Schema] = {}
    for name, number, several in input_tensors(model):
        kinds = ["number", "null"] if number else ["string", "number", "null"]
        fields[name] = {"type": kinds}
        if several:
            fields[name] = {"anyOf": [fields[name], _list({"type": kinds})]}
    columns = {name: _list(field) for name, field in fields.items()}
    row = {"type": "object", "properties": fields, "additionalProperties": False}
    return row, {**row, "properties": columns, "minProperties": 1}


def _object(_optional: dict[str, Schema] | None = None, **fields: Schema) -> Schema:
    return {"type": "object", "properties": {**fields, **(_optional or {})}, "required": list(fields)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _get(summary: str, answer: Schema) -> Schema:
    return {"get": _operation(summary, answer, "Error")}


def _get_ready(summary: str, answer: Schema) -> Schema:
    """A GET operation that answers 503 with the same schema when not ready."""
    operation = _get(summary, answer)
    responses = operation["get"]["responses"]
    responses["503"] = {**responses["200"], "description": "Not ready."}
    return operation


def _post(summary: str, body: str, answer: str, error: str = "Error") -> Schema:
    operation = _operation(summary, _ref(answer), error)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return {"post": operation}


def _operation(summary: str, answer: Schema, error: str) -> Schema:
    kinds = ", ".join(f"{status} {kind}" for kind, status in STATUS.items())
    refused = {"description": f"Error: {kinds}.", "content": {"application/json": {"schema": _ref(error)}}}
    answered = {"description": "OK.", "content": {"application/json": {"schema": answer}}}
    return {"summary": summary, "responses": {"200": answered, "default": refused}}
