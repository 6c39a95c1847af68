"""Manifests, pointers and the files they name: whatever they contain, nothing outside their folder is read, and damage
raises ArtifactError."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from table_model import blocks_of

from clickline.artifacts.checkpoint import (
    CheckpointState,
    find_checkpoint,
    open_checkpoint_folder,
    run_result,
    write_checkpoint,
)
from clickline.artifacts.dataset import Dataset, ShardWriter, Split, dataset_folder, finish_dataset
from clickline.artifacts.diff import differences, summary
from clickline.artifacts.manifest import digest, manifest_bytes
from clickline.artifacts.registry import Registry
from clickline.artifacts.version import (
    VERSION_FORMAT,
    PrecisionCost,
    VersionFile,
    VersionManifest,
    VersionModel,
    VersionNetwork,
    VersionSample,
    VersionSlot,
    verify,
)
from clickline.embedding.serving import PartShape, write_shards
from clickline.errors import ClicklineError
from clickline.features import DenseField, Encoder, FeatureSpec, SlotField
from clickline.records import LabelledRows
from clickline.scoring.scorer import DENSE, Scorer
from clickline.scoring.stored_sample import write_sample
from clickline.storage.storage import Storage
from clickline.validation import validate
from fuzz.target import Choices, Target, mutated, scratch

FEATURES = FeatureSpec(
    dense=(DenseField("I1", "I1", "none"),),
    slots=(SlotField("C1", "C1", 1), SlotField("C2", "C2", 2, multi=True)),
)
_ROWS = [{"I1": 1, "C1": "a", "C2": ["x", "y"]}, {"I1": 2, "C1": "b", "C2": ["z"]}]
_STORAGE = Storage()


def _as_text(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _tell(place: Path, base: Mapping[str, Any], data: bytes) -> None:
    """Write a manifest: the raw input, or a valid one that the input mutates."""
    choices = Choices(data)
    spoil = choices.number(4)
    place.write_bytes(_as_text(mutated(base, choices)) if spoil else choices.rest())


def _tried(*asked: Callable[[], Any]) -> None:
    """Call it; it must return, or raise an error with a message."""
    for ask in asked:
        try:
            ask()
        except ClicklineError as error:
            assert str(error)


# ── datasets ───────────────────────────────────────────────────────────────────────────────────


@cache
def _home() -> tuple[Path, dict[str, Any]]:
    home = scratch() / "home"
    folder = Path(dataset_folder(str(home), "abc"))
    folder.mkdir(parents=True)
    encoded, _ = Encoder(FEATURES).encode_values(_ROWS)
    ones = np.ones(2)
    writer = ShardWriter(folder / "train-00000.parquet", FEATURES)
    writer.write(
        [
            LabelledRows(
                ones.astype(np.float32),
                ones.astype(np.float32),
                ones.astype(np.uint32),
                ones.astype(np.uint32),
                ones.astype(np.int32),
                encoded,
            )
        ]
    )
    split = Split((writer.close("train-00000.parquet"),), {"rows": 2, "bad": {}})
    finish_dataset(_STORAGE, str(folder), "abc", FEATURES, {"config": "x"}, {"train": split})
    return home, json.loads((folder / "manifest.json").read_bytes())


def _dataset(data: bytes) -> None:
    home, base = _home()
    folder = Path(dataset_folder(str(home), "abc"))
    _tell(folder / "manifest.json", base, data)
    (home / "datasets" / "current").write_bytes(b"abc\n" if data[:1] != b"\xff" else data[1:])

    def read() -> None:
        dataset = Dataset.current(_STORAGE, str(home))
        for name, split in dataset.splits.items():
            assert split.rows >= 0
            for shard, group, rows in dataset.row_groups(name):
                path = folder / split.shards[shard].file
                assert path.resolve().parent == folder.resolve() and rows >= 0
                if group == 0 and path.samefile(folder / "train-00000.parquet"):
                    dataset.read(path, [group])

    _tried(read)


# ── versions ───────────────────────────────────────────────────────────────────────────────────


def make_version(folder: Path, features: FeatureSpec = FEATURES) -> dict[str, Any]:
    """Create a version with a minimal network; returns its manifest."""
    from onnx import TensorProto, helper

    folder.mkdir(parents=True, exist_ok=True)
    dim, dense, slots = 2, len(features.dense), len(features.slots)
    width = dim * slots + dense
    inputs = helper.make_tensor_value_info("inputs", TensorProto.FLOAT, ["rows", width])
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["inputs", "axes"], ["logit"], keepdims=0)],
        "sum",
        [inputs],
        [helper.make_tensor_value_info("logit", TensorProto.FLOAT, ["rows"])],
        [axes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / DENSE).write_bytes(model.SerializeToString())
    encoded, _ = Encoder(features).encode_values(_ROWS)
    ids = {int(id) for slot in encoded.slots for id in slot.ids_N}
    content = [dict.fromkeys(ids, (0.0, (0.25, -0.5)))]
    write_shards(folder, [PartShape(dim, False)], "fp32", 1, blocks_of([PartShape(dim, False)], content))
    manifest = VersionManifest(
        number=1,
        created="2026-01-01T00:00:00.000+00:00",
        parent=None,
        table="base",
        rows=len(ids),
        tombstones=0,
        table_precision="fp32",
        dense_precision="fp32",
        shards=1,
        parts=(PartShape(dim, False),),
        slots=tuple(VersionSlot(slot.name, dim, "sum", 0, 0.0, (0.0,) * dim) for slot in features.slots),
        features=features.to_json(),
        network=VersionNetwork("lr", None, (), False),
        width=width,
        logit_shift=0.0,
        calibration={"kind": "platt", "slope": 1.0, "offset": 0.0},
        model=VersionModel("run/step-000000001", 1),
        config="train: {epochs: 1}\n",
        report=None,
        sample=VersionSample(2, 2, 1e-5, 0.0),
        cost=PrecisionCost(),
        files={},
    )
    with Scorer.open(manifest, [folder])._source:  # type: ignore[attr-defined]
        scores_B = Scorer.open(manifest, [folder]).score(encoded).probability_B
    write_sample(folder, encoded, scores_B)
    files = {
        path.name: VersionFile(digest(path), path.stat().st_size)
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    content = manifest_bytes("version", VERSION_FORMAT, replace(manifest, files=files))
    (folder / "manifest.json").write_bytes(content)
    document: dict[str, Any] = json.loads(content)
    return document


@cache
def _registry() -> tuple[Path, dict[str, Any]]:
    place = scratch() / "registry"
    base = make_version(place / "versions" / "000000001")
    shutil.copytree(place / "versions" / "000000001", place / "versions" / "000000002")
    registry = Registry(_STORAGE, str(place))
    registry.move(1, "first", after=None)
    (place / "drafts").mkdir()
    return place, base


def _version(data: bytes) -> None:
    place, base = _registry()
    folder = place / "versions" / "000000002"
    _tell(folder / "manifest.json", {**base, "number": 2, "parent": 1}, data)
    registry = Registry(_STORAGE, str(place))

    def look() -> None:
        version = registry.version(2)
        for name in version.files:
            assert (folder / name).resolve().parent == folder.resolve()
        _tried(
            lambda: registry.check(version),
            lambda: verify(version, folder),
            lambda: summary(version),
            lambda: differences(registry.version(1), version),
        )
        assert version.size >= 0 and version.created is not None

    _tried(look, registry.versions, lambda: registry.garbage(1))


def _pointer(data: bytes) -> None:
    """A move of the pointer and a claim of a draft."""
    place, base = _registry()
    (place / "versions" / "000000002" / "manifest.json").write_bytes(_as_text({**base, "number": 2}))
    move = {
        "sequence": 2,
        "version": 2,
        "reason": "x",
        "at": "2026",
        "pinned": False,
        "by": "me",
        "before": [1],
        "highest": 2,
    }
    claim = {"number": 3, "parent": 1, "machine": "x", "process": "1 2", "since": 1.0, "scratch": None}
    _tell(place / "moves" / "000000002.json", move, data)
    _tell(place / "drafts" / "000000003.json", claim, data[3:])
    registry = Registry(_STORAGE, str(place))
    _tried(registry.current, registry.moves, lambda: registry.garbage(1), lambda: registry.version(2))


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────


class _Written:
    sha256 = "0" * 64


@cache
def _checkpoint_home() -> tuple[Path, dict[str, Any]]:
    home = scratch() / "trained"
    folder = write_checkpoint(
        home / "runs" / "r",
        7,
        lambda path: (path.write_bytes(b"rows"), _Written())[1],
        {"w": np.arange(4.0)},
        CheckpointState({}, {}, None, -1),
    ).folder
    return home, json.loads((folder / "manifest.json").read_bytes())


def _checkpoint(data: bytes) -> None:
    home, base = _checkpoint_home()
    run = home / "runs" / "r"
    folder = run / "step-000000007"
    _tell(folder / "manifest.json", base, data)
    _tell(run / "report.json", {"checkpoint": "step-000000007"}, data[4:])

    def look() -> None:
        checkpoint = open_checkpoint_folder(folder)
        assert checkpoint is not None
        for path in checkpoint.tables:
            assert path.parent == folder
        _tried(checkpoint.is_intact, checkpoint.dense)

    def judged() -> None:
        found = run_result(run)
        assert found is None or found.folder.resolve() == folder.resolve()

    _tried(look, judged, lambda: find_checkpoint("r", str(home)), lambda: find_checkpoint(None, str(home)))


# ── servers with mutated manifests and samples ─────────────────────────────────────────────────


def _scorer(data: bytes) -> None:
    place, base = _registry()
    folder = place / "versions" / "000000001"
    choices = Choices(data)
    document = mutated(base, choices) if choices.number(8) else base
    sample = folder / "sample.npz"
    _spoil_sample(sample, choices)

    def score() -> None:
        opened = Scorer.open(validate(VersionManifest, document, "the manifest"), [folder])
        try:
            opened.check_sample()
        finally:
            opened.close()

    _tried(score)


@cache
def _sample() -> dict[str, Any]:
    place, _ = _registry()
    with np.load(place / "versions" / "000000001" / "sample.npz") as arrays:
        return dict(arrays)


def _spoil_sample(path: Path, choices: Choices) -> None:
    arrays = dict(_sample())
    if choices.number(2):
        name = choices.one_of(sorted(arrays))
        kind = choices.one_of(["u1", "i8", "u8", "f4", "f8", "S3", "?"])
        match choices.number(5):
            case 0:
                del arrays[name]
            case 1:
                arrays[name] = arrays[name].astype(kind)
            case 2:
                arrays[name] = arrays[name][..., :1]
            case 3:
                arrays[name] = np.arange(choices.number(40)).astype(kind)
            case _:
                arrays[name] = np.full(arrays[name].shape, choices.one_of([-1, 2**40, 0, 3])).astype(
                    arrays[name].dtype
                )
    np.savez(path, **arrays)
    if choices.number(4) == 1:
        content = bytearray(path.read_bytes())
        content[choices.number(len(content))] ^= 1 << choices.number(8)
        path.write_bytes(bytes(content))


def _seeds() -> Sequence[bytes]:
    """Many kinds of choices; the documents themselves are in the targets."""
    random = np.random.default_rng(0)
    return [bytes(24), *(b"\1\0" + random.integers(0, 40, 40, dtype=np.uint8).tobytes() for _ in range(40))]


def _seeds_of(base: Callable[[], Any]) -> Callable[[], Sequence[bytes]]:
    return lambda: [*_seeds(), bytes(2) + _as_text(base())]


TARGETS = {
    "dataset": Target(_dataset, _seeds_of(lambda: _home()[1])),
    "version": Target(_version, _seeds_of(lambda: _registry()[1])),
    "pointer": Target(_pointer, _seeds),
    "checkpoint": Target(_checkpoint, _seeds_of(lambda: _checkpoint_home()[1])),
    "scorer": Target(_scorer, _seeds),
}
