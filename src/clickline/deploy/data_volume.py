"""The data volume from here: a pod that mounts it for as long as files go there or come from there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from posixpath import join, normpath

from clickline.deploy.deploy_status import summarize, unbound_claims
from clickline.deploy.file_transfer import TransferTotal, list_files, receive, send, transfer_total
from clickline.deploy.kube_client import ApiError, Kube, describe
from clickline.deploy.objects import Object
from clickline.deploy.prerequisites import (
    check_apis,
    check_namespace,
    check_references,
    create_namespace,
    is_ours,
    owner_of,
)
from clickline.deploy.render import Rendered
from clickline.deploy.retained_volumes import is_stale_reservation, release_volume
from clickline.errors import ClusterError, ConfigError, Mistake, StorageError
from clickline.progress import Progress, SlowTask

_READY_SECONDS = 300.0
_FAILED_SECONDS = 30.0
"""That a pod may be in a state that says failed: an image may come at the second try."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class TransferResult:
    files: int
    bytes: int
    source: str
    target: str


def push(kube: Kube, made: Rendered, path: Path, progress: Progress) -> TransferResult:
    """Files from here into the volume."""
    volume = _mount_path(made)
    if not path.exists():
        raise StorageError(f"{path} does not exist. Name a file or a folder of this machine.")
    files = list_files(path)
    if not files:
        raise StorageError(f"{path} holds no files.")
    total = transfer_total(path, files)
    inside = _relative_path(made, path.parent if total.single else path)
    target = normpath(join(volume, inside or "."))
    with _pod(kube, made, progress) as pod:
        command = ["clickline", "deploy", "data-receive", target]
        with kube.execute(made.namespace, pod, "data", command) as process:
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
            f"{target} got {arrived or 'nothing'} (files, bytes), and {expected} were sent. Send it again."
        )
    return TransferResult(total.files, total.bytes, str(path), target)


def pull(kube: Kube, made: Rendered, path: Path, progress: Progress) -> TransferResult:
    """Files from the volume to here."""
    source = normpath(join(_mount_path(made), _relative_path(made, path) or "."))

    def folder_for(total: TransferTotal) -> Path:
        progress.begin(f"receiving {source}", total_bytes=total.bytes)
        return path.parent if total.single else path

    with _pod(kube, made, progress) as pod:
        command = ["clickline", "deploy", "data-send", source]
        with kube.execute(made.namespace, pod, "data", command) as process:
            try:
                total = receive(process, folder_for, lambda size: progress.advance(size=size))
            except ClusterError:
                process.check()  # what it said itself tells more than that the stream ended
                raise
            progress.end()
            process.check()
    return TransferResult(total.files, total.bytes, source, str(path))


def _mount_path(made: Rendered) -> str:
    if made.data_folder is None:
        problem = "is none: the logs lie in a store, and there is no volume to move files to or from."
        remedy = "Put them into the store that data.train names, or choose another kind of volume."
        raise ConfigError([Mistake("clickline.yaml", 0, "deploy.storage.data.kind", problem, remedy)])
    return made.data_folder


def _relative_path(made: Rendered, path: Path) -> str | None:
    """Where in the volume a path of this machine lies; None if it is not in the folder that the volume stands for."""
    # Without `..`, which would lead out of the volume; links stay what the user calls them.
    whole, folder = (Path(normpath(one.absolute())) for one in (path, made.local_folder))
    return whole.relative_to(folder).as_posix() if whole.is_relative_to(folder) else None


