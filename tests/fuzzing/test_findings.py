"""What fuzzing found, each as a test of its own: it was wrong once, and is told in words since."""

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
from clickline.artifacts.checkpoint import open_checkpoint_folder, result_of, write_checkpoint
from clickline.artifacts.dataset import DATASET_FORMAT, Dataset, current_id
from clickline.artifacts.diff import differences, summary
from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version
from clickline.embedding.serving import FrozenTables, PartShape
from clickline.errors import ArtifactError, RequestRefused, StorageError
from clickline.features import DenseField, FeatureSpec
from clickline.scoring.onnx_network import Network
from clickline.scoring.scorer import Scorer
from clickline.serving.json_log import Log
from clickline.serving.protocols.http_common import HttpLimits
from clickline.storage import storage
from clickline.storage.filesystems import _load_credentials
from clickline.storage.storage import Storage

STORAGE = Storage()


# ── ways out of a folder ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "..", ".", "a/b", "", "a\0b", "\xff"])
def test_the_pointer_to_the_current_dataset_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "current").write_bytes(name.encode("latin-1"))
    with pytest.raises(ArtifactError, match="is no dataset's id"):
        current_id(STORAGE, str(tmp_path))
    with pytest.raises(ArtifactError):
        Dataset.current(STORAGE, str(tmp_path))


@pytest.mark.parametrize("file", ["../secret.parquet", "/etc/passwd", "sub/x.parquet"])
def test_a_dataset_names_files_of_its_own_folder_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / "secret.parquet").write_bytes(b"12345678")
    folder = tmp_path / "dataset"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.parquet").write_bytes(b"12345678")
    shard = {"file": file, "rows": 1, "row_groups": [1], "size": 8, "sha256": ""}
    told = {"id": "a", "identity": {}, "features": FEATURES.to_json()}
    told |= {"splits": {"train": {"shards": [shard], "report": {}}}}
    (folder / "manifest.json").write_text(json.dumps({"kind": "dataset", "format": DATASET_FORMAT, **told}))
    with pytest.raises(ArtifactError, match="is gone"):
        Dataset.open(STORAGE, str(folder))


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "manifest.json", ""])
def test_a_version_names_files_of_its_own_folder_alone(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "versions" / "000000001"
    body = make_version(folder)
    body["files"][file] = {"size": 1, "sha256": "0"}
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="its list of files is not one"):
        Registry(STORAGE, str(tmp_path)).version(1)


def test_a_file_of_a_version_that_is_a_link_is_read_only_if_its_content_is_what_was_published(
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

    return write_checkpoint(run, 7, rows, {"w": np.arange(4.0)}, {}).folder


@pytest.mark.parametrize("judged", ["../../other/step-000000007", "/etc", "..", 7, ["step-1"], {"a": 1}])
def test_a_report_names_a_checkpoint_of_its_own_run_alone(tmp_path: Path, judged: Any) -> None:
    _checkpoint(tmp_path / "other")
    _checkpoint(tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text(json.dumps({"checkpoint": judged}))
    with pytest.raises(ArtifactError, match="one of the run"):
        result_of(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        {"tables": {"../../tables.bin": "0"}},
        {"tables": {"tables-00-of-02.bin": "0", "/etc/passwd": "0"}},
        {"tables": ["tables.bin"]},
        {"step": "x"},
        {"step": None},
        {"dense_sha256": 5},
    ],
)
def test_a_checkpoint_says_what_a_checkpoint_must(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = _checkpoint(tmp_path / "run")
    told = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(told | change))
    with pytest.raises(ArtifactError, match="the manifest of"):
        open_checkpoint_folder(folder)


def test_a_checkpoint_that_names_no_tables_has_the_one_file_of_earlier_releases(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "run")
    told = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(told | {"tables": None}))
    found = open_checkpoint_folder(folder)
    assert found is not None and found.tables == (folder / "tables.bin",)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b"[" * 5000])
def test_a_torn_report_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        result_of(tmp_path)


@pytest.mark.parametrize("place", ["/etc/passwd", "../secret.bin", "secret.bin"])
def test_a_network_brings_no_files_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """ONNX can name a file to take weights from."""
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
    with pytest.raises(ArtifactError, match="refused by ONNX Runtime"):
        Network(model.SerializeToString(), 1)


