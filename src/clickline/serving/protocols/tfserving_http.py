"""TensorFlow Serving's REST interface: predict by rows or by columns, status, metadata."""

from __future__ import annotations

from typing import Any, Literal

from clickline.errors import RequestRefused
from clickline.serving.protocols.call import (
    OUTPUTS,
    Call,
    Limits,
    Scores,
    ServedModel,
    Target,
    multi_value_columns,
    number_columns,
)
from clickline.serving.protocols.http_common import (
    HttpRequest,
    HttpResponse,
    ServerState,
    check_target,
    format_numbers,
    json_response,
    parse_json,
    preview,
    version_header,
)
from clickline.serving.protocols.json_rows import kind_name, rows_from_columns, rows_from_objects

_SIGNATURES = ("predict", "serving_default")

Form = Literal["rows", "columns"]


def read_predict(request: HttpRequest, model: ServedModel, limits: Limits) -> Call:
    document = parse_json(request.body)
    if type(document) is not dict:
        raise RequestRefused("invalid", f"the body is {kind_name(document)}; it must be an object.")
    signature = document.get("signature_name", "")
    if signature not in ("", *_SIGNATURES):
        allowed = " or ".join(_SIGNATURES)
        raise RequestRefused("invalid", f"signature_name is {preview(signature)}; it must be {allowed}.")
    if ("instances" in document) == ("inputs" in document):
        raise RequestRefused("invalid", "the body must hold either instances (rows) or inputs (columns).")
    form: Form = "rows" if "instances" in document else "columns"
    if form == "rows":
        rows = rows_from_objects(model, document["instances"], "instances", limits)
    else:
        rows = rows_from_columns(model, document["inputs"], "inputs", limits)
    return Call(rows, details=form)


def write_predict(form: Form, answer: Scores) -> HttpResponse:
    outputs = {name: (output.values(answer), output.width) for name, output in OUTPUTS.items()}
    if form == "columns":
        tensors = {name: values.reshape(-1, width) for name, (values, width) in outputs.items()}
        return json_response({"outputs": tensors}, headers=[version_header(answer)])
    row = ",".join(f'"{name}":[{",".join(["%b"] * width)}]' for name, (_, width) in outputs.items())
    template = f"{{{row}}}".encode()
    texts = [
        format_numbers(values.reshape(-1, width)[:, place])
        for values, width in outputs.values()
        for place in range(width)
    ]
    rows = b",".join(map(template.__mod__, zip(*texts, strict=True)))
    return json_response(b'{"predictions":[%b]}' % rows, headers=[version_header(answer)])


def status(target: Target, state: ServerState) -> HttpResponse:
    model = check_target(target, state)
    version = {
        "version": str(model.number),
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    return json_response({"model_version_status": [version]})


def metadata(target: Target, state: ServerState) -> HttpResponse:
    model = check_target(target, state)
    numbers = number_columns(model.features)
    several = multi_value_columns(model.features)
    signature = {
        "inputs": {
            name: _tensor(
                name, "DT_FLOAT" if name in numbers else "DT_STRING", -1 if name in several else None
            )
            for name in model.columns
        },
        "outputs": {
            name: _tensor(name, "DT_INT64" if output.is_integer else "DT_FLOAT", output.width)
            for name, output in OUTPUTS.items()
        },
        "method_name": "tensorflow/serving/predict",
    }
    return json_response(
        {
            "model_spec": {"name": target.model, "signature_name": "", "version": str(model.number)},
            "metadata": {"signature_def": {"signature_def": dict.fromkeys(_SIGNATURES, signature)}},
        }
    )


def _tensor(name: str, dtype: str, width: int | None) -> dict[str, Any]:
    """Describe a tensor of rows with `width` values each; None: one value without its own dimension."""
    sizes = ["-1"] if width is None else ["-1", str(width)]
    shape = {"dim": [{"size": size, "name": ""} for size in sizes], "unknown_rank": False}
    return {"dtype": dtype, "tensor_shape": shape, "name": f"{name}:0"}
