"""Runs pods of rendered manifests without a cluster: their containers' commands exactly as written, as processes with the
same environment, user, folders and network names.

Each pod has a network namespace with an address of its own, and each container mount and process namespaces: the root
file system is read-only, volumes are where the manifest mounts them, and the user is the one that it names, without
any capability. Names of pods and Services are in /etc/hosts. What Kubernetes fills in ($(NAME), fields of the pod) is
filled in here.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Object = dict[str, Any]

_PROJECT = Path(__file__).parents[3]


def missing() -> str | None:
    """Why pods cannot run on this machine, or None."""
    if os.geteuid() != 0:
        return "pods are run by root alone, who makes their namespaces"
    tried = subprocess.run(
        ["sh", "-c", "ip netns add clprobe && ip netns del clprobe && unshare --mount --pid --fork true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Pods:
    """A node with a network; volumes outlive pods."""

    def __init__(self, folder: Path, objects: list[Object], kernels: Path | None = None) -> None:
        self.folder = folder
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self._id = f"cp{secrets.token_hex(2)}"
        self._block = int.from_bytes(os.urandom(1))
        self._addresses: dict[str, str] = {}
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._kernels = kernels
        _ip("link", "add", self._id, "type", "bridge")
        _ip("addr", "add", f"10.219.{self._block}.1/24", "dev", self._id)
        _ip("link", "set", self._id, "up")

    # ── pods ───────────────────────────────────────────────────────────────────────────────────

    def add(self, name: str, labels: Mapping[str, str], spec: Object) -> None:
        """A pod that an operator would make."""
        metadata = {"name": name, "namespace": "clickline", "labels": labels}
        self.objects["Pod", name] = {"kind": "Pod", "metadata": metadata, "spec": spec}

    def start(self, kind: str, name: str, index: int = 0) -> str:
        """The pod of a workload: its init containers one after the other to their ends, then its process. Returns the
        pod's name."""
        template = self._template(kind, name)
        pod = f"{name}-{index}" if kind == "StatefulSet" else f"{name}-{secrets.token_hex(3)}"
        if kind == "Pod":
            pod = name
        self.address(pod)
        spec = template["spec"]
        service = self.objects[kind, name]["spec"].get("serviceName")
        if service:
            self._addresses[f"{pod}.{service}"] = self._addresses[pod]
        for found_kind, service_name in self.objects:
            selector = self.objects[found_kind, service_name].get("spec", {}).get("selector", {})
            if found_kind == "Service" and selector.items() <= template["metadata"]["labels"].items():
                self._addresses[service_name] = self._addresses[pod]
        self._write_hosts()
        fields = {
            "metadata.name": pod,
            "status.podIP": self._addresses[pod],
            "metadata.namespace": self.objects[kind, name]["metadata"]["namespace"],
            "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
        }
        for container in spec.get("initContainers", ()):
            if container.get("restartPolicy") == "Always":
                continue  # a sidecar: what it does with the cluster's API is in tests/deploy/cluster/test_hold_ray.py
            process = self._container(pod, spec, container, fields)
            code = self._waited(process, 180)
            assert code == 0, (
                f"{pod}/{container['name']} exited with {code}:\n{self.log(pod, container['name'])}"
            )
        for container in spec["containers"]:
            self._running.setdefault(pod, []).append(self._container(pod, spec, container, fields))
        return pod

    def run(self, pod: str, kind: str, name: str, command: list[str], seconds: float = 180.0) -> str:
        """Another command in a pod's container, as `kubectl exec` does. Returns what it printed."""
        spec = self._template(kind, name)["spec"]
        container = {**spec["containers"][0], "name": f"exec-{secrets.token_hex(2)}", "command": command}
        process = self._container(pod, spec, container, {})
        code = self._waited(process, seconds)
        assert code == 0, f"{command} exited with {code}:\n{self.log(pod, container['name'])}"
        return self.log(pod, container["name"])

    def _waited(self, process: subprocess.Popen[bytes], seconds: float) -> int | None:
        """Its exit code, or None if it had to be killed."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return None

    def ended(self, pod: str, seconds: float) -> int | None:
        """The exit code of a pod that ends by itself."""
        return self._waited(self._running[pod][0], seconds)

    def stop(self, pod: str, *, seconds: float = 30.0) -> int:
        """SIGTERM to its process, as the kubelet sends it. Returns the exit code."""
        (process,) = self._running.pop(pod)
        os.kill(_first_inside(process), signal.SIGTERM)
        return process.wait(seconds)

    def kill(self, pod: str) -> None:
        """Without a word, as a machine dies."""
        for process in self._running.pop(pod, ()):
            _kill(process)

    def alive(self, pod: str) -> bool:
        return all(process.poll() is None for process in self._running[pod])

    def close(self) -> None:
        for pod in list(self._running):
            self.kill(pod)
        for number in range(2, 2 + len({*self._addresses.values()})):
            subprocess.run(["ip", "netns", "del", f"{self._id}{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._id], capture_output=True, check=False)

    # ── what is seen of them ───────────────────────────────────────────────────────────────────

    def log(self, pod: str, container: str | None = None) -> str:
        names = (
            [f"{pod}.{container}.log"]
            if container
            else sorted(p.name for p in self.folder.glob(f"{pod}.*.log"))
        )
        return "\n".join((self.folder / name).read_text(errors="replace") for name in names)

    def address(self, pod: str) -> str:
        """The pod's address; its network namespace is made with it."""
        if pod not in self._addresses:
            number = 2 + len({*self._addresses.values()})
            space, plug = f"{self._id}{number}", f"{self._id}p{number}"
            _ip("netns", "add", space)
            _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", plug, "master", self._id, "up")
            _ip("-n", space, "addr", "add", f"10.219.{self._block}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "default", "via", f"10.219.{self._block}.1")
            self._addresses[pod] = f"10.219.{self._block}.{number}"
        return self._addresses[pod]

    def until_ready(self, pod: str, kind: str, name: str, seconds: float = 120.0) -> None:
        """The readiness probe of the manifest is answered."""
        container = self._template(kind, name)["spec"]["containers"][0]
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        self.until(lambda: self._probe(pod, container["readinessProbe"], ports), pod, seconds)

    def until(self, what: Callable[[], Any], pod: str, seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert self.alive(pod), f"{pod} ended:\n{self.log(pod)}"
            assert time.monotonic() < deadline, f"{pod} is not ready:\n{self.log(pod)}"
            time.sleep(0.2)
        return found

    def _probe(self, pod: str, probe: Object, ports: Mapping[str, int]) -> bool:
        call = probe.get("httpGet") or probe["tcpSocket"]
        port = ports.get(call["port"], call["port"])
        try:
            if "httpGet" in probe:
                url = f"http://{self._addresses[pod]}:{port}{call['path']}"
                return bool(urllib.request.urlopen(url, timeout=2).status == 200)
            socket.create_connection((self._addresses[pod], port), timeout=2).close()
        except OSError:
            return False
        return True

    # ── containers ─────────────────────────────────────────────────────────────────────────────

    def _template(self, kind: str, name: str) -> Object:
        found = self.objects[kind, name]
        if kind == "Pod":
            return found
        template: Object = found["spec"]["template"]
        return template

    def _container(
        self, pod: str, spec: Object, container: Object, fields: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        environment = self._environment(container, fields)
        words = [*container["command"], *container.get("args", ())]
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in words]
        who = {**spec.get("securityContext", {}), **container["securityContext"]}
        groups = f"--groups={who['fsGroup']}" if "fsGroup" in who else "--clear-groups"
        root = f"/run/{self._id}"
        lines = [
            "set -e",
            "mount --make-rprivate /",
            f"mkdir -p {root} && mount -t tmpfs tmpfs {root} && mkdir {root}/up {root}/work {root}/root",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/up,workdir={root}/work {root}/root",
            f"R={root}/root; chmod 755 $R/root",
            "mount -t proc proc $R/proc; mount --rbind /dev $R/dev; mount --rbind /sys $R/sys",
            "mkdir -p $R/clickline",  # the image's working folder
        ]
        if self._kernels is not None:
            lines.append(f"mkdir -p $R/opt/kernels; mount --bind {self._kernels} $R/opt/kernels")
        for mount in container["volumeMounts"]:
            lines += self._mount(pod, spec, mount)
        # After the volumes, because one of them may hide its folder.
        lines.append(f"mkdir -p $R{_PROJECT}; mount --bind {_PROJECT} $R{_PROJECT}")
        lines.append(f"mount -o remount,ro,bind $R{_PROJECT}")
        lines += [f"mount --bind {self.folder}/{name} $R/etc/{name}" for name in ("hosts", "resolv.conf")]
        lines.append("mount -o remount,ro $R")
        given = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
        inside = (
            f"setpriv --reuid={who['runAsUser']} --regid={who.get('runAsGroup', 0)} {groups} --no-new-privs "
            f"--bounding-set=-all --inh-caps=-all env -i --chdir={container['workingDir']} {given} "
            + " ".join(map(shlex.quote, words))
        )
        lines.append(f"exec chroot $R {inside}")
        space = f"{self._id}{self._addresses[pod].rpartition('.')[2]}"
        with (self.folder / f"{pod}.{container['name']}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", space),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _mount(self, pod: str, spec: Object, mount: Object) -> list[str]:
        volume = next(one for one in spec["volumes"] if one["name"] == mount["name"])
        target = f"$R{mount['mountPath']}"
        if "configMap" in volume or "secret" in volume:
            source = self._file(volume, mount["subPath"])
            made = f"mkdir -p $(dirname {target}); touch {target}"
        else:
            group = spec.get("securityContext", {}).get("fsGroup", 0)
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            source = self.folder / (f"claim-{claim}" if claim else f"{pod}-{mount['name']}")
            if not source.exists():
                source.mkdir()
                os.chown(source, 0, group)
                source.chmod(0o2775 if claim else 0o777)
            made = f"mkdir -p {target}"
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                return [
                    f"mount -t tmpfs -o size={volume['emptyDir']['sizeLimit'].replace('Mi', 'm')},mode=1777 tmpfs {target}"
                ]
        lines = [made, f"mount --bind {source} {target}"]
        return [*lines, f"mount -o remount,ro,bind {target}"] if mount.get("readOnly") else lines

    def _file(self, volume: Object, key: str) -> Path:
        if "secret" in volume:
            return self.folder / f"secret-{volume['secret']['secretName']}-{key}"
        content = self.objects["ConfigMap", volume["configMap"]["name"]]["data"][key]
        path = self.folder / f"config-{key}"
        path.write_text(content)
        path.chmod(0o644)
        return path

    def _environment(self, container: Object, fields: Mapping[str, str]) -> dict[str, str]:
        image = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "LANG": "C.UTF-8"}
        if self._kernels is not None:
            image["CLICKLINE_KERNELS"] = "/opt/kernels"
        for one in container.get("env", ()):
            image[one["name"]] = (
                one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return image

    def _write_hosts(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        # It fails at once: other name servers cannot be reached, which takes longer to detect.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")


def _first_inside(process: subprocess.Popen[bytes]) -> int:
    """Process 1 of a container; all others end with it."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """unshare's own --kill-child is lost when the process inside changes its user."""
    if process.poll() is None:
        with suppress(OSError, IndexError):  # it has just ended
            os.kill(_first_inside(process), signal.SIGKILL)
    process.wait(30)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
