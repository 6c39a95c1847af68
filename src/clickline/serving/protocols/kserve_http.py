"""The Open Inference Protocol (KServe v2) over HTTP, with the binary tensor data extension.

Tensors are flat or nested lists in the JSON, or bytes after it: the header Inference-Header-Content-Length gives the
length of the JSON, `binary_data_size` the bytes of an input. A binary BYTES value is its length in 4 bytes followed by
its content; such texts never become Python objects.

Inputs have shape [N], [N, 1], or [N, K] for a multi-value slot; null, NaN and empty text are missing values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from types import NoneType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.embedding.raw_memory import Int
from clickline.errors import RequestRefused
from clickline.numba_cache import njit
from clickline.records import FLOAT64
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.http_common import (
    HttpRequest,
    json_response,
    kind_name,
    parse_json,
    preview,
    version_header,
)
from clickline.serving.protocols.json_rows import (
    FLOATS,
    RowsBuilder,
    check_rows,
    fields_of,
    known_field,
)
from clickline.serving.protocols.request import OUTPUTS, Call, Response, input_tensors, requested_outputs

_DTYPES: Mapping[str, Any] = {
    "BYTES": None,
    "BOOL": np.dtype("?"),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_VERSION = version("clickline")  # importing it from the package would violate the import order
_HEADER = b"inference-header-content-length"


# ── requests ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Input:
    name: str
    datatype: str
    rows: int
    per_row: int  # values per row
    data: Any  # from the JSON
    start: int  # in the body, if the values are binary
    end: int


class Infer(HttpRequest):
    """Scores tensors."""

    protocol = "inference_rest"

    def read(self, model: ScorerLike) -> Call:
        body = self.body
        split = self._json_size()
        document = parse_json(body if split is None else body[:split])
        if type(document) is not dict:
            raise RequestRefused("invalid", f"the request is {kind_name(document)}; it must be an object.")
        self._read_outputs(document)
        inputs = _inputs(document, len(body) if split is None else split, len(body))
        rows = inputs[0].rows
        for tensor in inputs:
            if tensor.rows != rows:
                raise RequestRefused(
                    "invalid",
                    f"{preview(tensor.name)} has {tensor.rows} rows, but {preview(inputs[0].name)} has {rows}; "
                    "all inputs must have the same number.",
                )
        check_rows(rows, self.limits)
        fields = fields_of(model)
        builder = RowsBuilder(fields, rows, body if split is not None else b"")
        for tensor in inputs:
            if known_field(tensor.name, fields, self.limits):
                if tensor.data is None:
                    _add_bytes(builder, tensor, body)
                else:
                    _add_json(builder, tensor)
        return Call(builder.build())

    def _json_size(self) -> int | None:
        """Return where the JSON ends and binary data begins; None: there is no binary data."""
        text = self.headers.get(_HEADER)
        if text is None:
            return None
        if not text.isdigit() or len(text) > 12 or int(text) > len(self.body):
            found = preview(text.decode("latin-1"))
            raise RequestRefused(
                "invalid",
                f"Inference-Header-Content-Length is {found}; it must be at most the body's "
                f"{len(self.body)} bytes.",
            )
        return int(text)

    def _read_outputs(self, document: Mapping[str, Any]) -> None:
        """Read the id, and which outputs are requested in which form."""
        self.id = document.get("id")
        if type(self.id) not in (str, NoneType):
            raise RequestRefused("invalid", f"id is {kind_name(self.id)}; it must be text.")
        binary = _parameters(document, "the request").get("binary_data_output", False)
        requested = document.get("outputs") or []
        if type(requested) is not list or not all(
            type(out) is dict and type(out.get("name")) is str for out in requested
        ):
            raise RequestRefused("invalid", "outputs must be a list of objects with a name.")
        forms = {out["name"]: _parameters(out, out["name"]).get("binary_data", binary) for out in requested}
        # Names, and whether they are requested as bytes.
        self.outputs = tuple((name, forms.get(name, binary) is True) for name in requested_outputs(forms))

    def encode(self, answer: Scores) -> Response:
        tensors = []
        binary = []
        for name, as_bytes in self.outputs:
            output = OUTPUTS[name]
            values_N = np.ascontiguousarray(output.values(answer).reshape(-1))
            shape = [values_N.size // output.width, output.width]
            tensor: dict[str, Any] = {
                "name": name,
                "datatype": "INT64" if output.is_integer else "FP32",
                "shape": shape,
            }
            if as_bytes:
                binary.append(values_N.tobytes())
                tensor["parameters"] = {"binary_data_size": values_N.nbytes}
            else:
                tensor["data"] = values_N
            tensors.append(tensor)
        document = {"model_name": self.model, "model_version": str(answer.version), "outputs": tensors}
        if self.id is not None:
            document["id"] = self.id
        if not binary:
            return json_response(document, headers=[version_header(answer)])
        head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = (
            (b"content-type", b"application/octet-stream"),
            (_HEADER, b"%d" % len(head)),
            version_header(answer),
        )
        return Response(b"".join([head, *binary]), headers=headers)


def _inputs(document: Mapping[str, Any], start: int, end: int) -> list[_Input]:
    """Parse the inputs; `start` and `end` bound the binary data in the body."""
    tensors = document.get("inputs")
    if type(tensors) is not list or not tensors:
        raise RequestRefused("invalid", "inputs must be a list with at least one tensor.")
    inputs: dict[str, _Input] = {}
    for tensor in tensors:
        if type(tensor) is not dict or type(tensor.get("name")) is not str:
            raise RequestRefused("invalid", "each input must be an object with a name.")
        name = tensor["name"]
        if name in inputs:
            raise RequestRefused(
                "invalid", f"{preview(name)} is given twice in inputs; it must be given once."
            )
        parsed = inputs[name] = _input(tensor, name, start, end)
        start = parsed.end
    if start != end:
        raise RequestRefused(
            "invalid", f"{end - start} bytes follow the data of the last input; check each binary_data_size."
        )
    return list(inputs.values())


def _input(tensor: Mapping[str, Any], name: str, start: int, end: int) -> _Input:
    datatype = tensor.get("datatype")
    if type(datatype) is not str or datatype not in _DTYPES:
        allowed = ", ".join(_DTYPES)
        raise RequestRefused(
            "invalid", f"{preview(name)} has the datatype {preview(datatype)}; allowed: {allowed}."
        )
    shape = tensor.get("shape")
    if (
        type(shape) is not list
        or len(shape) not in (1, 2)
        or not all(type(size) is int and size >= 0 for size in shape)
        or shape[1:] == [0]
    ):
        raise RequestRefused(
            "invalid",
            f"{preview(name)} has the shape {preview(shape)}; it must be [rows], [rows, 1] or, for several values, "
            "[rows, values].",
        )
    parameters = _parameters(tensor, name)
    if "shared_memory_region" in parameters:
        raise RequestRefused(
            "invalid",
            f"{preview(name)} is in shared memory, which is not supported; send its data in the request.",
        )
    size = parameters.get("binary_data_size")
    data = tensor.get("data")
    if (data is None) == (size is None):
        raise RequestRefused("invalid", f"{preview(name)} must have either data or a binary_data_size.")
    if size is not None and (type(size) is not int or not 0 <= size <= end - start):
        raise RequestRefused(
            "invalid",
            f"{preview(name)} has the binary_data_size {preview(size)}, but {end - start} bytes of binary data "
            "are left. Check Inference-Header-Content-Length.",
        )
    return _Input(name, datatype, shape[0], prod(shape[1:]), data, start, start + (size or 0))


def _parameters(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    parameters = document.get("parameters")
    if type(parameters) not in (dict, NoneType):
        found = kind_name(parameters)
        raise RequestRefused(
            "invalid", f"the parameters of {preview(name)} are {found}; they must be an object."
        )
    return parameters or {}


# ── values ─────────────────────────────────────────────────────────────────────────────────────

_JSON_KINDS: Mapping[str, set[type]] = {  # by the kind of the NumPy type
    "b": {bool, int, NoneType},
    "i": {int, NoneType},
    "u": {int, NoneType},
    "f": {int, float, NoneType},
}


def _add_json(builder: RowsBuilder, tensor: _Input) -> None:
    values = tensor.data
    if type(values) is list and set(map(type, values)) == {list}:
        values = [value for row in values for value in row]
    if type(values) is not list or len(values) != tensor.rows * tensor.per_row:
        found = f"{len(values)} values" if type(values) is list else kind_name(values)
        raise RequestRefused(
            "invalid",
            f"{preview(tensor.name)} has the shape {_shape(tensor)}, but its data is {found}; "
            f"it must be a list of {tensor.rows * tensor.per_row} values.",
        )
    dtype = _DTYPES[tensor.datatype]
    unexpected = set(map(type, values)) - ({str, NoneType} if dtype is None else _JSON_KINDS[dtype.kind])
    if unexpected:
        index = next(index for index, value in enumerate(values) if type(value) in unexpected)
        raise RequestRefused(
            "invalid",
            f"{preview(tensor.name)} has the datatype {tensor.datatype}, but is {kind_name(values[index])} in row "
            f"{index // tensor.per_row} (counted from 0).",
        )
    if tensor.per_row > 1:
        values = [values[at : at + tensor.per_row] for at in range(0, len(values), tensor.per_row)]
    # An FP32 category gets the text of a 32-bit float, the same as binary data.
    builder.values(tensor.name, values, FLOAT64 if dtype is None else FLOATS.get(dtype.name, FLOAT64))


def _add_bytes(builder: RowsBuilder, tensor: _Input, body: bytes) -> None:
    count = tensor.rows * tensor.per_row
    dtype = _DTYPES[tensor.datatype]
    size = tensor.end - tensor.start
    if size != count * dtype.itemsize if dtype is not None else size < count * 4:
        raise RequestRefused(
            "invalid",
            f"{preview(tensor.name)} has the shape {_shape(tensor)} as {tensor.datatype}, but {size} bytes.",
        )
    if dtype is not None:
        builder.array(tensor.name, np.frombuffer(body, dtype, count, tensor.start), tensor.per_row)
        return
    starts_N = np.empty(count, dtype=np.int64)
    ends_N = np.empty(count, dtype=np.int64)
    index = walk_texts(np.frombuffer(body, np.uint8), tensor.start, tensor.end, starts_N, ends_N)
    if index >= 0:
        where = (
            f"in row {index // tensor.per_row} (counted from 0)" if index < count else "after the last row"
        )
        raise RequestRefused(
            "invalid",
            f"the lengths of the texts in {preview(tensor.name)} do not match its {size} bytes {where}.",
        )
    builder.spans(tensor.name, starts_N, ends_N, tensor.per_row)


def _shape(tensor: _Input) -> str:
    return f"[{tensor.rows}]" if tensor.per_row == 1 else f"[{tensor.rows}, {tensor.per_row}]"


@njit(cache=True, nogil=True)
def walk_texts(
    data: NDArray[np.uint8], at: Int, end: Int, starts_N: NDArray[np.int64], ends_N: NDArray[np.int64]
) -> int:
    """Find the spans of texts that follow their length in 4 bytes. Returns the first one that does not fit; -1: all
    fit."""
    for n in range(starts_N.size):
        if end - at < 4:
            return n
        length = np.int64(0)
        for byte in range(4):
            length |= np.int64(data[at + byte]) << (8 * byte)
        at += 4
        if length > end - at:
            return n
        starts_N[n] = at
        at += length
        ends_N[n] = at
    return -1 if at == end else starts_N.size


# ── metadata and health ──────────────────────────────────────────────────────────────────────────


def server(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    return json_response({"name": "clickline", "version": _VERSION, "extensions": ["binary_tensor_data"]})


def live(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    return json_response({"live": True})


def ready(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    is_ready = versions.current is not None
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


def model_ready(model: str, version: int | None, versions: OpenVersions) -> Response:
    try:
        versions.find(model, version)
    except RequestRefused as refused:
        if refused.kind != "unavailable":
            raise
        return json_response({"name": model, "ready": False}, 503)
    return json_response({"name": model, "ready": True})


def metadata(model: str, version: int | None, versions: OpenVersions) -> Response:
    return json_response(describe_model(model, version, versions))


def describe_model(model: str, version: int | None, versions: OpenVersions) -> dict[str, Any]:
    """The metadata of a model, the same over HTTP and gRPC."""
    scorer = versions.find(model, version).scorer
    return {
        "name": model,
        "versions": [str(number) for number in versions.served()],
        "platform": "clickline",
        "inputs": [
            {
                "name": name,
                "datatype": "FP32" if number else "BYTES",
                "shape": [-1, -1] if several else [-1],
            }
            for name, number, several in input_tensors(scorer)
        ],
        "outputs": [
            {"name": name, "datatype": "INT64" if output.is_integer else "FP32", "shape": [-1, output.width]}
            for name, output in OUTPUTS.items()
        ],
    }
