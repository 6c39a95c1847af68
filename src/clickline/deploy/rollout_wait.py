"""Waits until every predictor serves the published version: the last step of a workflow. Also records that version in a
pipeline's pod for `apply --wait`."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from clickline.artifacts.from_config import registry_of
from clickline.config import Config
from clickline.deploy.objects import DeployPlan, Object
from clickline.errors import ClicklineError
from clickline.progress import Progress, pluralize

TERMINATION_LOG = Path("/dev/termination-log")
"""A file in a container whose content Kubernetes copies to the pod's status when the container ends."""

_REQUEST_SECONDS = 5.0
_POLL_SECONDS = 2.0


def rollout_host(name: str) -> str:
    """A host name that resolves to the addresses of all predictors, ready or not."""
    return f"{name}-rollout"


def rollout_service(plan: DeployPlan) -> Object:
    """The Service of `rollout_host`. Clients use another one, for ready predictors only."""
    ports: list[Object] = [{"name": "http", "port": plan.config.serve.http_port}]
    return plan.headless_service(rollout_host(plan.name), "predictor", ports)


def write_published_version(config: Config, place: Path = TERMINATION_LOG) -> None:
    """At the end of a pipeline, record the current version in the pod's status. Outside a pod, do nothing."""
    if place.exists() and (move := registry_of(config).current()) is not None:
        place.write_text(f"version {move.version}")


def read_published_version(message: str) -> int | None:
    """The version that `write_published_version` recorded."""
    found = re.fullmatch(r"version (\d+)", message.strip())
    return None if found is None else int(found[1])


def await_rollout(
    config: Config, progress: Progress, *, host: str | None = None, seconds: float = 900.0
) -> int:
    """Wait until all predictors serve the current version; returns their number. Raises ClicklineError on timeout."""
    move = registry_of(config).current()
    if move is None:
        raise ClicklineError("the registry has no current version to roll out. Publish one first.")
    deadline = time.monotonic() + seconds
    last_status = ""
    while True:
        predictors = _addresses(host or rollout_host(config.name), config.serve.http_port)
        lacking = {
            place: found
            for place in predictors
            if (found := _missing_version(config, place, move.version)) is not None
        }
        if not lacking:
            return len(predictors)
        if (status := "; ".join(f"{place}: {found}" for place, found in lacking.items())) != last_status:
            last_status = status
            progress.log(f"waiting for version {move.version}: {status}")
        if time.monotonic() > deadline:
            raise ClicklineError(
                f"{len(lacking)} of {pluralize(len(predictors), 'predictor')} without version {move.version} after "
                f"{seconds:,.0f} s: {status}. See their logs: clickline deploy logs predictor"
            )
        time.sleep(_POLL_SECONDS)


def _addresses(host: str, port: int) -> list[str]:
    """The addresses of all predictors; empty if the host name does not exist."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted(
        {
            f"[{place[0]}]:{port}" if kind == socket.AF_INET6 else f"{place[0]}:{port}"
            for kind, *_, place in found
        }
    )


def _missing_version(config: Config, place: str, version: int) -> str | None:
    """None if the predictor serves the version; otherwise what it serves, or why it does not respond."""
    section = config.serve
    asked = Request(f"{'http' if section.tls is None else 'https'}://{place}/v1/models/{config.name}")
    if section.token_file is not None:
        asked.add_header(
            "Authorization", f"Bearer {Path(section.token_file).read_text().partition(chr(10))[0]}"
        )
    context = None
    if section.tls is not None:
        context = ssl.create_default_context(cafile=section.tls.ca or section.tls.certificate)
        context.check_hostname = False  # connected by IP address, which is in no certificate
    try:
        with urlopen(asked, timeout=_REQUEST_SECONDS, context=context) as answer:
            states = json.load(answer)["model_version_status"]
    except (URLError, OSError, ValueError, KeyError) as error:
        return f"no response ({getattr(error, 'reason', None) or error})"
    serves = [str(one["version"]) for one in states if one["state"] == "AVAILABLE"]
    return None if str(version) in serves else f"serves {', '.join(serves) or 'none'}"