# ── documents that are not what they should be ─────────────────────────────────────────────────


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
def test_a_shard_that_is_misdescribed_is_told(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "t.parquet").write_bytes(b"12345678")
    shard = {"file": "t.parquet", "rows": 2, "row_groups": [2], "size": 8, "sha256": ""} | change
    told = {"id": "a", "identity": {}, "features": FEATURES.to_json()}
    told |= {"splits": {"train": {"shards": [shard], "report": {}}}}
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "dataset", "format": DATASET_FORMAT, **told}))
    with pytest.raises(ArtifactError, match="the manifest of"):
        Dataset.open(STORAGE, str(tmp_path))


def test_a_shard_with_other_columns_is_told(tmp_path: Path) -> None:
    dataset = Dataset("", "a", FEATURES, {}, {})
    pq.write_table(pa.table({"label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ArtifactError, match="its columns are not those"):
        dataset.read(tmp_path / "a.parquet", [0])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ArtifactError, match="is damaged"):
        dataset.read(tmp_path / "b.parquet", [0])


@pytest.mark.parametrize("key", ["dense", "slots", "missing"])
@pytest.mark.parametrize("value", [None, 1, "x", {"a": 1}, [None], [{}], [{"name": 1}]])
def test_features_that_are_none_are_told(key: str, value: Any) -> None:
    if key == "missing" and value == [None]:
        value = [1]
    with pytest.raises(ArtifactError, match="the list of features"):
        FeatureSpec.from_json({**FEATURES.to_json(), key: value})


@pytest.mark.parametrize("change", [{"number": -1}, {"number": 2**64}, {"separator": ""}])
def test_a_slot_that_no_encoder_can_take_is_told(change: dict[str, Any]) -> None:
    document = FEATURES.to_json()
    document["slots"][0] |= change
    with pytest.raises(ArtifactError, match="the features have slot 'C1'"):
        FeatureSpec.from_json(document)
    with pytest.raises(ArtifactError):
        FeatureSpec.from_json([])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["Infinity", "1e999", "NaN", "null", '"x"', "[]", "1" * 5000])
def test_a_move_that_names_no_version_is_told(tmp_path: Path, value: str) -> None:
    (tmp_path / "moves").mkdir()
    move = '{"version": %s, "reason": "", "at": "", "pinned": false, "by": "", "before": [], "highest": 1}'
    (tmp_path / "moves" / "000000001.json").write_text(move % value)
    with pytest.raises(ArtifactError, match="is damaged"):
        Registry(STORAGE, str(tmp_path)).current()


@pytest.mark.parametrize("value", ["Infinity", "NaN", "[]", "[" * 5000])
def test_a_claim_that_cannot_be_understood_is_dead(tmp_path: Path, value: str) -> None:
    (tmp_path / "drafts").mkdir()
    claim = '{"number": %s, "parent": %s, "since": 1, "machine": "", "process": "1", "scratch": null}'
    (tmp_path / "drafts" / "000000003.json").write_text(claim % (value, value))
    registry = Registry(STORAGE, str(tmp_path))
    assert registry.garbage(1).versions == ()


@pytest.mark.parametrize("key", ["features", "report", "config", "parts", "calibration"])
@pytest.mark.parametrize("value", [None, 1, "x", [1], {"dense": 5, "slots": [7], "evaluation": 3}])
def test_versions_are_compared_whatever_they_tell(key: str, value: Any) -> None:
    body = {"files": {}, "created": "", key: value}
    one, other = Version(1, "", body), Version(2, "", {"files": {}, "created": ""})
    assert set(differences(one, other)) == {"contents", "measures", "features", "config"}
    assert summary(one)["parent"] is None


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "!!bool x", "!!timestamp x", "!!int ''", "[" * 1500, "- 1", "x: 1"]
)
def test_credentials_that_are_no_yaml_of_ours_are_told_unshown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(StorageError, match="credentials file") as found:
        _load_credentials(file)
    assert text[:9] not in str(found.value).removeprefix(str(file)) or len(text) < 9


