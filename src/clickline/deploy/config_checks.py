"""Checks for settings that cannot work on Kubernetes, before an apply; and notes on those that may surprise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from posixpath import normpath

from clickline.config.deploy_sections import amount
from clickline.deploy.knative import RESERVED_PORTS, feature_flags, revision
from clickline.deploy.mlflow_server import tracking_uri
from clickline.deploy.objects import WORKING_FOLDER, DeployPlan
from clickline.deploy.pods import SCRATCH, claim_name, data_folder
from clickline.deploy.ray_pods import worker_range
from clickline.errors import Mistake
from clickline.progress import human_size, pluralize

_MAX_NAME_LENGTH = 38
"""KubeRay allows 47 characters for a job, Kubernetes 63 for a label; our suffixes take the rest."""
_CONFIG_MAP_BYTES = 2**20
_MIB = 2**20
# Memory of processes before they have any row, as in `clickline plan`.
_TRAINER, _SHARD = 560 * _MIB, 200 * _MIB
_SERVER, _SERVER_PROCESS = 190 * _MIB, 115 * _MIB

_Problem = tuple[str, str, str]
"""Key, problem, remedy."""


def config_mistakes(plan: DeployPlan) -> list[Mistake]:
    """All mistakes of the config."""
    found = (
        *_names(plan),
        *_folders(plan),
        *_inputs(plan),
        *_own_files(plan),
        *_secret_files(plan),
        *_no_volume(plan),
        *_training(plan),
        *_serving(plan),
        *_tracking(plan),
        *_memory(plan),
    )
    return [Mistake("clickline.yaml", 0, *one) for one in found]


# ── names and paths ────────────────────────────────────────────────────────────────────────────


def _names(plan: DeployPlan) -> Iterator[_Problem]:
    if len(plan.name) > _MAX_NAME_LENGTH:
        yield (
            "name",
            f"has {len(plan.name)} characters. Allowed on Kubernetes: at most {_MAX_NAME_LENGTH}, because the names of "
            "all objects start with it.",
            "Shorten it.",
        )
    if not plan.name[0].isalpha():
        yield (
            "name",
            f"is {plan.name}. Allowed on Kubernetes: a name that starts with a letter, because it is the name of "
            "Services.",
            "Prefix it with a letter.",
        )


def _folders(plan: DeployPlan) -> Iterator[_Problem]:
    """Mount paths must not overlap each other or the pods' own files."""
    home = plan.config.home
    if _is_uri(home):
        yield (
            "home",
            f"is {home}. Allowed on Kubernetes: a folder, where the models volume is mounted.",
            "Keep home a folder; publish.registry may be the URI.",
        )
        return
    places = {"home": home}
    if plan.deploy.storage.data.kind != "none":
        places["deploy.storage.data.mount"] = data_folder(plan)
    taken = {
        key: place
        for key, place in places.items()
        if _is_inside(str(WORKING_FOLDER), place)
        or any(_is_inside(place, own) for own in (str(SCRATCH), "/tmp"))
    }
    for key, place in taken.items():
        yield (
            key,
            f"is {place}, where the pods have files of their own. Allowed: a folder below the YAML's, or one "
            "elsewhere.",
            "Choose a folder such as data or .clickline.",
        )
    data = places.get("deploy.storage.data.mount")
    if data is not None and not taken and (_is_inside(data, home) or _is_inside(home, data)):
        yield (
            "deploy.storage.data.mount",
            f"is {data}, and home is {home}: one volume would be inside the other. Allowed: separate folders.",
            "Move one of them.",
        )


