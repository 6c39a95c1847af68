"""Ranking over HTTP: one context that all candidates share, the candidates, and their scores or the best of them.

{"context": {field: value}, "candidates": [{field: value}, …] or {field: [values]}, "top_k": K}
{"version": N, "scores": […]}                        in the order of the candidates, without top_k
{"version": N, "scores": […], "indices": […]}        the best K, best first; ties keep their order
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.http_common import (
    HttpRequest,
    json_response,
    kind_name,
    parse_object,
    preview,
    similar_name,
    version_header,
)
from clickline.serving.protocols.json_rows import rows_from_columns, rows_from_objects
from clickline.serving.protocols.request import Call, Response, top_k

_KEYS = ("context", "candidates", "top_k")


class Rank(HttpRequest):
    """Scores candidates that share a context."""

    protocol = "rank_rest"

    def read(self, model: ScorerLike) -> Call:
        document = parse_object(self.body)
        for key in document:
            if key not in _KEYS:
                hint = similar_name(key, _KEYS)
                raise RequestRefused(
                    "invalid", f"{preview(key)} is not allowed; {', '.join(_KEYS)} are.{hint}"
                )
        context = document.get("context", {})
        if type(context) is not dict:
            found = kind_name(context)
            raise RequestRefused("invalid", f"context is {found}; it must be an object of field: value.")
        candidates = document.get("candidates", [])
        self.top = document.get("top_k")
        if self.top is not None and (type(self.top) is not int or self.top < 1):
            raise RequestRefused(
                "invalid", f"top_k is {preview(self.top)}; it must be a whole number of at least 1."
            )
        rows_from = rows_from_columns if type(candidates) is dict else rows_from_objects
        rows = rows_from(model, candidates, "candidates", self.limits)
        return Call(rows, rows_from_objects(model, [context], "context", self.limits))

    def encode(self, answer: Scores) -> Response:
        document: dict[str, Any] = {
            "version": answer.version,
            "scores": np.ascontiguousarray(answer.probability_B),
        }
        if self.top is not None:
            best_K = top_k(answer.probability_B, self.top)
            document |= {"scores": answer.probability_B[best_K], "indices": best_K}
        return json_response(document, headers=[version_header(answer)])
