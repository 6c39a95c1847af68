"""Routes HTTP requests: maps method and path to the endpoint of a protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from clickline.errors import RequestRefused
from clickline.serving.protocols import elasticctr_http, kserve_http, openapi, tfserving_http
from clickline.serving.protocols.call import Call, Target, version_number
from clickline.serving.protocols.http_common import (
    HttpEndpoint,
    HttpInfoEndpoint,
    HttpResponse,
    error_response,
    method_not_allowed,
    preview,
)
from clickline.serving.protocols.ranking_http import read_rank, write_rank

_TFSERVING = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?(:[^/:]*|/metadata)?")
_KSERVE = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready)?")
_ELASTICCTR = "/ElasticCTRPredictionService/inference"

_ENDPOINTS: Mapping[str, tuple[str, Callable[..., Call], Callable[..., HttpResponse]]] = {
    ":predict": ("tfserving_rest", tfserving_http.read_predict, tfserving_http.write_predict),
    ":rank": ("rank_rest", read_rank, write_rank),
    "/infer": ("inference_rest", kserve_http.read_infer, kserve_http.write_infer),
}
_TFSERVING_INFO = {"": tfserving_http.status, "/metadata": tfserving_http.metadata}
_KSERVE_INFO = {"": kserve_http.metadata, "/ready": kserve_http.model_ready}
_SERVER_INFO = {
    "/v2": kserve_http.server,
    "/v2/": kserve_http.server,
    "/v2/health/live": kserve_http.live,
    "/v2/health/ready": kserve_http.ready,
}


def route(method: str, path: str) -> HttpEndpoint | HttpInfoEndpoint | HttpResponse:
    """Return the endpoint of a request, or an error response. `path` is decoded and without a query."""
    if path == _ELASTICCTR:
        refuse = elasticctr_http.refuse_inference
        inference = HttpEndpoint(
            "elasticctr_rest",
            Target(""),
            elasticctr_http.read_inference,
            elasticctr_http.write_inference,
            refuse,
        )
        return inference if method == "POST" else elasticctr_http.refuse_method(method, path)
    try:
        endpoint = _find_endpoint(path)
    except RequestRefused as refused:
        return error_response(refused.kind, str(refused))
    if endpoint is None:
        return error_response(
            "not_found",
            f"there is nothing at {preview(path)}. A model is at /v1/models/NAME or /v2/models/NAME.",
        )
    allowed = ("POST",) if isinstance(endpoint, HttpEndpoint) else ("GET", "HEAD")
    if method not in allowed:
        return method_not_allowed(method, path, allowed)
    return endpoint


def _find_endpoint(path: str) -> HttpEndpoint | HttpInfoEndpoint | None:
    if path == "/openapi.json":
        return HttpInfoEndpoint("rest", Target(""), openapi.document, error_response)
    if path in _SERVER_INFO:
        return HttpInfoEndpoint("inference_rest", Target(""), _SERVER_INFO[path], error_response)
    for protocol, pattern, info in (
        ("tfserving_rest", _TFSERVING, _TFSERVING_INFO),
        ("inference_rest", _KSERVE, _KSERVE_INFO),
    ):
        match = pattern.fullmatch(path)
        if match is None:
            continue
        target = Target(match[1], version_number(match[2] or ""))
        verb = match[3] or ""
        if verb in _ENDPOINTS:
            name, read, write = _ENDPOINTS[verb]
            return HttpEndpoint(name, target, read, write, error_response)
        if verb in info:
            return HttpInfoEndpoint(protocol, target, info[verb], error_response)
    return None