def _inputs(plan: DeployPlan) -> Iterator[_Problem]:
    """What stages read must be in a volume, or in an object store."""
    config = plan.config
    named = [
        *(("data.train", pattern) for pattern in config.data.train),
        *(("data.eval", pattern) for pattern in config.data.eval or ()),
        *(("data.donefile", place) for place in [config.data.donefile] if place and "/" in place),
        *(("data.slot_conf", place) for place in [config.data.slot_conf] if place),
        *(("train.warm_start", place) for place in [config.train.warm_start] if place),
    ]
    volumes = _mount_paths(plan)
    for key, place in named:
        if _is_uri(place) or any(_is_inside(place, volume) for volume in volumes):
            continue
        if plan.deploy.storage.data.kind == "none":
            yield (
                key,
                f"is {place}, and deploy.storage.data.kind is none: the pods have no such file. Allowed: URIs of an "
                "object store, such as s3://….",
                "Put the files into an object store and set its URI, or choose another kind of volume.",
            )
        else:
            yield (
                key,
                f"is {place}, outside of the pods' volumes ({' and '.join(volumes)}).",
                "Set deploy.storage.data.mount to the folder that holds it, or move it.",
            )
    registry = config.publish.registry
    if registry is not None and not _is_uri(registry) and not _is_inside(registry, config.home):
        yield (
            "publish.registry",
            f"is {registry}, outside of home ({config.home}), which the pods share. Allowed: a folder in home, or the "
            "URI of an object store.",
            "Remove it to use registry/ in home, or set a URI.",
        )


def _own_files(plan: DeployPlan) -> Iterator[_Problem]:
    """The user's Python files are part of the ConfigMap."""
    config = plan.config
    size = len(plan.config_text.encode()) + sum(len(text.encode()) for text in plan.files.values())
    for key, file in (("model.file", config.model.file), ("data.reader", config.data.reader)):
        if file is None:
            continue
        hidden = [place for place in _mount_paths(plan) if _is_inside(file, place)]
        if ".." in PurePosixPath(file).parts or hidden:
            where = f"in {hidden[0]}, where a volume is mounted" if hidden else "outside of the YAML's folder"
            yield (
                key,
                f"is {file}, {where}. It is deployed with the config. Allowed: a file beside the YAML, or in a "
                "folder of its own below.",
                "Move it there.",
            )
        if size > _CONFIG_MAP_BYTES:
            yield (
                key,
                f"makes the config {human_size(size)} large with the other files. Allowed in a ConfigMap: 1 MiB.",
                "Move data and weights out of Python files: into the data volume, or into your own image.",
            )


def _secret_files(plan: DeployPlan) -> Iterator[_Problem]:
    """Files with secrets are never copied from this machine: the cluster must have them."""
    given = {normpath(str(WORKING_FOLDER / path)) for path in plan.deploy.secrets.files}
    for key, file in _secrets(plan):
        if normpath(file) not in given:
            written = PurePosixPath(file)
            if written.is_relative_to(WORKING_FOLDER):
                written = written.relative_to(WORKING_FOLDER)
            yield (
                key,
                f"is {file}, and deploy.secrets.files has no entry for it. Secrets are never copied from this machine.",
                f"Create one (kubectl create secret generic NAME --from-file=KEY={written}) and set "
                f'deploy.secrets.files: {{"{written}": NAME/KEY}}.',
            )
    for path in plan.deploy.secrets.files:
        if ".." in PurePosixPath(path).parts:
            yield (
                "deploy.secrets.files",
                f"names {path}. Allowed: paths below the YAML's folder, and absolute ones.",
                "Move the file below the YAML's folder, here and in the key that names it.",
            )


def _secrets(plan: DeployPlan) -> list[tuple[str, str]]:
    """The config keys of secret files, and the files."""
    config = plan.config
    named = {
        "serve.token_file": config.serve.token_file,
        "serve.trusted_keys_file": config.serve.trusted_keys_file,
        "publish.signing_key_file": config.publish.signing_key_file,
        "studio.token_file": config.studio.token_file,
        "storage.credentials_file": config.storage.credentials_file,
    }
    for section, tls in (("serve", config.serve.tls), ("studio", config.studio.tls)):
        if tls is not None:
            named |= {f"{section}.tls.{key}": file for key, file in tls.model_dump().items()}
    return [(key, file) for key, file in named.items() if file]


