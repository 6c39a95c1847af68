"""A small deployment named ads in namespace shop, and pods in various states."""

from __future__ import annotations

from typing import Any

from clickline.config import Config
from clickline.progress import Progress

Object = dict[str, Any]

ADS = Config.model_validate({"name": "ads", "data": {"train": "x"}, "deploy": {"namespace": "shop"}})


def labels(role: str, name: str = "ads") -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "clickline",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": "clickline",
    }


def item(api: str, kind: str, name: str, role: str, **body: Any) -> Object:
    metadata = {"name": name, "namespace": "shop", "labels": labels(role)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def template(role: str, image: str = "clickline:0.1.0", **spec: Any) -> Object:
    containers = [{"name": role, "image": image}]
    return {"metadata": {"labels": labels(role)}, "spec": {"containers": containers, **spec}}


def deployment(image: str = "clickline:0.1.0", **spec: Any) -> Object:
    made = template("predictor", image, **spec)
    return item("apps/v1", "Deployment", "ads-predictor", "predictor", spec={"replicas": 2, "template": made})


def job(image: str = "clickline:0.1.0") -> Object:
    return item("batch/v1", "Job", "ads-pipeline", "pipeline", spec={"template": template("pipeline", image)})


def ours() -> list[Object]:
    """Unordered on purpose: apply sorts the objects."""
    namespace = item("v1", "Namespace", "shop", "access")
    del namespace["metadata"]["namespace"]
    ports = [{"name": "http", "port": 8501}, {"name": "grpc", "port": 8500}]
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return [
        job(),
        deployment(),
        item("v1", "Service", "ads-predictor", "predictor", spec={"type": "NodePort", "ports": ports}),
        item("v1", "PersistentVolumeClaim", "ads-models", "storage", spec=claim),
        item("v1", "ConfigMap", "ads-config", "config", data={"clickline.yaml": "name: ads\n"}),
        item("v1", "ServiceAccount", "ads-access", "access"),
        namespace,
    ]


def container(name: str, *, restarts: int = 0, last: Object | None = None, **state: Any) -> Object:
    found: Object = {"name": name, "restartCount": restarts, "ready": "running" in state, "state": state}
    return found if last is None else {**found, "lastState": {"terminated": last}}


def pod(
    name: str,
    role: str,
    phase: str,
    *containers: Object,
    ready: bool = False,
    uid: str | None = None,
    **more: Any,
) -> Object:
    made = item("v1", "Pod", name, role, spec={"nodeName": "node-1"})
    made["metadata"]["uid"] = uid or f"uid-of-{name}"
    since = {"lastTransitionTime": more.pop("since", "2026-11-16T10:00:30Z")}
    conditions = [{"type": "Ready", "status": str(ready), **since}, *more.pop("conditions", ())]
    made["status"] = {"phase": phase, "conditions": conditions, "containerStatuses": list(containers), **more}
    return made


def event(
    about: str, reason: str, message: str, *, kind: str = "Pod", at: str = "2026-11-16T10:00:00Z"
) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about}.{reason}.{at}", "namespace": "shop"},
        "type": "Warning",
        "involvedObject": {"kind": kind, "name": about},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


class RecordedProgress(Progress):
    """Keeps everything that it is given."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.sizes: list[int] = []

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.titles.append(title)

    def log(self, message: str) -> None:
        self.lines.append(message)

    def note(self, figures: str) -> None:
        self.notes.append(figures)

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.sizes.append(size)
