"""The section `deploy:` of clickline.yaml: how the system runs on Kubernetes.

It holds only what is specific to a cluster. What the roles do comes from the other sections: the number of workers from
`train.workers`, shards from `train.embedding_servers` and `publish.shards`, ports from `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from clickline.config.value_types import Complaint, LocalPath, Port, Section, as_type, only_for, ordered

SERVICE_VARIABLE = "CLICKLINE_SERVICE"
"""Set in the pods of predictors: the host name of their Service, or empty. A pod's own addresses help nobody."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def _tagged(image: str) -> str:
    """The part after the last slash must have a tag or a digest: without one the image changes from day to day."""
    if ":" not in image.rpartition("/")[2] and "@" not in image:
        raise ValueError(image)
    return image


ObjectName = Annotated[
    str,
    Field(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253),
    as_type("string", "a Kubernetes name: lower-case letters, digits, - and ."),
]
NamespaceName = Annotated[
    str,
    Field(pattern=rf"^{_LABEL}$"),
    as_type("string", "a Kubernetes name: lower-case letters, digits and inner hyphens"),
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
    as_type("string", "a Kubernetes quantity, such as 500m or 2"),
]
Memory = Annotated[
    str,
    Field(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)$"),
    as_type("string", "a Kubernetes quantity, such as 512Mi or 4Gi"),
]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
NodePath = Annotated[str, Field(pattern="^/"), as_type("string", "an absolute path")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$"), as_type("string", "secret/key")]


class TrainingSection(Section):
    """How Ray runs if train.mode is cluster."""

    kind: Literal["plain", "volcano", "kuberay"] = Field(
        "plain",
        description="plain: Ray from core objects, on any cluster; volcano: a gang-scheduled Volcano Job; "
        "kuberay: a RayJob of the KubeRay operator.",
    )
    queue: ObjectName | None = Field(None, description="Volcano queue; null: its default.")
    gang: bool = Field(
        False, description="kuberay: Volcano gang-schedules the head and the minimum number of workers."
    )


class WorkflowSection(Section):
    """What runs the pipeline."""

    kind: Literal["job", "argo"] = Field(
        "job", description="job: one Job runs all stages; argo: an Argo Workflow with a step per stage."
    )
    follow: bool = Field(
        False,
        description="Keep training as new hours arrive, like `up --follow`: a Deployment instead of a Job.",
    )
    schedule: Annotated[str, Field(pattern=r"^\S+( \S+){4}$")] | None = Field(
        None,
        description="Run the pipeline at these times, as a cron expression; null: once.",
        json_schema_extra={"x-allowed": "a cron expression of five fields, such as 0 3 * * *; or null"},
    )
    retries: int = Field(
        6, ge=0, le=100, description="How often a crashed stage is retried, from its checkpoint."
    )

    def checks(self) -> Iterator[Complaint]:
        if self.follow and self.schedule is not None:
            yield Complaint(
                ("schedule",),
                "is set together with follow: true, which trains continuously. Allowed: one of the two.",
                "Remove one of them.",
                ("follow",),
            )


class LookupRole(Section):
    """Lookup servers for the sparse tables: a StatefulSet of publish.shards x replicas pods."""

    replicas: int = Field(1, ge=1, le=100, description="Servers per shard.")


class CanarySection(Section):
    """How requests are split between a new revision and a stable one (knative)."""

    stable: ObjectName = Field(description="The stable revision, from `deploy status`.")
    percent: int = Field(10, ge=1, le=99, description="Percentage of the requests for the new revision.")


class ServingSection(Section):
    """The predictors."""

    kind: Literal["deployment", "knative"] = Field(
        "deployment", description="A Deployment, on any cluster, or a Knative Service."
    )
    replicas: int = Field(
        2, ge=0, le=1000, description="Minimum number of predictors; 0 with knative: none when idle."
    )
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        4, description="Maximum number of predictors, scaled by load; null: always `replicas`."
    )
    cpu_target: int = Field(
        70,
        ge=1,
        le=1000,
        description="deployment: target CPU utilization of the autoscaler, in percent of the request.",
    )
    concurrency: int = Field(
        32, ge=1, le=1000, description="knative: target number of concurrent requests per predictor."
    )
    protocol: Literal["http", "grpc"] = Field(
        "http", description="knative: the protocol of the one port that it exposes."
    )
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP",
        description="Service type of the predictors: reachable inside the cluster, on every node, or from outside.",
    )
    http_node_port: Port | None = Field(None, description="With NodePort; null: the cluster chooses.")
    grpc_node_port: Port | None = Field(None, description="With NodePort; null: the cluster chooses.")
    lookup: LookupRole | None = Field(
        None, description="Sparse tables in lookup servers; null: memory-mapped by each predictor."
    )
    canary: CanarySection | None = Field(
        None, description="knative: split the requests between two revisions; null: all to the newest."
    )

    def checks(self) -> Iterator[Complaint]:
        yield from ordered(self, "replicas", "max_replicas")
        if self.replicas == 0 and self.kind == "deployment":
            yield Complaint(
                ("replicas",), "is 0. Allowed with kind: knative only.", "Raise it to at least 1.", ("kind",)
            )
        ports = (self.http_node_port, self.grpc_node_port)
        named = ("http_node_port", "grpc_node_port")
        yield from only_for(self, "service", self.service, dict.fromkeys(named, ("NodePort", "LoadBalancer")))
        for key, port in zip(named, ports, strict=True):
            if port is not None and self.service != "ClusterIP" and not 30000 <= port <= 32767:
                yield Complaint(
                    (key,),
                    f"is {port}. Allowed: 30000 to 32767, the default range of node ports.",
                    "Choose one in that range, or remove it and let the cluster choose.",
                )
        if ports[0] is not None and ports[0] == ports[1]:
            yield Complaint(
                ("grpc_node_port",),
                f"is {ports[1]}, the same as http_node_port. Allowed: different ports.",
                "Change one of them.",
                ("http_node_port",),
            )
        if self.canary is not None and self.kind != "knative":
            yield Complaint(
                ("canary",),
                f"is set, but kind is {self.kind}. Allowed only for knative.",
                "Remove canary, or set kind: knative. To serve an older version: clickline versions pin.",
                ("kind",),
            )


