"""A small Kubernetes API server: real HTTP on loopback, objects in memory, no controllers.

It implements what `clickline deploy` uses, as the real one does: discovery, server-side apply with dry run, merge
patches, defaults, immutable fields, labels, deletion with dependents, followed logs, the scale of a StatefulSet, a proxy
to pods. Tests set the state of pods, inject faults, and bind volumes explicitly.
"""

from __future__ import annotations

import base64
import copy
import datetime
import ipaddress
import json
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN = "token-of-the-test"

Kinds = dict[str, dict[str, tuple[str, bool]]]

CORE: Kinds = {
    "v1": {
        "Namespace": ("namespaces", False),
        "Node": ("nodes", False),
        "PersistentVolume": ("persistentvolumes", False),
        "PersistentVolumeClaim": ("persistentvolumeclaims", True),
        "ConfigMap": ("configmaps", True),
        "Secret": ("secrets", True),
        "ServiceAccount": ("serviceaccounts", True),
        "Service": ("services", True),
        "Pod": ("pods", True),
        "Event": ("events", True),
    },
    "apps/v1": {"Deployment": ("deployments", True), "StatefulSet": ("statefulsets", True)},
    "batch/v1": {"Job": ("jobs", True), "CronJob": ("cronjobs", True)},
    "policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
    "autoscaling/v2": {"HorizontalPodAutoscaler": ("horizontalpodautoscalers", True)},
    "networking.k8s.io/v1": {"NetworkPolicy": ("networkpolicies", True)},
    "rbac.authorization.k8s.io/v1": {"Role": ("roles", True), "RoleBinding": ("rolebindings", True)},
    "storage.k8s.io/v1": {"StorageClass": ("storageclasses", False)},
    "scheduling.k8s.io/v1": {"PriorityClass": ("priorityclasses", False)},
}
OPERATORS: Kinds = {
    "batch.volcano.sh/v1alpha1": {"Job": ("jobs", True)},
    "scheduling.volcano.sh/v1beta1": {"PodGroup": ("podgroups", True), "Queue": ("queues", False)},
    "ray.io/v1": {"RayJob": ("rayjobs", True), "RayCluster": ("rayclusters", True)},
    "argoproj.io/v1alpha1": {
        "Workflow": ("workflows", True),
        "CronWorkflow": ("cronworkflows", True),
        "WorkflowTemplate": ("workflowtemplates", True),
    },
    "serving.knative.dev/v1": {"Service": ("services", True)},
}


@dataclass
class Fault:
    """A fault of requests with this verb, plural and, if given, name."""

    verb: str
    plural: str
    status: int = 403
    message: str = ""
    name: str | None = None
    dry_run: bool | None = None
    causes: tuple[tuple[str, str], ...] = ()
    cut: bool = False
    times: int = 1_000_000


@dataclass
class Log:
    """A container's log; an open one can be followed."""

    lines: list[str] = field(default_factory=list)
    open: bool = False
    cut_after: int | None = None
    """Number of lines after which the first reader's connection is closed."""


class _No(Exception):
    def __init__(self, status: int, message: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.causes = causes


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    503: "ServiceUnavailable",
}

Key = tuple[str, str, str, str]


