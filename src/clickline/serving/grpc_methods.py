"""The gRPC methods and the endpoint that answers each."""

from __future__ import annotations

from collections.abc import Mapping

from clickline.serving.grpc_server import GrpcInfoEndpoint
from clickline.serving.protocols import kserve_grpc, tfserving_grpc
from clickline.serving.protocols.ranking_grpc import Rank
from clickline.serving.protocols.request import Request

GRPC_ENDPOINTS: Mapping[str, type[Request]] = {
    "/tensorflow.serving.PredictionService/Predict": tfserving_grpc.Predict,
    "/inference.GRPCInferenceService/ModelInfer": kserve_grpc.Infer,
    "/clickline.v1.Ranking/Rank": Rank,
}
GRPC_INFO_ENDPOINTS: Mapping[str, tuple[str, GrpcInfoEndpoint]] = {
    "/tensorflow.serving.PredictionService/GetModelMetadata": ("tfserving_grpc", tfserving_grpc.metadata),
    "/tensorflow.serving.ModelService/GetModelStatus": ("tfserving_grpc", tfserving_grpc.status),
    "/inference.GRPCInferenceService/ServerLive": ("inference_grpc", kserve_grpc.server_live),
    "/inference.GRPCInferenceService/ServerReady": ("inference_grpc", kserve_grpc.server_ready),
    "/inference.GRPCInferenceService/ModelReady": ("inference_grpc", kserve_grpc.model_ready),
    "/inference.GRPCInferenceService/ServerMetadata": ("inference_grpc", kserve_grpc.server_metadata),
    "/inference.GRPCInferenceService/ModelMetadata": ("inference_grpc", kserve_grpc.model_metadata),
}
