"""Rank over HTTP: what all candidates share once, the candidates, and the best of them back.

{"context": {field: value}, "candidates": [{field: value}, …] or {field: [values]}, "top_k": K}
{"version": N, "scores": […]}                        in the candidates' order, without top_k
{"version": N, "scores": […], "indices": […]}        the best K, best first; of equal ones the first
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clickline.errors import RequestRefused
from clickline.serving.protocols.call import Call, Limits, Model, Scores, best
from clickline.serving.protocols.http_common import (
    Reply,
    Request,
    json_reply,
    parse_json,
    shown,
    similar_name,
    version_header,
)
from clickline.serving.protocols.json_rows import (
    kind_name,
    rows_from_columns,
    rows_from_objects,
)

_KEYS = ("context", "candidates", "top_k")


def read_rank(request: Request, model: Model, limits: Limits) -> Call:
    document = parse_json(request.body)
    if type(document) is not dict:
        raise RequestRefused("invalid", f"the body is {kind_name(document)}; an object is allowed.")
    for key in document:
        if key not in _KEYS:
            hint = similar_name(key, _KEYS)
            raise RequestRefused("invalid", f"{shown(key)} is not allowed; {', '.join(_KEYS)} are.{hint}")
    context = document.get("context", {})
    if type(context) is not dict:
        found = kind_name(context)
        raise RequestRefused("invalid", f"context is {found}; an object of field: value is allowed.")
    candidates = document.get("candidates", [])
    top = document.get("top_k")
    if top is not None and (type(top) is not int or top < 1):
        raise RequestRefused("invalid", f"top_k is {shown(top)}; a whole number of at least 1 is allowed.")
    if type(candidates) is dict:
        rows = rows_from_columns(model, candidates, "candidates", limits)
    else:
        rows = rows_from_objects(model, candidates, "candidates", limits)
    return Call(rows, rows_from_objects(model, [context], "context", limits), top)


def write_rank(top: int | None, answer: Scores) -> Reply:
    document: dict[str, Any] = {
        "version": answer.version,
        "scores": np.ascontiguousarray(answer.probability_B),
    }
    if top is not None:
        best_K = best(answer.probability_B, top)
        document |= {"scores": answer.probability_B[best_K], "indices": best_K}
    return json_reply(document, headers=[version_header(answer)])
