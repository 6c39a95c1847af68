"""Every HTTP, gRPC and brpc request of the model server, from bytes to encoded rows: an answer, or an error message."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence

import grpc_model
import numpy as np
import rest_model

from clickline.errors import RequestRefused
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import RequestRows
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.paddle_ctr import Ctr, ElasticCtr
from clickline.serving.protocols.paddle_general_model import GeneralModel
from clickline.serving.protocols.request import Limits, Response
from clickline.wire import brpc_frames
from clickline.wire.messages import (
    CtrRequest,
    ElasticCtrRequest,
    GeneralModelRequest,
    ModelInferRequest,
    OldGeneralModelRequest,
    PredictRequest,
    RpcMeta,
)
from fuzz.target import Choices, Target, mutated

_PATHS = (
    "/v1/models/ads:predict",
    "/v1/models/ads:rank",
    "/v2/models/ads/infer",
    "/ElasticCTRPredictionService/inference",
    "/v1/models/ads/versions/12:predict",
    "/GeneralModelService/inference",
    "/CTRPredictionService/inference",
)
_HEADERS: tuple[dict[bytes, bytes], ...] = (
    {},
    {b"content-encoding": b"gzip"},
    {b"content-type": b"application/proto"},
    {b"content-encoding": b"deflate"},
    {b"inference-header-content-length": b"60"},
    {b"inference-header-content-length": b"99999999999"},
)
_VERSIONS = rest_model.versions_of(rest_model.MODEL, names=("ads", "ctr"))
_FEASIGNS = rest_model.Model()
_FEASIGNS.features = FeatureSpec(
    (DenseField("d", "d", "none"),),
    (SlotField("2", "2", 2, "feasign"), SlotField("3", "3", 3, "feasign", multi=True)),
)
_FEASIGNS.columns = _FEASIGNS.features.columns
_DOCUMENTS = (
    {"instances": [{"I1": 3, "I2": 0.5, "C1": "ab", "tags": ["x", "y"], "4": [1, 2], "5": 7}, {"I1": None}]},
    {"inputs": {"I1": [1, 2], "C1": ["a", {"b64": "YQ=="}]}, "signature_name": "predict"},
    {"context": {"C1": "a"}, "candidates": [{"I1": 1}, {"I1": 2}], "top_k": 1},
    {"context": {}, "candidates": {"C2": ["x", None]}},
    {
        "id": "7",
        "inputs": [
            {"name": "I1", "datatype": "FP32", "shape": [2, 1], "data": [1.5, 2]},
            {"name": "tags", "datatype": "BYTES", "shape": [2, 2], "data": [["a", "b"], ["c", "d"]]},
        ],
        "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
        "parameters": {"binary_data_output": False},
    },
    {
        "instances": [
            {"slots": [{"slot_name": "4", "feasigns": [1, "-2"]}, {"slot_name": 5, "feasigns": [3]}]}
        ]
    },
    {"tensor": [{"name": "4", "shape": [2, 1], "lod": [0, 1, 2], "int64_data": [1, "2"]}]},
    {"insts": [{"tensor_array": [{"int64_data": [1], "elem_type": 0, "shape": [-1]}] * 5}]},
)


def _answer(rows: int) -> rest_model.Answer:
    scores_B = np.linspace(0.1, 0.9, rows, dtype=np.float32)
    return rest_model.Answer(12, scores_B, scores_B)


def _checked(rows: RequestRows) -> None:
    try:
        rest_model.ENCODER.encode(rows)
    except RequestRefused as refused:
        assert str(refused)


def _rest(data: bytes) -> None:
    """A raw body or a mutated document; sometimes to an unknown path."""
    choices = Choices(data)
    path, headers, mode = choices.one_of(_PATHS), choices.one_of(_HEADERS), choices.number(3)
    limits = Limits(max_rows=50, max_body=1 << 20, ignore_unknown=bool(choices.number(2)))
    if mode == 0:
        body = choices.rest()
    elif mode == 1:
        document = mutated(choices.one_of(_DOCUMENTS), choices)
        body = json.dumps(document).encode("utf-8", "surrogatepass")
    else:
        text = choices.rest().decode("latin-1")
        method, _, path = text.partition(" ")
        body = b""
    found = route("POST" if mode < 2 else method, path)
    if isinstance(found, Response):
        response = found
    elif found.endpoint is None:
        response = found.description(_VERSIONS)
    else:
        request = found.request(body, headers, limits)
        try:
            call = request.decode(rest_model.MODEL)
            _checked(call.rows)
            if call.context is not None:
                _checked(call.context)
            response = request.encode(_answer(call.rows.rows))
        except RequestRefused as refused:
            response = found.refuse(refused.kind, str(refused))
    assert response.body and 200 <= response.status < 500


def _grpc(data: bytes) -> None:
    choices = Choices(data)
    method = choices.one_of(list(grpc_model.METHODS))
    try:
        grpc_model.METHODS[method](choices.rest())
    except RequestRefused as refused:
        assert str(refused)


def _brpc(data: bytes) -> None:
    """A message of one of the services, or whole frames."""
    choices = Choices(data)
    service = choices.one_of((GeneralModel, ElasticCtr, Ctr))
    model = choices.one_of((rest_model.MODEL, _FEASIGNS))
    limits = Limits(max_rows=50, max_body=1 << 20, ignore_unknown=bool(choices.number(2)))
    framed, body = choices.number(2), choices.rest()
    try:
        if framed:
            size, meta_size = brpc_frames.read_header(body.ljust(brpc_frames.HEADER_BYTES))
            meta = brpc_frames.read_meta(body[12 : 12 + meta_size])
            body = brpc_frames.message_of(meta, body[12 + meta_size : 12 + size], limits.max_body)
        request = service(body, limits)
        rows = request.decode(model).rows
        RequestEncoder(model.features).encode(rows)
        assert request.encode(_answer(rows.rows)).body
        assert request.to_json(_answer(rows.rows))
    except brpc_frames.NotBrpc as error:
        assert str(error)
    except RequestRefused as refused:
        assert str(refused)


# ── seeds ──────────────────────────────────────────────────────────────────────────────────────


def _rest_seeds() -> Sequence[bytes]:
    seeds = [
        bytes([path, 0, 0, 0, 0, 0, 0, 0]) + json.dumps(document).encode()
        for path in range(len(_PATHS))
        for document in _DOCUMENTS
    ]
    inputs = [{"name": "C1", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 10}}]
    head = json.dumps({"inputs": inputs}).encode()[:-1].ljust(59) + b"}"
    seeds.append(b"\2\0\3\0\0\0\0\0" + head + b"\1\0\0\0a\1\0\0\0b")
    seeds += [bytes([path, 0, 0, 0, 1, 0, 0, 0, n, 0, 1, 0]) for path in range(4) for n in range(6)]
    paths = (
        "/v2",
        "/v2/health/live",
        "/v2/models/ads/ready",
        "/v1/models/ads/metadata",
        "/v1/models/x/versions/9",
    )
    return seeds + [bytes([0, 0, 0, 0, 2, 0, 0, 0]) + f"GET {path}".encode() for path in paths]


def _grpc_seeds() -> Sequence[bytes]:
    predict = PredictRequest()
    predict.model_spec.name = "ads"
    for name, kind, values in (("I1", 1, [0.5, 1.5]), ("C1", 7, [b"a", b"b"])):
        tensor = predict.inputs[name]
        tensor.dtype = kind
        tensor.tensor_shape.dim.add(size=2)
        (tensor.float_val if kind == 1 else tensor.string_val).extend(values)
    infer = ModelInferRequest(model_name="ads", id="7")
    infer.inputs.add(name="I1", datatype="FP32", shape=[2, 1]).contents.fp32_contents.extend([1, 2])
    raw = ModelInferRequest(model_name="ads")
    raw.inputs.add(name="C1", datatype="BYTES", shape=[2])
    raw.raw_input_contents.append(b"\1\0\0\0a\1\0\0\0b")
    bodies = [predict.SerializeToString(), infer.SerializeToString(), raw.SerializeToString(), b"\x0a\x03ads"]
    return [bytes([n, 0]) + body for n in range(len(grpc_model.METHODS)) for body in bodies]


def _brpc_seeds() -> Sequence[bytes]:
    named = GeneralModelRequest(fetch_var_names=["logistic"])
    named.tensor.add(name="4", shape=[3, 1], lod=[0, 1, 3], int64_data=[1, 2, 3])
    named.tensor.add(name="dense_input", elem_type=1, shape=[2, 2], float_data=[1, 2, 3, 4])
    named.tensor.add(name="5", elem_type=2, shape=[2, 1], tensor_content=bytes(8))
    old = OldGeneralModelRequest(log_id=1)
    inst = old.insts.add()
    for _ in range(5):
        inst.tensor_array.add(elem_type=0, shape=[-1], int64_data=[7])
    inst.tensor_array.add(elem_type=1, shape=[2], float_data=[1, 2])
    slots = ElasticCtrRequest()
    slots.instances.add().slots.add(slot_name="4", feasigns=[1, 2])
    ids = CtrRequest()
    ids.instances.add(sparse_ids=[1, 2], dense_ids=[0.5])
    bodies = [one.SerializeToString() for one in (named, old, slots, ids)]
    meta = RpcMeta(correlation_id=1, compress_type=2)
    meta.request.service_name, meta.request.method_name = "x", "inference"
    head = meta.SerializeToString()
    framed = [gzip.compress(body, mtime=0) for body in bodies]
    return [bytes([n, 0, n % 2, 0, 0, 0, 0, 0]) + body for n in range(3) for body in bodies] + [
        bytes([0, 0, 0, 0, 0, 0, 1, 0])
        + struct.pack(">4sLL", b"PRPC", len(head) + len(body), len(head))
        + head
        + body
        for body in framed
    ]


TARGETS = {
    "rest": Target(_rest, _rest_seeds),
    "grpc": Target(_grpc, _grpc_seeds),
    "brpc": Target(_brpc, _brpc_seeds),
}
