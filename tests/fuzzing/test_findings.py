"""Regression tests of past fuzzing findings."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rest_model
from fuzz.manifests import FEATURES, make_version
from fuzz.target import HOSTILE
from table_model import random_content, write_content

from clickline.artifacts.arrays import read_arrays
from clickline.artifacts.checkpoint import (
    CheckpointState,
    open_checkpoint_folder,
    run_result,
    write_checkpoint,
)
from clickline.artifacts.dataset import DATASET_FORMAT, Dataset, current_id
from clickline.artifacts.diff import differences, summary
from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version, VersionManifest
from clickline.embedding.serving import PartShape, ServingTable
from clickline.errors import ArtifactError, RequestRefused, StorageError
from clickline.features import DenseField, FeatureSpec
from clickline.scoring.onnx_network import OnnxNetwork
from clickline.scoring.scorer import Scorer
from clickline.serving.json_log import JsonLog
from clickline.serving.protocols.request import Limits
from clickline.storage import storage
from clickline.storage.filesystems import _load_credentials
from clickline.storage.storage import Storage
from clickline.validation import validate
from version_manifests import version_manifest

STORAGE = Storage()


# ── paths outside a folder ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "..", ".", "a/b", "", "a\0b", "\xff"])
def test_current_dataset_pointer_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "current").write_bytes(name.encode("latin-1"))
    with pytest.raises(ArtifactError, match="is not a dataset id"):
        current_id(STORAGE, str(tmp_path))
    with pytest.raises(ArtifactError):
        Dataset.current(STORAGE, str(tmp_path))


@pytest.mark.parametrize("file", ["../secret.parquet", "/etc/passwd", "sub/x.parquet"])
def test_dataset_names_only_files_of_its_own_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "secret.parquet").write_bytes(b"12345678")
    folder = tmp_path / "dataset"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.parquet").write_bytes(b"12345678")
    shard = {"file": file, "rows": 1, "row_groups": [1], "size": 8, "sha256": ""}
    document = {"id": "a", "identity": {}, "features": FEATURES.to_json()}
    document |= {"splits": {"train": {"shards": [shard], "report": {}}}}
    (folder / "manifest.json").write_text(
        json.dumps({"kind": "dataset", "format": DATASET_FORMAT, **document})
    )
    with pytest.raises(ArtifactError, match="is missing"):
        Dataset.open(STORAGE, str(folder))


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "manifest.json", ""])
def test_version_names_only_files_of_its_own_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "versions" / "000000001"
    body = make_version(folder)
    body["files"][file] = {"size": 1, "sha256": "0"}
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="its list of files is malformed"):
        Registry(STORAGE, str(tmp_path)).version(1)


def test_linked_file_of_a_version_is_read_only_if_its_checksum_matches(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "versions" / "000000001"
    make_version(folder)
    registry = Registry(STORAGE, str(tmp_path))
    (folder / "sample.npz").unlink()
    (folder / "sample.npz").symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match=r"sample\.npz"):
        registry.verify(registry.version(1), folder)


class _Rows:
    sha256 = "0" * 64


def _checkpoint(run: Path) -> Path:
    def rows(path: Path) -> _Rows:
        path.write_bytes(b"rows")
        return _Rows()

    return write_checkpoint(run, 7, rows, {"w": np.arange(4.0)}, CheckpointState({}, {}, None, -1)).folder


@pytest.mark.parametrize("judged", ["../../other/step-000000007", "/etc", "..", 7, ["step-1"], {"a": 1}])
def test_report_names_only_a_checkpoint_of_its_own_run(tmp_path: Path, judged: Any) -> None:
    _checkpoint(tmp_path / "other")
    _checkpoint(tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text(json.dumps({"checkpoint": judged}))
    with pytest.raises(ArtifactError, match="one of the run"):
        run_result(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        {"tables": {"../../tables.bin": "0"}},
        {"tables": {"tables-00-of-02.bin": "0", "/etc/passwd": "0"}},
        {"tables": ["tables.bin"]},
        {"tables": {}},
        {"tables": None},
        {"plan": None},
        {"run": {"dataset": "x"}},
        {"step": "x"},
        {"step": None},
        {"dense_sha256": 5},
    ],
)
def test_checkpoint_without_required_keys_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = _checkpoint(tmp_path / "run")
    document = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(document | change))
    with pytest.raises(ArtifactError, match="the manifest of"):
        open_checkpoint_folder(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b"[" * 5000])
def test_truncated_report_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        run_result(tmp_path)


@pytest.mark.parametrize("place", ["/etc/passwd", "../secret.bin", "secret.bin"])
def test_network_cannot_reference_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """An ONNX model can name a file with its weights."""
    from onnx import TensorProto, helper

    (tmp_path / "secret.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    weights = TensorProto(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=place)
    rows = [helper.make_tensor_value_info(name, 1, ["rows", 4]) for name in ("inputs", "logit")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["inputs", "w"], ["logit"])], "g", rows[:1], rows[1:], [weights]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="ONNX Runtime cannot load"):
        OnnxNetwork(model.SerializeToString(), 1)


# ── malformed documents ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change",
    [
        {"file": ["x"]},
        {"file": {}},
        {"size": []},
        {"rows": "7"},
        {"rows": 5},
        {"row_groups": "abc"},
        {"row_groups": [-1, 3]},
        {"row_groups": None},
        {"sha256": None},
    ],
)
def test_shard_that_contradicts_its_manifest_is_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "t.parquet").write_bytes(b"12345678")
    shard = {"file": "t.parquet", "rows": 2, "row_groups": [2], "size": 8, "sha256": ""} | change
    document = {"id": "a", "identity": {}, "features": FEATURES.to_json()}
    document |= {"splits": {"train": {"shards": [shard], "report": {}}}}
    (tmp_path / "manifest.json").write_text(
        json.dumps({"kind": "dataset", "format": DATASET_FORMAT, **document})
    )
    with pytest.raises(ArtifactError, match="the manifest of"):
        Dataset.open(STORAGE, str(tmp_path))


def test_shard_with_different_columns_is_reported(tmp_path: Path) -> None:
    dataset = Dataset("", "a", FEATURES, {}, {})
    pq.write_table(pa.table({"label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ArtifactError, match="its columns are not those"):
        dataset.read(tmp_path / "a.parquet", [0])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ArtifactError, match="is damaged"):
        dataset.read(tmp_path / "b.parquet", [0])


@pytest.mark.parametrize("key", ["dense", "slots", "missing"])
@pytest.mark.parametrize("value", [None, 1, "x", {"a": 1}, [None], [{}], [{"name": 1}]])
def test_invalid_features_are_reported(key: str, value: Any) -> None:
    if key == "missing" and value == [None]:
        value = [1]
    with pytest.raises(ArtifactError, match="the list of features"):
        FeatureSpec.from_json({**FEATURES.to_json(), key: value})


@pytest.mark.parametrize("change", [{"number": -1}, {"number": 2**64}, {"separator": ""}])
def test_slot_that_cannot_be_encoded_is_reported(change: dict[str, Any]) -> None:
    document = FEATURES.to_json()
    document["slots"][0] |= change
    with pytest.raises(ArtifactError, match="the features have slot 'C1'"):
        FeatureSpec.from_json(document)
    with pytest.raises(ArtifactError):
        FeatureSpec.from_json([])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["Infinity", "1e999", "NaN", "null", '"x"', "[]", "1" * 5000])
def test_move_without_a_version_is_reported(tmp_path: Path, value: str) -> None:
    (tmp_path / "moves").mkdir()
    move = '{"version": %s, "reason": "", "at": "", "pinned": false, "by": "", "before": [], "highest": 1}'
    (tmp_path / "moves" / "000000001.json").write_text(move % value)
    with pytest.raises(ArtifactError, match="is damaged"):
        Registry(STORAGE, str(tmp_path)).current()


@pytest.mark.parametrize("value", ["Infinity", "NaN", "[]", "[" * 5000])
def test_malformed_claim_is_void(tmp_path: Path, value: str) -> None:
    (tmp_path / "drafts").mkdir()
    claim = '{"number": %s, "parent": %s, "since": 1, "machine": "", "process": "1", "scratch": null}'
    (tmp_path / "drafts" / "000000003.json").write_text(claim % (value, value))
    registry = Registry(STORAGE, str(tmp_path))
    assert registry.garbage(1).versions == ()


@pytest.mark.parametrize("key", ["features", "report", "calibration"])
@pytest.mark.parametrize("value", [{}, {"dense": 5, "slots": [7], "evaluation": 3}])
def test_versions_with_any_documents_are_compared(key: str, value: Any) -> None:
    one, other = Version("", version_manifest(**{key: value})), Version("", version_manifest())
    assert set(differences(one, other)) == {"contents", "measures", "features", "config"}
    assert summary(one)["parent"] is None


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "[" * 5000])
def test_malformed_config_of_a_version_is_reported(text: str) -> None:
    with pytest.raises(ArtifactError, match="the config of a version is not YAML"):
        differences(Version("", version_manifest(config=text)), Version("", version_manifest()))


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "!!bool x", "!!timestamp x", "!!int ''", "[" * 1500, "- 1", "x: 1"]
)
def test_malformed_credentials_are_reported_without_their_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(StorageError, match="credentials file") as found:
        _load_credentials(file)
    assert text[:9] not in str(found.value).removeprefix(str(file)) or len(text) < 9


# ── versions that mislead kernels ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dim", [1, 3, 1000])
def test_manifest_whose_row_width_differs_from_its_tables_is_refused(tmp_path: Path, dim: int) -> None:
    """Kernels write the weights of the table's rows into a matrix whose size comes from the manifest."""
    body = make_version(tmp_path)
    slots = [{**slot, "dim": dim, "vector": [0.0] * dim} for slot in body["slots"]]
    body |= {"parts": [{"dim": dim, "wide": False}], "slots": slots}
    with pytest.raises(ArtifactError, match="the tables in"):
        Scorer.open(validate(VersionManifest, body, "the manifest"), [tmp_path])


