"""Homes for the studio, and the studio itself as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from jsonschema import Draft202012Validator

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from servers.waiting import eventually, free_ports

SCRIPT = Path(sys.executable).parent / "clickline"
SECRETS = ("planted-store-secret-4711", "planted-serve-token-0815")
SHOWN = (
    "status",
    "runs",
    "versions",
    "serving",
    "data",
    "cluster",
    "form",
)  # what every home can be asked, whatever state it is in


def clickline(*arguments: str, cwd: Path, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


def configure(folder: Path, **sections: Any) -> Path:
    """A small model, quick to learn; ports that are free."""
    folder.mkdir(parents=True, exist_ok=True)
    grpc, http, metrics = free_ports(3)
    config: dict[str, Any] = {
        "name": folder.name,
        "data": {"train": "data/train.tsv", "eval": "data/eval.tsv"},
        "cache": {"dir": "cache"},
        "model": {"embedding_dim": 4, "hidden": [8]},
        "train": {"batch_size": 256},
        "gate": {"auc": 0.55, "extra_epochs": 0},
        "tracking": {"enabled": False},
        "serve": {
            "grpc_port": grpc,
            "http_port": http,
            "metrics_port": metrics,
            "processes": 1,
            "drain_timeout": 2,
            "poll_interval": 0.2,
        },
        "studio": {"enabled": False},
    }
    for name, section in sections.items():
        config[name] = (
            {**config[name], **section} if isinstance(section, dict) and name in config else section
        )
    file = folder / "clickline.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def write_logs(folder: Path, rows: int = 6000) -> None:
    """Synthetic ones, of which three rows cannot be used."""
    generate(
        SampleOptions(format="criteo", rows=rows, out=folder / "data", seed=3, cardinality=500), Progress()
    )
    with (folder / "data" / "train.tsv").open("a") as file:
        file.write("1\tonly three\tcolumns\n" * 3)


class Shown:
    """A studio that answers."""

    def __init__(self, url: str, token_file: Path, authority: Path | None = None) -> None:
        self.url = url
        self.token_file = token_file
        verify = True if authority is None else ssl.create_default_context(cafile=authority)
        self.client = httpx.Client(base_url=url, timeout=30, verify=verify)
        document = self.client.get("/api/openapi.json", headers=self.bearer).json()
        self.paths = document["paths"]
        self._schemas = document["components"]

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def get(self, path: str, status: int = 200, **options: Any) -> Any:
        """An answer, held against the document of the API."""
        return self.checked("get", path, self.client.get(path, **options), status)

    def post(self, path: str, body: Any, status: int = 200, **options: Any) -> Any:
        return self.checked("post", path, self.client.post(path, json=body, **options), status)

    def of(self, home: str, what: str, status: int = 200, **options: Any) -> Any:
        return self.get(f"/api/homes/{home}/{what}", status, **options)

    def checked(self, method: str, path: str, answer: httpx.Response, status: int) -> Any:
        assert answer.status_code == status, answer.text
        kind = answer.headers["content-type"].partition(";")[0]
        told = self._described(path)[method]["responses"]["200" if status == 200 else "default"]["content"]
        schema = {**told[kind]["schema"], "components": self._schemas}
        document = answer.json() if kind == "application/json" else answer.text
        Draft202012Validator(schema).validate(document)
        return document

    def _described(self, path: str) -> Any:
        parts = path.partition("?")[0].split("/")
        for known, methods in self.paths.items():
            expected = known.split("/")
            if len(expected) == len(parts) and all(
                want == part or want.startswith("{") for want, part in zip(expected, parts, strict=True)
            ):
                if known.endswith("{run}") and parts[-1] == "diff":
                    continue
                return methods
        raise AssertionError(f"{path} is not in the document of the API")


@contextmanager
def opened(*arguments: str, cwd: Path, authority: Path | None = None) -> Iterator[Shown]:
    """`clickline studio` with these arguments, on a free port, until Ctrl-C; it must end quietly."""
    with (cwd / "studio.out").open("w") as out, (cwd / "studio.err").open("w") as err:
        process = subprocess.Popen(
            [SCRIPT, "studio", "--port", "0", "--json", *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        said = eventually(
            lambda: (cwd / "studio.out").read_text().rstrip().endswith("}") or process.poll() is not None
        )
        assert said and process.poll() is None, (cwd / "studio.err").read_text()
        told = json.loads((cwd / "studio.out").read_text())
        shown = Shown(told["url"], Path(told["token_file"]), authority)
        with closing(shown.client):
            yield shown
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert (cwd / "studio.err").read_text() == ""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