class ApiServer:
    """Objects by (API version, kind, namespace, name)."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.objects: dict[Key, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.logs: dict[tuple[str, str], Log] = {}
        self.previous_logs: dict[tuple[str, str], Log] = {}
        self.pages: dict[tuple[str, str], tuple[int, str]] = {}
        """Maps (pod, path) to the pod's response."""
        self.warnings: dict[str, str] = {}
        """Maps a plural to a warning sent with each of its responses."""
        self.statuses: dict[str, dict[str, Any]] = {}
        """Maps a kind to the status that its controller sets when an object is created or changed."""
        self.linger: dict[str, int] = {}
        """Maps a name to how often the object is still returned after its deletion."""
        self.writes: list[tuple[str, str, str]] = []
        """(verb, kind, name) of every write."""
        self.requests: list[str] = []
        self.volume: Path | None = None
        """The folder that pods mount as /clickline/data; commands in pods are really run, with it in its place."""
        self.cut_exec_after: int | None = None
        """Bytes of input after which the connection to a command is closed, once."""
        self.subprotocols = ("v5.channel.k8s.io", "v4.channel.k8s.io")
        self.changed = threading.Condition()
        self._applied: dict[Key, dict[str, Any]] = {}
        self._version = 100
        self.url = ""
        self.certificate = Path()

    # ── what tests do ──────────────────────────────────────────────────────────────────────────

    def put(self, item: dict[str, Any]) -> dict[str, Any]:
        """Store an object without checks, like a controller."""
        metadata = item["metadata"]
        key = (item["apiVersion"], item["kind"], metadata.get("namespace", ""), metadata["name"])
        with self.changed:
            stored = copy.deepcopy(item)
            stored["metadata"].setdefault("uid", str(uuid.uuid4()))
            stored["metadata"].setdefault("creationTimestamp", "2026-11-16T10:00:00Z")
            self.objects[key] = stored
            self.changed.notify_all()
        return stored

    def namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        self.put(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}
        )
        self._fill(name)

    def one(self, kind: str, name: str) -> dict[str, Any] | None:
        with self.changed:
            return next(
                (item for key, item in self.objects.items() if (key[1], key[3]) == (kind, name)), None
            )

    def names(self, kind: str) -> list[str]:
        with self.changed:
            return sorted(key[3] for key in self.objects if key[1] == kind)

    def say(self, pod: str, container: str, *lines: str) -> None:
        """Append lines to an open log."""
        with self.changed:
            self.logs.setdefault((pod, container), Log(open=True)).lines.extend(lines)
            self.changed.notify_all()

    def end_log(self, pod: str, container: str) -> None:
        with self.changed:
            self.logs[pod, container].open = False
            self.changed.notify_all()

    def kubeconfig(
        self, path: Path, *, token: str = TOKEN, server: str | None = None, trusted: bool = True
    ) -> Path:
        trust = {"certificate-authority": str(self.certificate)} if trusted else {}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "small", "cluster": {"server": server or self.url, **trust}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "small", "user": "me"}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))
        return path

    # ── verbs ──────────────────────────────────────────────────────────────────────────────────

    def check(self, verb: str, plural: str, name: str, *, dry_run: bool) -> Fault | None:
        with self.changed:
            for fault in self.faults:
                if (fault.verb, fault.plural) != (verb, plural) or fault.times < 1:
                    continue
                if fault.name in (None, name) and fault.dry_run in (None, dry_run):
                    fault.times -= 1
                    return fault
        return None

    def get(self, key: Key) -> dict[str, Any]:
        with self.changed:
            found = self.objects.get(key)
            if found is None:
                raise _No(404, f'{key[1]} "{key[3]}" not found')
            if found["metadata"].get("deletionTimestamp"):
                self.linger[key[3]] = self.linger.get(key[3], 0) - 1
                if self.linger[key[3]] < 0:
                    self._drop(key)
                    raise _No(404, f'{key[1]} "{key[3]}" not found')
            return found

    def list(self, api: str, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        wanted = dict(one.split("=", 1) for one in selector.split(",")) if selector else {}
        with self.changed:
            for key in [key for key in self.objects if key[:2] == (api, kind) == ("v1", "Pod")]:
                if key[3] in self.linger:
                    with suppress(_No):
                        self.get(key)  # counts how often it is returned
            return [
                item
                for key, item in self.objects.items()
                if key[:2] == (api, kind) and (not namespace or key[2] == namespace)
                if wanted.items() <= (item["metadata"].get("labels") or {}).items()
            ]

    def apply(self, key: Key, item: dict[str, Any], *, dry_run: bool) -> tuple[int, dict[str, Any]]:
        with self.changed:
            if key[2] and ("v1", "Namespace", "", key[2]) not in self.objects:
                raise _No(404, f'namespaces "{key[2]}" not found')
            live = self.objects.get(key)
            if live is None:
                new = copy.deepcopy(item)
                new["metadata"]["uid"] = str(uuid.uuid4())
                new["metadata"]["creationTimestamp"] = "2026-11-16T10:00:00Z"
                _defaults(new)
            else:
                new = _without(copy.deepcopy(live), self._applied.get(key, {}), item)
                new = _merged(new, item)
                _defaults(new)
                _check_fixed(live, new)
            if live is not None and new == live:
                return 200, live
            if live is None or live.get("spec") != new.get("spec"):
                new["metadata"]["generation"] = (live or new)["metadata"].get("generation", 0) + 1
            new["metadata"]["resourceVersion"] = str(self._version + 1)
            if dry_run:
                return (200 if live else 201), new
            self._version += 1
            if key[1] in self.statuses:
                new["status"] = copy.deepcopy(self.statuses[key[1]])
            self.objects[key] = new
            self._applied[key] = copy.deepcopy(item)
            self.writes.append(("apply", key[1], key[3]))
            if key[1] == "Namespace":
                self._fill(key[3])
            self.changed.notify_all()
            return (200 if live else 201), new

    def patch(self, key: Key, changes: dict[str, Any]) -> dict[str, Any]:
        """A merge patch. One with a resourceVersion is rejected if there is a newer one."""
        with self.changed:
            live = self.get(key)
            meant = (changes.get("metadata") or {}).get("resourceVersion")
            if meant not in (None, live["metadata"].get("resourceVersion")):
                raise _No(409, f'Operation cannot be fulfilled on "{key[3]}": the object has been modified')
            new = _patched(live, changes)
            _check_fixed(live, new)
            self._version += 1
            new["metadata"]["resourceVersion"] = str(self._version)
            self.objects[key] = new
            self.writes.append(("patch", key[1], key[3]))
            self.changed.notify_all()
            return new

    def scale(self, key: Key, changes: dict[str, Any] | None) -> dict[str, Any]:
        """The scale of a StatefulSet, after a merge patch if `changes` are given. Tests set the number of pods."""
        live = self.get(key) if changes is None else self.patch(key, {"spec": changes["spec"]})
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": key[3], "namespace": key[2]},
            "spec": {"replicas": live["spec"].get("replicas", 0)},
            "status": {"replicas": (live.get("status") or {}).get("replicas", 0)},
        }

    def bind_volumes(self) -> None:
        """One round of the volume controller, for claims that name their volume: as in syncVolume and
        syncUnboundClaim of pv_controller.go."""
        with self.changed:
            volumes = {key[3]: item for key, item in self.objects.items() if key[1] == "PersistentVolume"}
            claims = {
                (key[2], key[3]): item
                for key, item in self.objects.items()
                if key[1] == "PersistentVolumeClaim"
            }
            for volume in volumes.values():
                held = volume["spec"].get("claimRef") or {}
                claim = claims.get((held.get("namespace", ""), held.get("name", "")))
                if not held.get("uid"):
                    volume["status"] = {"phase": "Available"}
                elif claim is None or claim["metadata"]["uid"] != held["uid"]:
                    volume["status"] = {"phase": "Released"}
            for place, claim in claims.items():
                named = volumes.get(claim["spec"].get("volumeName", ""))
                claim.setdefault("status", {"phase": "Pending"})
                if named is None:
                    continue
                held = named["spec"].setdefault("claimRef", {})
                uid = claim["metadata"]["uid"]
                if (held.get("namespace"), held.get("name")) == place and held.get("uid", uid) == uid:
                    held |= {"uid": uid, "resourceVersion": "7"}
                    named["status"] = {"phase": "Bound"}
                    claim["status"] = {"phase": "Bound", "capacity": dict(named["spec"]["capacity"])}

    def delete(self, key: Key, uid: str | None) -> dict[str, Any]:
        with self.changed:
            found = self.get(key)
            if uid is not None and found["metadata"]["uid"] != uid:
                raise _No(409, "the UID in the precondition does not match")
            self.writes.append(("delete", key[1], key[3]))
            found["metadata"]["deletionTimestamp"] = "2026-11-16T11:00:00Z"
            if self.linger.get(key[3], 0) < 1:
                self._drop(key)
            return found

    def _drop(self, key: Key) -> None:
        gone = self.objects.pop(key)
        self._applied.pop(key, None)
        uid = gone["metadata"]["uid"]
        for other, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences") or ()
            inside = key[1] == "Namespace" and other[2] == key[3]
            if other in self.objects and (inside or any(owner["uid"] == uid for owner in owners)):
                self._drop(other)

    def _fill(self, namespace: str) -> None:
        for kind, name in (("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")):
            self.put({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}})

    def resource(self, api: str, plural: str) -> tuple[str, bool] | None:
        for kind, (name, namespaced) in self.kinds.get(api, {}).items():
            if name == plural:
                return kind, namespaced
        return None


