"""The addresses of a server and a `curl` command to try it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from clickline.machine import connect_host

if TYPE_CHECKING:
    from clickline.config import Config

_HEALTH_SECONDS = 1.0


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a server."""

    grpc: str
    http: str
    metrics: str
    curl: str  # a shell command

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def endpoint_of(config: Config, example: Mapping[str, Any] | None = None) -> Endpoint:
    """The endpoint of a config. The `curl` command scores the row `example`; without one it reads the model's
    status."""
    section = config.serve
    host, scheme = _in_url(section.host), _scheme(config)
    token = (
        "" if section.token_file is None else f' -H "Authorization: Bearer $(head -n1 {section.token_file})"'
    )
    ca = "" if section.tls is None else f" --cacert {section.tls.ca or section.tls.certificate}"
    url = f"{scheme}://{_in_url(connect_host(section.host))}:{section.http_port}/v1/models/{config.name}"
    rows = "" if example is None else shlex.quote(json.dumps({"instances": [example]}))
    target = f"{url}:predict -d {rows}" if rows else url
    return Endpoint(
        grpc=f"{host}:{section.grpc_port}",
        http=f"{scheme}://{host}:{section.http_port}",
        metrics=f"{scheme}://{host}:{section.metrics_port}/metrics",
        curl=f"curl{ca}{token} {target}",
    )


def readiness(config: Config) -> str:
    """The result of /readyz: "ready", what is missing, or why the server did not answer."""
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    section = config.serve
    context = None
    if section.tls is not None:
        context = ssl.create_default_context()
        context.check_hostname = False  # the server is on this machine, and nothing secret is sent
        context.verify_mode = ssl.CERT_NONE
    url = f"{_scheme(config)}://{_in_url(connect_host(section.host))}:{section.metrics_port}/readyz"
    try:
        with urlopen(url, timeout=_HEALTH_SECONDS, context=context) as answer:
            return str(answer.read(1000).decode(errors="replace").strip().partition("\n")[0])
    except HTTPError as error:
        with error:
            return error.read(1000).decode(errors="replace").strip()
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no answer: {getattr(reason, 'strerror', None) or reason}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _scheme(config: Config) -> str:
    return "http" if config.serve.tls is None else "https"
