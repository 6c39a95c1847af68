"""The Open Inference Protocol over gRPC, with the real tritonclient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_model import MODEL, answer, grpc_server, read, target, versions
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from clickline.errors import RequestRefused
from clickline.serving.protocols import kserve_grpc


@pytest.fixture
def client() -> Iterator[triton.InferenceServerClient]:
    with grpc_server() as address, triton.InferenceServerClient(address) as made:
        yield made


def inputs(rows: int = 3) -> list[triton.InferInput]:
    numbers = triton.InferInput("I1", [rows], "FP32")
    numbers.set_data_from_numpy(np.arange(rows, dtype=np.float32))
    texts = triton.InferInput("C1", [rows, 1], "BYTES")
    texts.set_data_from_numpy(np.array([[f"user {n}"] for n in range(rows)], dtype=np.object_))
    return [numbers, texts]


def test_health_and_metadata(client):
    assert client.is_server_live(client_timeout=20) and client.is_server_ready(client_timeout=20)
    assert client.is_model_ready("ads", client_timeout=20)
    assert client.is_model_ready("ads", "12", client_timeout=20)
    assert not client.is_model_ready("ads", "7", client_timeout=20)
    server = client.get_server_metadata(client_timeout=20)
    assert (server.name, server.version) == ("clickline", "0.1.0")
    model = client.get_model_metadata("ads", client_timeout=20)
    assert (model.name, list(model.versions), model.platform) == ("ads", ["11", "12"], "clickline")
    kinds = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.inputs}
    assert kinds == {
        "I1": ("FP32", [-1]),
        "I2": ("FP32", [-1]),
        "C1": ("BYTES", [-1]),
        "C2": ("BYTES", [-1]),
        "hour": ("FP32", [-1]),
        "tags": ("BYTES", [-1, -1]),
    }
    assert {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.outputs} == {
        "probabilities": ("FP32", [-1, 2]),
        "logistic": ("FP32", [-1, 1]),
        "logits": ("FP32", [-1, 1]),
        "class_ids": ("INT64", [-1, 1]),
    }


def test_inference_with_raw_contents(client):
    result = client.infer("ads", inputs(), request_id="req-7", client_timeout=20)
    np.testing.assert_allclose(result.as_numpy("probabilities"), [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    np.testing.assert_allclose(result.as_numpy("logistic"), [[0.25], [0.5], [0.75]])
    np.testing.assert_allclose(result.as_numpy("logits"), np.log([[1 / 3], [1], [3]]), rtol=1e-6)
    assert result.as_numpy("class_ids").tolist() == [[0], [0], [1]]
    assert result.as_numpy("class_ids").dtype == np.int64
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("req-7", "ads", "12")
    assert len(response.raw_output_contents) == 4


def test_requested_outputs_are_honoured(client):
    wanted = [triton.InferRequestedOutput("logistic")]
    result = client.infer("ads", inputs(1), outputs=wanted, client_timeout=20)
    assert [output.name for output in result.get_response().outputs] == ["logistic"]
    with pytest.raises(InferenceServerException, match='There is no output "score"'):
        client.infer("ads", inputs(), outputs=[triton.InferRequestedOutput("score")], client_timeout=20)


def test_a_bad_request_names_the_field(client):
    first, second = inputs(3)[0], inputs(2)[1]
    with pytest.raises(InferenceServerException, match="C1 has 2 rows and I1 has 3") as refused:
        client.infer("ads", [first, second], client_timeout=20)
    assert "INVALID_ARGUMENT" in refused.value.status()


@pytest.mark.parametrize("rows", [1, 200])
def test_typed_contents_are_answered_in_typed_contents(rows):
    request = service_pb2.ModelInferRequest(model_name="ads", model_version="12", id="x")
    tensor = request.inputs.add(name="I1", datatype="FP64", shape=[rows])
    tensor.contents.fp64_contents.extend(range(rows))
    body = request.SerializeToString()
    infer = read(kserve_grpc.Infer, body)
    assert (infer.model, infer.version) == ("ads", 12)
    assert infer.decode(MODEL).rows.numbers_CB[0].tolist() == list(range(rows))
    p = np.linspace(0.1, 0.9, rows, dtype=np.float32)
    response = service_pb2.ModelInferResponse.FromString(infer.encode(answer(*p)).body)
    assert not response.raw_output_contents and response.id == "x"
    found = {output.name: output for output in response.outputs}
    assert list(found["logistic"].contents.fp32_contents) == p.tolist()
    assert list(found["probabilities"].shape) == [rows, 2]
    assert list(found["class_ids"].contents.int64_contents) == (p > 0.5).astype(int).tolist()


def test_version_that_is_not_a_number_is_refused():
    body = service_pb2.ModelReadyRequest(name="ads", version="latest").SerializeToString()
    with pytest.raises(RequestRefused, match='The version is "latest"; it must be a whole number'):
        kserve_grpc.model_ready(body, versions(12))
    with pytest.raises(RequestRefused, match="malformed"):
        target(kserve_grpc.Infer, b"\x0a\x01\xff")
