"""Copies files to and from the data volume, through a pod that mounts it for the duration of the transfer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from posixpath import join, normpath

from clickline.deploy.deploy_status import is_over, pod_status, unbound_claims
from clickline.deploy.file_transfer import TransferTotal, list_files, receive, send, transfer_total
from clickline.deploy.kube_client import ApiError, Kube, if_allowed
from clickline.deploy.objects import Object, describe
from clickline.deploy.prerequisites import (
    check_apis,
    check_namespace,
    check_owner,
    check_references,
    create_namespace,
)
from clickline.deploy.render import Rendered
from clickline.deploy.retained_volumes import is_stale_reservation, release_volume
from clickline.errors import ClusterError, ConfigError, Mistake, StorageError
from clickline.progress import Progress, SlowTask

_READY_SECONDS = 300.0
_FAILED_SECONDS = 30.0
"""How long a pod may be in a failed state: an image pull may succeed at the second attempt."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class TransferResult:
    """What was transferred."""

    files: int
    bytes: int
    source: str
    target: str


def push(kube: Kube, rendered: Rendered, path: Path, progress: Progress) -> TransferResult:
    """Copy local files into the volume."""
    volume = _mount_path(rendered)
    if not path.exists():
        raise StorageError(f"{path} does not exist. Name a local file or folder.")
    files = list_files(path)
    if not files:
        raise StorageError(f"{path} contains no files.")
    total = transfer_total(path, files)
    inside = _relative_path(rendered, path.parent if total.single else path)
    target = normpath(join(volume, inside or "."))
    with _pod(kube, rendered, progress) as pod:
        command = ["clickline", "deploy", "data-receive", target]
        with kube.exec(rendered.namespace, pod, "data", command) as process:
            progress.begin(f"sending {path}", total_bytes=total.bytes)
            try:
                send(files, total, process, lambda size: progress.advance(size=size))
                arrived = process.readline(4096).decode(errors="replace").strip()
                process.check()
            finally:
                progress.end()
    expected = f"{total.files} {total.bytes}"
    if arrived != expected:
        raise ClusterError(
            f"{target} received {arrived or 'nothing'} (files, bytes), and {expected} were sent. Send it again."
        )
    return TransferResult(total.files, total.bytes, str(path), target)


def pull(kube: Kube, rendered: Rendered, path: Path, progress: Progress) -> TransferResult:
    """Copy files from the volume to this machine."""
    source = normpath(join(_mount_path(rendered), _relative_path(rendered, path) or "."))

    def folder_for(total: TransferTotal) -> Path:
        progress.begin(f"receiving {source}", total_bytes=total.bytes)
        return path.parent if total.single else path

    with _pod(kube, rendered, progress) as pod:
        command = ["clickline", "deploy", "data-send", source]
        with kube.exec(rendered.namespace, pod, "data", command) as process:
            try:
                total = receive(process, folder_for, lambda size: progress.advance(size=size))
            except ClusterError:
                process.check()  # its own message is more helpful than that the stream ended
                raise
            progress.end()
            process.check()
    return TransferResult(total.files, total.bytes, source, str(path))


def _mount_path(rendered: Rendered) -> str:
    if rendered.data_folder is None:
        problem = "is none: the logs are in an object store, and there is no volume to copy files to or from."
        remedy = "Put them into the store that data.train names, or choose another kind of volume."
        raise ConfigError([Mistake("clickline.yaml", 0, "deploy.storage.data.kind", problem, remedy)])
    return rendered.data_folder


def _relative_path(rendered: Rendered, path: Path) -> str | None:
    """A local path relative to the folder that corresponds to the volume; None if it is outside of it."""
    # Without `..`, which would lead out of the volume; links are not resolved.
    absolute, folder = (Path(normpath(one.absolute())) for one in (path, rendered.local_folder))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else None


# ── the pod ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _pod(kube: Kube, rendered: Rendered, progress: Progress) -> Iterator[str]:
    """A ready pod for one transfer; it is deleted afterwards in any case."""
    *needed, item = rendered.data_pod_objects
    _create_missing(kube, rendered, [*needed, item], progress)
    name = f"{item['metadata']['name']}-{secrets.token_hex(3)}"
    pod = {**item, "metadata": {**item["metadata"], "name": name}}
    try:
        kube.apply(pod)  # inside `try`: Ctrl-C may come before the response
        _await_ready(kube, rendered, pod, progress)
        yield name
    finally:
        try:
            kube.delete(pod)
        except ClusterError as error:  # must not hide an earlier error; the pod ends by itself after a day
            progress.log(
                f"Pod {name} could not be deleted: {error} kubectl -n {rendered.namespace} delete pod {name}"
            )


def _create_missing(kube: Kube, rendered: Rendered, objects: list[Object], progress: Progress) -> None:
    """Create the objects that do not exist; only `apply` changes existing ones."""
    check_apis(kube, objects)
    if (fresh := check_namespace(kube, objects, rendered.namespace)) is not None:
        create_namespace(kube, fresh)
        progress.log(f"created    {describe(fresh)}")
    notes: list[str] = []
    check_references(kube, objects, rendered.namespace, notes)
    for line in notes:
        progress.log(line)
    for one in objects[:-1]:
        live = kube.live(one)
        if live is None:
            kube.apply(one)
            progress.log(f"created    {describe(one)}")
            continue
        check_owner(live, rendered.name)
        if one["kind"] == "PersistentVolume" and is_stale_reservation(kube, one, live):
            release_volume(kube, live)
            progress.log(
                f"released   {describe(one)}: it was still reserved for a deleted claim; the new claim gets it, with "
                "its files"
            )


def _await_ready(kube: Kube, rendered: Rendered, pod: Object, progress: Progress) -> None:
    name, begun = pod["metadata"]["name"], time.monotonic()
    failed_since: float | None = None
    with SlowTask(progress, f"waiting for Pod {name}") as slow:
        while True:
            live = kube.live(pod)
            if live is None:
                raise ClusterError(f"Pod {name} was deleted before it was ready. Try again.")
            state, why = _state(kube, rendered, live)
            if state == "running":
                return
            now = time.monotonic()
            failed_since = None if state != "failed" else failed_since or now
            stuck = failed_since is not None and now - failed_since > _FAILED_SECONDS
            if stuck or is_over(live) or now - begun > _READY_SECONDS:
                raise ClusterError(f"Pod {name} is not ready after {now - begun:.0f} s: {why or state}.")
            slow.tick(why or state)
            time.sleep(_POLL_SECONDS)


def _state(kube: Kube, rendered: Rendered, pod: Object) -> tuple[str, str]:
    """The pod's state and the reason, as `deploy status` reports them."""
    name = pod["metadata"]["name"]
    events = if_allowed(kube.list, "v1", "Event", rendered.namespace)
    about = [
        one
        for one in (() if isinstance(events, ApiError) else events)  # they only explain why it waits
        if one.get("type") == "Warning" and one["involvedObject"].get("name") == name
    ]
    status = pod_status(pod, "data", {}, about, {})
    waits = [] if status["state"] == "running" else _unbound_claims(kube, rendered)
    return status["state"], "; ".join(part for part in (status["why"], *waits) if part)


def _unbound_claims(kube: Kube, rendered: Rendered) -> list[str]:
    """The claims of the pod that are not bound, and why."""
    named = [one for one in rendered.data_pod_objects if one["kind"] == "PersistentVolumeClaim"]
    claims = [claim for one in named if (claim := kube.live(one)) is not None]
    return [
        f"claim {name} {state}" + (f": {why}" if why else "")
        for name, state, why in unbound_claims(kube, claims)
    ]
