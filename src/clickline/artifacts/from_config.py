"""The stores that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clickline.artifacts.registry import Registry
from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from clickline.artifacts.signing import Signer, Trusted


def storage_of(config: Config) -> Storage:
    """Any store, with the config's options and credentials."""
    credentials = config.storage.credentials
    return Storage(config.storage.options, None if credentials is None else Path(credentials))


def registry_of(config: Config, signer: Signer | None = None, *, any_version: bool = False) -> Registry:
    """The versions of this service that may be used: those that a key of serve.trusted_keys_file has signed, where it
    is set; else, for whoever signs, those of the same key. `any_version` is for those who only tell of them."""
    trusted = None
    if not any_version:
        trusted = _trusted(config) or (None if signer is None else signer.trusted)
    place = config.publish.registry or Storage.join(config.home, "registry")
    return Registry(storage_of(config), place, trusted)


def signer_of(config: Config) -> Signer | None:
    """Who signs what is published; refuses when servers would not trust it."""
    file, trusted = config.publish.signing_key_file, _trusted(config)
    signer = None
    if file is not None:
        from clickline.artifacts.signing import Signer  # few sign, and it takes a package of its own

        signer = Signer.read(file)
    if trusted is not None and not (signer is not None and trusted.knows(signer)):
        found = "is not set" if signer is None else f"{file} is none of their private keys"
        raise ClicklineError(
            f"publish.signing_key_file {found}, and servers use only what the keys of serve.trusted_keys_file "
            f"{config.serve.trusted_keys_file} have signed. Set it to the private key of one of them, or add its "
            "public key there."
        )
    return signer


def _trusted(config: Config) -> Trusted | None:
    if config.serve.trusted_keys_file is None:
        return None
    from clickline.artifacts.signing import Trusted

    return Trusted.read(config.serve.trusted_keys_file)
