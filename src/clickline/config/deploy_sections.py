"""The section `deploy:` of clickline.yaml: how the system runs on Kubernetes.

Only what a cluster needs to be told is here. What the roles do comes from the other sections: how many workers from
`train.workers`, shards from `train.embedding_servers` and `publish.shards`, ports from `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from clickline.config.value_types import Complaint, LocalPath, Section, as_type

SERVICE_VARIABLE = "CLICKLINE_SERVICE"
"""Set in the pods of predictors: the name that others reach them by, or nothing. A pod's own addresses are no use."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def _tagged(image: str) -> str:
    """What stands behind the last slash must carry a tag or a digest: without one it means another image each day."""
    if ":" not in image.rpartition("/")[2] and "@" not in image:
        raise ValueError(image)
    return image


ObjectName = Annotated[
    str,
    Field(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253),
    as_type("string", "a name of Kubernetes: lower-case letters, digits, - and ."),
]
NamespaceName = Annotated[
    str,
    Field(pattern=rf"^{_LABEL}$"),
    as_type("string", "a name of Kubernetes: lower-case letters, digits and inner hyphens"),
]
Image = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]*$"),
    AfterValidator(_tagged),
    as_type("string", "an image with a tag or a digest, such as registry/clickline:0.1.0"),
]
Cpu = Annotated[
    str,
    Field(pattern=r"^([0-9]+m|[0-9]+(\.[0-9]{1,3})?)$"),
    as_type("string", "a quantity of Kubernetes, such as 500m or 2"),
]
Memory = Annotated[
    str,
    Field(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)$"),
    as_type("string", "a quantity of Kubernetes, such as 512Mi or 4Gi"),
]
NodePort = Annotated[int, Field(ge=1, le=65535)]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
NodePath = Annotated[str, Field(pattern="^/"), as_type("string", "an absolute path")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$"), as_type("string", "secret/key")]


class TrainingSection(Section):
    """Where training runs when train.mode is cluster."""

    kind: Literal["plain", "volcano", "kuberay"] = Field(
        "plain",
        description="plain: Ray from core objects, on any cluster; volcano: a Volcano Job, scheduled as a whole; "
        "kuberay: a RayJob of the KubeRay operator.",
    )
    queue: ObjectName | None = Field(None, description="Queue of Volcano; null: its default.")
    gang: bool = Field(
        False, description="kuberay: Volcano schedules head and smallest number of workers as a whole."
    )


class WorkflowSection(Section):
    """What runs the pipeline."""

    kind: Literal["job", "argo"] = Field(
        "job", description="job: one Job runs all stages; argo: a Workflow with a step for each."
    )
    follow: bool = Field(
        False, description="Keep training as hours arrive, as `up --follow`: a trainer instead of a job."
    )
    schedule: Annotated[str, Field(pattern=r"^\S+( \S+){4}$")] | None = Field(
        None,
        description="Run the pipeline at these times, in cron's five fields; null: once.",
        json_schema_extra={"x-allowed": "five fields of cron, such as 0 3 * * *; or null"},
    )
    retries: int = Field(
        6, ge=0, le=100, description="How often a stage that crashed begins again, from its checkpoint."
    )

    def checks(self) -> Iterator[Complaint]:
        if self.follow and self.schedule is not None:
            yield Complaint(
                ("schedule",),
                "is given beside follow: true, which learns all the time. Allowed: one of the two.",
                "Remove one of them.",
                ("follow",),
            )


class LookupRole(Section):
    """Sparse tables in servers of their own, a StatefulSet of publish.shards x replicas."""

    replicas: int = Field(1, ge=1, le=100, description="Servers of each shard.")


class CanarySection(Section):
    """Traffic that a new revision gets while the old one answers the rest (knative)."""

    stable: ObjectName = Field(description="The revision that answers the rest, from `deploy status`.")
    percent: int = Field(10, ge=1, le=99, description="Share of the requests for the new revision.")


class ServingSection(Section):
    """The predictors."""

    kind: Literal["deployment", "knative"] = Field(
        "deployment", description="A Deployment on any cluster, or a Service of Knative."
    )
    replicas: int = Field(
        2, ge=0, le=1000, description="Predictors at least; 0 with knative: none when idle."
    )
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        4, description="Predictors at most, by load; null: always `replicas`."
    )
    cpu_target: int = Field(
        70,
        ge=1,
        le=1000,
        description="deployment: percent of the requested CPU that more predictors keep to.",
    )
    concurrency: int = Field(
        32, ge=1, le=1000, description="knative: requests at a time that one predictor is meant for."
    )
    protocol: Literal["http", "grpc"] = Field("http", description="knative: the one port that it opens.")
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP",
        description="How the predictors are reached: inside, on every node's address, from outside.",
    )
    http_node_port: NodePort | None = Field(None, description="With NodePort; null: the cluster chooses.")
    grpc_node_port: NodePort | None = Field(None, description="With NodePort; null: the cluster chooses.")
    lookup: LookupRole | None = Field(
        None, description="Sparse tables in servers of their own; null: mapped in each predictor."
    )
    canary: CanarySection | None = Field(
        None, description="knative: split the traffic between two revisions; null: all to the newest."
    )

    def checks(self) -> Iterator[Complaint]:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            yield Complaint(
                ("max_replicas",),
                f"is {self.max_replicas}, below replicas {self.replicas}.",
                "Raise max_replicas or lower replicas.",
                ("replicas",),
            )
        if self.replicas == 0 and self.kind == "deployment":
            yield Complaint(
                ("replicas",), "is 0. Allowed with kind: knative only.", "Raise it to at least 1.", ("kind",)
            )
        ports = (self.http_node_port, self.grpc_node_port)
        for key, port in zip(("http_node_port", "grpc_node_port"), ports, strict=True):
            if port is not None and self.service == "ClusterIP":
                yield Complaint(
                    (key,),
                    f"is {port}, but service is ClusterIP. Allowed only with NodePort or LoadBalancer.",
                    f"Remove {key}, or set service: NodePort.",
                    ("service",),
                )
            elif port is not None and not 30000 <= port <= 32767:
                yield Complaint(
                    (key,),
                    f"is {port}. Allowed: 30000 to 32767, the range that clusters keep for node ports.",
                    "Choose one of them, or remove it and let the cluster choose.",
                )
        if ports[0] is not None and ports[0] == ports[1]:
            yield Complaint(
                ("grpc_node_port",),
                f"is {ports[1]}, and so is http_node_port. Allowed: different ports.",
                "Change one of them.",
                ("http_node_port",),
            )
        if self.canary is not None and self.kind != "knative":
            yield Complaint(
                ("canary",),
                f"is given, but kind is {self.kind}. Allowed only for knative.",
                "Remove canary, or set kind: knative. To serve an older version: clickline versions pin.",
                ("kind",),
            )