# ── what a version makes kernels do ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dim", [1, 3, 1000])
def test_a_manifest_with_rows_of_another_width_than_its_tables_is_refused(tmp_path: Path, dim: int) -> None:
    """Kernels write as many weights as the table's rows have into a matrix that the manifest is the measure of."""
    body = make_version(tmp_path)
    slots = [{**slot, "dim": dim, "vector": [0.0] * dim} for slot in body["slots"]]
    body |= {"parts": [{"dim": dim, "wide": False}], "slots": slots}
    with pytest.raises(ArtifactError, match="the tables in"):
        Scorer.open(body, [tmp_path])


@pytest.mark.parametrize("key", ["features", "parts", "slots", "calibration", "created", "width", "number"])
@pytest.mark.parametrize("value", [None, "x", [1], {"a": 1}, float("inf")])
def test_a_manifest_that_misdescribes_a_version_is_told(tmp_path: Path, key: str, value: Any) -> None:
    body = make_version(tmp_path) | {key: value}
    if (key, value) == ("calibration", None):
        Scorer.open(body, [tmp_path]).close()  # which is allowed
    else:
        with pytest.raises(ArtifactError):
            Scorer.open(body, [tmp_path])


@pytest.mark.parametrize(
    "key", ["features", "parts", "slots", "calibration", "created", "width", "dense", "number"]
)
def test_a_manifest_that_lacks_a_part_is_told(tmp_path: Path, key: str) -> None:
    body = make_version(tmp_path)
    del body[key]
    with pytest.raises(ArtifactError, match=r"lacks or misnames|encoded in format"):
        Scorer.open(body, [tmp_path])


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
        _another("ids_0", lambda ids: ids.astype(np.uint8)),  # kernels would read 8 bytes of each
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
def test_a_sample_that_kernels_cannot_take_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    body = make_version(tmp_path)
    spoil(tmp_path / "sample.npz")
    scorer = Scorer.open(body, [tmp_path])
    with pytest.raises(ArtifactError):
        scorer.check_sample()
    scorer.close()


def _footer(path: Path, text: bytes, length: int | None = None) -> None:
    """Another footer with a checksum that is right."""
    data = path.read_bytes()
    trailer = struct.Struct("<QI4x8s")
    size = trailer.unpack(data[-trailer.size :])[0]
    body = data[: -trailer.size - size]
    told = len(text) if length is None else length
    path.write_bytes(body + text + trailer.pack(told, zlib.crc32(text), b"CLKFROZE"))


PARTS = [PartShape(3, True)]


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 5000, b"[1]", b'"x"', b"NaN", b"{}", b""])
def test_a_footer_that_is_no_document_is_told(tmp_path: Path, text: bytes) -> None:
    write_content(tmp_path / "t", PARTS, random_content(np.random.default_rng(0), PARTS, 9))
    _footer(tmp_path / "t" / "table-00000-of-00001.bin", text)
    with pytest.raises(ArtifactError, match="the footer of"):
        FrozenTables.open([tmp_path / "t"])


@pytest.mark.parametrize("key", ["rows", "tombstones", "buckets", "rows_at", "directory_at", "end"])
@pytest.mark.parametrize("value", [9.0, 2**32, 2**63, 2**70, -1, float("inf"), float("nan"), None, "9", [9]])
def test_a_footer_with_a_section_that_cannot_be_is_told(tmp_path: Path, key: str, value: Any) -> None:
    write_content(tmp_path / "t", PARTS, random_content(np.random.default_rng(0), PARTS, 9))
    path = tmp_path / "t" / "table-00000-of-00001.bin"
    data = path.read_bytes()
    footer = json.loads(data[data.rindex(b'{"content"') : -24])
    footer["sections"][0][key] = value
    _footer(path, json.dumps(footer).encode())
    with pytest.raises(ArtifactError):
        FrozenTables.open([tmp_path / "t"])


@pytest.mark.parametrize(
    "change", [{"shards": 2**40}, {"shards": float("inf")}, {"parts": [{"dim": 2**31, "wide": 0}]}]
)
def test_an_empty_table_claims_no_room(tmp_path: Path, change: dict[str, Any]) -> None:
    """Nothing stands in the file that would contradict its footer."""
    write_content(tmp_path / "t", PARTS, [{}])
    path = tmp_path / "t" / "table-00000-of-00001.bin"
    data = path.read_bytes()
    footer = json.loads(data[data.rindex(b'{"content"') : -24])
    _footer(path, json.dumps(footer | change).encode())
    with pytest.raises(ArtifactError, match="the footer of"):
        FrozenTables.open([tmp_path / "t"])