def _no_volume(plan: DeployPlan) -> Iterator[_Problem]:
    """Without a models volume each pod has a temporary home of its own."""
    config, key = plan.config, "deploy.storage.models.kind"
    if plan.deploy.storage.models.kind != "none":
        return
    remedy = "Choose another kind, such as new"
    if config.publish.registry is None or not _is_uri(config.publish.registry):
        yield (
            key,
            "is none, and publish.registry is not a URI: predictors would never see a version.",
            f"{remedy}, or set publish.registry to the URI of an object store.",
        )
    if plan.on_ray:
        yield (
            key,
            "is none, and train.mode is cluster, whose pods share home.",
            f"{remedy}, or set train.mode: local.",
        )
    if plan.deploy.workflow.kind == "argo":
        yield (
            key,
            "is none, and deploy.workflow.kind is argo, whose steps pass results on in home.",
            f"{remedy}, or set deploy.workflow.kind: job.",
        )
    if plan.deploy.tracking.enabled:
        yield (
            key,
            "is none, and deploy.tracking.enabled is true: MLflow's data would be lost with its pod.",
            f"{remedy}, or set tracking.uri to your own server.",
        )


# ── roles ──────────────────────────────────────────────────────────────────────────────────────


def _training(plan: DeployPlan) -> Iterator[_Problem]:
    training, workflow = plan.deploy.training, plan.deploy.workflow
    if training.kind != "plain" and not plan.on_ray:
        yield (
            "deploy.training.kind",
            f"is {training.kind}, but train.mode is local, which does not use it. Allowed only with train.mode "
            "cluster.",
            "Set train.mode: cluster, or deploy.training.kind: plain.",
        )
    if training.gang and training.kind != "kuberay":
        yield (
            "deploy.training.gang",
            f"is true, but deploy.training.kind is {training.kind}. Allowed only for kuberay; volcano always "
            "gang-schedules.",
            "Remove it, or change the kind.",
        )
    if training.queue is not None and training.kind != "volcano" and not training.gang:
        yield (
            "deploy.training.queue",
            f"is {training.queue}, but Volcano schedules nothing here. Allowed only for kind volcano, or kuberay "
            "with gang.",
            "Remove it, or set deploy.training.kind: volcano.",
        )
    if workflow.schedule is not None and training.kind != "plain" and workflow.kind == "job":
        yield (
            "deploy.workflow.schedule",
            f"is given, but deploy.training.kind is {training.kind}, whose job runs once. Allowed with plain, or with "
            "deploy.workflow.kind argo.",
            "Set deploy.workflow.kind: argo, or deploy.training.kind: plain.",
        )
    if workflow.follow and plan.config.data.dates is None:
        yield (
            "deploy.workflow.follow",
            "is true, but data.dates is missing: it sets the first hour.",
            "Set data.dates: {from: YYYYMMDD/HH}, and data.train to a {date}/{hour} pattern.",
        )


