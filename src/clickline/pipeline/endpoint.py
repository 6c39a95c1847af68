"""Where a service answers, and a line to try it with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickline.config import Config

_HEALTH_SECONDS = 1.0


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a service."""

    grpc: str
    http: str
    metrics: str
    curl: str  # a line for a shell

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def endpoint(config: Config, example: Mapping[str, Any] | None = None) -> Endpoint:
    """`example`: a row that the service answers; without one the line asks for the model's state."""
    section = config.serve
    host = f"[{section.host}]" if ":" in section.host else section.host
    scheme = _scheme(config)
    token = (
        "" if section.token_file is None else f' -H "Authorization: Bearer $(head -n1 {section.token_file})"'
    )
    known = "" if section.tls is None else f" --cacert {section.tls.authority or section.tls.certificate}"
    url = f"{scheme}://{_reached(host)}:{section.http_port}/v1/models/{config.name}"
    rows = "" if example is None else shlex.quote(json.dumps({"instances": [example]}))
    asked = f"{url}:predict -d {rows}" if rows else url
    return Endpoint(
        grpc=f"{host}:{section.grpc_port}",
        http=f"{scheme}://{host}:{section.http_port}",
        metrics=f"{scheme}://{host}:{section.metrics_port}/metrics",
        curl=f"curl{known}{token} {asked}",
    )


def readiness(config: Config) -> str:
    """What the service says of itself: "ready", what is missing, or why it cannot be asked."""
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    section = config.serve
    host = _reached(f"[{section.host}]" if ":" in section.host else section.host)
    context = None
    if section.tls is not None:
        context = ssl.create_default_context()
        context.check_hostname = False  # it is this machine, and nothing secret is asked or told
        context.verify_mode = ssl.CERT_NONE
    url = f"{_scheme(config)}://{host}:{section.metrics_port}/readyz"
    try:
        with urlopen(url, timeout=_HEALTH_SECONDS, context=context) as answer:
            return str(answer.read(1000).decode(errors="replace").strip().partition("\n")[0])
    except HTTPError as error:
        with error:
            return error.read(1000).decode(errors="replace").strip()
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no answer: {getattr(reason, 'strerror', None) or reason}"


def _scheme(config: Config) -> str:
    return "http" if config.serve.tls is None else "https"


def _reached(host: str) -> str:
    """An address to call, where a service listens on all."""
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
