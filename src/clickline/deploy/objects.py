"""Kubernetes objects as plain dicts: what all of them share, and their YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

import yaml

from clickline.config import Config, resolved
from clickline.config.deploy_sections import DeploySection
from clickline.config.sections import ServeSection, StudioSection

Object = dict[str, Any]

SERVING_ROLES = ("predictor", "lookup")

WORKING_FOLDER = PurePosixPath("/clickline")
"""The folder of clickline.yaml in a pod; relative paths in it start here."""


@dataclass(frozen=True)
class DeployPlan:
    """What is deployed: the config as the pods see it, and the user's Python files that it names."""

    config: Config
    files: Mapping[str, str]
    """Maps a path in a pod to the file's text."""
    config_text: str
    """The YAML of the config in the pods."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def deploy(self) -> DeploySection:
        return self.config.deploy

    @property
    def on_ray(self) -> bool:
        return self.config.train.mode == "cluster"

    def object_name(self, role: str) -> str:
        """The name of this deployment's object with that role."""
        return f"{self.name}-{role}"

    def labels(self, role: str) -> dict[str, str]:
        """The labels of every object and pod of a role."""
        return {**self.selector(role), "app.kubernetes.io/managed-by": "clickline"}

    def selector(self, role: str) -> dict[str, str]:
        """The labels that select the pods of a role. They never change, because selectors are immutable."""
        return {**instance_labels(self.name), "app.kubernetes.io/component": role}

    def object(
        self, api: str, kind: str, role: str, *, name: str = "", namespaced: bool = True, **body: Any
    ) -> Object:
        """An object with its metadata, named after its role by default; `body` is the rest: spec, data, rules, …"""
        metadata: Object = {"name": name or self.object_name(role)}
        if namespaced:
            metadata["namespace"] = self.deploy.namespace
        metadata["labels"] = self.labels(role)
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}

    def workload(self, kind: str, role: str, template: Object, **spec: Any) -> Object:
        """A Deployment or StatefulSet of the pods of a role."""
        spec |= {"selector": {"matchLabels": self.selector(role)}, "template": template}
        return self.object("apps/v1", kind, role, spec=spec)

    def headless_service(self, name: str, role: str, ports: list[Object]) -> Object:
        """A Service whose host name resolves to the addresses of all pods of a role, ready or not."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self.selector(role),
            "ports": ports,
        }
        return self.object("v1", "Service", role, name=name, spec=spec)

    def config_map(self) -> Object:
        """The ConfigMap with the config and the user's files."""
        return self.object("v1", "ConfigMap", "config", data=self._config_files())

    def config_hash(self, role: str) -> str:
        """A hash of what the pods of a role read at startup, so that a change replaces them.

        For training roles it leaves out how models are served: a change of that must not restart training.
        """
        files = self._config_files()
        if role not in SERVING_ROLES:
            files["clickline.yaml"] = resolved(self.config.model_copy(update=self._serving_defaults()))
        return sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]

    def _serving_defaults(self) -> dict[str, Any]:
        # The trusted keys also matter when versions are published.
        keys = {"trusted_keys_file": self.config.serve.trusted_keys_file}
        serve = ServeSection().model_copy(update=keys)
        return {"deploy": DeploySection(), "serve": serve, "studio": StudioSection()}

    def mounted_files(self) -> dict[str, str]:
        """Maps a path in a pod to the ConfigMap key."""
        mounts = {str(WORKING_FOLDER / "clickline.yaml"): "clickline.yaml"}
        return mounts | {path: _config_map_key(path) for path in self.files}

    def _config_files(self) -> dict[str, str]:
        return {"clickline.yaml": self.config_text} | {
            _config_map_key(path): content for path, content in self.files.items()
        }


def _config_map_key(path: str) -> str:
    """ConfigMap keys cannot contain slashes."""
    inside = PurePosixPath(path)
    return ".".join(
        (inside.relative_to(WORKING_FOLDER) if inside.is_relative_to(WORKING_FOLDER) else inside).parts
    ).lstrip("/.")


def describe(item: Object) -> str:
    """An object's name in messages: Deployment ads-predictor."""
    return f"{item['kind']} {item['metadata']['name']}"


def instance_labels(name: str) -> dict[str, str]:
    """The labels of every object and pod of a deployment."""
    return {"app.kubernetes.io/name": "clickline", "app.kubernetes.io/instance": name}


def label(item: Object, key: str) -> str | None:
    """One of the app.kubernetes.io labels that all our objects have."""
    found = (item["metadata"].get("labels") or {}).get(f"app.kubernetes.io/{key}")
    return None if found is None else str(found)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, and equal parts in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Object]) -> str:
    """The YAML of one or several objects."""
    return "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110) for one in objects
    )
