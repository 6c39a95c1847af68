"""TensorFlow Serving's REST interface: predict by rows or by columns, status, metadata."""

from __future__ import annotations

from typing import Any

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.http_common import (
    HttpRequest,
    format_numbers,
    json_response,
    parse_object,
    preview,
    version_header,
)
from clickline.serving.protocols.json_rows import rows_from_columns, rows_from_objects
from clickline.serving.protocols.request import OUTPUTS, Call, Response, input_tensors

_SIGNATURES = ("predict", "serving_default")


class Predict(HttpRequest):
    """Scores rows, or columns of values."""

    protocol = "tfserving_rest"

    def read(self, model: ScorerLike) -> Call:
        document = parse_object(self.body)
        signature = document.get("signature_name", "")
        if signature not in ("", *_SIGNATURES):
            allowed = " or ".join(_SIGNATURES)
            raise RequestRefused("invalid", f"signature_name is {preview(signature)}; it must be {allowed}.")
        if ("instances" in document) == ("inputs" in document):
            raise RequestRefused("invalid", "the body must hold either instances (rows) or inputs (columns).")
        self.by_rows = "instances" in document
        if self.by_rows:
            return Call(rows_from_objects(model, document["instances"], "instances", self.limits))
        return Call(rows_from_columns(model, document["inputs"], "inputs", self.limits))

    def encode(self, answer: Scores) -> Response:
        outputs = {name: (output.values(answer), output.width) for name, output in OUTPUTS.items()}
        if not self.by_rows:
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


def status(model: str, version: int | None, versions: OpenVersions) -> Response:
    statuses = [
        {"version": str(number), "state": state, "status": {"error_code": "OK", "error_message": ""}}
        for number, state in versions.states(model, version).items()
    ]
    return json_response({"model_version_status": statuses})


def metadata(model: str, version: int | None, versions: OpenVersions) -> Response:
    scorer = versions.find(model, version).scorer
    signature = {
        "inputs": {
            name: _tensor(name, "DT_FLOAT" if number else "DT_STRING", -1 if several else None)
            for name, number, several in input_tensors(scorer)
        },
        "outputs": {
            name: _tensor(name, "DT_INT64" if output.is_integer else "DT_FLOAT", output.width)
            for name, output in OUTPUTS.items()
        },
        "method_name": "tensorflow/serving/predict",
    }
    return json_response(
        {
            "model_spec": {"name": model, "signature_name": "", "version": str(scorer.number)},
            "metadata": {"signature_def": {"signature_def": dict.fromkeys(_SIGNATURES, signature)}},
        }
    )


def _tensor(name: str, dtype: str, width: int | None) -> dict[str, Any]:
    """Describe a tensor of rows with `width` values each; None: one value without its own dimension."""
    sizes = ["-1"] if width is None else ["-1", str(width)]
    shape = {"dim": [{"size": size, "name": ""} for size in sizes], "unknown_rank": False}
    return {"dtype": dtype, "tensor_shape": shape, "name": f"{name}:0"}