@pytest.mark.parametrize("key", ["features", "parts", "slots", "calibration", "created", "width", "number"])
@pytest.mark.parametrize("value", [None, "x", [1], {"a": 1}, float("inf")])
def test_manifest_that_contradicts_its_version_is_reported(tmp_path: Path, key: str, value: Any) -> None:
    body = make_version(tmp_path) | {key: value}
    if (key, value) == ("calibration", None):
        Scorer.open(validate(VersionManifest, body, "the manifest"), [tmp_path]).close()  # which is allowed
    else:
        with pytest.raises(ArtifactError):
            Scorer.open(validate(VersionManifest, body, "the manifest"), [tmp_path])


@pytest.mark.parametrize(
    "key", ["features", "parts", "slots", "calibration", "created", "width", "dense_precision", "number"]
)
def test_manifest_without_a_required_part_is_reported(tmp_path: Path, key: str) -> None:
    body = make_version(tmp_path)
    del body[key]
    with pytest.raises(ArtifactError, match=r"is invalid|encoded in format"):
        Scorer.open(validate(VersionManifest, body, "the manifest"), [tmp_path])


def _another(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with np.load(path) as arrays:
            found = dict(arrays)
        found[name] = change(found[name])
        np.savez(path, **found)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        _another("ids_0", lambda ids: ids.astype(np.uint8)),  # kernels would read 8 bytes for each
        _another("ids_0", lambda ids: ids[:1]),
        _another("ids_0", lambda ids: ids.reshape(1, -1)),
        _another("ids_1", lambda ids: np.zeros(0, np.uint64)),
        _another("offsets_1", lambda offsets: offsets * 1000),
        _another("offsets_1", lambda offsets: -offsets),
        _another("offsets_1", lambda offsets: offsets.astype(np.float64)),
        _another("dense_DB", lambda dense: dense.T.copy()),
        _another("dense_DB", lambda dense: dense.astype(np.float64)),
        _another("probability_B", lambda scores: scores[:1]),
        _another("probability_B", lambda scores: np.full_like(scores, np.nan)),
    ],
)
def test_sample_with_wrong_types_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    body = make_version(tmp_path)
    spoil(tmp_path / "sample.npz")
    scorer = Scorer.open(validate(VersionManifest, body, "the manifest"), [tmp_path])
    with pytest.raises(ArtifactError):
        scorer.check_sample()
    scorer.close()


