"""TensorFlow Serving's gRPC API, with a client that has its own stubs, and message by message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from grpc_model import MODEL, VERSIONS, answer, decoded, grpc_server, read, target

from clickline.errors import RequestRefused
from clickline.serving.protocols import tfserving_grpc
from clickline.serving.protocols.request import Limits
from clickline.serving.protocols.tfserving_grpc import Predict
from clickline.wire.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
)


def request(rows: int = 3, **spec) -> PredictRequest:
    made = PredictRequest()
    made.model_spec.name = spec.pop("name", "ads")
    for key, value in spec.items():
        if key == "version":
            made.model_spec.version.value = value
        else:
            setattr(made.model_spec, key, value)
    made.inputs["I1"].dtype = 1
    made.inputs["I1"].tensor_shape.dim.add(size=rows)
    made.inputs["I1"].float_val.extend(range(rows))
    made.inputs["C1"].dtype = 7
    made.inputs["C1"].tensor_shape.dim.add(size=rows)
    made.inputs["C1"].string_val.extend([b"68fd1e64"] * rows)
    return made


def answered(made: PredictRequest, *probabilities: float) -> PredictResponse:
    asked = read(Predict, made.SerializeToString())
    asked.decode(MODEL)
    return PredictResponse.FromString(asked.encode(answer(*probabilities)).body)


def values(tensor) -> list:
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    assert not tensor.tensor_content
    return np.array(tensor.float_val if tensor.dtype == 1 else tensor.int64_val).reshape(shape).tolist()


def refusal(call, *args) -> str:
    with pytest.raises(RequestRefused) as refused:
        call(*args)
    assert refused.value.kind == "invalid"
    return str(refused.value)


def test_all_outputs_in_typed_fields():
    response = answered(request(), 0.25, 0.5, 0.75)
    found = {name: values(tensor) for name, tensor in response.outputs.items()}
    assert found["probabilities"] == [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]
    assert found["logistic"] == [[0.25], [0.5], [0.75]]
    assert found["class_ids"] == [[0], [0], [1]] and response.outputs["class_ids"].dtype == 9
    np.testing.assert_allclose(found["logits"], np.log([[1 / 3], [1], [3]]), rtol=1e-6)
    assert len(found) == 4
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("ads", 12, "serving_default")


@pytest.mark.parametrize("rows", [1, 127, 128, 1000])
def test_varint_lengths_of_every_size_are_correct(rows):
    probabilities = np.linspace(0.01, 0.99, rows, dtype=np.float32)
    response = answered(request(rows), *probabilities)
    assert values(response.outputs["logistic"]) == [[float(p)] for p in probabilities]
    assert np.array(values(response.outputs["class_ids"])).sum() == (probabilities > 0.5).sum()


def test_the_output_filter_is_honoured():
    made = request(1)
    made.output_filter.extend(["logits", "logistic", "logits"])
    assert sorted(answered(made, 0.5).outputs) == ["logistic", "logits"]
    made.output_filter.append("score")
    message = refusal(decoded, Predict, made.SerializeToString())
    assert message == 'There is no output "score". Available: probabilities, logistic, logits, class_ids.'


@pytest.mark.parametrize("signature", ["", "serving_default", "predict"])
def test_signatures(signature):
    response = answered(request(1, signature_name=signature), 0.5)
    assert response.model_spec.signature_name == (signature or "serving_default")


def test_unknown_signature_is_refused():
    body = request(signature_name="classify").SerializeToString()
    message = refusal(decoded, Predict, body)
    assert message == 'There is no signature "classify". Available: serving_default, predict.'


def test_target_of_a_request():
    assert target(Predict, request().SerializeToString()) == ("ads", None)
    assert target(Predict, request(version=7).SerializeToString()) == ("ads", 7)
    assert target(Predict, request(version=0).SerializeToString()) == ("ads", 0)
    assert target(Predict, b"") == ("", None)
    message = refusal(target, Predict, request(version_label="stable").SerializeToString())
    assert "stable" in message and "only numbers" in message
    assert "malformed" in refusal(target, Predict, b"\x0a\x02\xff\xff")
    assert "malformed" in refusal(target, Predict, b"\xff")


def test_model_spec_in_two_pieces_is_merged():
    head = PredictRequest()
    head.model_spec.version.value = 5
    both = head.SerializeToString() + request(signature_name="predict").SerializeToString()
    assert target(Predict, both) == ("ads", 5)
    merged = read(Predict, both)
    merged.decode(MODEL)
    response = PredictResponse.FromString(merged.encode(answer(0.5, 0.5, 0.5)).body)
    assert response.model_spec.signature_name == "predict"


def test_limits_of_the_config_are_enforced():
    made = request(3)
    assert "allowed: up to 2" in refusal(decoded, Predict, made.SerializeToString(), Limits(max_rows=2))
    made.inputs["age"].CopyFrom(made.inputs["I1"])
    assert '"age" is not a field' in refusal(decoded, Predict, made.SerializeToString())
    call = decoded(Predict, made.SerializeToString(), Limits(ignore_unknown=True))
    assert call.rows.rows == 3 and call.context is None


def test_invalid_utf8_is_malformed():
    assert "output_filter" in refusal(decoded, Predict, b"\x1a\x01\xff")


def test_metadata_describes_inputs_and_outputs():
    asked = GetModelMetadataRequest(metadata_field=["signature_def"])
    asked.model_spec.name = "ads"
    response = GetModelMetadataResponse.FromString(
        tfserving_grpc.metadata(asked.SerializeToString(), VERSIONS)
    )
    assert (response.model_spec.name, response.model_spec.version.value) == ("ads", 12)
    signatures = SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert sorted(signatures.signature_def) == ["predict", "serving_default"]
    signature = signatures.signature_def["serving_default"]
    assert signature.method_name == "tensorflow/serving/predict"
    kinds = {
        name: (info.dtype, [dim.size for dim in info.tensor_shape.dim])
        for name, info in signature.inputs.items()
    }
    assert kinds == {
        "I1": (1, [-1]),  # a float and a bucket
        "I2": (1, [-1]),
        "C1": (7, [-1]),
        "C2": (7, [-1]),
        "hour": (1, [-1]),  # only a bucket, which is also made from a number
        "tags": (7, [-1, -1]),
    }
    assert signature.inputs["C1"].name == "C1:0"
    outputs = {
        name: (info.dtype, [dim.size for dim in info.tensor_shape.dim])
        for name, info in signature.outputs.items()
    }
    assert outputs == {
        "probabilities": (1, [-1, 2]),
        "logistic": (1, [-1, 1]),
        "logits": (1, [-1, 1]),
        "class_ids": (9, [-1, 1]),
    }


def test_unknown_metadata_field_is_refused():
    body = GetModelMetadataRequest(metadata_field=["graph"]).SerializeToString()
    assert (
        refusal(tfserving_grpc.metadata, body, VERSIONS)
        == 'There is no metadata field "graph". Available: signature_def.'
    )


def test_status_of_versions():
    asked = GetModelStatusRequest()
    asked.model_spec.name = "ads"
    response = GetModelStatusResponse.FromString(tfserving_grpc.status(asked.SerializeToString(), VERSIONS))
    found = [(one.version, one.state, one.status.error_code) for one in response.model_version_status]
    assert found == [(12, 30, 0), (11, 40, 0)]
    assert response.model_version_status[0].HasField("status")


PUBLIC = """
syntax = "proto3";
package tensorflow.serving;
import "google/protobuf/any.proto";
import "google/protobuf/wrappers.proto";
message Dim { int64 size = 1; string name = 2; }
message Shape { repeated Dim dim = 2; bool unknown_rank = 3; }
message Tensor {
  int32 dtype = 1; Shape tensor_shape = 2; int32 version_number = 3; bytes tensor_content = 4;
  repeated float float_val = 5; repeated double double_val = 6; repeated int32 int_val = 7 [packed = false];
  repeated bytes string_val = 8; repeated int64 int64_val = 10; repeated bool bool_val = 11;
}
message Spec {
  string name = 1; google.protobuf.Int64Value version = 2; string signature_name = 3; string version_label = 4;
}
message Request {
  Spec model_spec = 1; map<string, Tensor> inputs = 2; repeated string output_filter = 3; bytes client_id = 6;
}
message Response { map<string, Tensor> outputs = 1; Spec model_spec = 2; }
message MetadataRequest { Spec model_spec = 1; repeated string metadata_field = 2; }
message MetadataResponse { Spec model_spec = 1; map<string, google.protobuf.Any> metadata = 2; }
service PredictionService {
  rpc Predict(Request) returns (Response);
  rpc GetModelMetadata(MetadataRequest) returns (MetadataResponse);
}
message StatusRequest { Spec model_spec = 1; }
message Status { int32 error_code = 1; string error_message = 2; }
message VersionStatus { int64 version = 1; int32 state = 2; Status status = 3; }
message StatusResponse { repeated VersionStatus model_version_status = 1; }
service ModelService { rpc GetModelStatus(StatusRequest) returns (StatusResponse); }
"""

CLIENT = """
import json, struct, sys
import grpc
import public_pb2 as pb, public_pb2_grpc as stubs
channel = grpc.insecure_channel(sys.argv[1])
prediction, models = stubs.PredictionServiceStub(channel), stubs.ModelServiceStub(channel)
request = pb.Request(client_id=b"me", output_filter=["probabilities", "class_ids"])
request.model_spec.name = "ads"
request.model_spec.signature_name = "predict"
shape = pb.Shape(dim=[pb.Dim(size=2)])
request.inputs["I1"].CopyFrom(pb.Tensor(dtype=1, tensor_shape=shape, tensor_content=struct.pack("<2f", 1, 2)))
request.inputs["I2"].CopyFrom(pb.Tensor(dtype=3, tensor_shape=shape, int_val=[-1, 5]))
request.inputs["C1"].CopyFrom(pb.Tensor(dtype=7, tensor_shape=shape, string_val=[b"a", b"b"]))
response = prediction.Predict(request, timeout=20)
status = models.GetModelStatus(pb.StatusRequest(model_spec=request.model_spec), timeout=20)
metadata = prediction.GetModelMetadata(pb.MetadataRequest(model_spec=request.model_spec), timeout=20)
request.inputs["I1"].tensor_content = struct.pack("<2f", 1, float("inf"))
try:
    prediction.Predict(request, timeout=20)
    refused = None
