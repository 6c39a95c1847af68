"""The logs of a deployment's pods: of all containers in order of time, and followed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from clickline.config import Config
from clickline.deploy.deploy_status import (
    LONG_RUNNING,
    SCHEDULED,
    WORKLOADS,
    containers,
    created,
    desired_pods,
    finished,
    is_over,
)
from clickline.deploy.kube_client import ApiError, Kube
from clickline.deploy.objects import Object, instance_labels
from clickline.errors import ClusterError

_POLL_SECONDS = 2.0


class PodLogLine(NamedTuple):
    """A line of a container's log."""

    at: str
    pod: str
    container: str
    text: str


class _Source(NamedTuple):
    """One run of a container; a restart is another."""

    pod: str
    uid: str
    container: str
    restarts: int


def list_pods(kube: Kube, config: Config, role: str | None) -> list[Object]:
    """The pods of a role, or of all roles; oldest first."""
    labels = instance_labels(config.name) | ({} if role is None else {"app.kubernetes.io/component": role})
    found = kube.list("v1", "Pod", config.deploy.namespace, labels)
    return sorted(found, key=lambda pod: (created(pod), pod["metadata"]["name"]))


def last_lines(
    kube: Kube, found: Sequence[Object], *, namespace: str, lines: int, previous: bool = False
) -> list[PodLogLine]:
    """The last lines of all containers together, or of their previous runs."""
    sources = [one for pod in found for one in _sources(pod) if one.restarts or not previous]
    options = {"previous": "true"} if previous else {}
    collected = [
        line for one in sources for line in _read(kube, namespace, one, tailLines=str(lines), **options)
    ]
    collected.sort(key=lambda line: line.at)
    return collected[-lines:] if lines else []


def _sources(pod: Object) -> list[_Source]:
    """The containers that have started."""
    metadata = pod["metadata"]
    return [
        _Source(metadata["name"], metadata.get("uid", ""), one["name"], one.get("restartCount", 0))
        for one in containers(pod)
        if not (one.get("state") or {}).get("waiting") or one.get("restartCount", 0)
    ]


def _read(kube: Kube, namespace: str, source: _Source, **options: str) -> Iterator[PodLogLine]:
    """The lines of one container (`options`: see `Kube.log`); none if it has no log yet or its pod is gone."""
    try:
        for text in kube.log(namespace, source.pod, source.container, **options):
            at, _, message = text.partition(" ")
            if at > options.get("sinceTime", ""):  # which has whole seconds: their lines come again
                yield PodLogLine(at, source.pod, source.container, message)
    except ApiError as refused:
        if refused.status not in (400, 404):
            raise


def follow(kube: Kube, config: Config, role: str | None, after: Sequence[PodLogLine]) -> Iterator[PodLogLine]:
    """The lines after `after`, also of pods that start later. Ends when no pod runs and none will."""
    lines: queue.SimpleQueue[PodLogLine | ClusterError] = queue.SimpleQueue()
    last_seen: dict[tuple[str, str], str] = {}
    for line in after:
        last_seen[line.pod, line.container] = max(line.at, last_seen.get((line.pod, line.container), ""))
    readers: dict[_Source, threading.Thread] = {}

    def read(source: _Source) -> None:
        try:
            since = last_seen.get((source.pod, source.container))
            options = {} if since is None else {"sinceTime": since}
            for line in _read(kube, config.deploy.namespace, source, follow="true", **options):
                last_seen[source.pod, source.container] = line.at
                lines.put(line)
        except ApiError as refused:
            lines.put(refused)
        except ClusterError:
            return  # disconnected, or idle for long: the next poll resumes it

    done: set[_Source] = set()
    while True:
        found = list_pods(kube, config, role)
        for pod in found:
            for source in _sources(pod):
                reader = readers.get(source)
                if source in done or (reader is not None and reader.is_alive()):
                    continue
                if reader is not None and is_over(pod):
                    done.add(source)  # read to the end after the pod had finished
                    continue
                readers[source] = threading.Thread(target=read, args=(source,), daemon=True)
                readers[source].start()
        deadline = time.monotonic() + _POLL_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                item = lines.get(timeout=remaining)
            except queue.Empty:
                break
            if isinstance(item, ClusterError):
                raise item
            yield item
        reading = any(reader.is_alive() for reader in readers.values())
        if not reading and _is_finished(kube, config, found, role) and lines.empty():
            return


def _is_finished(kube: Kube, config: Config, found: Sequence[Object], role: str | None) -> bool:
    """Whether no pod runs and none will."""
    if not all(map(is_over, found)):
        return False
    labels, namespace = instance_labels(config.name), config.deploy.namespace
    workloads = [one for api, kind in WORKLOADS for one in kube.list(api, kind, namespace, labels)]
    if role is not None:
        workloads = [one for one in workloads if role in desired_pods(one)]
    return bool(workloads) and all(
        one["kind"] not in (*LONG_RUNNING, *SCHEDULED) and finished(one) for one in workloads
    )
