"""All targets by name, with their module: a process loads only the target that it fuzzes."""

from __future__ import annotations

import importlib

from fuzz.target import Target

SURFACES = {
    **dict.fromkeys(
        ("criteo", "csv", "slots", "paddlerec", "tfrecord", "recordio", "parquet", "compressed"), "readers"
    ),
    **dict.fromkeys(("config", "credentials"), "configs"),
    **dict.fromkeys(("dataset", "version", "pointer", "checkpoint", "scorer"), "manifests"),
    "serving-table": "serving_table",
    **dict.fromkeys(("rest", "grpc", "brpc"), "requests"),
    "http2": "http2",
    **dict.fromkeys(("lookup", "lookup-answer"), "lookup"),
    "studio": "studio",
}


def load(name: str) -> Target:
    found: Target = importlib.import_module(f"fuzz.{SURFACES[name]}").TARGETS[name]
    return found
