"""A published version opened for scoring: encoder, embedding rows and network.

    RequestRows ──RequestEncoder──▶ ids, floats ──RowSource.gather──▶ inputs ──OnnxNetwork──▶ logits ──▶ probabilities

Everything that a request needs is in one object, so no answer can mix two versions. Safe to use from several threads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.version import VersionManifest
from clickline.embedding.jagged_ids import JaggedIds, to_jagged
from clickline.embedding.serving import GatherBatch, GatherPlan, ServingTable, gather_plan
from clickline.errors import ArtifactError, RequestRefused
from clickline.features import ValidationErrors
from clickline.features.request_encoder import EncodedRequest, RequestEncoder
from clickline.models.calibration import Calibration, calibration_from_json
from clickline.records import ABSENT, EncodedRows, LabelledRows, RequestRows
from clickline.scoring.onnx_network import OnnxNetwork, SplitNetwork
from clickline.scoring.stored_sample import read_sample

DENSE = "dense.onnx"
_CHUNK_ROWS = 8192  # rows scored at a time: activations of more would not fit in the CPU caches
_MAX_BUFFERS = 4  # matrices kept for the next requests
_MAX_SPLITS = 4  # of fields into those of the context and of the candidates, each with its own ONNX session
_SPLIT_REQUESTS = 32  # requests after which a split may replace another: a session costs as much as they do
_MAX_COUNTED = 256  # field sets without a split whose requests are counted
_DECAY_REQUESTS = 1024  # requests without a split after which all counts are halved, so that old ones fade
_TOLERANCE = 1e-5  # between machines, which may round differently

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scores:
    """The scores of a request's rows, all from one version."""

    version: int
    logit_B: Floats
    probability_B: Floats


class RowSource(Protocol):
    """Where the embedding rows of ids come from: mapped files, or lookup servers."""

    def gather(self, batch: GatherBatch) -> None:
        """Find the rows of a batch, and pool them."""

    def close(self) -> None:
        """Release all resources."""


@dataclass(frozen=True)
class _FieldGroup:
    """A subset of the fields with its own input matrix: dense floats after the vectors."""

    encoder: RequestEncoder
    plan: GatherPlan
    slots: NDArray[np.int64]  # indices of the model's slots
    columns: tuple[int, ...]  # column of each input in the full input matrix
    vectors: int  # inputs that belong to vectors

    @property
    def width(self) -> int:
        return len(self.columns)


@dataclass(eq=False)
class _Split:
    """Ranks requests whose candidates have only fields of `own_C`, and whose context has none of them. Fields that a
    request lacks are missing values, so one split serves many sets of fields."""

    own_C: NDArray[np.bool_]
    shared_C: NDArray[np.bool_]
    own: _FieldGroup
    shared: _FieldGroup
    network: SplitNetwork | None
    requests: int = 0  # since the last split was created

    def fits(self, candidates_C: NDArray[np.bool_], context_C: NDArray[np.bool_]) -> bool:
        return not ((candidates_C & self.shared_C).any() or (context_C & self.own_C).any())


