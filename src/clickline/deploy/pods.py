"""Pod templates: every role runs with the same identity, mounts and init container.

Any user id works, the root file system is read-only and no process can gain privileges: the restricted Pod Security
Standard. All volumes are claims, because that standard allows neither NFS nor hostPath in a pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from clickline.config.deploy_sections import Resources
from clickline.config.sections import ServeSection, StudioSection
from clickline.deploy.objects import SERVING_ROLES, DeployPlan, Object

SCRATCH = PurePosixPath("/scratch")
TOKEN_FILE = "ray-token"
"""The file in `home` with the token of Ray's processes. The first pod creates it."""

_SHARED_MEMORY = "/dev/shm"

_SecretFiles = dict[str, tuple[str, str]]


def pod(
    plan: DeployPlan,
    role: str,
    command: Sequence[str],
    *,
    resources: Resources,
    ports: Mapping[str, int] | None = None,
    probes: Mapping[str, Object] | None = None,
    ray: bool = False,
    data: bool = False,
    writes_data: bool = False,
    writes_home: bool = True,
    extra_env: Sequence[Object] = (),
    restart: str | None = None,
    grace: int | None = None,
    uses_api: bool = False,
    pre_stop: Object | None = None,
    wait_for: str | None = None,
    calls_predictors: bool = False,
) -> Object:
    """A pod template with one process.

    `data`: it reads the click logs; `writes_data`: it also writes them. `writes_home`: it writes to `home`. `ray`: it
    is a node of the Ray cluster. `uses_api`: it calls the Kubernetes API. `wait_for`: a host:port that must accept
    connections before it starts. `restart`: the pod's restartPolicy, if not Always. `calls_predictors`: it sends
    requests to predictors and so needs their token and certificate, as the serving roles do.
    """
    signs = writes_home and role != "tracking"
    secret_files = _secret_files(
        plan, signs=signs, calls_predictors=calls_predictors or role in SERVING_ROLES
    )
    volumes, mounts = _volumes(
        plan, ray=ray, data=data, writes_data=writes_data, writes_home=writes_home, secret_files=secret_files
    )
    shared: Object = {
        "image": plan.deploy.image,
        "imagePullPolicy": plan.deploy.pull,
        "workingDir": "/clickline",
        "env": [*environment(plan, ray=ray), *extra_env],
        **_secret_environment(plan),
        "volumeMounts": mounts,
        "securityContext": security(),
        # The pod's status then shows why a container failed, even when the next one is already running.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    options = [] if writes_home else ["--read-only"]
    options += ["--data", data_folder(plan)] if writes_data and claim_name(plan, "data") is not None else []
    options += [] if wait_for is None else ["--await", wait_for]
    init = {
        "name": "ready",
        "command": ["clickline", "deploy", "check-pod", *options],
        **shared,
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
    }
    main: Object = {"name": role, "command": list(command), **shared, "resources": resource_spec(resources)}
    if ports:
        main["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    if probes:
        main |= probes
    if pre_stop is not None:
        main["lifecycle"] = {"preStop": pre_stop}
    spec: Object = {
        "serviceAccountName": plan.object_name("access"),
        "automountServiceAccountToken": uses_api,
        "enableServiceLinks": False,  # otherwise one unused variable for each Service of the namespace
        "securityContext": _pod_security(plan),
        "initContainers": [init],
        "containers": [main],
        "volumes": volumes,
        **_placement(plan),
    }
    if restart is not None:
        spec["restartPolicy"] = restart
    if grace is not None:
        spec["terminationGracePeriodSeconds"] = grace
    return {
        "metadata": {
            "labels": plan.labels(role),
            "annotations": {"clickline/config": plan.config_hash(role)},
        },
        "spec": spec,
    }


def data_pod(plan: DeployPlan) -> Object:
    """A pod to copy click logs into the data volume with (`kubectl cp`, or `kubectl exec … clickline sample`). It is
    ready once the volume is writable."""
    template = pod(
        plan,
        "data",
        ["sleep", "86400"],
        resources=plan.deploy.resources.lookup,
        data=True,
        writes_data=True,
        writes_home=False,
        restart="OnFailure",
        grace=0,
    )
    return plan.object("v1", "Pod", "data", spec=template["spec"])


# ── containers ─────────────────────────────────────────────────────────────────────────────────


def security() -> Object:
    """The securityContext of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _pod_security(plan: DeployPlan) -> Object:
    identity = plan.deploy.identity
    return {
        "runAsNonRoot": True,
        "runAsUser": identity.user,
        "runAsGroup": identity.group,
        "fsGroup": identity.fs_group,
        "fsGroupChangePolicy": "OnRootMismatch",  # do not walk a volume with many files at every start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def environment(plan: DeployPlan, *, ray: bool) -> list[Object]:
    """Environment variables of every container."""
    variables = {
        "HOME": str(SCRATCH),
        "USER": "clickline",  # a numeric user id has no name of its own
        "NUMBA_CACHE_DIR": str(SCRATCH / "kernels"),
        "PYTHONUNBUFFERED": "1",
    }
    if ray:
        variables |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(PurePosixPath(plan.config.home, TOKEN_FILE)),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    return [{"name": name, "value": value} for name, value in variables.items()]


def _secret_environment(plan: DeployPlan) -> Object:
    secrets = plan.deploy.secrets.environment
    return {"envFrom": [{"secretRef": {"name": name}} for name in secrets]} if secrets else {}


def resource_spec(resources: Resources) -> Object:
    """The resource requests and limits of a container."""
    limits: Object = {"memory": resources.memory_limit}
    if resources.cpu_limit is not None:
        limits["cpu"] = resources.cpu_limit
    if resources.gpu:
        limits["nvidia.com/gpu"] = str(resources.gpu)
    return {"requests": {"cpu": resources.cpu, "memory": resources.memory}, "limits": limits}


def http_probe(path: str, port: str | int, *, tls: bool = False, **timing: int) -> Object:
    """An HTTP probe."""
    call: Object = {"path": path, "port": port}
    if tls:
        call["scheme"] = "HTTPS"
    return {"httpGet": call, **timing}


# ── folders ────────────────────────────────────────────────────────────────────────────────────


def data_folder(plan: DeployPlan) -> str:
    """The mount path of the data volume."""
    return plan.deploy.storage.data.mount or "/clickline/data"


def claim_name(plan: DeployPlan, volume: str) -> str | None:
    """The claim of the `data` or `models` volume; None if there is no such volume."""
    section = getattr(plan.deploy.storage, volume)
    if section.kind == "none":
        return None
    return section.claim or plan.object_name(volume)


def _volumes(
    plan: DeployPlan,
    *,
    ray: bool,
    data: bool,
    writes_data: bool,
    writes_home: bool,
    secret_files: _SecretFiles,
) -> tuple[list[Object], list[Object]]:
    """The volumes of a pod, and their mounts in its containers."""
    volumes: list[Object] = [{"name": "config", "configMap": {"name": plan.object_name("config")}}]
    volumes += [
        {"name": f"secret-{secret}", "secret": {"secretName": secret, "defaultMode": 0o440}}
        for secret in sorted({secret for secret, _ in secret_files.values()})
    ]
    mounts: list[Object] = [
        {"name": "config", "mountPath": path, "subPath": key, "readOnly": True}
        for path, key in plan.mounted_files().items()
    ]
    mounts += [
        {"name": f"secret-{secret}", "mountPath": path, "subPath": key, "readOnly": True}
        for path, (secret, key) in secret_files.items()
    ]

    def mount(name: str, path: str | None, claim: str | None = None, *, read_only: bool = False) -> None:
        """Mount a claim, or an empty folder if there is none."""
        source: Object = (
            {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
        )
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

    logs = claim_name(plan, "data")
    if data and logs is not None:
        mount("data", data_folder(plan), logs, read_only=not writes_data)
    mount("models", plan.config.home, claim_name(plan, "models"), read_only=not writes_home)
    mount("scratch", str(SCRATCH))
    mount("tmp", "/tmp")
    if data and plan.deploy.storage.cache is not None:
        mount("cache", plan.config.cache.dir, plan.object_name("cache"))
    if ray:
        mounts.append({"name": "shm", "mountPath": _SHARED_MEMORY})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}})
    return volumes, mounts


def _secret_files(plan: DeployPlan, *, signs: bool, calls_predictors: bool) -> _SecretFiles:
    """Maps a path in a pod to (secret, key). The key that signs versions goes only to pods that publish, not to
    servers; a server's certificate and token go only to pods that serve or call servers."""
    config = plan.config
    hidden = {None if signs else config.publish.signing_key_file}
    if not calls_predictors:
        hidden |= _server_files(config.serve) | _server_files(config.studio)
        hidden -= {config.serve.trusted_keys_file, config.publish.signing_key_file if signs else None}
    files: _SecretFiles = {}
    for path, source in sorted(plan.deploy.secrets.files.items()):
        place = PurePosixPath("/clickline", path)
        secret, _, key = source.partition("/")
        if str(place) not in hidden:
            files[str(place)] = (secret, key)
    return files


def _server_files(section: ServeSection | StudioSection) -> set[str | None]:
    tls = section.tls
    return {section.token_file, *(() if tls is None else (tls.certificate, tls.key, tls.ca))}


# ── nodes ──────────────────────────────────────────────────────────────────────────────────────


def _placement(plan: DeployPlan) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    nodes = plan.deploy.nodes
    if plan.deploy.pull_secrets:
        placed["imagePullSecrets"] = [{"name": name} for name in plan.deploy.pull_secrets]
    if nodes.selector:
        placed["nodeSelector"] = dict(nodes.selector)
    if nodes.tolerations:
        placed["tolerations"] = [
            {key: value for key, value in one.model_dump().items() if value is not None}
            for one in nodes.tolerations
        ]
    return placed
