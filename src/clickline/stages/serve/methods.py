"""The gRPC methods: which door or page answers each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from clickline.errors import RequestRefused
from clickline.stages.serve.doors import inference, ranking, tfserving
from clickline.stages.serve.grpc_server import GrpcDoor, GrpcPage
from clickline.stages.serve.versions import Versions

__all__ = ["GRPC_DOORS", "GRPC_PAGES"]

_RELEASE = version("clickline")

GRPC_DOORS: Mapping[str, tuple[str, GrpcDoor]] = {
    "/tensorflow.serving.PredictionService/Predict": ("tfserving_grpc", tfserving),
    "/inference.GRPCInferenceService/ModelInfer": ("inference_grpc", inference),
    "/clickline.v1.Ranking/Rank": ("rank_grpc", ranking),
}


def _tfserving_metadata(body: bytes, versions: Versions) -> bytes:
    target = tfserving.target(body)
    return tfserving.metadata(body, versions.find(target.model, target.version).scorer)


def _tfserving_status(body: bytes, versions: Versions) -> bytes:
    target = tfserving.target(body)
    states = {
        lease.scorer.number: "UNLOADING" if lease.retired else "AVAILABLE" if lease.served else "LOADING"
        for lease in versions.open()
    }
    if target.version is None:
        versions.check_name(target.model)
        return tfserving.status(states)
    found = versions.find(target.model, target.version).scorer.number
    return tfserving.status({found: states.get(found, "END")})


def _model_ready(body: bytes, versions: Versions) -> bytes:
    target = inference.target(body)
    try:
        versions.find(target.model, target.version)
    except RequestRefused:
        return inference.model_ready(False)
    return inference.model_ready(True)


def _model_metadata(body: bytes, versions: Versions) -> bytes:
    target = inference.target(body)
    served = [lease.scorer.number for lease in versions.open() if lease.served]
    return inference.model_metadata(body, versions.find(target.model, target.version).scorer, served)


GRPC_PAGES: Mapping[str, tuple[str, GrpcPage]] = {
    "/tensorflow.serving.PredictionService/GetModelMetadata": ("tfserving_grpc", _tfserving_metadata),
    "/tensorflow.serving.ModelService/GetModelStatus": ("tfserving_grpc", _tfserving_status),
    "/inference.GRPCInferenceService/ServerLive": (
        "inference_grpc",
        lambda body, versions: inference.server_live(),
    ),
    "/inference.GRPCInferenceService/ServerReady": (
        "inference_grpc",
        lambda body, versions: inference.server_ready(versions.current is not None),
    ),
    "/inference.GRPCInferenceService/ModelReady": ("inference_grpc", _model_ready),
    "/inference.GRPCInferenceService/ServerMetadata": (
        "inference_grpc",
        lambda body, versions: inference.server_metadata(_RELEASE),
    ),
    "/inference.GRPCInferenceService/ModelMetadata": ("inference_grpc", _model_metadata),
}