except grpc.RpcError as error:
    refused = [error.code().name, error.details()]
print(json.dumps({
    "probabilities": list(response.outputs["probabilities"].float_val),
    "class_ids": list(response.outputs["class_ids"].int64_val),
    "outputs": sorted(response.outputs),
    "spec": [response.model_spec.name, response.model_spec.version.value, response.model_spec.signature_name],
    "status": [[one.version, one.state] for one in status.model_version_status],
    "metadata": metadata.metadata["signature_def"].type_url,
    "refused": refused,
}))
"""


def test_client_with_its_own_stubs(tmp_path: Path):
    """In its own process, with stubs generated by grpc_tools from the public field numbers."""
    (tmp_path / "public.proto").write_text(PUBLIC)
    (tmp_path / "client.py").write_text(CLIENT)
    protoc = (
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        "--python_out=.",
        "--grpc_python_out=.",
        "public.proto",
    )
    subprocess.run(protoc, cwd=tmp_path, check=True, timeout=60)
    with grpc_server() as address:
        done = subprocess.run(
            [sys.executable, "client.py", address],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("probabilities") == pytest.approx([2 / 3, 1 / 3, 1 / 3, 2 / 3])
    assert said == {
        "class_ids": [0, 1],
        "outputs": ["class_ids", "probabilities"],
        "spec": ["ads", 12, "predict"],
        "status": [[12, 30], [11, 40]],
        "metadata": "type.googleapis.com/tensorflow.serving.SignatureDefMap",
        "refused": [
            "INVALID_ARGUMENT",
            "I1 contains infinity; allowed: a finite number, or NaN for missing.",
        ],
    }
