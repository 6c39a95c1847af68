"""A release: a trained model with a snapshot of its tables, to be packed into a version's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.manifest import as_json
from clickline.embedding import snapshot_digest
from clickline.embedding.serving import PartShape
from clickline.models.model import Model
from clickline.models.onnx_export import export_onnx, with_weights
from clickline.models.quantization import quantize
from clickline.records import LabelledRows


@dataclass(frozen=True)
class Release:
    """A model to publish."""

    model: Model
    snapshot: Path | Sequence[Path]  # of the model's tables: full, in parts, or a delta
    origin: Mapping[str, Any]  # its checkpoint, step and dataset
    config: str  # resolved, as YAML
    report: Mapping[str, Any] | None  # its evaluation report
    rows: LabelledRows  # to store with their scores, and to calibrate the ranges of 8-bit weights on
    gate_sample: tuple[LabelledRows, NDArray[np.float32]] | None = None  # rows with the gate's scores

    def sample(self, max_rows: int) -> tuple[LabelledRows, NDArray[np.float32]]:
        """At most `max_rows` rows to store with their scores, and those scores: the gate's own, if given."""
        if self.gate_sample is not None and self.gate_sample[0].rows:
            rows, score_B = self.gate_sample
            return rows.slice(0, min(max_rows, rows.rows)), score_B[:max_rows]
        rows = self.rows.slice(0, min(max_rows, self.rows.rows))
        return rows, self.model.score(rows)

    @property
    def parts(self) -> tuple[PartShape, ...]:
        tables = self.model.tables
        return tuple(PartShape(part.layout.dim, tables.wide_optimizer is not None) for part in tables.parts)

    def slots(self) -> list[dict[str, Any]]:
        """The slots for the manifest, each with its default row for unknown ids."""
        tables = self.model.tables
        slots: list[dict[str, Any]] = [{} for _ in tables.slots]
        for part, slot_numbers in enumerate(tables.slots_by_table):
            records = tables.parts[part].default_records()
            for record, s in zip(records, slot_numbers, strict=True):
                slot = tables.slots[s]
                slots[s] = {
                    "name": slot.name,
                    "dim": slot.dim,
                    "pooling": slot.pooling,
                    "part": part,
                    "wide": 0.0 if tables.wide_optimizer is None else float(record["wide"]),
                    "vector": [float(value) for value in record["vector"]],
                }
        return slots

    @cached_property
    def since(self) -> str | None:
        """The base of a delta snapshot; None for a full one."""
        first = self.snapshot if isinstance(self.snapshot, Path) else self.snapshot[0]
        with first.open("rb") as file:
            base: str | None = json.loads(file.readline())[
                "base"
            ]  # verified with the rest when its rows are read
        return base

    def body(self) -> dict[str, Any]:
        """The manifest's entries about the model, as read back from JSON."""
        model = self.model
        document = {
            "parts": [{"dim": part.dim, "wide": part.wide} for part in self.parts],
            "slots": self.slots(),
            "features": model.features.to_json(),
            "network": {
                "name": model.plan.network,
                "file_sha256": model.plan.network_sha256,
                "hidden": list(model.plan.hidden),
                "batch_norm": model.plan.batch_norm,
            },
            "width": model.spec.width,
            "logit_shift": model.plan.logit_shift,
            "calibration": None if model.calibration is None else model.calibration.to_json(),
            "model": {**self.origin, "snapshot": snapshot_digest(self.snapshot)},
            "config": self.config,
            "report": self.report,
        }
        read: dict[str, Any] = json.loads(as_json(document))
        return read

    def onnx(self, precision: str, earlier: bytes | None) -> bytes:
        """The network as ONNX; `earlier` is that of an earlier version, possibly of the same network."""
        network, spec = self.model.network, self.model.spec
        if precision == "fp32":
            return (earlier and with_weights(earlier, network)) or export_onnx(network, spec)
        content = export_onnx(network, spec, folded=True)
        inputs_BI, wide_B = self.model.buffers(self.rows)
        self.model.tables.gather(self.rows.encoded.slots, inputs_BI, wide_B, train=False)
        return quantize(content, inputs_BI, np.ascontiguousarray(wide_B))