# ── more than there is ─────────────────────────────────────────────────────────────────────────


def test_arrays_that_grow_when_they_are_opened_are_refused(tmp_path: Path) -> None:
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


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.uint64), "c": np.array(7)}
    np.savez(tmp_path / "a.npz", **arrays)
    found = read_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_a_manifest_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MOST_WHOLE", 1000)
    (tmp_path / "a").write_bytes(bytes(1001))
    with pytest.raises(StorageError, match="1,001 bytes"):
        STORAGE.read(str(tmp_path / "a"))
    (tmp_path / "a").write_bytes(bytes(1000))
    assert len(STORAGE.read(str(tmp_path / "a"))) == 1000


def test_a_web_server_that_sends_more_than_it_announced_is_not_listened_to() -> None:
    """It says 10 bytes to whoever asks for the size, and never ends when it is asked for them."""
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
    with listening, pytest.raises(StorageError, match="10 were announced"):
        STORAGE.read(f"http://127.0.0.1:{listening.getsockname()[1]}/a")
    assert sent < 1 << 28


# ── time that grows faster than what was sent ──────────────────────────────────────────────────


def _seconds(path: str, document: Any, limits: HttpLimits) -> float:
    body = json.dumps(document).encode()
    assert len(body) < limits.max_body
    began = time.process_time()
    try:
        rest_model.call(path, body, limits=limits)
    except RequestRefused as refused:
        pytest.fail(str(refused))
    return time.process_time() - began


def test_a_slot_given_many_times_costs_no_more_than_its_values() -> None:
    """100,000 times the same slot was 10,000 million copied values."""
    limits = HttpLimits(max_rows=50, max_body=1 << 24)

    def asked(times: int) -> Any:
        return {"instances": [{"slots": [{"slot_name": "4", "feasigns": [1, 2]}] * times}]}

    path = "/ElasticCTRPredictionService/inference"
    _seconds(path, asked(10), limits)
    assert _seconds(path, asked(100_000), limits) < 60 * _seconds(path, asked(10_000), limits) + 1


def test_names_that_nobody_knows_cost_no_look_at_every_row() -> None:
    limits = HttpLimits(max_rows=10_000, max_body=1 << 24, ignore_unknown=True)

    def asked(rows: int) -> Any:
        return {"instances": [{"C1": "a", **{f"x{row}_{n}": 1 for n in range(10)}} for row in range(rows)]}

    path = "/v1/models/ads:predict"
    _seconds(path, asked(10), limits)
    assert _seconds(path, asked(10_000), limits) < 60 * _seconds(path, asked(1000), limits) + 1


def test_the_list_of_hostile_values_is_json() -> None:
    assert json.loads(json.dumps(HOSTILE[:10])) == list(HOSTILE[:10])


# ── datasets with names that are no text ───────────────────────────────────────────────────────


def test_a_field_whose_name_is_no_text_is_damage(tmp_path: Path):
    pq.write_table(pa.table({"label": [1.0]}), tmp_path / "a.parquet")
    dataset = Dataset("", "a", FeatureSpec((DenseField("\ud800", "x", "none"),), ()), {}, {})
    with pytest.raises(ArtifactError, match=r"is damaged: .* surrogates not allowed"):
        dataset.read(tmp_path / "a.parquet", [0])


# ── logs ───────────────────────────────────────────────────────────────────────────────────────


def test_what_a_client_sent_begins_no_line_of_a_log_and_moves_no_cursor():
    lines: list[bytes] = []
    sent = "模型 é\x85\u2028\u2029\x9b2J\x1b[31m\x7f\u202e\ud800\U000e0001\r\n"
    Log("server", lines.append).say("refused", why=sent)
    (line,) = lines
    shown = line.decode().removesuffix("\n")
    assert shown.isprintable()
    assert "模型 é" in shown
    assert json.loads(shown)["why"] == sent