_VOLUME_KEYS = {
    "storage_class": ("new",),
    "access": ("new",),
    "claim": ("existing",),
    "server": ("nfs",),
    "path": ("nfs", "host"),
}
"""Keys of a volume and the kinds that have them; all are required, except those of a new one."""


class Volume(Section):
    """A volume that the pods share."""

    kind: Literal["new", "existing", "nfs", "host", "none"] = Field(
        "new",
        description="new: a new claim; existing: a claim that exists; nfs: an NFS server; host: a folder of the node, "
        "for a single-node cluster; none: all data is in object stores.",
    )
    size: Memory = Field("10Gi", description="Requested size.")
    storage_class: ObjectName | None = Field(
        None, description="new: the storage class of the claim; null: the cluster's default."
    )
    access: Literal["ReadWriteOnce", "ReadWriteMany"] | None = Field(
        None,
        description="new: ReadWriteOnce for pods on one node, ReadWriteMany on several. Default: ReadWriteOnce.",
    )
    claim: ObjectName | None = Field(None, description="existing: the name of the claim.")
    server: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="nfs: the host name of the server."
    )
    path: NodePath | None = Field(None, description="nfs: the exported folder; host: the node's folder.")

    def checks(self) -> Iterator[Complaint]:
        for key, kinds in _VOLUME_KEYS.items():
            if getattr(self, key) is None and self.kind != "new" and self.kind in kinds:
                yield Complaint((key,), f"is missing, and kind: {self.kind} needs it.", "Set it.", ("kind",))
        yield from only_for(self, "kind", self.kind, _VOLUME_KEYS)


class DataVolume(Volume):
    """The volume with the click logs."""

    mount: LocalPath | None = Field(
        None,
        description="Mount path: the folder that contains the files of data.train and data.eval. Default: data.",
    )


class NodeCache(Section):
    """A folder on one node for local copies of remote data; the pipeline runs on that node."""

    node: ObjectName = Field(description="The node's name.")
    path: NodePath = Field(description="The folder on that node; it must exist.")


class StorageVolumes(Section):
    """The volumes of the pods."""

    data: DataVolume = Field(
        DataVolume(), description="Click logs; mounted read-only into pods that only read them."
    )
    models: Volume = Field(Volume(), description="`home`: datasets, checkpoints, versions, logs, state.")
    cache: NodeCache | None = Field(
        None,
        description="Local copies of remote data on one node, up to cache.size; null: in each pod, until it ends.",
    )


