"""Signatures of versions in a registry: what is trusted, what is refused, and with which message."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clickline.artifacts.manifest import MANIFEST, SIGNATURE
from clickline.artifacts.promotion import pin, roll_back
from clickline.artifacts.registry import Registry
from clickline.artifacts.signing import Signer, TrustedKeys, make_keys
from clickline.artifacts.version import Version
from clickline.errors import ArtifactError, ClicklineError, VersionUntrusted
from clickline.storage.storage import Storage
from servers.s3 import s3_server
from version_manifests import version_manifest


class Keys:
    """A key pair in files."""

    def __init__(self, folder: Path) -> None:
        self.private, self.public = make_keys(folder)
        self.signer = Signer.read(str(self.private))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def trusting(uri: str | Path, *trusted: Keys, storage: Storage | None = None) -> Registry:
    """The registry as seen by a server that trusts these keys."""
    file = trusted[0].private.with_name("trusted.pem")
    file.write_bytes(b"text between blocks is ignored\n".join(one.public.read_bytes() for one in trusted))
    return Registry(storage or Storage(), str(uri), TrustedKeys.read(str(file)))


def publish(registry: Registry, signer: Signer | None, parent: int | None = None, **changes: Any) -> Version:
    with registry.draft(parent) as draft:
        (draft.folder / "table.bin").write_bytes(b"rows of %d" % draft.number)
        (draft.folder / "dense.onnx").write_bytes(b"weights")
        return draft.commit(version_manifest(parent, **changes), None, signer)


def test_signed_version_is_accepted_and_openssl_agrees(tmp_path: Path, keys: Keys) -> None:
    registry = trusting(tmp_path / "registry", keys)
    version = publish(registry, keys.signer)
    assert registry.version(1) == version == registry.versions()[0]
    assert set(version.files) == {"table.bin", "dense.onnx"}, "every file but these two is in the manifest"
    assert {path.name for path in Path(version.folder).iterdir()} == {*version.files, MANIFEST, SIGNATURE}
    registry.check_trust()
    registry.move(1, "first", after=None)
    registry.check_trust()
    folder = Path(version.folder)
    openssl = shutil.which("openssl")
    if openssl is not None:
        command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", keys.public, "-rawin"]
        asked = [*command, "-in", folder / MANIFEST, "-sigfile", folder / SIGNATURE]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout.strip()) == (0, "Signature Verified Successfully")


def test_gc_that_rolls_back_restores_the_signed_bytes(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = trusting(tmp_path / "r", keys)
    versions = [publish(registry, keys.signer, config="\udc80") for _ in range(3)]
    manifest = Path(versions[1].folder) / MANIFEST
    signed, delete = manifest.read_bytes(), Storage.delete

    def delete_then_move(self: Storage, uri: str) -> None:
        delete(self, uri)
        if uri == str(manifest):
            registry.move(3, "while gc removes version 2", after=None)

    monkeypatch.setattr(Storage, "delete", delete_then_move)
    assert registry.gc(1) == []
    assert manifest.read_bytes() == signed
    assert registry.version(2) == versions[1], "its signature is still valid"


def test_unsigned_version_is_refused(tmp_path: Path, keys: Keys) -> None:
    untrusting, server = Registry(Storage(), str(tmp_path / "r")), trusting(tmp_path / "r", keys)
    publish(untrusting, keys.signer)
    publish(untrusting, None)
    message = r"version 2 is not signed: there is no .*000000002/manifest\.sig.*trusted\.pem.*publish\.signing_key_file"
    with pytest.raises(VersionUntrusted, match=message):
        server.version(2)
    assert [version.number for version in server.versions()] == [1]
    with pytest.raises(VersionUntrusted, match="version 2 is not signed"):
        pin(server, 2, "by hand")
    assert server.current() is None, "the pointer did not move"
    moved = untrusting.move(2, "moved", after=untrusting.move(1, "first", after=None))
    with pytest.raises(VersionUntrusted, match="version 2 is not signed"):
        server.check_trust()
    assert roll_back(server, None, None).now.version == 1, "away from it"
    server.check_trust()
    assert moved.version == 2


@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE])
def test_any_changed_byte_of_manifest_or_signature_is_refused(tmp_path: Path, keys: Keys, name: str) -> None:
    registry = trusting(tmp_path / "registry", keys)
    file = Path(publish(registry, keys.signer).folder, name)
    right = file.read_bytes()
    for at in range(len(right)):
        file.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        with pytest.raises(
            VersionUntrusted, match="the signature of version 1 is invalid: its manifest was changed"
        ):
            registry.version(1)
    for wrong in (right + b"\n", right[:-1], b""):
        file.write_bytes(wrong)
        with pytest.raises(VersionUntrusted):
            registry.version(1)
    file.write_bytes(right)
    assert registry.version(1).number == 1
    file.write_bytes(right + b"\n")
    if name == MANIFEST:
        with pytest.raises(VersionUntrusted):  # also after the valid one was accepted
            registry.version(1)


def test_changed_byte_of_any_file_is_detected(tmp_path: Path, keys: Keys) -> None:
    registry = trusting(tmp_path / "registry", keys)
    version = publish(registry, keys.signer)
    registry.verify(version, Path(version.folder))
    for name in version.files:
        file = Path(version.folder, name)
        right = file.read_bytes()
        file.write_bytes(bytes([right[0] ^ 1]) + right[1:])
        with pytest.raises(ArtifactError, match=f"{name} is damaged"):
            registry.verify(version, Path(version.folder))
        file.write_bytes(right)


def test_keys_are_rotated_by_trusting_both(tmp_path: Path, keys: Keys) -> None:
    new = Keys(tmp_path / "new")
    registry = Registry(Storage(), str(tmp_path / "registry"))
    publish(registry, keys.signer)
    publish(registry, new.signer)
    both = trusting(registry.uri, keys, new)
    assert [version.number for version in both.versions()] == [1, 2]
    assert [version.number for version in trusting(registry.uri, keys).versions()] == [1]
    assert [version.number for version in trusting(registry.uri, new).versions()] == [2]
    with pytest.raises(VersionUntrusted, match=r"none of the trusted keys \(the 1 of"):
        trusting(registry.uri, new).version(1)


def test_signature_is_valid_only_for_its_version(tmp_path: Path, keys: Keys) -> None:
    registry = trusting(tmp_path / "registry", keys)
    first, second = publish(registry, keys.signer), publish(registry, None)
    shutil.copy(Path(first.folder, SIGNATURE), second.folder)
    with pytest.raises(VersionUntrusted, match="the signature of version 2 is invalid"):
        registry.version(2)
    shutil.copy(Path(first.folder, MANIFEST), second.folder)  # validly signed, but its number is 1
    with pytest.raises(ArtifactError, match="it has number 1, its folder is 000000002"):
        registry.version(2)


def test_delta_on_an_unsigned_version_is_refused(tmp_path: Path, keys: Keys) -> None:
    untrusting = Registry(Storage(), str(tmp_path / "registry"))
    server = trusting(untrusting.uri, keys)
    publish(untrusting, None)
    delta = publish(untrusting, keys.signer, parent=1)
    assert server.version(2) == delta
    message = "version 2 cannot be used, because of a version that it builds on: version 1 is not signed"
    with pytest.raises(VersionUntrusted, match=message):
        server.chain(delta)
    with pytest.raises(VersionUntrusted, match=message):
        server.move(2, "moved", after=None)
    untrusting.move(2, "moved", after=None)
    with pytest.raises(VersionUntrusted, match=message):
        server.check_trust()


def test_copied_registry_keeps_its_signatures(tmp_path: Path, keys: Keys) -> None:
    publish(Registry(Storage(), str(tmp_path / "here")), keys.signer)
    publish(Registry(Storage(), str(tmp_path / "here")), keys.signer, parent=1)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    there = trusting(tmp_path / "there", keys)
    chain = there.chain(there.version(2))
    assert [version.number for version in chain] == [1, 2]
    for version in chain:
        there.verify(version, Path(version.folder))


def test_gc_handles_untrusted_versions(tmp_path: Path, keys: Keys) -> None:
    server = trusting(tmp_path / "registry", keys)
    for signer in (None, None, keys.signer, keys.signer):
        publish(server, signer)
    server.move(4, "moved", after=server.move(3, "moved", after=None))
    assert server.gc(1) == [1, 2]


@pytest.mark.slow
def test_signed_registry_in_s3(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with s3_server() as endpoint:
        storage = Storage({"s3": {"client_kwargs": {"endpoint_url": endpoint}}}, None)
        storage._drivers.open("s3://models/x").mkdir("models")
        untrusting = Registry(storage, "s3://models/ads")
        server = trusting(untrusting.uri, keys, storage=storage)
        publish(untrusting, keys.signer)
        publish(untrusting, keys.signer, parent=1)
        publish(untrusting, None)
        chain = server.chain(server.version(2))
        folders = [server.fetch(version, tmp_path / "copies") for version in chain]
        for version, folder in zip(chain, folders, strict=True):
            server.verify(version, folder)
        with pytest.raises(
            VersionUntrusted, match=r"version 3 is not signed: there is no s3://models/ads/versions/"
        ):
            server.version(3)
        # Copied to a disk with its signatures, as an operator would.
        filesystem = storage._drivers.open("s3://models/x")
        filesystem.get("models/ads/versions", str(tmp_path / "disk" / "versions"), recursive=True)
    disk = trusting(tmp_path / "disk", keys)
    assert [version.number for version in disk.chain(disk.version(2))] == [1, 2]
    once = {"client_kwargs": {"endpoint_url": endpoint}, "config_kwargs": {"retries": {"max_attempts": 0}}}
    fresh = trusting("s3://models/ads", keys, storage=Storage({"s3": once}, None))
    with pytest.raises(ClicklineError) as caught:  # an unreachable store does not make the version untrusted
        fresh.version(2)
    assert not isinstance(caught.value, ArtifactError)
    fresh.check_trust()


def test_store_failure_at_the_signature_is_not_a_refusal(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(Registry(Storage(), str(tmp_path / "r")), keys.signer)
    (Path(tmp_path, "r/versions/000000001") / SIGNATURE).unlink()
    (Path(tmp_path, "r/versions/000000001") / SIGNATURE).mkdir()  # exists, but is not a file
    with pytest.raises(ClicklineError) as caught:
        trusting(tmp_path / "r", keys).version(1)
    assert "manifest.sig" in str(caught.value)


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


def test_keys_are_created_once_and_the_private_one_is_owner_only(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path / "a" / "b")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes(), public.read_bytes()
    with pytest.raises(ClicklineError, match=r"signing-key\.pem: it already exists.*--out"):
        make_keys(tmp_path / "a" / "b")
    private.unlink()
    with pytest.raises(ClicklineError, match=r"public-key\.pem: it already exists"):
        make_keys(tmp_path / "a" / "b")
    assert not private.exists()
    assert public.read_bytes() == before[1]
    (tmp_path / "file").touch()
    with pytest.raises(ClicklineError, match="--out"):
        make_keys(tmp_path / "file")


def test_files_without_a_valid_key_are_named(tmp_path: Path, keys: Keys) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )

    file = tmp_path / "file.pem"
    curve = ec.generate_private_key(ec.SECP256R1())
    ours = load_pem_private_key(keys.private.read_bytes(), None)
    public = curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    block = b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    for content, message in (
        (b"", "contains no public key"),
        (keys.public.read_bytes() + keys.private.read_bytes(), "contains a private key"),
        (keys.public.read_bytes() + block, "contains a block that is not a key"),
        (public, "contains a key of another kind. Allowed: Ed25519"),
    ):
        file.write_bytes(content)
        with pytest.raises(ClicklineError, match=message) as caught:
            TrustedKeys.read(str(file))
        assert f"serve.trusted_keys_file {file}" in str(caught.value)
    for content, message in (
        (b"x", "contains no private key"),
        (keys.public.read_bytes(), "contains no private key"),
        (
            ours.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"p")),
            "has a password",
        ),
        (
            curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "another kind. Allowed: Ed25519",
        ),
    ):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ClicklineError, match=message) as caught:
            Signer.read(str(file))
        assert f"publish.signing_key_file {file}" in str(caught.value)
    for read in (TrustedKeys.read, Signer.read):
        with pytest.raises(ClicklineError, match="cannot be read: No such file"):
            read(str(tmp_path / "absent"))


def test_warning_if_others_can_read_the_private_key(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    keys.private.chmod(0o644)
    Signer.read(str(keys.private))
    assert f"is readable by other users: chmod 600 {keys.private}" in caplog.text
