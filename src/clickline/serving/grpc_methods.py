"""The gRPC methods and the endpoint that answers each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from clickline.errors import RequestRefused
from clickline.serving.grpc_server import GrpcEndpoint, GrpcInfoEndpoint
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols import kserve_grpc, ranking_grpc, tfserving_grpc

_RELEASE = version("clickline")

GRPC_ENDPOINTS: Mapping[str, tuple[str, GrpcEndpoint]] = {
    "/tensorflow.serving.PredictionService/Predict": ("tfserving_grpc", tfserving_grpc),
    "/inference.GRPCInferenceService/ModelInfer": ("inference_grpc", kserve_grpc),
    "/clickline.v1.Ranking/Rank": ("rank_grpc", ranking_grpc),
}


def _tfserving_metadata(body: bytes, versions: OpenVersions) -> bytes:
    target = tfserving_grpc.target(body)
    return tfserving_grpc.metadata(body, versions.find(target.model, target.version).scorer)


def _tfserving_status(body: bytes, versions: OpenVersions) -> bytes:
    target = tfserving_grpc.target(body)
    states = {
        lease.scorer.number: "UNLOADING" if lease.retired else "AVAILABLE" if lease.was_current else "LOADING"
        for lease in versions.open()
    }
    if target.version is None:
        versions.check_name(target.model)
        return tfserving_grpc.status(states)
    found = versions.find(target.model, target.version).scorer.number
    return tfserving_grpc.status({found: states.get(found, "END")})


def _model_ready(body: bytes, versions: OpenVersions) -> bytes:
    target = kserve_grpc.target(body)
    try:
        versions.find(target.model, target.version)
    except RequestRefused:
        return kserve_grpc.model_ready(False)
    return kserve_grpc.model_ready(True)


def _model_metadata(body: bytes, versions: OpenVersions) -> bytes:
    target = kserve_grpc.target(body)
    served = [lease.scorer.number for lease in versions.open() if lease.was_current]
    return kserve_grpc.model_metadata(body, versions.find(target.model, target.version).scorer, served)


GRPC_INFO_ENDPOINTS: Mapping[str, tuple[str, GrpcInfoEndpoint]] = {
    "/tensorflow.serving.PredictionService/GetModelMetadata": ("tfserving_grpc", _tfserving_metadata),
    "/tensorflow.serving.ModelService/GetModelStatus": ("tfserving_grpc", _tfserving_status),
    "/inference.GRPCInferenceService/ServerLive": (
        "inference_grpc",
        lambda body, versions: kserve_grpc.server_live(),
    ),
    "/inference.GRPCInferenceService/ServerReady": (
        "inference_grpc",
        lambda body, versions: kserve_grpc.server_ready(versions.current is not None),
    ),
    "/inference.GRPCInferenceService/ModelReady": ("inference_grpc", _model_ready),
    "/inference.GRPCInferenceService/ServerMetadata": (
        "inference_grpc",
        lambda body, versions: kserve_grpc.server_metadata(_RELEASE),
    ),
    "/inference.GRPCInferenceService/ModelMetadata": ("inference_grpc", _model_metadata),
}
