"""The differences between what is live and what an apply would make of it, as text that diff tools read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from clickline.deploy.apply import Step, content
from clickline.deploy.kube_client import shown
from clickline.deploy.objects import Object, text


@dataclass(frozen=True)
class Difference:
    object: str
    action: str
    """created, changed, replaced or removed."""
    diff: str


def differences(steps: Sequence[Step]) -> list[Difference]:
    """One for each object that would not stay as it is. Secrets are named by objects, never part of them."""
    return [
        Difference(shown(step.item), step.action, _diff(step)) for step in steps if step.action != "unchanged"
    ]


def _diff(step: Step) -> str:
    place = f"{step.item['kind']}/{step.item['metadata']['name']}"
    live = [] if step.live is None else _lines(step.live)
    new = [] if step.action == "removed" else _lines(step.new or step.item, step.item)
    names = ("/dev/null" if not live else f"live/{place}", "/dev/null" if not new else f"new/{place}")
    return "\n".join(unified_diff(live, new, *names, lineterm=""))


def _lines(item: Object, named: Object | None = None) -> list[str]:
    """An object as YAML without what the server writes into each. One that is made anew was tried under another
    name."""
    cleaned = deepcopy(content(item))
    if named is not None:
        cleaned["metadata"] = {**cleaned["metadata"], "name": named["metadata"]["name"]}
    if (item["apiVersion"], item["kind"]) == ("batch/v1", "Job"):
        cleaned = _without_own_labels(cleaned)
    return text([_sorted(cleaned)]).splitlines()


_OF_JOB = ("controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name")


def _without_own_labels(job: Object) -> Object:
    """By what a Job knows its pods is another thing in each."""
    job.get("spec", {}).pop("selector", None)
    for holder in (job, job.get("spec", {}).get("template") or {}):
        for label in _OF_JOB:
            ((holder.get("metadata") or {}).get("labels") or {}).pop(label, None)
    return job


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value