def _defaults(item: dict[str, Any]) -> None:
    """A few of the defaults of the real server."""
    spec = item.get("spec", {})
    match item["kind"]:
        case "Deployment":
            spec.setdefault("progressDeadlineSeconds", 600)
        case "Job":
            spec.setdefault("backoffLimit", 6)
            spec["selector"] = {
                "matchLabels": {"batch.kubernetes.io/controller-uid": item["metadata"]["uid"]}
            }
        case "Service" if item["apiVersion"] == "v1":
            spec.setdefault("clusterIP", "10.96.0.9")
            for n, port in enumerate(spec.get("ports", ())):
                port.setdefault("protocol", "TCP")
                if spec.get("type") == "NodePort":
                    port.setdefault("nodePort", 30100 + n)
        case "StatefulSet":
            spec.setdefault("replicas", 1)
        case "PersistentVolumeClaim":
            spec.setdefault("storageClassName", "standard")
            spec.setdefault("volumeMode", "Filesystem")


def _merged(live: Any, new: Any) -> Any:
    if isinstance(live, dict) and isinstance(new, dict):
        return {**live, **{key: _merged(live.get(key), value) for key, value in new.items()}}
    if isinstance(live, list) and isinstance(new, list) and len(live) == len(new):
        return [_merged(a, b) for a, b in zip(live, new, strict=True)]
    return copy.deepcopy(new)


