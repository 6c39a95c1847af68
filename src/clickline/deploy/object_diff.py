"""Unified diffs between the live objects and what an apply would make of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from clickline.deploy.apply import ObjectChange, without_server_fields
from clickline.deploy.objects import Object, describe, to_yaml


@dataclass(frozen=True)
class ObjectDiff:
    """The change of one object."""

    object: str
    action: str
    """created, changed, replaced or removed."""
    diff: str


def object_diffs(steps: Sequence[ObjectChange]) -> list[ObjectDiff]:
    """One for each object that would change. Objects only name secrets, so none is ever shown."""
    return [
        ObjectDiff(describe(step.item), step.action, _diff(step))
        for step in steps
        if step.action != "unchanged"
    ]


def _diff(step: ObjectChange) -> str:
    place = f"{step.item['kind']}/{step.item['metadata']['name']}"
    live = [] if step.live is None else _lines(step.live)
    new = [] if step.action == "removed" else _lines(step.new or step.item, step.item)
    names = ("/dev/null" if not live else f"live/{place}", "/dev/null" if not new else f"new/{place}")
    return "\n".join(unified_diff(live, new, *names, lineterm=""))


def _lines(item: Object, named: Object | None = None) -> list[str]:
    """The lines of an object's YAML without the server's fields. `named` has the real name of an object that was tried
    under another one."""
    cleaned = deepcopy(without_server_fields(item))
    if named is not None:
        cleaned["metadata"] = {**cleaned["metadata"], "name": named["metadata"]["name"]}
    if (item["apiVersion"], item["kind"]) == ("batch/v1", "Job"):
        cleaned = _without_job_labels(cleaned)
    return to_yaml([_sorted(cleaned)]).splitlines()


_JOB_LABELS = (
    "controller-uid",
    "job-name",
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
)


def _without_job_labels(job: Object) -> Object:
    """The labels and selector that a Job's controller adds differ in every Job."""
    job.get("spec", {}).pop("selector", None)
    for holder in (job, job.get("spec", {}).get("template") or {}):
        for label in _JOB_LABELS:
            ((holder.get("metadata") or {}).get("labels") or {}).pop(label, None)
    return job


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value
