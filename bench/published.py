"""A published version to serve: Wide & Deep with a million ids, created without training, and requests with raw fields."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from clickline.artifacts.version import VersionModel
from clickline.config import Config, load_config
from clickline.embedding import begin_snapshot
from clickline.features import DenseField, Encoder, FeatureSpec, SlotField
from clickline.models.from_config import plan_of
from clickline.models.model import Model
from clickline.progress import Progress
from clickline.publishing.release import Release
from clickline.publishing.run import PublishResult, publish_release
from clickline.records import EncodedRows, LabelledRows, RawRows, TextColumn
from clickline.wire.messages import PredictRequest, RankRequest

DENSE, SLOTS = 13, 26
FEATURES = FeatureSpec(
    dense=tuple(DenseField(f"I{n}", f"I{n}", "log1p") for n in range(1, DENSE + 1)),
    slots=tuple(SlotField(f"C{n}", f"C{n}", n) for n in range(1, SLOTS + 1)),
)
CONTEXT = (*(f"I{n}" for n in range(1, 8)), *(f"C{n}" for n in range(1, 14)))
"""The user's fields of a ranking request; the others are the candidate's."""

CANDIDATE = tuple(name for name in FEATURES.columns if name not in CONTEXT)


def text(slot: int, value: int) -> bytes:
    """A category in the format of Criteo: eight hexadecimal digits."""
    return f"{(slot * 0x9E3779B1 + value * 0x85EBCA77) & 0xFFFFFFFF:08x}".encode()


def rows_of(values_SB: np.ndarray, seed: int) -> LabelledRows:
    """Encoded rows with these categories."""
    slots, rows = values_SB.shape
    rng = np.random.default_rng(seed)
    columns = {}
    for s in range(slots):
        texts = [text(s, value) for value in values_SB[s].tolist()]
        starts_B = np.arange(rows, dtype=np.int64) * 8
        data = np.frombuffer(b"".join(texts), dtype=np.uint8)
        columns[f"C{s + 1}"] = TextColumn(data, starts_B, starts_B + 8)
    encoded, _ = Encoder(FEATURES).encode(RawRows(rows, columns, np.arange(rows)))
    dense_DB = rng.exponential(1, (DENSE, rows)).astype(np.float32)
    ones_B = np.ones(rows, dtype=np.float32)
    shows_B = np.ones(rows, dtype=np.uint32)
    return LabelledRows(
        (rng.random(rows) < 0.25).astype(np.float32),
        ones_B,
        shows_B,
        np.zeros(rows, dtype=np.uint32),
        np.full(rows, -1, dtype=np.int32),
        EncodedRows(rows, dense_DB, encoded.slots),
    )


class Live:
    """A model in memory, as in continuous training, that can be published repeatedly."""

    def __init__(self, folder: Path, ids: int = 1_000_000, *settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "clickline.yaml"
        file.write_text(
            "name: ads\ndata: {train: none.tsv}\ncache: {dir: cache}\nmodel: {hidden: [512, 256, 128, 32]}\n"
            "train: {seed: 0}\n"
        )
        self.config: Config = load_config(file, settings)
        self.folder = folder
        self.model = Model.build(FEATURES, plan_of(self.config, FEATURES, ids), 2)
        self.values = ids // SLOTS
        self._generation: int | None = None
        for start in range(0, self.values, 8192):
            stop = min(start + 8192, self.values)
            self.touch(np.tile(np.arange(start, stop), (SLOTS, 1)))

    def touch(self, values_SB: np.ndarray) -> None:
        """Update the rows of these categories."""
        rows = rows_of(values_SB, 0)
        inputs_BI, wide_B = self.model.buffers(rows)
        lookup = self.model.tables.gather(rows.encoded.slots, inputs_BI, wide_B, train=True)
        rng = np.random.default_rng(values_SB.shape[1])
        self.model.tables.apply(
            lookup,
            rng.normal(0, 0.1, inputs_BI.shape).astype(np.float32),
            rng.normal(0, 0.1, wide_B.shape).astype(np.float32),
        )

    def publish(self) -> PublishResult:
        """Publish the whole table at first, later a delta."""
        began = time.monotonic()
        snapshot = begin_snapshot(self.model.tables, since=self._generation)
        path = self.folder / f"snapshot-{snapshot.generation}.bin"
        snapshot.write(path)
        self._generation = snapshot.generation
        sample = rows_of(np.random.default_rng(1).integers(0, self.values, (SLOTS, 4096)), 1)
        origin = VersionModel("bench", 0, tables_sha256="", dataset="bench")
        release = Release(self.model, path, origin, "", None, sample)
        return publish_release(self.config, release, iter(()), Progress(), reason="bench", started=began)


def _fill(inputs, names, rows: int, values: int, rng: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    for name in names:
        tensor = inputs[name]
        tensor.tensor_shape.dim.add().size = rows
        if name.startswith("I"):
            tensor.dtype = 1
            tensor.float_val.extend(rng.integers(0, 100, rows).tolist())
        else:
            tensor.dtype = 7
            slot = int(name[1:]) - 1
            tensor.string_val.extend([text(slot, value) for value in rng.integers(0, values, rows).tolist()])


def predict_body(rows: int, values: int, seed: int) -> bytes:
    """A PredictRequest of TensorFlow Serving with raw fields."""
    request = PredictRequest()
    request.model_spec.name = "ads"
    request.output_filter.append("logistic")
    _fill(request.inputs, FEATURES.columns, rows, values, np.random.default_rng(seed))
    body: bytes = request.SerializeToString()
    return body


def rank_body(rows: int, values: int, seed: int) -> bytes:
    """A RankRequest with one user and `rows` candidates."""
    request = RankRequest()
    request.model_spec.name = "ads"
    rng = np.random.default_rng(seed)
    _fill(request.context, CONTEXT, 1, values, rng)
    _fill(request.candidates, CANDIDATE, rows, values, rng)
    body: bytes = request.SerializeToString()
    return body