def _patched(live: Any, changes: Any) -> Any:
    """RFC 7396: null removes a field."""
    if not isinstance(changes, dict):
        return copy.deepcopy(changes)
    new = copy.deepcopy(live) if isinstance(live, dict) else {}
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _patched(new.get(key), value)
    return new


def _without(live: Any, before: Any, now: Any) -> Any:
    """Remove the fields that the last apply had and this one does not."""
    if isinstance(live, dict) and isinstance(before, dict) and isinstance(now, dict):
        for key in before:
            if key in live and key not in now:
                del live[key]
            elif key in live:
                live[key] = _without(live[key], before[key], now[key])
    return live


def _check_fixed(live: dict[str, Any], new: dict[str, Any]) -> None:
    kind, name = live["kind"], live["metadata"]["name"]
    old_spec, spec = live.get("spec", {}), new.get("spec", {})
    if (live["apiVersion"], kind) == ("batch/v1", "Job") and old_spec.get("template") != spec.get("template"):
        words = f'Job.batch "{name}" is invalid: spec.template: Invalid value: …: field is immutable'
        raise _No(422, words, (("spec.template", "field is immutable"),))
    if kind == "StatefulSet":
        free = ("replicas", "template", "updateStrategy", "minReadySeconds")
        if any(old_spec.get(key) != spec.get(key) for key in {*old_spec, *spec} if key not in free):
            words = "spec: Forbidden: updates to statefulset spec for fields other than 'replicas', … are forbidden"
            raise _No(422, f'StatefulSet.apps "{name}" is invalid: {words}', (("spec", words),))
    if kind == "PersistentVolumeClaim" and old_spec != spec:
        words = "spec is immutable after creation except resources.requests"
        raise _No(
            422, f'PersistentVolumeClaim "{name}" is invalid: spec: Forbidden: {words}', (("spec", words),)
        )
    if kind == "PersistentVolume" and any(
        old_spec.get(source) != spec.get(source) for source in ("nfs", "hostPath", "local")
    ):
        words = "spec.persistentvolumesource is immutable after creation"
        raise _No(422, f'PersistentVolume "{name}" is invalid: spec: Forbidden: {words}', (("spec", words),))
    if live["apiVersion"] == "batch.volcano.sh/v1alpha1" and old_spec.get("tasks") != spec.get("tasks"):
        raise _No(
            403,
            'admission webhook "validatejob.volcano.sh" denied the request: job updates may not change fields '
            "other than `minAvailable`, `tasks[*].replicas under spec`",
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # each response is one packet and must not wait for another
    api: ApiServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.api.requests.append(f"{method} {self.path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(_No(401, "Unauthorized"))
            return
        try:
            self._route(method, url.path, query, body)
        except _No as no:
            self._refuse(no)

    def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        api = self.api
        if path == "/version":
            self._send(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        elif path == "/api":
            self._send(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self._send(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()})
        elif (found := re.fullmatch(r"/apis/([^/]+)", path)) is not None:
            group = next((one for one in self._groups() if one["name"] == found[1]), None)
            if group is None:
                raise _No(404, "the server could not find the requested resource")
            self._send(200, {"kind": "APIGroup", "apiVersion": "v1", **group})
        elif (found := re.fullmatch(r"/api/(v1)|/apis/([^/]+/[^/]+)", path)) is not None:
            self._discover(found[1] or found[2])
        elif (
            found := re.fullmatch(
                r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?"
                r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>log|proxy|exec|scale)(?P<rest>/.*)?)?",
                path,
            )
        ) is not None:
            version = found["core"] or found["group"]
            resource = api.resource(version, found["plural"])
            if resource is None:
                raise _No(404, "the server could not find the requested resource")
            self._object(method, version, resource[0], found.groupdict(), query, body)
        else:
            raise _No(404, "the server could not find the requested resource")

    def _object(
        self,
        method: str,
        version: str,
        kind: str,
        found: dict[str, str | None],
        query: dict[str, str],
        body: bytes,
    ) -> None:
        api = self.api
        name, plural = found["name"] or "", found["plural"] or ""
        verb = {"GET": "get" if name else "list", "PATCH": "patch", "DELETE": "delete"}[method]
        asked = f"{plural}/{found['part']}" if found["part"] else plural
        dry_run = query.get("dryRun") == "All"
        fault = api.check(verb, asked, name, dry_run=dry_run)
        if fault is not None and fault.cut:
            self._cut()
            return
        if fault is not None:
            group = version.rpartition("/")[0]
            words = f'{asked} "{name}" is forbidden: User "me" cannot {verb} resource "{asked}" in API group "{group}"'
            raise _No(fault.status, fault.message or words, fault.causes)
        headers = {"Warning": f'299 - "{api.warnings[plural]}"'} if plural in api.warnings else {}
        key = (version, kind, found["namespace"] or "", name)
        if found["part"] == "log":
            self._log(name, query)
        elif found["part"] == "exec":
            if key not in api.objects:
                raise _No(404, f'pods "{name}" not found')
            self._exec(parse_qs(urlsplit(self.path).query)["command"])
        elif found["part"] == "proxy":
            pod = re.sub(r"^https?:|:\d+$", "", name)
            page = api.pages.get((pod, found["rest"] or "/"))
            if page is None:  # nothing listens there
                words = "error trying to reach service: dial tcp 10.244.0.9:8502: connect: connection refused"
                raise _No(503, words)
            self._send_bytes(page[0], page[1].encode(), "text/plain")
        elif found["part"] == "scale":
            if method == "PATCH" and self.headers.get("Content-Type") != "application/merge-patch+json":
                raise _No(415, "a scale takes merge patches here")
            self._send(200, api.scale(key, json.loads(body) if method == "PATCH" else None), headers)
        elif method == "GET" and name:
            self._send(200, api.get(key), headers)
        elif method == "GET":
            # Like the real server: the items of a list have no kind.
            items = [
                {field: value for field, value in item.items() if field not in ("apiVersion", "kind")}
                for item in api.list(version, kind, found["namespace"] or "", query.get("labelSelector", ""))
            ]
            begin = int(query.get("continue") or 0)
            end = begin + int(query.get("limit") or 500)
            more = {"continue": str(end)} if end < len(items) else {}
            document = {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": more,
                "items": items[begin:end],
            }
            self._send(200, document, headers)
        elif method == "PATCH" and self.headers.get("Content-Type") == "application/merge-patch+json":
            self._send(200, api.patch(key, json.loads(body)), headers)
        elif method == "PATCH":
            if self.headers.get("Content-Type") != "application/apply-patch+yaml" or not query.get(
                "fieldManager"
            ):
                raise _No(415, "only server-side apply and merge patches are here")
            status, item = api.apply(key, yaml.safe_load(body), dry_run=dry_run)
            self._send(status, item, headers)
        else:
            options = json.loads(body or b"{}")
            self._send(200, api.delete(key, (options.get("preconditions") or {}).get("uid")), headers)

    def _log(self, pod: str, query: dict[str, str]) -> None:
        api = self.api
        logs = api.previous_logs if query.get("previous") == "true" else api.logs
        log = logs.get((pod, query["container"]))
        if log is None:
            words = f'container "{query["container"]}" in pod "{pod}" is waiting to start: PodInitializing'
            raise _No(400, words)
        since = query.get("sinceTime", "")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        with api.changed:
            # sinceTime has whole seconds: the lines of that second are sent again.
            lines = [line for line in log.lines if line[:19] >= since[:19]]
            if "tailLines" in query:
                lines = lines[len(lines) - min(len(lines), int(query["tailLines"])) :]
            skipped = len(log.lines) - len(lines)
        while True:
            for line in lines:
                data = f"{line}\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                sent += 1
                if log.cut_after == sent:
                    log.cut_after = None
                    self._cut()
                    return
            self.wfile.flush()
            with api.changed:
                seen = skipped + sent
                if query.get("follow") == "true":
                    api.changed.wait_for(lambda seen=seen: len(log.lines) > seen or not log.open, timeout=20)
                lines = log.lines[seen:] if query.get("follow") == "true" else []
                if not lines:
                    break
        self.wfile.write(b"0\r\n\r\n")

    def _exec(self, command: list[str]) -> None:
        """As the API server does it: the channels of a websocket are the standard streams of a process."""
        offered = [one.strip() for one in self.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        chosen = next(one for one in offered if one in self.api.subprotocols)
        guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(sha1((self.headers["Sec-WebSocket-Key"] + guid).encode()).digest())
        self.send_response(101)
        for name, value in (
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Accept", accept.decode()),
            ("Sec-WebSocket-Protocol", chosen),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        program = str(Path(sys.executable).parent / command[0])
        words = [word.replace("/clickline/data", str(self.api.volume)) for word in command[1:]]
        with subprocess.Popen(
            [program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "200"},
        ) as process:
            if self._streams(process):
                self._end(process.wait())
            else:
                process.kill()

    def _streams(self, process: subprocess.Popen[bytes]) -> bool:
        """Until the process has ended, or the client is gone (False). One thread: two must not share a TLS socket."""
        assert process.stdin and process.stdout and process.stderr
        outputs = {process.stdout: 1, process.stderr: 2}
        fed = 0
        self._heard = b""  # received but not yet parsed; before the 101 the client sends nothing
        while outputs:
            buffered = self._heard or self.connection.pending()
            ready, _, _ = select.select([self.connection, *outputs], [], [], 0 if buffered else 10)
            if buffered or self.connection in ready:
                code, data = self._frame()
                if code == 8:
                    return False
                if data[:2] == b"\xff\0":
                    process.stdin.close()
                elif data[:1] == b"\0":
                    fed += len(data) - 1
                    cut = self.api.cut_exec_after
                    if cut is not None and fed > cut:
                        self.api.cut_exec_after = None
                        self._cut()
                        return False
                    with suppress(BrokenPipeError):
                        process.stdin.write(data[1:])
                        process.stdin.flush()
            for pipe in [one for one in outputs if one in ready]:
                data = os.read(pipe.fileno(), 65536)
                if data:
                    self._say(bytes([outputs[pipe]]) + data)
                else:
                    del outputs[pipe]
        return True

    def _frame(self) -> tuple[int, bytes]:
        """A complete message of the client; clients mask their messages."""
        head = self._bytes(2)
        if len(head) < 2:
            return 8, b""
        length = head[1] & 0x7F
        if length > 125:
            length = int.from_bytes(self._bytes(2 if length == 126 else 8))
        mask = self._bytes(4)
        data = self._bytes(length)
        keys = int.from_bytes((mask * (length // 4 + 1))[:length])
        return head[0] & 0x0F, (int.from_bytes(data) ^ keys).to_bytes(length)

    def _bytes(self, count: int) -> bytes:
        while len(self._heard) < count:
            try:
                more = self.connection.recv(1 << 20)
            except OSError:
                more = b""
            if not more:
                return b""
            self._heard += more
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    def _say(self, data: bytes, code: int = 2) -> None:
        size = len(data)
        head = bytes([0x80 | code])
        head += (
            bytes([size])
            if size < 126
            else b"\x7e" + size.to_bytes(2)
            if size < 65536
            else b"\x7f" + size.to_bytes(8)
        )
        self.wfile.write(head + data)
        self.wfile.flush()

    def _end(self, code: int) -> None:
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            words = f"command terminated with non-zero exit code: exit status {code}"
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status |= {"status": "Failure", "message": words, "reason": "NonZeroExitCode"}
            status["details"] = {"causes": causes}
        self._say(b"\3" + json.dumps(status).encode())
        self._say(b"\x03\xe8", code=8)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _groups(self) -> list[dict[str, Any]]:
        versions: dict[str, list[str]] = {}
        for version in self.api.kinds:
            group, _, number = version.rpartition("/")
            if group:
                versions.setdefault(group, []).append(number)
        return [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{number}", "version": number} for number in numbers],
                "preferredVersion": {"groupVersion": f"{group}/{numbers[0]}", "version": numbers[0]},
            }
            for group, numbers in versions.items()
        ]

    def _discover(self, version: str) -> None:
        if version not in self.api.kinds:
            raise _No(404, "the server could not find the requested resource")
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "kind": kind,
                "verbs": verbs,
            }
            for kind, (plural, namespaced) in self.api.kinds[version].items()
        ]
        if version == "v1":
            status = {
                "name": "pods/status",
                "singularName": "",
                "namespaced": True,
                "kind": "Pod",
                "verbs": ["get"],
            }
            resources.append(status)
        document = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }
        self._send(200, document)

    def _refuse(self, no: _No) -> None:
        causes = [{"field": where, "message": words} for where, words in no.causes]
        document = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": str(no),
            "reason": _REASONS.get(no.status, "Unknown"),
            "code": no.status,
        }
        self._send(no.status, {**document, "details": {"causes": causes}})

    def _send(self, status: int, document: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(document).encode(), "application/json", headers)

    def _send_bytes(self, status: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(kinds: Kinds, certificate: tuple[Path, Path]) -> Iterator[ApiServer]:
    """A server with these kinds, over TLS: the real kubectl sends its token only over TLS."""
    api = ApiServer(copy.deepcopy(kinds))
    handler = type("Handler", (_Handler,), {"api": api})
    server = _Server(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    # The handshake runs in the thread of the connection, not in the accepting one.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    api.certificate = certificate[0]
    api.url = f"https://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield api
    finally:
        with api.changed:
            for log in api.logs.values():
                log.open = False
            api.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that disconnect or do not trust the certificate are part of the tests."""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key for this machine's loopback address."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files
