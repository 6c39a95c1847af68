"""Opens fsspec file systems by protocol, with the config's options and the user's credentials."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clickline.errors import StorageError
from clickline.storage.redaction import Redactor, secrets_in

_log = logging.getLogger(__name__)

# A store that sends nothing for this long has failed; a whole transfer has no time limit.
_CONNECT_SECONDS = 30
_READ_SECONDS = 120


@dataclass(frozen=True)
class _Driver:
    section: str  # its name in the options and in the credentials file
    package: str
    extra: str | None  # pip install 'clickline[extra]'


_DRIVERS = {
    "s3": _Driver("s3", "s3fs", "s3"),
    "s3a": _Driver("s3", "s3fs", "s3"),
    "gs": _Driver("gs", "gcsfs", "gs"),
    "gcs": _Driver("gs", "gcsfs", "gs"),
    "http": _Driver("http", "aiohttp", "http"),
    "https": _Driver("http", "aiohttp", "http"),
    "webhdfs": _Driver("webhdfs", "requests", "webhdfs"),
    "hdfs": _Driver("hdfs", "pyarrow", None),
    "memory": _Driver("memory", "fsspec", None),
}


def protocol_of(uri: str) -> str:
    """The protocol of a URI: `s3` for s3://…, `file` for a plain path."""
    protocol, separator, _ = uri.partition("://")
    return protocol.lower() if separator else "file"


class FileSystems:
    """Opens each store once. fsspec's own cache would share them, and their credentials, with other code."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]], credentials_file: Path | None) -> None:
        credentials = _load_credentials(credentials_file) if credentials_file else {}
        self._settings = _deep_merge(_by_section(options), credentials)
        self._opened: dict[tuple[int, str, str], Any] = {}
        self._lock = threading.Lock()
        from_environment = (
            value
            for name, value in os.environ.items()
            if value and name.startswith(("AWS_", "GOOGLE_", "FSSPEC_")) and _looks_secret(name)
        )
        self.redact = Redactor([*secrets_in(credentials), *from_environment, *_misplaced_secrets(options)])

    def open(self, uri: str) -> Any:
        """The fsspec file system of a URI."""
        protocol = protocol_of(uri)
        driver = _DRIVERS.get(protocol)
        if driver is None:
            known = ", ".join(f"{name}://" for name in _DRIVERS)
            raise StorageError(
                self.redact(
                    f"{uri}: the protocol {protocol}:// is not supported. Use a local path or one of {known}."
                )
            )
        from fsspec.registry import get_filesystem_class

        try:
            kind = get_filesystem_class(protocol)
        except ImportError:
            install = f"clickline[{driver.extra}]" if driver.extra else driver.package
            raise StorageError(
                f"{protocol}:// needs the package {driver.package}: pip install '{install}'"
            ) from None
        uri_options = kind._get_kwargs_from_urls(uri)  # host, port and user of a WebHDFS URI
        # The process id: a driver's sockets and threads do not survive a fork.
        key = (os.getpid(), protocol, repr(sorted(uri_options.items())))
        with self._lock:
            if key not in self._opened:
                settings = {**self._settings.get(driver.section, {}), **uri_options}
                self._opened[key] = _open_filesystem(protocol, kind, settings)
            return self._opened[key]


def _open_filesystem(protocol: str, kind: Any, settings: dict[str, Any]) -> Any:
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        settings["client_kwargs"] = {
            "timeout": timeout,
            "trust_env": True,
            **settings.get("client_kwargs", {}),
        }
    # No listings cache: a new donefile must be visible at once.
    filesystem = kind(**settings, skip_instance_cache=True, use_listings_cache=False)
    if protocol == "webhdfs":
        # Every call of the driver goes through `request`, without a timeout.
        session = filesystem.session
        session.request = partial(session.request, timeout=(_CONNECT_SECONDS, _READ_SECONDS))
        session.hooks["response"].append(_refuse_failed_reads)
    return filesystem


def _refuse_failed_reads(response: Any, *_: Any, **__: Any) -> None:
    """Raise for failed reads: fsspec would take a data node's error page for the file's content."""
    if "op=OPEN" in response.url:
        response.raise_for_status()


def _load_credentials(file: Path) -> dict[str, Mapping[str, Any]]:
    import yaml

    shape = f"It must map stores ({', '.join(_DRIVERS)}) to their options, like s3: {{key: …, secret: …}}."
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise StorageError(
            f"{file}: the credentials file cannot be read ({error.strerror}). Correct its path or mode."
        ) from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
        # Besides YAMLError, what PyYAML raises for values such as 2001-99-99 or !!bool x.
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise StorageError(
            f"{file}{where}: the credentials file is not valid YAML or JSON. {shape}"
        ) from None
    tree = tree or {}
    if not isinstance(tree, dict) or not all(
        name in _DRIVERS and isinstance(section, dict) for name, section in tree.items()
    ):
        raise StorageError(f"{file}: the credentials file has the wrong structure. {shape}")
    if file.stat().st_mode & 0o077:
        _log.warning("%s holds credentials and is readable by other users: chmod 600 %s", file, file)
    return _by_section(tree)


def _by_section(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Options by the name of their driver: https:// shares those of http://."""
    unknown = sorted(options.keys() - _DRIVERS.keys())
    if unknown:
        raise StorageError(
            f"storage.options has {unknown[0]}, which is not a known store. Use one of {', '.join(_DRIVERS)}."
        )
    sections: dict[str, Mapping[str, Any]] = {}
    for protocol, section in options.items():
        name = _DRIVERS[protocol].section
        sections[name] = _deep_merge(sections.get(name, {}), section)
    return sections


def _deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with `over`, key by key at every depth: both may have client_kwargs."""
    out = {
        name: _deep_merge(value, {}) if isinstance(value, Mapping) else value for name, value in base.items()
    }
    for name, value in over.items():
        current = out.get(name)
        out[name] = (
            _deep_merge(current, value) if isinstance(current, dict) and isinstance(value, dict) else value
        )
    return out


def _misplaced_secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Secrets in options. Options should hold none, but what looks like one is kept out of messages."""
    for name, value in options.items():
        if _looks_secret(name):
            yield from secrets_in(value, name)
        elif isinstance(value, Mapping):
            yield from _misplaced_secrets(value)


def _looks_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("key", "secret", "token", "password", "auth"))
