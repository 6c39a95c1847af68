"""The init container of every pod: real files, a real foreign user, a real read-only mount."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickline.deploy.init_container import check_pod
from clickline.errors import ClicklineError, StorageError

STRANGER = 1_234_567  # a user id that is not in /etc/passwd
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user or mount")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; only their owner can reach pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def image_of_kernels(folder: Path) -> Path:
    kernels = folder / "image" / "kernels"
    (kernels / "embedding_1").mkdir(parents=True)
    (kernels / "embedding_1" / "index.nbi").write_bytes(b"index")
    (kernels / "embedding_1" / "find.1.nbc").write_bytes(b"code" * 1000)
    return kernels


def as_stranger(call: str, group: int = STRANGER) -> str:
    """The error of a call by another user, who may not even read the interpreter, which is loaded before."""
    return in_child(f"os.setgroups([]); os.setgid({group}); os.setuid({STRANGER})", call)


def in_child(before: str, call: str) -> str:
    program = (
        "import os, subprocess, tempfile\n"
        "from pathlib import Path\n"
        "from clickline.errors import StorageError\n"
        "from clickline.deploy.init_container import check_pod\n"
        f"{before}\n"
        f"try:\n    print(*{call}, sep='\\n')\n"
        "except StorageError as error:\n    print('refused:', error)\n"
    )
    command = ["unshare", "--mount", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_directories_are_created_and_free_space_reported_without_leftovers(tmp_path: Path):
    there, new = tmp_path / "there", tmp_path / "a" / "b"
    there.mkdir()
    result = check_pod([there, new])
    assert [line.split(":")[0] for line in result] == [str(there), str(new)]
    assert all(line.endswith("B free") and "writable" in line for line in result)
    assert list(there.iterdir()) == list(new.iterdir()) == []


@needs_root
def test_unwritable_directory_is_reported_with_owner_mode_user_and_remedy(open_folder: Path):
    owned = open_folder / "data"
    owned.mkdir(mode=0o755)
    os.chown(owned, 501, 502)
    owned.chmod(0o2755)
    said = as_stranger(f"check_pod([Path({str(owned / 'logs')!r})])")
    assert said.startswith(f"refused: {owned / 'logs'}: Permission denied")
    assert f"{owned} belongs to uid 501, gid 502, with mode 2755" in said
    assert f"this process is uid {STRANGER}, gid {STRANGER}" in said
    assert "fsGroup (deploy.identity.fs_group)" in said and f"chown -R {STRANGER}:{STRANGER}" in said
    assert not (owned / "logs").exists()


@needs_root
def test_directory_below_an_unreadable_one_is_reported(open_folder: Path):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "data").mkdir()
    said = as_stranger(f"check_pod([Path({str(closed / 'data')!r})])")
    assert said.startswith(f"refused: {closed / 'data'}: Permission denied")
    assert f"{closed} belongs to uid 0, gid 0, with mode 0700" in said


@needs_root
def test_group_permission_on_the_volume_suffices(open_folder: Path):
    volume = open_folder / "volume"
    volume.mkdir()
    os.chown(volume, 0, 777)
    volume.chmod(0o2775)
    said = as_stranger(
        f"check_pod([Path({str(volume)!r})], token=Path({str(volume / 'token')!r}))", group=777
    )
    assert "writable" in said and "created a token" in said
    assert (volume / "token").stat().st_gid == 777


@needs_root
def test_read_only_mount_is_reported(tmp_path: Path):
    mount = f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'none', {str(tmp_path)!r}], check=True)"
    said = in_child(mount, f"check_pod([Path({str(tmp_path)!r})])")
    assert (
        said.startswith("refused:")
        and "Read-only file system" in said
        and "mount the volume writable" in said
    )


@needs_root
def test_full_volume_is_reported(tmp_path: Path):
    mount = (
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none', {str(tmp_path)!r}], check=True)"
    )
    fill = f"os.posix_fallocate(os.open({str(tmp_path / 'data')!r}, os.O_CREAT | os.O_WRONLY), 0, 65536)"
    said = in_child(f"{mount}; {fill}", f"check_pod([Path({str(tmp_path)!r})])")
    assert said.startswith("refused:") and "No space left" in said and "It is full" in said


def test_file_in_place_of_a_directory_is_reported(tmp_path: Path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StorageError, match=r"data: File exists; .* Check that the volume is mounted there"):
        check_pod([tmp_path / "data"])


def test_kernels_are_copied_completely_and_owned_by_the_process_user(tmp_path: Path):
    kernels = image_of_kernels(tmp_path)
    (kernels / "embedding_1" / "index.nbi").chmod(0o444)
    cache = tmp_path / "scratch" / "kernels"
    assert check_pod([], kernels=kernels, cache=cache) == [f"{cache}: 1 compiled kernels from {kernels}"]
    assert (cache / "embedding_1" / "find.1.nbc").read_bytes() == b"code" * 1000
    assert os.access(cache / "embedding_1" / "index.nbi", os.W_OK)
    assert (cache / "embedding_1" / "index.nbi").stat().st_mode & stat.S_IWUSR
    assert [path.name for path in cache.parent.iterdir()] == ["kernels"]


def test_existing_kernels_are_kept(tmp_path: Path):
    kernels, cache = image_of_kernels(tmp_path), tmp_path / "scratch" / "kernels"
    check_pod([], kernels=kernels, cache=cache)
    (cache / "embedding_1" / "learned.1.nbc").write_bytes(b"compiled here")
    assert check_pod([], kernels=kernels, cache=cache) == [f"{cache}: has kernels already"]
    assert (cache / "embedding_1" / "learned.1.nbc").exists()


def test_image_without_kernels_is_reported_and_accepted(tmp_path: Path):
    (line,) = check_pod([], kernels=tmp_path / "none", cache=tmp_path / "kernels")
    assert "compiled when first used" in line
    assert list(tmp_path.iterdir()) == []


def test_concurrent_copy_by_another_container_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels, cache = image_of_kernels(tmp_path), tmp_path / "scratch" / "kernels"
    rename = Path.rename

    def beaten(self: Path, target: Path) -> Path:
        (target / "embedding_1").mkdir(parents=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", beaten)
    assert check_pod([], kernels=kernels, cache=cache) == [
        f"{cache}: another container has copied the kernels"
    ]
    assert [path.name for path in cache.parent.iterdir()] == ["kernels"]


def test_failed_copy_leaves_no_files_and_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels, cache = image_of_kernels(tmp_path), tmp_path / "scratch" / "kernels"

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StorageError, match=r"kernels: No space left on device; .* It is full"):
        check_pod([], kernels=kernels, cache=cache)
    assert list(cache.parent.iterdir()) == []


def test_token_is_created_once_and_never_printed(tmp_path: Path):
    token = tmp_path / "home" / "ray-token"
    (line,) = check_pod([], token=token)
    made = token.read_text()
    assert len(made) == 64 and int(made, 16) and made not in line
    assert stat.S_IMODE(token.stat().st_mode) == 0o640
    assert check_pod([], token=token) == [f"{token}: has a token already"]
    assert token.read_text() == made
    assert [path.name for path in token.parent.iterdir()] == ["ray-token"]


def _make(token: Path, gate: multiprocessing.synchronize.Barrier, seen: multiprocessing.Queue[str]) -> None:
    gate.wait(30)
    check_pod([], token=token)
    seen.put(token.read_text())


def test_concurrent_pods_agree_on_one_token(tmp_path: Path):
    spawn = multiprocessing.get_context("spawn")
    gate, seen = spawn.Barrier(6), spawn.Queue()
    pods = [spawn.Process(target=_make, args=(tmp_path / "token", gate, seen)) for _ in range(6)]
    for pod in pods:
        pod.start()
    tokens = {seen.get(timeout=60) for _ in pods}
    for pod in pods:
        pod.join(30)
    assert len(tokens) == 1 and len(tokens.pop()) == 64
    assert [pod.exitcode for pod in pods] == [0] * 6


def test_empty_token_file_is_reported(tmp_path: Path):
    (tmp_path / "token").touch()
    with pytest.raises(StorageError, match=r"token is empty, and must contain Ray's token\. Delete it"):
        check_pod([], token=tmp_path / "token")


@needs_root
def test_unreadable_token_is_reported(open_folder: Path):
    volume = open_folder / "home"
    volume.mkdir()
    volume.chmod(0o777)
    check_pod([], token=volume / "token")
    said = as_stranger(f"check_pod([], token=Path({str(volume / 'token')!r}))")
    assert said.startswith(f"refused: {volume / 'token'}: Permission denied")
    assert "belongs to uid 0, gid 0, with mode 0640" in said and "fsGroup" in said


def test_cpu_without_the_required_features_is_reported(monkeypatch: pytest.MonkeyPatch):
    from llvmlite import binding

    monkeypatch.setattr(
        binding, "get_host_cpu_features", lambda: {"cx16": True, "popcnt": True, "avx2": False}
    )
    with pytest.raises(
        ClicklineError, match=r"for x86-64-v3, .* lacks sse4\.2, ssse3, avx2, bmi.*CPU=x86-64\."
    ):
        check_pod([], cpu="x86-64-v3")
    assert check_pod([], cpu="x86-64") == check_pod([], cpu="znver4") == []


def test_cpu_with_the_required_features_is_accepted():
    from llvmlite import binding

    if not binding.get_host_cpu_features().get("avx2", False):
        pytest.skip("this machine's CPU is older than x86-64-v3")
    assert check_pod([], cpu="x86-64-v3") == []
