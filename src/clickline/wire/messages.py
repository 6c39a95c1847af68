"""The messages of the supported protocols, as protobuf classes.

`make protos` compiles `messages.binpb` from `protos/`. It is loaded into a separate descriptor pool, so that a process
can also load TensorFlow, tritonclient or other packages that define the same names.

These classes are for small messages, tests and clients; `request_reader.py` reads the tensors of a request without an
object per value.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


def _load() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(files(__package__).joinpath("messages.binpb").read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _load()
"""The descriptor pool, for gRPC's reflection service."""

_SERVICES = (
    "tensorflow.serving.PredictionService",
    "tensorflow.serving.ModelService",
    "inference.GRPCInferenceService",
    "clickline.v1.Ranking",
    "baidu.paddle_serving.predictor.general_model.GeneralModelService",
    "baidu.paddle_serving.predictor.elastic_ctr.ElasticCTRPredictionService",
    "baidu.paddle_serving.predictor.ctr_prediction.CTRPredictionService",
)

METHODS: dict[str, tuple[str, ...]] = {
    service: tuple(method.name for method in POOL.FindServiceByName(service).methods) for service in _SERVICES
}
"""The methods of each service, by its full name."""


def _message(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(name))


TensorProto = _message("tensorflow.TensorProto")

ModelSpec = _message("tensorflow.serving.ModelSpec")
PredictRequest = _message("tensorflow.serving.PredictRequest")
PredictResponse = _message("tensorflow.serving.PredictResponse")
SignatureDefMap = _message("tensorflow.serving.SignatureDefMap")
GetModelMetadataRequest = _message("tensorflow.serving.GetModelMetadataRequest")
GetModelMetadataResponse = _message("tensorflow.serving.GetModelMetadataResponse")
GetModelStatusRequest = _message("tensorflow.serving.GetModelStatusRequest")
GetModelStatusResponse = _message("tensorflow.serving.GetModelStatusResponse")

ServerLiveRequest = _message("inference.ServerLiveRequest")
ServerLiveResponse = _message("inference.ServerLiveResponse")
ServerReadyRequest = _message("inference.ServerReadyRequest")
ServerReadyResponse = _message("inference.ServerReadyResponse")
ModelReadyRequest = _message("inference.ModelReadyRequest")
ModelReadyResponse = _message("inference.ModelReadyResponse")
ServerMetadataRequest = _message("inference.ServerMetadataRequest")
ServerMetadataResponse = _message("inference.ServerMetadataResponse")
ModelMetadataRequest = _message("inference.ModelMetadataRequest")
ModelMetadataResponse = _message("inference.ModelMetadataResponse")
ModelInferRequest = _message("inference.ModelInferRequest")
ModelInferResponse = _message("inference.ModelInferResponse")

RankRequest = _message("clickline.v1.RankRequest")
RankResponse = _message("clickline.v1.RankResponse")

_PADDLE = "baidu.paddle_serving.predictor"
GeneralModelRequest = _message(f"{_PADDLE}.general_model.Request")
GeneralModelResponse = _message(f"{_PADDLE}.general_model.Response")
OldGeneralModelRequest = _message(f"{_PADDLE}.general_model_v0_6.Request")
ElasticCtrRequest = _message(f"{_PADDLE}.elastic_ctr.Request")
CtrRequest = _message(f"{_PADDLE}.ctr_prediction.Request")
CtrResponse = _message(f"{_PADDLE}.ctr_prediction.Response")
RpcMeta = _message("brpc.policy.RpcMeta")
