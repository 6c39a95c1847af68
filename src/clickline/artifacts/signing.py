"""Ed25519 signatures of versions, which prove who published them.

The manifest is signed byte for byte, and it contains the SHA-256 of every other file of its version. A delta is trusted
if all versions that it builds on are. The signature is next to the manifest, as 64 raw bytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from clickline.artifacts.manifest import SIGNATURE
from clickline.errors import ClicklineError, StorageError, VersionUntrusted
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PRIVATE_NAME, PUBLIC_NAME = "signing-key.pem", "public-key.pem"
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_KEYGEN_HINT = "`clickline versions keygen --out DIR` makes a pair of keys."

_log = logging.getLogger(__name__)


class TrustedKeys:
    """Public keys; versions signed by one of them may be used."""

    def __init__(self, keys: Sequence[Ed25519PublicKey], source: str) -> None:
        """`source`: where the keys come from, for messages."""
        self._keys = tuple(keys)
        self._source = source
        self._verified: set[bytes] = set()  # digests of manifests, which never change

    @classmethod
    def read(cls, file: str) -> TrustedKeys:
        """The keys of a PEM file, one or more."""
        content = _read_file(file, "serve.trusted_keys_file")
        if b"PRIVATE KEY" in content:
            raise ClicklineError(
                f"serve.trusted_keys_file {file} contains a private key. Servers need only public ones: keep the "
                "private key where versions are published."
            )
        with _requires_cryptography():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
            from cryptography.hazmat.primitives.serialization import load_pem_public_key
        keys = []
        for block in _PUBLIC.findall(content):
            try:
                key = load_pem_public_key(block)
            except ValueError as error:
                raise ClicklineError(
                    f"serve.trusted_keys_file {file} contains a block that is not a key. {_KEYGEN_HINT}"
                ) from error
            if not isinstance(key, Ed25519PublicKey):
                raise ClicklineError(
                    f"serve.trusted_keys_file {file} contains a key of another kind. Allowed: Ed25519. {_KEYGEN_HINT}"
                )
            keys.append(key)
        if not keys:
            raise ClicklineError(
                f"serve.trusted_keys_file {file} contains no public key. Put one or more there, each a PEM block that "
                f"begins with BEGIN PUBLIC KEY. {_KEYGEN_HINT}"
            )
        return cls(keys, f"the {len(keys)} of serve.trusted_keys_file {file}")

    def includes(self, signer: Signer) -> bool:
        return signer.public in self._keys

    def check(self, storage: Storage, folder: str, manifest: bytes) -> None:
        """Refuse a version whose manifest is not signed by any of the keys. StorageError: the store failed, so nothing
        is known about the version."""
        digest = hashlib.sha256(manifest).digest()
        if digest in self._verified:
            return
        name = folder.rstrip("/").rpartition("/")[2]
        number = int(name) if name.isdigit() else name
        uri = Storage.join(folder, SIGNATURE)
        try:
            signature = storage.read(uri)
        except StorageError:
            if storage.describe(uri) is not None:
                raise
            raise VersionUntrusted(
                f"version {number} is not signed: there is no {redacted(uri)}. Only versions signed by a trusted key "
                f"are used ({self._source}). Publish it again with publish.signing_key_file, or use "
                "another version."
            ) from None
        if not any(_is_valid(key, signature, manifest) for key in self._keys):
            raise VersionUntrusted(
                f"the signature of version {number} is invalid: its manifest was changed, or none of the trusted keys "
                f"({self._source}) signed it. Use another version; if its key should be trusted, add its public "
                "key to that file."
            )
        self._verified.add(digest)


class Signer:
    """The private key that signs published versions."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key()

    @classmethod
    def read(cls, file: str) -> Signer:
        content = _read_file(file, "publish.signing_key_file")
        if Path(file).stat().st_mode & 0o007:
            _log.warning("publish.signing_key_file %s is readable by other users: chmod 600 %s", file, file)
        with _requires_cryptography():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        try:
            key = load_pem_private_key(content, password=None)
        except TypeError as error:
            raise ClicklineError(
                f"publish.signing_key_file {file} has a password, which cannot be asked for. Store the key without one."
            ) from error
        except ValueError as error:
            raise ClicklineError(
                f"publish.signing_key_file {file} contains no private key. {_KEYGEN_HINT}"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ClicklineError(
                f"publish.signing_key_file {file} contains a key of another kind. Allowed: Ed25519. {_KEYGEN_HINT}"
            )
        return cls(key)

    @property
    def trusted(self) -> TrustedKeys:
        """Only this key as the trusted one."""
        return TrustedKeys([self.public], "the one of publish.signing_key_file")

    def sign(self, manifest: bytes) -> bytes:
        return self._key.sign(manifest)


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Create a private key, readable only by its owner, and its public key; existing files are not overwritten."""
    with _requires_cryptography():
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            PublicFormat,
        )
    private, public = folder / PRIVATE_NAME, folder / PUBLIC_NAME
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    shared = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (private, public):
            if file.exists():
                raise FileExistsError(17, "it already exists, and a lost key cannot be recovered", file)
        for file, content, mode in ((private, secret, 0o600), (public, shared, 0o644)):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(handle, "wb") as opened:
                opened.write(content)
    except OSError as error:
        raise ClicklineError(
            f"{error.filename or folder}: {error.strerror}. Name another folder with --out."
        ) from error
    return private, public


def _is_valid(key: Ed25519PublicKey, signature: bytes, manifest: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _read_file(file: str, key: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ClicklineError(
            f"{key} {file} cannot be read: {error.strerror or error}. Put the PEM file there."
        ) from error


@contextmanager
def _requires_cryptography() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ClicklineError(
            f"signing versions needs the package {error.name}: pip install 'clickline[sign]'"
        ) from error
