"""Objects of Kubernetes as plain dicts: what all of them share, and their text."""

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
"""Where the config lies in a pod: relative paths of the YAML begin here, as they begin in its folder elsewhere."""


@dataclass(frozen=True)
class DeployPlan:
    """What is deployed: the config as the pods see it, and the user's own Python files that it names."""

    config: Config
    files: Mapping[str, str]
    """Path in a pod to text."""
    config_text: str
    """The config's text in the pods."""

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
        """The name of an object of this deployment."""
        return f"{self.name}-{role}"

    def labels(self, role: str) -> dict[str, str]:
        """What every object and pod of a role carries."""
        return {**self.selector(role), "app.kubernetes.io/managed-by": "clickline"}

    def selector(self, role: str) -> dict[str, str]:
        """Which pods are of a role; it never changes, because selectors cannot."""
        return {
            "app.kubernetes.io/name": "clickline",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": role,
        }

    def object(
        self,
        api: str,
        kind: str,
        name: str,
        role: str,
        body: Mapping[str, Any],
        *,
        annotations: Mapping[str, str] | None = None,
        namespaced: bool = True,
    ) -> Object:
        """An object with its metadata; `body` is the rest: spec, data, rules, …"""
        metadata: Object = {"name": name}
        if namespaced:
            metadata["namespace"] = self.deploy.namespace
        metadata["labels"] = self.labels(role)
        if annotations:
            metadata["annotations"] = dict(annotations)
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}

    def config_map(self) -> Object:
        """The config and the user's files."""
        return self.object(
            "v1", "ConfigMap", self.object_name("config"), "config", {"data": dict(self._config_files())}
        )

    def config_hash(self, role: str) -> str:
        """Changes with what the pods of a role depend on, so that those that read it at their start are replaced.

        How models are served is no matter of those that make them: a change there must not train again.
        """
        files = self._config_files()
        if role not in SERVING_ROLES:
            files["clickline.yaml"] = resolved(self.config.model_copy(update=self._serving_defaults()))
        return sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]

    def _serving_defaults(self) -> dict[str, Any]:
        # Whom a registry's versions must be signed by is asked when they are made, too.
        keys = {"trusted_keys_file": self.config.serve.trusted_keys_file}
        serve = ServeSection().model_copy(update=keys)
        return {"deploy": DeploySection(), "serve": serve, "studio": StudioSection()}

    def mounted_files(self) -> dict[str, str]:
        """Path in a pod to key of the ConfigMap."""
        mounts = {str(WORKING_FOLDER / "clickline.yaml"): "clickline.yaml"}
        return mounts | {path: _config_map_key(path) for path in self.files}

    def _config_files(self) -> dict[str, str]:
        return {"clickline.yaml": self.config_text} | {
            _config_map_key(path): content for path, content in self.files.items()
        }


def _config_map_key(path: str) -> str:
    """Keys of a ConfigMap have no slashes."""
    inside = PurePosixPath(path)
    return ".".join(
        (inside.relative_to(WORKING_FOLDER) if inside.is_relative_to(WORKING_FOLDER) else inside).parts
    ).lstrip("/.")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read; equal parts are written out, not referred to."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Object]) -> str:
    """YAML of one or several objects."""
    return "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110) for one in objects
    )