def _footer(path: Path, text: bytes, length: int | None = None) -> None:
    """Replace the footer, with a correct checksum."""
    data = path.read_bytes()
    trailer = struct.Struct("<QI4x8s")
    size = trailer.unpack(data[-trailer.size :])[0]
    body = data[: -trailer.size - size]
    document = len(text) if length is None else length
    path.write_bytes(body + text + trailer.pack(document, zlib.crc32(text), b"CLKFROZE"))


PARTS = [PartShape(3, True)]


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 5000, b"[1]", b'"x"', b"NaN", b"{}", b""])
def test_footer_that_is_not_json_is_reported(tmp_path: Path, text: bytes) -> None:
    write_content(tmp_path / "t", PARTS, random_content(np.random.default_rng(0), PARTS, 9))
    _footer(tmp_path / "t" / "table-00000-of-00001.bin", text)
    with pytest.raises(ArtifactError, match="the footer of"):
        ServingTable.open([tmp_path / "t"])


@pytest.mark.parametrize("key", ["rows", "tombstones", "buckets", "rows_at", "directory_at", "end"])
@pytest.mark.parametrize("value", [9.0, 2**32, 2**63, 2**70, -1, float("inf"), float("nan"), None, "9", [9]])
def test_footer_with_an_impossible_section_is_reported(tmp_path: Path, key: str, value: Any) -> None:
    write_content(tmp_path / "t", PARTS, random_content(np.random.default_rng(0), PARTS, 9))
    path = tmp_path / "t" / "table-00000-of-00001.bin"
    data = path.read_bytes()
    footer = json.loads(data[data.rindex(b'{"content"') : -24])
    footer["sections"][0][key] = value
    _footer(path, json.dumps(footer).encode())
    with pytest.raises(ArtifactError):
        ServingTable.open([tmp_path / "t"])