class Scorer:
    """A published version that scores requests."""

    def __init__(self, manifest: VersionManifest, folder: Path, source: RowSource, threads: int = 1) -> None:
        """`folder` has the version's own files; `source` has its embedding rows, and is closed with the scorer."""
        try:
            self._open(manifest, folder, source, threads)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise ArtifactError(
                f"the manifest of the version in {folder} is invalid: {error!r}. Publish again."
            ) from error

    def _open(self, manifest: VersionManifest, folder: Path, source: RowSource, threads: int) -> None:
        self.manifest = manifest
        self.number = manifest.number
        self.created = datetime.fromisoformat(manifest.created).timestamp()
        self.features = manifest.feature_spec
        self.columns = self.features.columns
        self.misses_S = np.zeros(len(self.features.slots), dtype=np.int64)
        self.lookups_S = np.zeros(len(self.features.slots), dtype=np.int64)
        self._folder = folder
        self._source = source
        self._shift = np.float32(manifest.logit_shift)
        self._calibration: Calibration | None = (
            None if manifest.calibration is None else calibration_from_json(manifest.calibration)
        )
        try:
            content = (folder / DENSE).read_bytes()
        except OSError as error:
            raise ArtifactError(f"{folder / DENSE} cannot be read: {error}. Publish again.") from error
        self._network = OnnxNetwork(content, threads)
        if self._network.width != manifest.width:
            raise ArtifactError(
                f"{folder / DENSE} has {self._network.width} inputs, the manifest says {manifest.width}. "
                "Publish again."
            )
        self._encoder = RequestEncoder(self.features)
        self._parts = manifest.parts
        self._slot_columns = np.cumsum([0, *(slot.dim for slot in manifest.slots)])
        self._vectors = int(self._slot_columns[-1])
        self._all_slots = np.arange(len(self.features.slots))
        self._plan = self._gather_plan(self._all_slots, self._slot_columns[:-1])
        self._tolerance = _TOLERANCE if manifest.dense_precision == "fp32" else manifest.sample.tolerance
        self._splits: tuple[_Split, ...] = ()
        self._request_counts: OrderedDict[bytes, int] = OrderedDict()  # by the candidates' fields
        self._since_decay = 0  # requests without a split
        self._split_lock = Lock()
        self._buffers: deque[Floats] = deque(maxlen=_MAX_BUFFERS)

    @classmethod
    def open(
        cls, manifest: VersionManifest, folders: Sequence[Path], *, threads: int = 1, work: Path | None = None
    ) -> Scorer:
        """Open a version whose tables are mapped from files: the folders of its chain, base first, its own last."""
        tables = ServingTable.open(folders, work=work)
        try:
            scorer = cls(manifest, folders[-1], tables, threads)
            if scorer._parts != tables.parts:  # else kernels would write beyond the inputs
                raise ArtifactError(
                    f"the tables in {folders[-1]} have rows of {tables.parts}, the manifest says {scorer._parts}. "
                    "Publish again."
                )
            return scorer
        except BaseException:
            tables.close()
            raise

    def close(self) -> None:
        self._source.close()

    # ── scoring ────────────────────────────────────────────────────────────────────────────────

    def predict(self, rows: RequestRows) -> Scores:
        """Score a request's rows."""
        encoded, errors = self._encoder.encode_arrays(rows)
        _raise_first(errors)
        if rows.rows > _CHUNK_ROWS:
            return self.score(encoded.by_slot())
        return self._scores(self._logits(encoded.rows, encoded.dense_DB, _jagged(encoded)))

    def encode(self, rows: RequestRows) -> EncodedRows:
        """Encode a request to ids and floats; an error for an invalid value names its field."""
        encoded, errors = self._encoder.encode(rows)
        _raise_first(errors)
        return encoded

    def score(self, encoded: EncodedRows) -> Scores:
        """Score encoded rows."""
        if encoded.rows <= _CHUNK_ROWS:
            jagged = to_jagged(encoded.slots, encoded.rows)
            return self._scores(self._logits(encoded.rows, encoded.dense_DB, jagged))
        starts = range(0, encoded.rows, _CHUNK_ROWS)
        chunks = [self.score(encoded.slice(start, start + _CHUNK_ROWS)) for start in starts]
        return Scores(
            self.number,
            np.concatenate([chunk.logit_B for chunk in chunks]),
            np.concatenate([chunk.probability_B for chunk in chunks]),
        )

    def probabilities(self, rows: LabelledRows) -> Floats:
        """The predicted probabilities, as the evaluator calls it."""
        return self.score(rows.encoded).probability_B

    def rank(self, context: RequestRows, candidates: RequestRows) -> Scores:
        """Score candidates that share the fields of `context`, which has one row."""
        context_C, candidates_C = self._check_fields(context, candidates)
        split = self._split(candidates_C, context_C)
        if split is None:
            return self._rank_unsplit(context, candidates, context_C)
        shared_1I = np.empty((1, split.shared.width), dtype=np.float32)
        shared_wide = self._gather(split.shared, context, shared_1I)
        with self._buffer(candidates.rows, split.own.width) as own_BI:
            wide_B = self._gather(split.own, candidates, own_BI)
            wide_B += shared_wide[0]
            if split.network is not None:
                return self._scores(split.network.logits(own_BI, shared_1I[0], wide_B))
            with self._buffer(candidates.rows, self._network.width) as inputs_BI:
                inputs_BI[:, split.shared.columns] = shared_1I
                inputs_BI[:, split.own.columns] = own_BI
                return self._scores(self._network.logits(inputs_BI, wide_B))

    def check_sample(self) -> float:
        """Score the stored sample, which also warms everything up. Raises if the scores differ from the stored ones;
        returns the largest difference."""
        encoded, expected_B = read_sample(self._folder, len(self.features.slots))
        try:
            probability_B = self.score(encoded).probability_B
            difference = float(np.abs(probability_B - expected_B).max(initial=0.0))
        except ValueError as error:
            raise ArtifactError(
                f"the stored sample of version {self.number} does not match its tables: {error}. Publish again."
            ) from error
        allowed = self._tolerance
        if not difference <= allowed:  # also if it is NaN
            raise ArtifactError(
                f"version {self.number} scores its stored sample differently than at publish: by {difference:.2g}; "
                f"allowed: {allowed:.2g}. Its files are damaged, or this machine computes differently; publish "
                "again."
            )
        self.misses_S[:] = 0
        self.lookups_S[:] = 0
        return difference

    # ── internals ─────────────────────────────────────────────────────────────────────────────────

    def _logits(self, rows: int, dense_DB: Floats, jagged: JaggedIds) -> Floats:
        wide_B = np.empty(rows, dtype=np.float32)
        with self._buffer(rows, self._network.width) as inputs_BI:
            inputs_BI[:, self._vectors :] = dense_DB.T
            self._source.gather(GatherBatch(self._plan, jagged, inputs_BI, wide_B, self.misses_S))
            self.lookups_S += np.diff(jagged.starts_S1)
            return self._network.logits(inputs_BI, wide_B)

    def _scores(self, logit_B: Floats) -> Scores:
        shifted_B = logit_B + self._shift
        with np.errstate(over="ignore"):  # exp of a large number is infinite, which gives score 0
            probability_B = np.float32(1) / (np.float32(1) + np.exp(-shifted_B))
        if self._calibration is not None:
            probability_B = self._calibration.apply(probability_B)
        return Scores(self.number, shifted_B, probability_B)

    def _gather(self, group: _FieldGroup, rows: RequestRows, inputs_BI: Floats) -> Floats:
        """Fill the inputs of a group of fields; returns their wide sums."""
        encoded, errors = group.encoder.encode_arrays(rows)
        _raise_first(errors)
        wide_B = np.empty(rows.rows, dtype=np.float32)
        inputs_BI[:, group.vectors :] = encoded.dense_DB.T
        jagged = _jagged(encoded)
        misses_S = np.zeros(group.slots.size, dtype=np.int64)
        self._source.gather(GatherBatch(group.plan, jagged, inputs_BI, wide_B, misses_S))
        self.misses_S[group.slots] += misses_S
        self.lookups_S[group.slots] += np.diff(jagged.starts_S1)
        return wide_B

    def _check_fields(
        self, context: RequestRows, candidates: RequestRows
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which columns the context has, and which the candidates have."""
        if context.rows != 1:
            raise RequestRefused("invalid", f"the context has {context.rows} rows; allowed: exactly one.")
        context_C = _present_columns(context, self.columns)
        candidates_C = _present_columns(candidates, self.columns)
        both = np.flatnonzero(candidates_C & context_C)
        if both.size:
            name = self.columns[both[0]]
            raise RequestRefused(
                "invalid",
                f"field {name} is in the context and in the candidates. Send it in one of them.",
            )
        return context_C, candidates_C

    def _split(self, candidates_C: NDArray[np.bool_], context_C: NDArray[np.bool_]) -> _Split | None:
        """The split for a request. None: there is none, and requests like this are too rare to create one: clients that
        keep changing their fields must not make this process create sessions all the time."""
        for split in self._splits:
            if split.fits(candidates_C, context_C):
                split.requests += 1
                return split
        with self._split_lock:
            self._since_decay += 1
            if self._since_decay == _DECAY_REQUESTS:
                self._decay_counts()
            key = candidates_C.tobytes()
            count = self._request_counts.pop(key, 0) + 1
            self._request_counts[key] = count  # last, as the newest
            if len(self._request_counts) > _MAX_COUNTED:
                self._request_counts.popitem(last=False)
            splits = sorted(self._splits, key=lambda split: -split.requests)
            if len(splits) == _MAX_SPLITS:
                least = splits.pop()
                if count < _SPLIT_REQUESTS or count <= least.requests:
                    return None
            created = self._make_split(candidates_C)
            for split in splits:
                split.requests = 0
            self._request_counts.clear()
            self._splits = (*splits, created)
            return created

    def _decay_counts(self) -> None:
        self._since_decay = 0
        for split in self._splits:
            split.requests //= 2
        for key in self._request_counts:
            self._request_counts[key] //= 2

    def _make_split(self, own_C: NDArray[np.bool_]) -> _Split:
        names = frozenset(name for name, own in zip(self.columns, own_C, strict=True) if own)
        own, shared = self._field_group(names), self._field_group(frozenset(self.columns) - names)
        return _Split(own_C, ~own_C, own, shared, self._network.split(own.columns, shared.columns))

    def _rank_unsplit(
        self, context: RequestRows, candidates: RequestRows, context_C: NDArray[np.bool_]
    ) -> Scores:
        """Rank without a split: the context's values are repeated in every row."""
        one, rows = self.encode(context), self.encode(candidates)
        repeated = one.take(np.zeros(candidates.rows, dtype=np.int64))
        shared = {name for name, given in zip(self.columns, context_C, strict=True) if given}
        dense_DB = rows.dense_DB.copy()
        for d, field in enumerate(self.features.dense):
            if field.column in shared:
                dense_DB[d] = repeated.dense_DB[d]
        slots = tuple(
            repeated.slots[s] if slot.column in shared else rows.slots[s]
            for s, slot in enumerate(self.features.slots)
        )
        return self.score(EncodedRows(candidates.rows, dense_DB, slots))

    def _field_group(self, columns_taken: frozenset[str]) -> _FieldGroup:
        encoder = RequestEncoder(self.features, columns_taken)
        slots = np.array(encoder.slots, dtype=np.int64)
        dims = [self.manifest.slots[s].dim for s in slots]
        starts = np.cumsum([0, *dims])
        columns = [
            int(self._slot_columns[s]) + j for s, dim in zip(slots, dims, strict=True) for j in range(dim)
        ]
        columns += [self._vectors + d for d in encoder.dense]
        return _FieldGroup(
            encoder, self._gather_plan(slots, starts[:-1]), slots, tuple(columns), int(starts[-1])
        )

    def _gather_plan(self, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> GatherPlan:
        described = [self.manifest.slots[s] for s in slots]
        return gather_plan(
            self._parts,
            [
                (slot.part, int(column), slot.pooling, slot.wide, slot.vector)
                for slot, column in zip(described, columns, strict=True)
            ],
        )

    @contextmanager
    def _buffer(self, rows: int, width: int) -> Iterator[Floats]:
        """A reused matrix: newly allocated memory of this size would cause page faults each time."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.empty(0, dtype=np.float32)
        if buffer.size < rows * width:
            buffer = np.empty(rows * width, dtype=np.float32)
        try:
            yield buffer[: rows * width].reshape(rows, width)
        finally:
            self._buffers.append(buffer)


def _jagged(encoded: EncodedRequest) -> JaggedIds:
    """The ids of all slots as one array, without a copy unless a slot is multi-valued."""
    if encoded.multi:
        return to_jagged(encoded.by_slot().slots, encoded.rows)
    slots = encoded.ids_SB.shape[0]
    starts_S1 = np.arange(slots + 1, dtype=np.int64) * encoded.rows
    return JaggedIds(
        encoded.ids_SB.reshape(-1), starts_S1, np.zeros(0, dtype=np.int64), np.full(slots, -1, dtype=np.int64)
    )


def _present_columns(rows: RequestRows, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Which columns a request has values for."""
    present_C: NDArray[np.bool_] = rows.kind_C != ABSENT
    for name in rows.multi:
        present_C[columns.index(name)] = True
    return present_C


def _raise_first(errors: Sequence[ValidationErrors]) -> None:
    for group in errors:
        first = next(iter(group))
        raise RequestRefused("invalid", f"row {first.row}: {first.detail}.")
