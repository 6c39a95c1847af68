"""The stores that a config names."""

from __future__ import annotations

from pathlib import Path

from clickline.artifacts.registry import Registry
from clickline.config import Config
from clickline.storage.stores import Storage

__all__ = ["registry_of", "storage_of"]


def storage_of(config: Config) -> Storage:
    """Any store, with the config's options and credentials."""
    credentials = config.storage.credentials
    return Storage(config.storage.options, None if credentials is None else Path(credentials))


def registry_of(config: Config) -> Registry:
    """The versions of this service."""
    return Registry(storage_of(config), config.publish.registry or Storage.join(config.home, "registry"))