@pytest.mark.parametrize(
    "change", [{"shards": 2**40}, {"shards": float("inf")}, {"parts": [{"dim": 2**31, "wide": 0}]}]
)
def test_empty_table_cannot_claim_memory(tmp_path: Path, change: dict[str, Any]) -> None:
    """The file has no content that would contradict its footer."""
    write_content(tmp_path / "t", PARTS, [{}])
    path = tmp_path / "t" / "table-00000-of-00001.bin"
    data = path.read_bytes()
    footer = json.loads(data[data.rindex(b'{"content"') : -24])
    _footer(path, json.dumps(footer | change).encode())
    with pytest.raises(ArtifactError, match="the footer of"):
        ServingTable.open([tmp_path / "t"])


# ── wrong sizes ────────────────────────────────────────────────────────────────────────────────


def test_compressed_arrays_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(10_000_000))
    with pytest.raises(ArtifactError, match="larger than the file"):
        read_arrays(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", w=np.zeros(4))
    with zipfile.ZipFile(tmp_path / "b.npz") as members:
        content = members.read("w.npy").replace(b"(4,), }", b"(99999999999,), }"[:17])
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as members:
        members.writestr("w.npy", content)
    with pytest.raises(ArtifactError):
        read_arrays(tmp_path / "c.npz")
    (tmp_path / "d.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ArtifactError):
        read_arrays(tmp_path / "d.npz")


def test_arrays_round_trip(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.uint64), "c": np.array(7)}
    np.savez(tmp_path / "a.npz", **arrays)
    found = read_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_manifest_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MAX_READ", 1000)
    (tmp_path / "a").write_bytes(bytes(1001))
    with pytest.raises(StorageError, match="1,001 bytes"):
        STORAGE.read(str(tmp_path / "a"))
    (tmp_path / "a").write_bytes(bytes(1000))
    assert len(STORAGE.read(str(tmp_path / "a"))) == 1000


def test_web_server_that_sends_more_than_announced_is_cut_off() -> None:
    """It reports a size of 10 bytes, and then sends without end."""
    listening = socket.create_server(("127.0.0.1", 0))
    sent = 0

    def serve() -> None:
        nonlocal sent
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(1 << 16)
                if asked.startswith(b"HEAD"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\n")
                    continue
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                    while sent < 1 << 30:
                        connection.sendall(bytes(1 << 20))
                        sent += 1 << 20
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    with listening, pytest.raises(StorageError, match="10 were expected"):
        STORAGE.read(f"http://127.0.0.1:{listening.getsockname()[1]}/a")
    assert sent < 1 << 28


# ── superlinear time ───────────────────────────────────────────────────────────────────────────


def _seconds(path: str, document: Any, limits: Limits) -> float:
    body = json.dumps(document).encode()
    assert len(body) < limits.max_body
    began = time.process_time()
    try:
        rest_model.call(path, body, limits=limits)
    except RequestRefused as refused:
        pytest.fail(str(refused))
    return time.process_time() - began


def test_repeated_slot_takes_linear_time() -> None:
    """The same slot 100,000 times copied 10 billion values."""
    limits = Limits(max_rows=50, max_body=1 << 24)

    def asked(times: int) -> Any:
        return {"instances": [{"slots": [{"slot_name": "4", "feasigns": [1, 2]}] * times}]}

    path = "/ElasticCTRPredictionService/inference"
    _seconds(path, asked(10), limits)
    assert _seconds(path, asked(100_000), limits) < 60 * _seconds(path, asked(10_000), limits) + 1


def test_unknown_names_take_linear_time() -> None:
    limits = Limits(max_rows=10_000, max_body=1 << 24, ignore_unknown=True)

    def asked(rows: int) -> Any:
        return {"instances": [{"C1": "a", **{f"x{row}_{n}": 1 for n in range(10)}} for row in range(rows)]}

    path = "/v1/models/ads:predict"
    _seconds(path, asked(10), limits)
    assert _seconds(path, asked(10_000), limits) < 60 * _seconds(path, asked(1000), limits) + 1


def test_hostile_values_are_json() -> None:
    assert json.loads(json.dumps(HOSTILE[:10])) == list(HOSTILE[:10])


# ── dataset names that are not text ────────────────────────────────────────────────────────────


def test_field_name_that_is_not_text_is_reported_as_damage(tmp_path: Path):
    pq.write_table(pa.table({"label": [1.0]}), tmp_path / "a.parquet")
    dataset = Dataset("", "a", FeatureSpec((DenseField("\ud800", "x", "none"),), ()), {}, {})
    with pytest.raises(ArtifactError, match=r"is damaged: .* surrogates not allowed"):
        dataset.read(tmp_path / "a.parquet", [0])


# ── logs ───────────────────────────────────────────────────────────────────────────────────────


def test_client_input_cannot_inject_log_lines_or_control_characters():
    lines: list[bytes] = []
    sent = "模型 é\x85\u2028\u2029\x9b2J\x1b[31m\x7f\u202e\ud800\U000e0001\r\n"
    JsonLog("server", lines.append).event("refused", why=sent)
    (line,) = lines
    text = line.decode().removesuffix("\n")
    assert text.isprintable()
    assert "模型 é" in text
    assert json.loads(text)["why"] == sent
