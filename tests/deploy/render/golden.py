"""Deployments whose rendered files are compared byte by byte: tests/deploy/render/golden/*.yaml.

After an intended change: `.venv/bin/python tests/deploy/render/golden.py`, then review the diff.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from clickline.deploy.objects import to_yaml
from clickline.deploy.render import Rendered, render

GOLDEN = Path(__file__).parent / "golden"

_DATA = "name: ads\ndata: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}\n"
_RAY = "train: {mode: cluster, workers: {min: 2, max: 3}, embedding_servers: 2}\n"

CASES = {
    "smallest": _DATA,
    "plain-cluster": f"{_DATA}{_RAY}deploy: {{serving: {{service: NodePort, lookup: {{replicas: 2}}}}}}\n",
    "volcano-nfs": f"""{_DATA}{_RAY}
deploy:
  training: {{kind: volcano, queue: night}}
  nodes: {{selector: {{disk: fast}}, tolerations: [{{key: spot, operator: Exists}}], priority_class: low}}
  storage:
    data: {{kind: nfs, server: files.example, path: /exports/logs}}
    models: {{kind: nfs, server: files.example, path: /exports/models}}
""",
    "kuberay-knative": f"""{_DATA}{_RAY}
deploy:
  training: {{kind: kuberay, gang: true}}
  serving: {{kind: knative, replicas: 0, canary: {{stable: ads-predictor-0a1b2c3d, percent: 20}}}}
  storage: {{data: {{kind: existing, claim: logs}}, models: {{kind: existing, claim: models}}}}
""",
    "argo-tracking": f"""{_DATA}{_RAY}
deploy:
  workflow: {{kind: argo, schedule: 0 3 * * *}}
  tracking: {{enabled: true}}
  storage: {{data: {{kind: host, path: /srv/logs}}, models: {{kind: host, path: /srv/models}}}}
""",
    "follow-secrets": """name: ads
data:
  format: slots
  train: "s3://logs/{date}/{hour}/*.txt"
  dates: {from: 20260101}
cache: {size: 20GiB}
serve: {brpc_port: 8510, token_file: token, tls: {certificate: tls/crt, key: tls/key}}
deploy:
  namespace: prod
  create_namespace: false
  image: registry/clickline:0.1.0
  pull_secrets: [registry]
  secrets:
    environment: [s3-keys]
    files: {token: serving/token, tls/crt: serving-tls/tls.crt, tls/key: serving-tls/tls.key}
  workflow: {follow: true}
  serving: {service: LoadBalancer, replicas: 3, max_replicas: null}
  storage: {data: {kind: none}, models: {size: 100Gi, access: ReadWriteMany}, cache: {node: node-1, path: /mnt/cache}}
  resources: {pipeline: {cpu: "4", memory: 8Gi, memory_limit: 8Gi}}
""",
}


def render_text(config: str, *overrides: str) -> Rendered:
    """The rendered deployment of a config text, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "clickline.yaml")
        file.write_text(config)
        return render(file, overrides)


if __name__ == "__main__":
    for name, config in CASES.items():
        (GOLDEN / f"{name}.yaml").write_text(to_yaml(render_text(config).objects))
