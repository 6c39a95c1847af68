"""An MLflow server beside the pipeline, with its database and files in the models volume."""

from __future__ import annotations

from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import http_probe, pod


def tracking_uri(name: str, port: int) -> str:
    """The URI of the server."""
    return f"http://{name}-tracking:{port}"


def tracking_server(plan: DeployPlan) -> list[Object]:
    """The server's Deployment and Service. Its database is the file that runs use without a server, so that earlier
    runs are kept."""
    role, section, home = "tracking", plan.deploy.tracking, plan.config.home
    port = section.port
    command = [
        "mlflow",
        "server",
        "--host=0.0.0.0",
        f"--port={port}",
        "--workers=1",  # SQLite allows one writer
        f"--backend-store-uri=sqlite:///{home}/mlflow.db",
        f"--artifacts-destination={home}/mlflow-artifacts",
        f"--allowed-hosts={_hosts(plan)}",
    ]
    probe = http_probe("/health", "http", timeoutSeconds=5)
    template = pod(
        plan,
        role,
        command,
        resources=plan.deploy.resources.tracking,
        ports={"http": port},
        probes={
            "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 120},
            "readinessProbe": {**probe, "periodSeconds": 10},
            "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 6},
        },
        extra_env=[
            {"name": "GIT_PYTHON_REFRESH", "value": "quiet"},
            {"name": "MLFLOW_DISABLE_TELEMETRY", "value": "true"},
            {"name": "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "value": "false"},
        ],
    )
    if section.image is not None:
        template["spec"]["containers"][0]["image"] = section.image
    service = {
        "selector": plan.selector(role),
        "ports": [{"name": "http", "port": port, "targetPort": "http", "appProtocol": "http"}],
    }
    once = {"type": "Recreate"}  # never two servers on one database
    return [
        plan.workload("Deployment", role, template, replicas=1, strategy=once),
        plan.object("v1", "Service", role, spec=service),
    ]


def _hosts(plan: DeployPlan) -> str:
    """The host names that MLflow accepts requests for; localhost is for kubectl port-forward."""
    service = plan.object_name("tracking")
    inside = [service, f"{service}.{plan.deploy.namespace}", f"{service}.{plan.deploy.namespace}.svc"]
    names = [*inside, f"{inside[-1]}.cluster.local", "localhost", "127.0.0.1"]
    return ",".join(f"{name}:*" for name in names)
