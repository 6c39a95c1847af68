"""deploy data push and pull: files arrive completely or not at all, and no pod is left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ads_objects import RecordedProgress, container
from api_server import ApiServer, Fault

from clickline.deploy.data_volume import pull, push
from clickline.deploy.file_transfer import TransferTotal, list_files, receive, send, transfer_total
from clickline.deploy.kube_client import Kube
from clickline.deploy.render import Rendered, render
from clickline.errors import ClusterError, ConfigError, StorageError

CONFIG = """
name: ads
data: {train: data/train.tsv}
model: {name: lr}
deploy: {namespace: shop}
"""
READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [container("data", running={})],
}


@pytest.fixture
def volume(bare: ApiServer, tmp_path: Path) -> Path:
    """The folder that the data pod mounts as /clickline/data."""
    bare.volume = tmp_path / "volume"
    bare.volume.mkdir()
    bare.statuses["Pod"] = READY
    return bare.volume


@pytest.fixture
def made(tmp_path: Path) -> Rendered:
    logs = tmp_path / "project" / "data"
    (logs / "20260101").mkdir(parents=True)
    (logs / "train.tsv").write_bytes(os.urandom(3_000_000))
    (logs / "20260101" / "a.tsv").write_text("a\n")
    (tmp_path / "project" / "clickline.yaml").write_text(CONFIG)
    return render(tmp_path / "project" / "clickline.yaml")


def below(folder: Path) -> dict[str, bytes]:
    return {
        one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()
    }


# ── there and back ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
def test_push_and_pull_round_trip(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered, tmp_path: Path, protocol: str
) -> None:
    bare.subprotocols = (protocol,)  # before 1.30 a server cannot close the stdin of a process
    result = RecordedProgress()
    moved = push(kube, made, made.local_folder, result)
    assert (moved.files, moved.bytes, moved.target) == (2, 3_000_002, "/clickline/data")
    assert below(volume) == below(made.local_folder)
    assert sum(result.sizes) == 3_000_002
    assert "created    PersistentVolumeClaim ads-data" in result.lines
    back = pull(kube, made, tmp_path / "copy", RecordedProgress())
    assert (back.files, back.bytes) == (2, 3_000_002)
    assert below(tmp_path / "copy") == below(made.local_folder)
    assert bare.names("Pod") == []


def test_paths_in_the_volumes_folder_keep_their_place_and_others_go_to_the_root(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered, tmp_path: Path
) -> None:
    push(kube, made, made.local_folder / "20260101", RecordedProgress())
    assert list(below(volume)) == ["20260101/a.tsv"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.tsv").write_text("b\n")
    assert push(kube, made, other / "b.tsv", RecordedProgress()).target == "/clickline/data"
    assert sorted(below(volume)) == ["20260101/a.tsv", "b.tsv"]
    (volume / "20260101" / "a.tsv").write_text("newer\n")
    pull(kube, made, made.local_folder / "20260101" / "a.tsv", RecordedProgress())
    assert (made.local_folder / "20260101" / "a.tsv").read_text() == "newer\n"


def test_push_does_not_change_a_live_deployment(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered
) -> None:
    push(kube, made, made.local_folder, RecordedProgress())
    bare.writes.clear()
    other = render(made.local_folder.parent / "clickline.yaml", ["serve.drain_timeout=25"])
    push(kube, other, made.local_folder, RecordedProgress())
    assert {(verb, kind) for verb, kind, _ in bare.writes} == {("apply", "Pod"), ("delete", "Pod")}


# ── what goes wrong ────────────────────────────────────────────────────────────────────────────


def test_closed_connection_leaves_no_partial_file_and_no_pod(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered
) -> None:
    (volume / "train.tsv").write_text("of before\n")
    bare.cut_exec_after = 1_500_000
    with pytest.raises(ClusterError, match="the connection to the pod was closed"):
        push(kube, made, made.local_folder / "train.tsv", RecordedProgress())
    assert (volume / "train.tsv").read_text() == "of before\n"
    assert bare.names("Pod") == []
    push(kube, made, made.local_folder / "train.tsv", RecordedProgress())
    assert (volume / "train.tsv").read_bytes() == (made.local_folder / "train.tsv").read_bytes()


def test_error_of_the_process_in_the_pod_is_shown(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered
) -> None:
    volume.rmdir()
    volume.write_text("a file where the folder must be")
    with pytest.raises(ClusterError, match="cannot be written"):
        push(kube, made, made.local_folder, RecordedProgress())
    volume.unlink()
    with pytest.raises(ClusterError, match="does not exist in the volume"):
        pull(kube, made, made.local_folder / "none.tsv", RecordedProgress())
    assert bare.names("Pod") == []


def test_pod_that_cannot_start_is_explained_and_deleted(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clickline.deploy.data_volume._FAILED_SECONDS", 0.1)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    bare.statuses["Pod"] = {"phase": "Pending", "containerStatuses": [container("data", waiting=waiting)]}
    with pytest.raises(ClusterError, match="ImagePullBackOff in data: the image cannot be pulled"):
        push(kube, made, made.local_folder, RecordedProgress())
    assert bare.names("Pod") == []
    monkeypatch.setattr("clickline.deploy.data_volume._READY_SECONDS", 0.1)
    bare.statuses["Pod"] = {"phase": "Pending"}
    bare.faults.append(Fault("list", "events"))  # without events it is still reported as waiting
    with pytest.raises(ClusterError, match="is not ready after"):
        push(kube, made, made.local_folder, RecordedProgress())
    assert bare.names("Pod") == []


def test_forbidden_exec_names_the_missing_permission(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered
) -> None:
    bare.faults.append(Fault("get", "pods/exec"))
    with pytest.raises(ClusterError, match="get and create pods/exec in namespace shop"):
        push(kube, made, made.local_folder, RecordedProgress())
    assert bare.names("Pod") == []


def test_push_without_a_data_volume_is_an_error(bare: ApiServer, kube: Kube, made: Rendered) -> None:
    more = ["data.train=s3://logs/train.tsv", "deploy.storage.data.kind=none"]
    none = render(made.local_folder.parent / "clickline.yaml", more)
    for move in (push, pull):
        with pytest.raises(ConfigError, match=r"deploy\.storage\.data\.kind is none"):
            move(kube, none, made.local_folder, RecordedProgress())
    assert bare.writes == []


def test_path_without_files_is_reported_before_creating_a_pod(
    bare: ApiServer, kube: Kube, made: Rendered, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="contains no files"):
        push(kube, made, tmp_path / "empty", RecordedProgress())
    with pytest.raises(StorageError, match="does not exist"):
        push(kube, made, tmp_path / "nowhere", RecordedProgress())
    assert bare.writes == []


def test_interrupted_push_deletes_its_pod(
    bare: ApiServer, volume: Path, made: Rendered, tmp_path: Path
) -> None:
    bare.statuses["Pod"] = {"phase": "Pending"}
    with subprocess.Popen(
        [Path(sys.executable).parent / "clickline", "deploy", "data", "push", "data"],
        cwd=tmp_path / "project",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        with bare.changed:
            while not any(kind == "Pod" for _, kind, _ in bare.writes):
                assert bare.changed.wait(deadline - time.monotonic())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert bare.names("Pod") == []


# ── volumes that outlive their claims ──────────────────────────────────────────────────────────


@pytest.fixture
def stored(made: Rendered) -> Rendered:
    """A deployment with its data volume on NFS."""
    where = "deploy.storage.data={kind: nfs, server: files.example, path: /exports/ads}"
    return render(made.local_folder.parent / "clickline.yaml", [where])


def test_push_after_namespace_deletion_gets_the_same_volume(
    bare: ApiServer, kube: Kube, volume: Path, stored: Rendered
) -> None:
    push(kube, stored, stored.local_folder, RecordedProgress())
    bare.bind_volumes()
    bare.delete(("v1", "Namespace", "", "shop"), None)
    bare.bind_volumes()
    result = RecordedProgress()
    push(kube, stored, stored.local_folder, result)
    bare.bind_volumes()
    claim = bare.one("PersistentVolumeClaim", "ads-data")
    assert claim is not None and claim["status"]["phase"] == "Bound"
    assert any(line.startswith("released   PersistentVolume shop-ads-data") for line in result.lines)


def test_push_does_not_take_the_volume_of_another_claim(
    bare: ApiServer, kube: Kube, volume: Path, stored: Rendered
) -> None:
    push(kube, stored, stored.local_folder, RecordedProgress())
    bare.namespace("elsewhere")
    place = {"name": "mine", "namespace": "elsewhere"}
    claim = bare.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": place, "spec": {}})
    live = bare.one("PersistentVolume", "shop-ads-data")
    assert live is not None
    live["spec"]["claimRef"] |= {**place, "uid": claim["metadata"]["uid"]}
    with pytest.raises(ClusterError, match="is bound to claim mine of namespace elsewhere"):
        push(kube, stored, stored.local_folder, RecordedProgress())


def test_pod_waiting_for_its_claim_names_claim_and_volume(
    bare: ApiServer, kube: Kube, volume: Path, stored: Rendered, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(kube, stored, stored.local_folder, RecordedProgress())
    bare.bind_volumes()
    claim = bare.one("PersistentVolumeClaim", "ads-data")
    assert claim is not None
    claim["status"] = {"phase": "Lost"}
    volumes = [key for key in bare.objects if key[1] == "PersistentVolume"]
    bare.statuses["Pod"] = {"phase": "Pending"}
    monkeypatch.setattr("clickline.deploy.data_volume._READY_SECONDS", 0.1)
    monkeypatch.setattr(  # the volume is deleted meanwhile
        "clickline.deploy.data_volume._create_missing",
        lambda *given: [bare.delete(key, None) for key in volumes],
    )
    with pytest.raises(ClusterError, match="claim ads-data Lost: volume shop-ads-data does not exist"):
        push(kube, stored, stored.local_folder, RecordedProgress())


# ── the stream ─────────────────────────────────────────────────────────────────────────────────


def stream_of(folder: Path) -> bytes:
    out = io.BytesIO()
    files = list_files(folder)
    send(files, transfer_total(folder, files), out, lambda size: None)
    return out.getvalue()


def received(stream: bytes, folder: Path) -> TransferTotal:
    return receive(io.BytesIO(stream), lambda _: folder)


def test_file_with_a_wrong_checksum_never_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tsv").write_bytes(b"x" * 1000)
    stream = stream_of(tmp_path / "from").replace(b"x" * 1000, b"x" * 999 + b"y")
    with pytest.raises(StorageError, match=r"a\.tsv did not arrive as it was sent: its checksum differs"):
        received(stream, tmp_path / "to")
    assert below(tmp_path / "to") == {}


def test_truncated_stream_keeps_complete_files(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tsv").write_bytes(b"a" * 1000)
    (tmp_path / "from" / "b.tsv").write_bytes(b"b" * 1000)
    whole = stream_of(tmp_path / "from")
    with pytest.raises(ClusterError, match=r"the stream ended within b\.tsv"):
        received(whole[: whole.index(b"b" * 1000) + 500], tmp_path / "to")
    assert below(tmp_path / "to") == {"a.tsv": b"a" * 1000}
    with pytest.raises(ClusterError, match="the stream ended before all files had arrived"):
        received(whole[: whole.rindex(b"{")], tmp_path / "to")


@pytest.mark.parametrize("name", ["../out.tsv", "/etc/out.tsv", "a/../../out.tsv", ""])
def test_name_outside_the_folder_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tsv").write_text("a")
    stream = stream_of(tmp_path / "from").replace(b'"a.tsv"', f'"{name}"'.encode())
    with pytest.raises(StorageError, match="would be outside"):
        received(stream, tmp_path / "to")


def test_link_in_the_target_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "from" / "sub").mkdir(parents=True)
    (tmp_path / "from" / "sub" / "a.tsv").write_text("a")
    (tmp_path / "to").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "to" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link that leads out"):
        received(stream_of(tmp_path / "from"), tmp_path / "to")
    assert below(tmp_path / "elsewhere") == {}


def test_transfer_larger_than_the_volume_is_rejected_first(tmp_path: Path) -> None:
    stream = b'{"files": 1, "bytes": 9000000000000000000, "single": true}\n'
    with pytest.raises(StorageError, match=r"free, and .* are needed"):
        received(stream, tmp_path / "to")
    assert below(tmp_path / "to") == {}


HALF = ".c.tsv.0123456789abcdef"


def test_partial_files_of_a_killed_writer_are_skipped_and_removed(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tsv").write_text("a")
    (tmp_path / "from" / HALF).write_text("half")
    (tmp_path / "to").mkdir()
    stale, fresh = tmp_path / "to" / HALF, tmp_path / "to" / ".d.tsv.0123456789abcdef"
    for one in (stale, fresh):
        one.write_text("half")
    os.utime(stale, (1, 1))
    receive(io.BytesIO(stream_of(tmp_path / "from")), lambda _: tmp_path / "to", clears=True)
    assert sorted(below(tmp_path / "to")) == [fresh.name, "a.tsv"]  # another push may be writing it


def test_pull_removes_nothing_from_the_local_folder(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tsv").write_text("a")
    (tmp_path / "to" / "deep" / ".dir.part-1").mkdir(parents=True)
    mine = [tmp_path / "to" / "deep" / name for name in (".movie.part-Frag7", HALF)]
    for one in mine:
        one.write_text("mine")
        os.utime(one, (1, 1))
    os.utime(tmp_path / "to" / "deep" / ".dir.part-1", (1, 1))
    received(stream_of(tmp_path / "from"), tmp_path / "to")
    assert all(one.read_text() == "mine" for one in mine)


def test_push_removes_only_partial_files_from_the_volume(
    bare: ApiServer, kube: Kube, volume: Path, made: Rendered
) -> None:
    for name in (".movie.part-Frag7", HALF):
        (volume / name).write_text("of before")
        os.utime(volume / name, (1, 1))
    push(kube, made, made.local_folder, RecordedProgress())
    assert sorted(below(volume)) == [".movie.part-Frag7", "20260101/a.tsv", "train.tsv"]


# ── what is sent, and where it goes ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("named", "expected"),
    [("../data/20260101", ["20260101/a.tsv"]), ("../data/../more", ["b.tsv"]), ("../data/./", None)],
)
def test_dot_segments_in_paths_are_resolved(
    bare: ApiServer,
    kube: Kube,
    volume: Path,
    made: Rendered,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    expected: list[str] | None,
) -> None:
    for name in ("sub", "more"):
        (made.local_folder.parent / name).mkdir()
    (made.local_folder.parent / "more" / "b.tsv").write_text("b\n")
    monkeypatch.chdir(made.local_folder.parent / "sub")
    assert push(kube, made, Path(named), RecordedProgress()).target.startswith("/clickline/data")
    assert sorted(below(volume)) == (expected or sorted(below(made.local_folder)))


def test_linked_folder_is_sent_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "disk" / "20260102").mkdir(parents=True)
    (tmp_path / "disk" / "20260102" / "b.tsv").write_text("b")
    (tmp_path / "data").mkdir()
    for day in ("20260102", "20260103"):  # the same folder twice is not a loop
        (tmp_path / "data" / day).symlink_to(tmp_path / "disk" / "20260102")
    received(stream_of(tmp_path / "data"), tmp_path / "to")
    assert below(tmp_path / "to") == {"20260102/b.tsv": b"b", "20260103/b.tsv": b"b"}


@pytest.mark.parametrize(
    ("target", "words"), [("..", "is a link to one of its parent folders"), ("none", "does not exist")]
)
def test_broken_link_is_reported(tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "link").symlink_to(target)
    with pytest.raises(StorageError, match=f"deep/link .*{words}"):
        list_files(tmp_path / "data")
