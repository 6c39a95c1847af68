"""Routes HTTP requests: maps method and path to the endpoint of a protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clickline.errors import RequestRefused
from clickline.serving.protocols import brpc_pages, elasticctr_http, kserve_http, openapi, tfserving_http
from clickline.serving.protocols.http_common import (
    HttpRequest,
    Route,
    error_response,
    method_not_allowed,
    preview,
)
from clickline.serving.protocols.paddle_ctr import CtrHttp, ElasticCtrHttp
from clickline.serving.protocols.paddle_general_model import GeneralModelHttp, refuse_general_model
from clickline.serving.protocols.ranking_http import Rank
from clickline.serving.protocols.request import Response, version_number

_TFSERVING = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?(:[^/:]*|/metadata)?")
_KSERVE = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready)?")
_ENDPOINTS: Mapping[str, type[HttpRequest]] = {
    ":predict": tfserving_http.Predict,
    ":rank": Rank,
    "/infer": kserve_http.Infer,
}
_PADDLE: Mapping[str, Route] = {
    path: Route(endpoint.protocol, endpoint, refuse=refuse)
    for path, endpoint, refuse in (
        ("/GeneralModelService/inference", GeneralModelHttp, refuse_general_model),
        ("/ElasticCTRPredictionService/inference", ElasticCtrHttp, elasticctr_http.refuse_inference),
        ("/CTRPredictionService/inference", CtrHttp, elasticctr_http.refuse_inference),
    )
}
_TFSERVING_INFO = {"": tfserving_http.status, "/metadata": tfserving_http.metadata}
_KSERVE_INFO = {"": kserve_http.metadata, "/ready": kserve_http.model_ready}
_SERVER_INFO: Mapping[str, Route] = {
    "/openapi.json": Route("rest", describe=openapi.document),
    "/v2": Route("inference_rest", describe=kserve_http.server),
    "/v2/": Route("inference_rest", describe=kserve_http.server),
    "/health": Route("rest", describe=brpc_pages.health),
    "/status": Route("rest", describe=brpc_pages.status),
    "/v2/health/live": Route("inference_rest", describe=kserve_http.live),
    "/v2/health/ready": Route("inference_rest", describe=kserve_http.ready),
}


def route(method: str, path: str) -> Route | Response:
    """Return the route of a request, or an error response. `path` is decoded and without a query."""
    if path in _PADDLE and method == "POST":
        return _PADDLE[path]
    if path in _PADDLE:
        return elasticctr_http.refuse_method(method, path)
    try:
        found = _SERVER_INFO.get(path) or _model_route(path)
    except RequestRefused as refused:
        return error_response(refused.kind, str(refused))
    if found is None:
        return error_response(
            "not_found",
            f"there is nothing at {preview(path)}. A model is at /v1/models/NAME or /v2/models/NAME.",
        )
    allowed = ("GET", "HEAD") if found.endpoint is None else ("POST",)
    if method not in allowed:
        return method_not_allowed(method, path, allowed)
    return found


def _model_route(path: str) -> Route | None:
    for protocol, pattern, info in (
        ("tfserving_rest", _TFSERVING, _TFSERVING_INFO),
        ("inference_rest", _KSERVE, _KSERVE_INFO),
    ):
        match = pattern.fullmatch(path)
        if match is None:
            continue
        model, version, verb = match[1], version_number(match[2] or ""), match[3] or ""
        endpoint = _ENDPOINTS.get(verb)
        if endpoint is not None:
            return Route(endpoint.protocol, endpoint, model=model, version=version)
        if verb in info:
            return Route(protocol, describe=info[verb], model=model, version=version)
    return None
