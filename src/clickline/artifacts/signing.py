"""Signatures of versions: who made one, told by an Ed25519 key.

What is signed is the manifest, byte for byte, and the manifest holds the SHA-256 of every other file of its version. A
delta is trusted when all versions that it builds on are. The signature lies beside the manifest, as 64 plain bytes.
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
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PRIVATE_NAME, PUBLIC_NAME = "signing-key.pem", "public-key.pem"
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_HOW = "`clickline versions keygen --out DIR` makes a pair of keys."

_log = logging.getLogger(__name__)


class Trusted:
    """Public keys; what one of them signed may be used."""

    def __init__(self, keys: Sequence[Ed25519PublicKey], source: str) -> None:
        """`source`: where they come from, in words."""
        self._keys = tuple(keys)
        self._source = source
        self._found_right: set[bytes] = set()  # digests of manifests, which never change

    @classmethod
    def read(cls, file: str) -> Trusted:
        """The keys of a PEM file, one or more."""
        content = _content(file, "serve.trusted_keys_file")
        if b"PRIVATE KEY" in content:
            raise ClicklineError(
                f"serve.trusted_keys_file {file} holds a private key. Servers need public ones only: keep the private "
                "key where versions are published."
            )
        with _package():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
            from cryptography.hazmat.primitives.serialization import load_pem_public_key
        keys = []
        for block in _PUBLIC.findall(content):
            try:
                key = load_pem_public_key(block)
            except ValueError as error:
                raise ClicklineError(
                    f"serve.trusted_keys_file {file} holds a block that is no key. {_HOW}"
                ) from error
            if not isinstance(key, Ed25519PublicKey):
                raise ClicklineError(
                    f"serve.trusted_keys_file {file} holds a key of another kind. Allowed: Ed25519. {_HOW}"
                )
            keys.append(key)
        if not keys:
            raise ClicklineError(
                f"serve.trusted_keys_file {file} holds no public key. Put one or more there, each a PEM block that "
                f"begins with BEGIN PUBLIC KEY. {_HOW}"
            )
        return cls(keys, f"the {len(keys)} of serve.trusted_keys_file {file}")

    def knows(self, signer: Signer) -> bool:
        return signer.public in self._keys

    def check(self, storage: Storage, folder: str, manifest: bytes) -> None:
        """Refuse a version whose manifest none of the keys has signed. StorageError: the store failed, which says
        nothing about it."""
        digest = hashlib.sha256(manifest).digest()
        if digest in self._found_right:
            return
        name = folder.rstrip("/").rpartition("/")[2]
        number = int(name) if name.isdigit() else name
        place = Storage.join(folder, SIGNATURE)
        try:
            signature = storage.read(place)
        except StorageError:
            if storage.describe(place) is not None:
                raise
            raise VersionUntrusted(
                f"version {number} is not signed: there is no {shown(place)}. Only versions that are signed with a "
                f"trusted key are used ({self._source}). Publish it again with publish.signing_key_file, or use "
                "another version."
            ) from None
        if not any(_signed(key, signature, manifest) for key in self._keys):
            raise VersionUntrusted(
                f"the signature of version {number} is wrong: its manifest was changed, or none of the trusted keys "
                f"({self._source}) has signed it. Use another version; if its key should be trusted, add its public "
                "key to that file."
            )
        self._found_right.add(digest)


class Signer:
    """The private key that signs what is published."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key()

    @classmethod
    def read(cls, file: str) -> Signer:
        content = _content(file, "publish.signing_key_file")
        if Path(file).stat().st_mode & 0o007:
            _log.warning("publish.signing_key_file %s: other users may read it: chmod 600 %s", file, file)
        with _package():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        try:
            key = load_pem_private_key(content, password=None)
        except TypeError as error:
            raise ClicklineError(
                f"publish.signing_key_file {file} has a password, and there is nobody to ask. Store the key without."
            ) from error
        except ValueError as error:
            raise ClicklineError(f"publish.signing_key_file {file} holds no private key. {_HOW}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ClicklineError(
                f"publish.signing_key_file {file} holds a key of another kind. Allowed: Ed25519. {_HOW}"
            )
        return cls(key)

    @property
    def trusted(self) -> Trusted:
        """This key and no other."""
        return Trusted([self.public], "that of publish.signing_key_file")

    def sign(self, manifest: bytes) -> bytes:
        return self._key.sign(manifest)


def make_keys(folder: Path) -> tuple[Path, Path]:
    """A new private key, for its owner alone, and its public one; files that are there are left alone."""
    with _package():
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
    told = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (private, public):
            if file.exists():
                raise FileExistsError(
                    17, "it is there already, and a key that is lost cannot be made again", file
                )
        for file, content, mode in ((private, secret, 0o600), (public, told, 0o644)):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(handle, "wb") as opened:
                opened.write(content)
    except OSError as error:
        raise ClicklineError(
            f"{error.filename or folder}: {error.strerror}. Name another folder with --out."
        ) from error
    return private, public


def _signed(key: Ed25519PublicKey, signature: bytes, manifest: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _content(file: str, key: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ClicklineError(
            f"{key} {file} cannot be read: {error.strerror or error}. Put the PEM file there."
        ) from error


@contextmanager
def _package() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ClicklineError(
            f"signatures of versions need the package {error.name}: pip install 'clickline[sign]'"
        ) from error
