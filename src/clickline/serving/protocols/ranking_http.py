"""Ranking over HTTP: one context that all candidates share, the candidates, and their scores or the best of them.

{"context": {field: value}, "candidates": [{field: value}, …] or {field: [values]}, "top_k": K}
{"version": N, "scores": […]}                        in the order of the candidates, without top_k
{"version": N, "scores": […], "indices": […]}        the best K, best first; ties keep their order
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clickline.errors import RequestRefused
from clickline.serving.protocols.call import Call, Limits, Scores, ServedModel, top_k
from clickline.serving.protocols.http_common import (
    HttpRequest,
    HttpResponse,
    json_response,
    parse_json,
    preview,
    similar_name,
    version_header,
)
from clickline.serving.protocols.json_rows import (
    kind_name,
    rows_from_columns,
    rows_from_objects,
)

_KEYS = ("context", "candidates", "top_k")


def read_rank(request: HttpRequest, model: ServedModel, limits: Limits) -> Call:
    document = parse_json(request.body)
    if type(document) is not dict:
        raise RequestRefused("invalid", f"the body is {kind_name(document)}; it must be an object.")
    for key in document:
        if key not in _KEYS:
            hint = similar_name(key, _KEYS)
            raise RequestRefused("invalid", f"{preview(key)} is not allowed; {', '.join(_KEYS)} are.{hint}")
    context = document.get("context", {})
    if type(context) is not dict:
        found = kind_name(context)
        raise RequestRefused("invalid", f"context is {found}; it must be an object of field: value.")
    candidates = document.get("candidates", [])
    top = document.get("top_k")
    if top is not None and (type(top) is not int or top < 1):
        raise RequestRefused("invalid", f"top_k is {preview(top)}; it must be a whole number of at least 1.")
    if type(candidates) is dict:
        rows = rows_from_columns(model, candidates, "candidates", limits)
    else:
        rows = rows_from_objects(model, candidates, "candidates", limits)
    return Call(rows, rows_from_objects(model, [context], "context", limits), top)


def write_rank(top: int | None, answer: Scores) -> HttpResponse:
    document: dict[str, Any] = {
        "version": answer.version,
        "scores": np.ascontiguousarray(answer.probability_B),
    }
    if top is not None:
        best_K = top_k(answer.probability_B, top)
        document |= {"scores": answer.probability_B[best_K], "indices": best_K}
    return json_response(document, headers=[version_header(answer)])
