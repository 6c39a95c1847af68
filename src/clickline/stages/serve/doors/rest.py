"""Where an HTTP request goes: its method and path to the door or page of a protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from clickline.errors import RequestRefused
from clickline.stages.serve.doors import openapi, rest_elasticctr, rest_inference, rest_tfserving
from clickline.stages.serve.doors.calls import Call, Target, version_number
from clickline.stages.serve.doors.rest_calls import (
    Door,
    Headers,
    HttpLimits,
    Known,
    Page,
    Reply,
    refusal,
    shown,
    wrong_method,
)
from clickline.stages.serve.doors.rest_ranking import read_rank, write_rank

__all__ = ["Door", "Headers", "HttpLimits", "Known", "Page", "Reply", "refusal", "route"]

_TFSERVING = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?(:[^/:]*|/metadata)?")
_INFERENCE = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready)?")
_ELASTICCTR = "/ElasticCTRPredictionService/inference"

_DOORS: Mapping[str, tuple[str, Callable[..., Call], Callable[..., Reply]]] = {
    ":predict": ("tfserving_rest", rest_tfserving.read_predict, rest_tfserving.write_predict),
    ":rank": ("rank_rest", read_rank, write_rank),
    "/infer": ("inference_rest", rest_inference.read_infer, rest_inference.write_infer),
}
_TFSERVING_PAGES = {"": rest_tfserving.status, "/metadata": rest_tfserving.metadata}
_INFERENCE_PAGES = {"": rest_inference.metadata, "/ready": rest_inference.model_ready}
_SERVER_PAGES = {
    "/v2": rest_inference.server,
    "/v2/": rest_inference.server,
    "/v2/health/live": rest_inference.live,
    "/v2/health/ready": rest_inference.ready,
}


def route(method: str, path: str) -> Door | Page | Reply:
    """What answers a request; a reply that says so if nothing does. `path` is decoded and without a query."""
    if path == _ELASTICCTR:
        refuse = rest_elasticctr.refuse_inference
        door = Door(
            "elasticctr_rest",
            Target(""),
            rest_elasticctr.read_inference,
            rest_elasticctr.write_inference,
            refuse,
        )
        return door if method == "POST" else rest_elasticctr.refuse_method(method, path)
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