def _serving(plan: DeployPlan) -> Iterator[_Problem]:
    serve, section = plan.config.serve, plan.deploy.serving
    ports = {key: getattr(serve, key) for key in ("http_port", "grpc_port", "metrics_port", "lookup_port")}
    if serve.brpc_port is not None:
        ports["brpc_port"] = serve.brpc_port
    named = {f"serve.{key}": port for key, port in ports.items()}
    if plan.deploy.tracking.enabled:
        named["deploy.tracking.port"] = plan.deploy.tracking.port
    for key, port in named.items():
        if port < 1024:
            yield (
                key,
                f"is {port}. Allowed in pods: 1024 to 65535, because nothing runs as root there.",
                "Choose another one. Your own Service, or an Ingress, can expose it as 80 or 443.",
            )
    if section.kind == "deployment":
        return
    for key in ("http_port", "grpc_port", "metrics_port"):
        if ports[key] in RESERVED_PORTS:
            yield (
                f"serve.{key}",
                f"is {ports[key]}, which Knative's own container uses in every pod. Not allowed with knative: "
                f"{', '.join(map(str, RESERVED_PORTS))}.",
                "Choose another one.",
            )
    if serve.tls is not None:
        yield (
            "serve.tls",
            "is given, but deploy.serving.kind is knative, which connects to its pods without TLS.",
            "Remove it and configure the certificate in Knative's gateway, or set deploy.serving.kind: deployment.",
        )
    if section.service != "ClusterIP":
        yield (
            "deploy.serving.service",
            f"is {section.service}, but deploy.serving.kind is knative, which exposes the service by its gateway.",
            "Remove it, or set deploy.serving.kind: deployment.",
        )
    yield from _canary(plan)


def _canary(plan: DeployPlan) -> Iterator[_Problem]:
    canary = plan.deploy.serving.canary
    if canary is None:
        return
    service = plan.object_name("predictor")
    if not canary.stable.startswith(f"{service}-"):
        yield (
            "deploy.serving.canary.stable",
            f"is {canary.stable}. Allowed: a revision of {service}, whose names begin with {service}-.",
            "Take one from `clickline deploy status`.",
        )
    elif canary.stable == revision(plan):
        yield (
            "deploy.serving.canary.stable",
            f"is {canary.stable}, which is the revision of this very config: there is nothing to compare.",
            "Change what the canary should test (image, resources, serve), or remove canary.",
        )


def _tracking(plan: DeployPlan) -> Iterator[_Problem]:
    tracking, section = plan.config.tracking, plan.deploy.tracking
    if not section.enabled:
        return
    if tracking.enabled is False:
        yield (
            "deploy.tracking.enabled",
            "is true, but tracking.enabled is false: nothing would be sent to it.",
            "Change one of them.",
        )
    if tracking.uri not in (None, tracking_uri(plan.name, section.port)):
        yield (
            "deploy.tracking.enabled",
            f"is true, but tracking.uri names another server, {tracking.uri}.",
            "Remove one of the two.",
        )


# ── memory ─────────────────────────────────────────────────────────────────────────────────────


def _memory(plan: DeployPlan) -> Iterator[_Problem]:
    """Check lower bounds of memory; `clickline plan` estimates what the tables take."""
    config, takes = plan.config, plan.deploy.resources
    processes = config.serve.processes or 1
    needed, limit = _SERVER + processes * _SERVER_PROCESS, amount(takes.predictor.memory_limit)
    if needed > limit:
        yield (
            "serve.processes",
            f"is {processes}, which takes {human_size(needed)} before any table. Allowed by "
            f"deploy.resources.predictor.memory_limit {takes.predictor.memory_limit}: "
            f"{max(1, int((limit - _SERVER) // _SERVER_PROCESS))}.",
            "Lower it, or raise memory_limit.",
        )
    if plan.on_ray:
        yield from _training_memory(plan)


def _training_memory(plan: DeployPlan) -> Iterator[_Problem]:
    """Training may start on train.workers.min pods, so all embedding servers must fit there: the memory of their
    processes and what they request from Ray."""
    config = plan.config
    least, _ = worker_range(config)
    written = plan.deploy.resources.ray_worker.memory_limit
    limit, per_pod = amount(written), math.ceil(config.train.embedding_servers / least)
    asked = [
        0 if memory == "auto" else int(memory)
        for memory in (config.cluster.worker.memory, config.cluster.embedding_server.memory)
    ]
    worker, shard = max(((_TRAINER, _SHARD), tuple(asked)), key=lambda both: both[0] + per_pod * both[1])
    if worker + per_pod * shard <= limit:
        return
    yield (
        "train.embedding_servers",
        f"is {config.train.embedding_servers}: with train.workers.min {least} a pod holds {per_pod} of them, "
        f"{human_size(shard)} each at least, beside a worker of {human_size(worker)}. Allowed by "
        f"deploy.resources.ray_worker.memory_limit {written}: {max(0, int((limit - worker) // shard)) * least} shards.",
        "Lower train.embedding_servers or cluster.embedding_server.memory, or raise memory_limit or "
        "train.workers.min. `clickline plan` estimates the memory of the tables.",
    )


