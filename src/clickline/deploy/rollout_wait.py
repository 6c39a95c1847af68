"""Which version a roll-out is meant to bring, and waiting until every predictor answers with it: the last step of
a workflow, and what a pipeline's pod leaves for `apply --wait`."""

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
"""In a container of Kubernetes: what is written here stands in its pod's status when it has ended."""

_REQUEST_SECONDS = 5.0
_POLL_SECONDS = 2.0


def rollout_host(name: str) -> str:
    """A name behind which are the addresses of all predictors, ready or not."""
    return f"{name}-rollout"


def rollout_service(plan: DeployPlan) -> Object:
    """That name. Clients have another, with one address for those that are ready."""
    return plan.object(
        "v1",
        "Service",
        rollout_host(plan.name),
        "predictor",
        {
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": plan.selector("predictor"),
                "ports": [{"name": "http", "port": plan.config.serve.http_port}],
            }
        },
    )


def write_published_version(config: Config, place: Path = TERMINATION_LOG) -> None:
    """At the end of a pipeline, in a pod: which version is current now. Elsewhere nothing is written."""
    if place.exists() and (move := registry_of(config).current()) is not None:
        place.write_text(f"version {move.version}")


def read_published_version(message: str) -> int | None:
    """What `leave_version` wrote."""
    found = re.fullmatch(r"version (\d+)", message.strip())
    return None if found is None else int(found[1])


def await_rollout(
    config: Config, progress: Progress, *, host: str | None = None, seconds: float = 900.0
) -> int:
    """How many predictors serve the current version, once all do; 0: there are none. Raises ClicklineError when one
    does not in time."""
    move = registry_of(config).current()
    if move is None:
        raise ClicklineError("the registry has no current version to roll out. Publish one first.")
    deadline = time.monotonic() + seconds
    behind = ""
    while True:
        predictors = _addresses(host or rollout_host(config.name), config.serve.http_port)
        lacking = {
            place: found
            for place in predictors
            if (found := _missing_version(config, place, move.version)) is not None
        }
        if not lacking:
            return len(predictors)
        if (told := "; ".join(f"{place}: {found}" for place, found in lacking.items())) != behind:
            behind = told
            progress.log(f"version {move.version} is awaited: {told}")
        if time.monotonic() > deadline:
            raise ClicklineError(
                f"{len(lacking)} of {pluralize(len(predictors), 'predictor')} without version {move.version} after "
                f"{seconds:,.0f} s: {told}. Their logs tell why: clickline deploy logs predictor"
            )
        time.sleep(_POLL_SECONDS)


def _addresses(host: str, port: int) -> list[str]:
    """Of all predictors; none when nothing has the name."""
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
    """None if it does; else what it says instead."""
    section = config.serve
    asked = Request(f"{'http' if section.tls is None else 'https'}://{place}/v1/models/{config.name}")
    if section.token_file is not None:
        asked.add_header(
            "Authorization", f"Bearer {Path(section.token_file).read_text().partition(chr(10))[0]}"
        )
    context = None
    if section.tls is not None:
        context = ssl.create_default_context(cafile=section.tls.ca or section.tls.certificate)
        context.check_hostname = False  # it is asked by its address, which no certificate names
    try:
        with urlopen(asked, timeout=_REQUEST_SECONDS, context=context) as answer:
            states = json.load(answer)["model_version_status"]
    except (URLError, OSError, ValueError, KeyError) as error:
        return f"no answer ({getattr(error, 'reason', None) or error})"
    serves = [str(one["version"]) for one in states if one["state"] == "AVAILABLE"]
    return None if str(version) in serves else f"serves {', '.join(serves) or 'none'}"
