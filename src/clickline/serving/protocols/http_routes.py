"""Where an HTTP request goes: its method and path to the door or page of a protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from clickline.errors import RequestRefused
from clickline.serving.protocols import elasticctr_http, kserve_http, openapi, tfserving_http
from clickline.serving.protocols.call import Call, Target, version_number
from clickline.serving.protocols.http_common import (
    Door,
    Page,
    Reply,
    refusal,
    shown,
    wrong_method,
)
from clickline.serving.protocols.ranking_http import read_rank, write_rank

_TFSERVING = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?(:[^/:]*|/metadata)?")
_INFERENCE = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready)?")
_ELASTICCTR = "/ElasticCTRPredictionService/inference"

_DOORS: Mapping[str, tuple[str, Callable[..., Call], Callable[..., Reply]]] = {
    ":predict": ("tfserving_rest", tfserving_http.read_predict, tfserving_http.write_predict),
    ":rank": ("rank_rest", read_rank, write_rank),
    "/infer": ("inference_rest", kserve_http.read_infer, kserve_http.write_infer),
}
_TFSERVING_PAGES = {"": tfserving_http.status, "/metadata": tfserving_http.metadata}
_INFERENCE_PAGES = {"": kserve_http.metadata, "/ready": kserve_http.model_ready}
_SERVER_PAGES = {
    "/v2": kserve_http.server,
    "/v2/": kserve_http.server,
    "/v2/health/live": kserve_http.live,
    "/v2/health/ready": kserve_http.ready,
}


def route(method: str, path: str) -> Door | Page | Reply:
    """What answers a request; a reply that says so if nothing does. `path` is decoded and without a query."""
    if path == _ELASTICCTR:
        refuse = elasticctr_http.refuse_inference
        door = Door(
            "elasticctr_rest",
            Target(""),
            elasticctr_http.read_inference,
            elasticctr_http.write_inference,
            refuse,
        )
        return door if method == "POST" else elasticctr_http.refuse_method(method, path)
    try:
        found = _named(path)
    except RequestRefused as refused:
        return refusal(refused.kind, str(refused))
    if found is None:
        return refusal(
            "not_found",
            f"there is nothing at {shown(path)}. A model is at /v1/models/NAME or /v2/models/NAME.",
        )
    allowed = ("POST",) if isinstance(found, Door) else ("GET", "HEAD")
    if method not in allowed:
        return wrong_method(method, path, allowed)
    return found


def _named(path: str) -> Door | Page | None:
    if path == "/openapi.json":
        return Page("rest", Target(""), openapi.document, refusal)
    if path in _SERVER_PAGES:
        return Page("inference_rest", Target(""), _SERVER_PAGES[path], refusal)
    for protocol, pattern, pages in (
        ("tfserving_rest", _TFSERVING, _TFSERVING_PAGES),
        ("inference_rest", _INFERENCE, _INFERENCE_PAGES),
    ):
        match = pattern.fullmatch(path)
        if match is None:
            continue
        target = Target(match[1], version_number(match[2] or ""))
        verb = match[3] or ""
        if verb in _DOORS:
            name, read, write = _DOORS[verb]
            return Door(name, target, read, write, refusal)
        if verb in pages:
            return Page(protocol, target, pages[verb], refusal)
    return None
