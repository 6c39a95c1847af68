"""A release: a trained model with a snapshot of its tables, to be packed into a version's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.manifest import as_json
from clickline.artifacts.version import (
    PrecisionCost,
    VersionManifest,
    VersionModel,
    VersionNetwork,
    VersionSample,
    VersionSlot,
    utc_now,
)
from clickline.embedding import snapshot_digest
from clickline.models.model import Model
from clickline.models.onnx_export import export_onnx, with_weights
from clickline.models.quantization import quantize
from clickline.records import LabelledRows, PartShape, Precision
from clickline.validation import document_of, validate


@dataclass(frozen=True)
class Release:
    """A model to publish."""

    model: Model
    snapshot: Path | Sequence[Path]  # of the model's tables: full, in parts, or a delta
    origin: VersionModel
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

    def slots(self) -> tuple[VersionSlot, ...]:
        """The slots for the manifest, each with its default row for unknown ids."""
        tables = self.model.tables
        slots: dict[int, VersionSlot] = {}
        for part, slot_numbers in enumerate(tables.slots_by_table):
            records = tables.parts[part].default_records()
            for record, s in zip(records, slot_numbers, strict=True):
                slot = tables.slots[s]
                wide = 0.0 if tables.wide_optimizer is None else float(record["wide"])
                vector = tuple(float(value) for value in record["vector"])
                slots[s] = VersionSlot(slot.name, slot.dim, slot.pooling, part, wide, vector)
        return tuple(slots[s] for s in range(len(tables.slots)))

    @cached_property
    def since(self) -> str | None:
        """The base of a delta snapshot; None for a full one."""
        first = self.snapshot if isinstance(self.snapshot, Path) else self.snapshot[0]
        with first.open("rb") as file:
            base: str | None = json.loads(file.readline())[
                "base"
            ]  # verified with the rest when its rows are read
        return base

    def manifest(
        self, table_precision: Precision, dense_precision: Precision, shards: int, sample_rows: int
    ) -> VersionManifest:
        """The manifest of a version of this model, before its files are written and verified."""
        model, plan = self.model, self.model.plan
        manifest = VersionManifest(
            number=0,
            created=utc_now(),
            parent=None,
            table="base",
            rows=0,
            tombstones=0,
            table_precision=table_precision,
            dense_precision=dense_precision,
            shards=shards,
            parts=self.parts,
            slots=self.slots(),
            features=model.features.to_json(),
            network=VersionNetwork(plan.network, plan.network_sha256, tuple(plan.hidden), plan.batch_norm),
            width=model.spec.width,
            logit_shift=plan.logit_shift,
            calibration=None if model.calibration is None else model.calibration.to_json(),
            model=replace(self.origin, snapshot=snapshot_digest(self.snapshot)),
            config=self.config,
            report=None if self.report is None else dict(self.report),
            sample=VersionSample(sample_rows),
            cost=PrecisionCost(),
            files={},
        )
        # As read back from JSON, so that it can be compared with an earlier version's.
        return validate(
            VersionManifest, json.loads(as_json(document_of(manifest))), "the new version's manifest"
        )

    def onnx(self, precision: str, earlier: bytes | None) -> bytes:
        """The network as ONNX; `earlier` is that of an earlier version, possibly of the same network."""
        network, spec = self.model.network, self.model.spec
        if precision == "fp32":
            return (earlier and with_weights(earlier, network)) or export_onnx(network, spec)
        content = export_onnx(network, spec, folded=True)
        inputs_BI, wide_B = self.model.buffers(self.rows)
        self.model.tables.gather(self.rows.encoded.slots, inputs_BI, wide_B, train=False)
        return quantize(content, inputs_BI, np.ascontiguousarray(wide_B))