# ── notes ──────────────────────────────────────────────────────────────────────────────────────


def config_notes(plan: DeployPlan) -> list[str]:
    """Notes on settings that work but may surprise."""
    return [*_storage_notes(plan), *_access_notes(plan), *_knative_notes(plan), *_resource_notes(plan)]


def _storage_notes(plan: DeployPlan) -> Iterator[str]:
    config, storage = plan.config, plan.deploy.storage
    models = storage.models
    if models.kind == "new" and models.access != "ReadWriteMany":
        yield (
            "deploy.storage.models is ReadWriteOnce: all pods that mount it run on one node"
            + (", Ray's workers too" if plan.on_ray else "")
            + ". For several nodes set access: ReadWriteMany, with a storage class that supports it, or kind: nfs."
        )
    for name in ("data", "models"):
        volume = getattr(storage, name)
        if volume.kind == "host":
            yield (
                f"deploy.storage.{name} is {volume.path} on whichever node a pod runs: only for a single-node cluster. "
                f"The folder must belong to {plan.deploy.identity.user}:{plan.deploy.identity.fs_group}, or be "
                "writable for it."
            )
    if claim_name(plan, "models") is None:
        yield (
            "deploy.storage.models.kind is none: checkpoints are lost with the pod, so that a new pod starts "
            "from the beginning."
        )
    if claim_name(plan, "data") is not None and storage.data.kind == "new":
        yield ("deploy.storage.data is a new, empty volume: `clickline deploy data push FOLDER` fills it.")
    places = (*config.data.train, *(config.data.eval or ()), config.publish.registry or "")
    remote = any(map(_is_uri, places))
    if remote and not plan.deploy.secrets.environment and config.storage.credentials_file is None:
        yield (
            "data or versions are in an object store, and no credentials are set (deploy.secrets.environment, or "
            "storage.credentials_file): that works if the store is public, or the nodes themselves have access."
        )
    if storage.cache is not None:
        if not remote:
            yield "deploy.storage.cache is given, but nothing is read from an object store: it stays empty."
        yield (
            f"deploy.storage.cache: the pods that read the logs run on node {storage.cache.node} (by its label "
            f"kubernetes.io/hostname), where {storage.cache.path} must exist."
        )


def _access_notes(plan: DeployPlan) -> Iterator[str]:
    config, named = plan.config, {normpath(file) for _, file in _secrets(plan)}
    for path in plan.deploy.secrets.files:
        if normpath(str(WORKING_FOLDER / path)) not in named:
            yield f"deploy.secrets.files: {path} is mounted, but no key of the config names it."
    missing = [
        key
        for key, value in (("serve.tls", config.serve.tls), ("serve.token_file", config.serve.token_file))
        if value is None
    ]
    if missing and plan.deploy.serving.service != "ClusterIP":
        yield (
            f"deploy.serving.service is {plan.deploy.serving.service} without {' and '.join(missing)}: anyone who "
            "can reach the nodes can request predictions."
        )
    if config.serve.token_file is not None:
        yield "serve.token_file also protects /metrics: Prometheus needs the token."
    if config.serve.tls is not None and plan.deploy.serving.lookup is not None:
        name = plan.object_name("lookup")
        yield f"serve.tls: the certificate must also be valid for the lookup servers, *.{name}."
    if plan.deploy.tracking.enabled and plan.deploy.tracking.image is None:
        yield (
            "deploy.tracking: the MLflow of this image has only the API; for the web UI set deploy.tracking.image to "
            "an image with the full MLflow."
        )


