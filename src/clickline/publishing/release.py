"""What is published: a trained model with the snapshot of its tables, packed into a version's files."""

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
from clickline.models.quantization import quantise
from clickline.records import LabelledRows


@dataclass(frozen=True)
class Release:
    """A model as it is to be served."""

    model: Model
    snapshot: Path | Sequence[Path]  # of the model's tables: whole, in parts, or what changed since another
    origin: Mapping[str, Any]  # checkpoint, step, dataset: where it came from
    config: str  # resolved, as YAML
    report: Mapping[str, Any] | None  # what it was judged by
    rows: LabelledRows  # to be stored with their scores, and to fix the ranges of 8-bit weights on
    judged: tuple[LabelledRows, NDArray[np.float32]] | None = (
        None  # with the scores that the gate saw: stored instead
    )

    def sample(self, most: int) -> tuple[LabelledRows, NDArray[np.float32]]:
        """Rows to be stored with their scores, and those scores: as the gate saw them, where it was told."""
        if self.judged is not None and self.judged[0].rows:
            rows, score_B = self.judged
            return rows.part(0, min(most, rows.rows)), score_B[:most]
        rows = self.rows.part(0, min(most, self.rows.rows))
        return rows, self.model.score(rows)

    @property
    def parts(self) -> tuple[PartShape, ...]:
        tables = self.model.tables
        return tuple(PartShape(part.layout.dim, tables.wide_optimizer is not None) for part in tables.parts)

    def slots(self) -> list[dict[str, Any]]:
        """Each slot with the row that ids get which the tables do not know."""
        tables = self.model.tables
        described: list[dict[str, Any]] = [{} for _ in tables.slots]
        for part, members in enumerate(tables.members):
            records = tables.parts[part].default_records()
            for record, s in zip(records, members, strict=True):
                slot = tables.slots[s]
                described[s] = {
                    "name": slot.name,
                    "dim": slot.dim,
                    "pooling": slot.pooling,
                    "part": part,
                    "wide": 0.0 if tables.wide_optimizer is None else float(record["wide"]),
                    "vector": [float(value) for value in record["vector"]],
                }
        return described

    @cached_property
    def since(self) -> str | None:
        """The snapshot that this one holds the changes since; None for a whole one."""
        first = self.snapshot if isinstance(self.snapshot, Path) else self.snapshot[0]
        with first.open("rb") as file:
            base: str | None = json.loads(file.readline())[
                "base"
            ]  # checked with the rest when its rows are read
        return base

    def body(self) -> dict[str, Any]:
        """What the manifest says of the model itself, as JSON gives it back."""
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
        """The network as serving runs it; `earlier` is that of a version of perhaps the same network."""
        network, spec = self.model.network, self.model.spec
        if precision == "fp32":
            return (earlier and with_weights(earlier, network)) or export_onnx(network, spec)
        content = export_onnx(network, spec, folded=True)
        inputs_BI, wide_B = self.model.buffers(self.rows)
        self.model.tables.gather(self.rows.encoded.slots, inputs_BI, wide_B, train=False)
        return quantise(content, inputs_BI, np.ascontiguousarray(wide_B))