_VOLUME_NEEDS = {"nfs": ("server", "path"), "host": ("path",), "existing": ("claim",)}
_VOLUME_KEYS = ("storage_class", "access", "claim", "server", "path")
_VOLUME_TAKES = {
    "new": ("storage_class", "access"),
    "existing": ("claim",),
    "nfs": ("server", "path"),
    "host": ("path",),
    "none": (),
}


class Volume(Section):
    """A volume that the pods share."""

    kind: Literal["new", "existing", "nfs", "host", "none"] = Field(
        "new",
        description="new: a claim is made; existing: a claim of yours; nfs: a server of yours; host: a folder of the "
        "node, for a laptop's cluster; none: all lies in object stores.",
    )
    size: Memory = Field("10Gi", description="What is claimed.")
    storage_class: ObjectName | None = Field(
        None, description="new: the class of the claim; null: the cluster's default."
    )
    access: Literal["ReadWriteOnce", "ReadWriteMany"] | None = Field(
        None,
        description="new: ReadWriteOnce serves pods on one node, ReadWriteMany on several. Left out: ReadWriteOnce.",
    )
    claim: ObjectName | None = Field(None, description="existing: the name of the claim.")
    server: Annotated[str, Field(min_length=1)] | None = Field(None, description="nfs: its host.")
    path: NodePath | None = Field(None, description="nfs: the exported folder; host: the node's folder.")

    def checks(self) -> Iterator[Complaint]:
        for key in _VOLUME_NEEDS.get(self.kind, ()):
            if getattr(self, key) is None:
                yield Complaint(
                    (key,), f"is not given, and kind: {self.kind} needs it.", "Give it.", ("kind",)
                )
        for key in _VOLUME_KEYS:
            if getattr(self, key) is not None and key not in _VOLUME_TAKES[self.kind]:
                kinds = " or ".join(kind for kind, keys in _VOLUME_TAKES.items() if key in keys)
                yield Complaint(
                    (key,),
                    f"is given, but kind is {self.kind}. Allowed only for {kinds}.",
                    f"Remove {key}, or change kind.",
                    ("kind",),
                )


class DataVolume(Volume):
    """The volume with the click logs."""

    mount: LocalPath | None = Field(
        None,
        description="Where it is mounted: the folder that holds the files of data.train and data.eval. Left out: data.",
    )


class NodeCache(Section):
    """A folder of one node for local copies of remote data; the pipeline runs there."""

    node: ObjectName = Field(description="The node's name.")
    path: NodePath = Field(description="The folder on it; it must exist.")


class StorageVolumes(Section):
    """Where the pods find data and keep models."""

    data: DataVolume = Field(
        DataVolume(), description="Click logs; mounted read-only where they are only read."
    )
    models: Volume = Field(Volume(), description="`home`: datasets, checkpoints, versions, logs, state.")
    cache: NodeCache | None = Field(
        None, description="Copies of remote data on one node, of cache.size; null: in the pod, for its life."
    )