def _knative_notes(plan: DeployPlan) -> Iterator[str]:
    section = plan.deploy.serving
    if section.kind != "knative":
        return
    needed = feature_flags(plan)
    if needed:
        yield (
            "Knative must allow what the pods need: in its ConfigMap config-features (namespace knative-serving) set "
            + ", ".join(f"{flag}: enabled" for flag in needed)
            + f". {_patch('config-features', dict.fromkeys(needed, 'enabled'))}"
        )
    registry = _registry(plan.deploy.image)
    if "@" not in plan.deploy.image and registry not in _LOCAL_REGISTRIES:
        skipped = {"registries-skipping-tag-resolving": ",".join((*_LOCAL_REGISTRIES, registry))}
        yield (
            f"Knative resolves the tag of {plan.deploy.image} at its registry ({registry}). For an image that is "
            f"only on the nodes name it dev.local/…, or disable that: {_patch('config-deployment', skipped)}"
        )
    yield (
        "Knative accepts requests once a version is published. Without one for an hour the revision fails: "
        f"delete it (kubectl -n {plan.deploy.namespace} delete ksvc {plan.object_name('predictor')}) and apply again."
    )
    if section.protocol == "grpc":
        yield (
            "deploy.serving.protocol is grpc: Knative exposes only that port, and HTTP cannot be reached from "
            "outside."
        )
    if section.canary is not None:
        yield "Both revisions read the same ConfigMap: a restarted pod of the stable one has the new config."


_LOCAL_REGISTRIES = ("kind.local", "ko.local", "dev.local")
"""Registries of locally built images, whose tags Knative never resolves."""


def _registry(image: str) -> str:
    """The registry of an image, as Knative names it."""
    first, slash, _ = image.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else "index.docker.io"


def _patch(config_map: str, data: dict[str, str]) -> str:
    return f"kubectl -n knative-serving patch configmap {config_map} --type merge -p '{json.dumps({'data': data})}'"


def _resource_notes(plan: DeployPlan) -> Iterator[str]:
    config, deploy = plan.config, plan.deploy
    for role in ("pipeline", "ray_head", "ray_worker", "predictor", "lookup", "tracking"):
        gpus = getattr(deploy.resources, role).gpu
        if gpus:
            yield f"deploy.resources.{role}.gpu is {gpus}: this release runs on CPUs and leaves them idle."
    section = deploy.serving
    if (
        section.kind == "deployment"
        and section.max_replicas is not None
        and section.max_replicas > section.replicas
    ):
        yield (
            "The autoscaler needs the cluster's metrics server; without one it stays at "
            f"{pluralize(section.replicas, 'predictor')}."
        )
    if section.lookup is not None:
        pods = config.publish.shards * section.lookup.replicas
        yield (
            f"deploy.serving.lookup: {pluralize(pods, 'pod')}, publish.shards {config.publish.shards} x replicas "
            f"{section.lookup.replicas}. They cannot serve versions that were published with another number of shards."
        )
    least, most = worker_range(config)
    if plan.on_ray and deploy.training.kind == "volcano":
        yield (
            f"Volcano starts nothing before {2 + least} of {2 + most} pods fit at the same time (train.workers.min "
            f"{least}, the head and the driver)."
        )


# ── paths ──────────────────────────────────────────────────────────────────────────────────────


def _mount_paths(plan: DeployPlan) -> list[str]:
    """The mount paths of volumes in the pods."""
    data = [] if plan.deploy.storage.data.kind == "none" else [data_folder(plan)]
    return data if _is_uri(plan.config.home) else [*data, plan.config.home]


def _is_uri(place: str) -> bool:
    return "://" in place or "::" in place


def _is_inside(path: str, folder: str) -> bool:
    return PurePosixPath(normpath(path)).is_relative_to(normpath(folder))