# ── the pod ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _pod(kube: Kube, made: Rendered, progress: Progress) -> Iterator[str]:
    """A pod of its own that is ready; it goes again whatever happens."""
    *needed, item = made.data_pod_objects
    _create_missing(kube, made, [*needed, item], progress)
    name = f"{item['metadata']['name']}-{secrets.token_hex(3)}"
    pod = {**item, "metadata": {**item["metadata"], "name": name}}
    try:
        kube.apply(pod)  # in here: a Ctrl-C may come while the answer is on its way
        _await_ready(kube, made, pod, progress)
        yield name
    finally:
        try:
            kube.delete(pod)
        except (
            ClusterError
        ) as error:  # what went wrong before it is not hidden; by itself the pod ends in a day
            progress.log(
                f"Pod {name} could not be removed: {error} kubectl -n {made.namespace} delete pod {name}"
            )


def _create_missing(kube: Kube, made: Rendered, objects: list[Object], progress: Progress) -> None:
    """What is there stays as it is: changing it is `apply`'s."""
    check_apis(kube, objects)
    own = next((one for one in objects if one["kind"] == "Namespace"), None)
    if (fresh := check_namespace(kube, own, made.namespace)) is not None:
        create_namespace(kube, fresh)
        progress.log(f"created    {describe(fresh)}")
    notes: list[str] = []
    check_references(kube, objects, made.namespace, notes)
    for line in notes:
        progress.log(line)
    for one in objects[:-1]:
        live = kube.live(one)
        if live is None:
            kube.apply(one)
            progress.log(f"created    {describe(one)}")
        elif not is_ours(live, made.name):
            raise ClusterError(
                f"{describe(one)} exists and was not made by this deployment ({owner_of(live)}). "
                "Rename the deployment (name:), choose another deploy.namespace, or remove that object."
            )
        elif one["kind"] == "PersistentVolume" and is_stale_reservation(kube, one, live):
            release_volume(kube, live)
            progress.log(
                f"freed      {describe(one)}: it was still reserved for a claim that is gone; the new claim gets it, with "
                "the files that lie on it"
            )


def _await_ready(kube: Kube, made: Rendered, pod: Object, progress: Progress) -> None:
    name, begun = pod["metadata"]["name"], time.monotonic()
    failed_since: float | None = None
    with SlowTask(progress, f"waiting for Pod {name}") as slow:
        while True:
            live = kube.live(pod)
            if live is None:
                raise ClusterError(f"Pod {name} was removed before it was ready. Try again.")
            state, why = _state(kube, made, live)
            if state == "running":
                return
            now = time.monotonic()
            failed_since = None if state != "failed" else failed_since or now
            over = (live.get("status") or {}).get("phase") in ("Failed", "Succeeded")
            if (
                over
                or now - begun > _READY_SECONDS
                or (failed_since and now - failed_since > _FAILED_SECONDS)
            ):
                raise ClusterError(f"Pod {name} is not ready after {now - begun:.0f} s: {why or state}.")
            slow.tick(why or state)
            time.sleep(_POLL_SECONDS)


def _state(kube: Kube, made: Rendered, pod: Object) -> tuple[str, str]:
    """As `deploy status` tells it."""
    name = pod["metadata"]["name"]
    try:
        events = [one for one in kube.list("v1", "Event", made.namespace) if one.get("type") == "Warning"]
    except ApiError as refused:
        if refused.status != 403:
            raise
        events = []  # they say why it waits, and it may be ready all the same
    about = [one for one in events if one["involvedObject"].get("name") == name]
    found = {"name": made.name, "namespace": made.namespace, "objects": [pod], "events": about}
    told = summarize({**found, "served": {}, "notes": []})["roles"][0]["pods"][0]
    if told["state"] == "running":
        return told["state"], told["why"]
    return told["state"], "; ".join(part for part in (told["why"], *_unbound_claims(kube, made)) if part)


def _unbound_claims(kube: Kube, made: Rendered) -> list[str]:
    """The claims of the pod that have no volume, and why."""
    named = [one for one in made.data_pod_objects if one["kind"] == "PersistentVolumeClaim"]
    claims = [claim for one in named if (claim := kube.live(one)) is not None]
    return [
        f"claim {name} {state}" + (f": {why}" if why else "")
        for name, state, why in unbound_claims(kube, claims)
    ]