class TrackingServer(Section):
    """An MLflow server beside the pipeline; one that you have is named by tracking.uri."""

    enabled: bool = Field(False, description="Whether it is deployed.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(5000, description="Its port.")
    image: Image | None = Field(
        None,
        description="An image with the complete MLflow; null: that of all roles, which has no web pages.",
        json_schema_extra={"x-allowed": "an image with a tag or a digest, or null"},
    )


class IdentitySection(Section):
    """Who the processes are. Any id works; root never does."""

    user: UserId = Field(10001, description="runAsUser.")
    group: UserId = Field(10001, description="runAsGroup.")
    fs_group: UserId = Field(10001, description="Group that owns the volumes (fsGroup).")


class Resources(Section):
    """What one pod asks for and may use."""

    cpu: Cpu = Field("100m", description="Reserved cores.")
    memory: Memory = Field("768Mi", description="Reserved memory.")
    cpu_limit: Cpu | None = Field(None, description="Most cores; null: what the node has free.")
    memory_limit: Memory = Field("4Gi", description="Most memory; beyond it the pod is ended.")
    gpu: int = Field(0, ge=0, le=64, description="Whole accelerators (nvidia.com/gpu).")

    def checks(self) -> Iterator[Complaint]:
        if amount(self.memory_limit) < amount(self.memory):
            yield Complaint(
                ("memory_limit",),
                f"is {self.memory_limit}, below memory {self.memory}.",
                "Raise memory_limit or lower memory.",
                ("memory",),
            )
        if self.cpu_limit is not None and amount(self.cpu_limit) < amount(self.cpu):
            yield Complaint(
                ("cpu_limit",),
                f"is {self.cpu_limit}, below cpu {self.cpu}.",
                "Raise cpu_limit or lower cpu.",
                ("cpu",),
            )


_UNITS = {
    "m": 0.001,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
}


def amount(quantity: str) -> float:
    """Cores or bytes of a quantity of Kubernetes."""
    number = quantity.rstrip("kKMGTim")
    return float(number) * _UNITS.get(quantity[len(number) :], 1)


class ResourcesSection(Section):
    """What the pods of each role ask for and may use; the defaults fit a node of two cores."""

    pipeline: Resources = Field(Resources(), description="The stages; with mode cluster the driver alone.")
    ray_head: Resources = Field(
        Resources(cpu="50m", memory="512Mi", memory_limit="2Gi"),
        description="Ray's head; it computes nothing.",
    )
    ray_worker: Resources = Field(Resources(), description="Workers and shards of training.")
    predictor: Resources = Field(
        Resources(cpu="50m", memory="256Mi", memory_limit="2Gi"), description="The endpoint."
    )
    lookup: Resources = Field(
        Resources(cpu="50m", memory="128Mi", memory_limit="2Gi"), description="Servers of the sparse table."
    )
    tracking: Resources = Field(
        Resources(cpu="50m", memory="384Mi", memory_limit="1Gi"), description="MLflow."
    )


class Toleration(Section):
    """A taint that the pods bear."""

    key: str | None = Field(None, description="Of the taint; null with operator Exists: all.")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="How the value is compared.")
    value: str | None = Field(None, description="Of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="null: all effects."
    )


class NodesSection(Section):
    """Which nodes the pods go to."""

    selector: dict[str, str] = Field({}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field((), description="Taints that the pods bear.")
    priority_class: ObjectName | None = Field(None, description="PriorityClass of the pods of training.")


class SecretsSection(Section):
    """Secrets of the cluster, by name; none is ever written into a file."""

    environment: tuple[ObjectName, ...] = Field(
        (), description="Secrets whose keys become environment variables of the pods, such as the keys of S3."
    )
    files: dict[str, SecretKey] = Field(
        {},
        description="Files of this config that come from secrets: the path as written in serve.token_file, serve.tls, "
        "serve.trusted_keys_file, publish.signing_key_file, studio or storage.credentials_file, and secret/key.",
        json_schema_extra={"x-allowed": "a group of paths, each secret/key"},
    )


class DeploySection(Section):
    """Kubernetes: what `clickline deploy` writes and applies."""

    namespace: NamespaceName = Field("clickline", description="Where all of it lives.")
    create_namespace: bool = Field(True, description="Whether the namespace is part of it, or yours.")
    image: Image = Field(
        f"clickline:{version('clickline')}",
        description="One image for all roles.",
        json_schema_extra={"default": "clickline: and the release"},
    )
    pull: Literal["IfNotPresent", "Always", "Never"] = Field("IfNotPresent", description="imagePullPolicy.")
    pull_secrets: tuple[ObjectName, ...] = Field((), description="Secrets for the image's registry.")
    training: TrainingSection = TrainingSection()
    workflow: WorkflowSection = WorkflowSection()
    serving: ServingSection = ServingSection()
    storage: StorageVolumes = StorageVolumes()
    tracking: TrackingServer = TrackingServer()
    identity: IdentitySection = IdentitySection()
    resources: ResourcesSection = ResourcesSection()
    nodes: NodesSection = NodesSection()
    secrets: SecretsSection = SecretsSection()
    network_policy: bool = Field(
        True,
        description="Whether only the pods that must may talk to each other, and clients to the endpoint.",
    )