class TrackingServer(Section):
    """An MLflow server for this deployment; to use an existing one, set tracking.uri."""

    enabled: bool = Field(False, description="Whether to deploy it.")
    port: Port = Field(5000, description="Its port.")
    image: Image | None = Field(
        None,
        description="An image with the full MLflow; null: the image of all roles, which has no web UI.",
        json_schema_extra={"x-allowed": "an image with a tag or a digest, or null"},
    )


class IdentitySection(Section):
    """User and groups of the processes. Any id works, except root."""

    user: UserId = Field(10001, description="runAsUser.")
    group: UserId = Field(10001, description="runAsGroup.")
    fs_group: UserId = Field(10001, description="Group that owns the volumes (fsGroup).")


class Resources(Section):
    """Resource requests and limits of a pod."""

    cpu: Cpu = Field("100m", description="CPU request.")
    memory: Memory = Field("768Mi", description="Memory request.")
    cpu_limit: Cpu | None = Field(None, description="CPU limit; null: whatever the node has free.")
    memory_limit: Memory = Field("4Gi", description="Memory limit; a pod that exceeds it is killed.")
    gpu: int = Field(0, ge=0, le=64, description="Number of GPUs (nvidia.com/gpu).")

    def checks(self) -> Iterator[Complaint]:
        yield from ordered(self, "memory", "memory_limit", amount)
        yield from ordered(self, "cpu", "cpu_limit", amount)


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
    """A Kubernetes quantity in cores or bytes."""
    number = quantity.rstrip("kKMGTim")
    return float(number) * _UNITS.get(quantity[len(number) :], 1)


class ResourcesSection(Section):
    """Requests and limits per role; the defaults fit a node with two cores."""

    pipeline: Resources = Field(
        Resources(), description="The stages; with train.mode cluster only the driver."
    )
    ray_head: Resources = Field(
        Resources(cpu="50m", memory="512Mi", memory_limit="2Gi"),
        description="Ray's head; it runs no tasks.",
    )
    ray_worker: Resources = Field(Resources(), description="Training workers and embedding servers.")
    predictor: Resources = Field(
        Resources(cpu="50m", memory="256Mi", memory_limit="2Gi"), description="Predictors."
    )
    lookup: Resources = Field(
        Resources(cpu="50m", memory="128Mi", memory_limit="2Gi"), description="Lookup servers."
    )
    tracking: Resources = Field(
        Resources(cpu="50m", memory="384Mi", memory_limit="1Gi"), description="MLflow."
    )


class Toleration(Section):
    """A taint that the pods tolerate."""

    key: str | None = Field(None, description="Key of the taint; null with operator Exists: every taint.")
    operator: Literal["Equal", "Exists"] = Field(
        "Equal", description="Whether the value must be equal, or any value matches."
    )
    value: str | None = Field(None, description="Value of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="null: all effects."
    )


class NodesSection(Section):
    """The nodes that the pods may run on."""

    selector: dict[str, str] = Field({}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field((), description="Taints that the pods tolerate.")
    priority_class: ObjectName | None = Field(None, description="PriorityClass of the training pods.")


class SecretsSection(Section):
    """Secrets of the cluster, by name; their values are never written into manifests."""

    environment: tuple[ObjectName, ...] = Field(
        (), description="Secrets whose keys become environment variables of the pods, such as S3 credentials."
    )
    files: dict[str, SecretKey] = Field(
        {},
        description="Files of this config that are in secrets: the path as written in serve.token_file, serve.tls, "
        "serve.trusted_keys_file, publish.signing_key_file, studio or storage.credentials_file, and secret/key.",
        json_schema_extra={"x-allowed": "a group of paths, each secret/key"},
    )


class DeploySection(Section):
    """Kubernetes: what `clickline deploy` renders and applies."""

    namespace: NamespaceName = Field("clickline", description="The namespace of all objects.")
    create_namespace: bool = Field(
        True, description="Whether `deploy apply` creates the namespace, or it exists already."
    )
    image: Image = Field(
        f"clickline:{version('clickline')}",
        description="The image of all roles.",
        json_schema_extra={"default": "clickline: and the version of this release"},
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
        description="Whether NetworkPolicies allow only the connections that are needed.",
    )
