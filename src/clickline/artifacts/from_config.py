"""Opens the storage, registry and signing key that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clickline.artifacts.registry import Registry
from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from clickline.artifacts.signing import Signer, TrustedKeys


def storage_of(config: Config) -> Storage:
    """Storage with the config's options and credentials."""
    credentials = config.storage.credentials_file
    return Storage(config.storage.options, None if credentials is None else Path(credentials))


def registry_of(config: Config, signer: Signer | None = None, *, any_version: bool = False) -> Registry:
    """The registry, limited to versions signed by a key of serve.trusted_keys_file if it is set, else by the key of
    `signer` if there is one. `any_version` lifts the limit, for commands that only list versions."""
    trusted = None
    if not any_version:
        trusted = _trusted(config) or (None if signer is None else signer.trusted)
    uri = config.publish.registry or Storage.join(config.home, "registry")
    return Registry(storage_of(config), uri, trusted)


def signer_of(config: Config) -> Signer | None:
    """The key that signs published versions; refused if servers would not trust it."""
    file, trusted = config.publish.signing_key_file, _trusted(config)
    signer = None
    if file is not None:
        from clickline.artifacts.signing import Signer  # few users sign, and it needs an extra package

        signer = Signer.read(file)
    if trusted is not None and not (signer is not None and trusted.includes(signer)):
        problem = "is not set" if signer is None else f"{file} is not the private key of any of them"
        raise ClicklineError(
            f"publish.signing_key_file {problem}, and servers use only versions signed by a key of "
            f"serve.trusted_keys_file {config.serve.trusted_keys_file}. Set it to the private key of one of them, or "
            "add its public key there."
        )
    return signer


def _trusted(config: Config) -> TrustedKeys | None:
    if config.serve.trusted_keys_file is None:
        return None
    from clickline.artifacts.signing import TrustedKeys

    return TrustedKeys.read(config.serve.trusted_keys_file)
