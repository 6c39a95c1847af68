"""The gRPC methods and brpc services, and the endpoint that answers each."""

from __future__ import annotations

from collections.abc import Mapping

from clickline.serving.grpc_server import GrpcInfoEndpoint
from clickline.serving.protocols import kserve_grpc, paddle_ctr, paddle_general_model, tfserving_grpc
from clickline.serving.protocols.paddle_common import FeedRequest
from clickline.serving.protocols.ranking_grpc import Rank
from clickline.serving.protocols.request import Request

_PADDLE = "baidu.paddle_serving.predictor"

GRPC_ENDPOINTS: Mapping[str, type[Request]] = {
    "/tensorflow.serving.PredictionService/Predict": tfserving_grpc.Predict,
    "/inference.GRPCInferenceService/ModelInfer": kserve_grpc.Infer,
    "/clickline.v1.Ranking/Rank": Rank,
    f"/{_PADDLE}.general_model.GeneralModelService/inference": paddle_general_model.GeneralModelGrpc,
    f"/{_PADDLE}.elastic_ctr.ElasticCTRPredictionService/inference": paddle_ctr.ElasticCtrGrpc,
    f"/{_PADDLE}.ctr_prediction.CTRPredictionService/inference": paddle_ctr.CtrGrpc,
}
BRPC_ENDPOINTS: Mapping[str, type[FeedRequest]] = {
    f"{_PADDLE}.general_model.GeneralModelService": paddle_general_model.GeneralModel,
    f"{_PADDLE}.elastic_ctr.ElasticCTRPredictionService": paddle_ctr.ElasticCtr,
    f"{_PADDLE}.ctr_prediction.CTRPredictionService": paddle_ctr.Ctr,
}
"""By service; each has the method `inference`."""
GRPC_INFO_ENDPOINTS: Mapping[str, tuple[str, GrpcInfoEndpoint]] = {
    "/tensorflow.serving.PredictionService/GetModelMetadata": ("tfserving_grpc", tfserving_grpc.metadata),
    "/tensorflow.serving.ModelService/GetModelStatus": ("tfserving_grpc", tfserving_grpc.status),
    "/inference.GRPCInferenceService/ServerLive": ("inference_grpc", kserve_grpc.server_live),
    "/inference.GRPCInferenceService/ServerReady": ("inference_grpc", kserve_grpc.server_ready),
    "/inference.GRPCInferenceService/ModelReady": ("inference_grpc", kserve_grpc.model_ready),
    "/inference.GRPCInferenceService/ServerMetadata": ("inference_grpc", kserve_grpc.server_metadata),
    "/inference.GRPCInferenceService/ModelMetadata": ("inference_grpc", kserve_grpc.model_metadata),
}
