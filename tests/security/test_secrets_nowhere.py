"""Secrets are planted wherever a user may have them, the whole pipeline runs, and none may appear anywhere: not in a file
of the home, an object of the stores, a log, an output, an answer of the server or the studio, or a command line."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import yaml

from clickline.artifacts.signing import make_keys
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ConfigError
from clickline.processes import descendants
from clickline.progress import Progress
from clickline.storage.storage import Storage
from servers.s3 import s3_server
from servers.waiting import eventually, free_ports
from serving.lookup.fleet import certificate_in
from serving.service import predict_request

SCRIPT = Path(sys.executable).parent / "clickline"

PLANTED = {
    "s3 key": "AKIAPLANTED0S3KEY",
    "s3 secret": "planted/s3+secret",
    "s3 session": "planted-s3-session",
    "http header": "planted-http-header",
    "environment key": "AKIAPLANTEDINENV",
    "environment secret": "planted-environment-secret",
    "environment session": "planted-environment-session",
    "mlflow password": "planted-mlflow-password",
    "serve token": "planted-serve-token",
    "studio token": "planted-studio-token",
    "wrong token": "planted-wrong-token",
}
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": PLANTED["environment key"],
    "AWS_SECRET_ACCESS_KEY": PLANTED["environment secret"],
    "AWS_SESSION_TOKEN": PLANTED["environment session"],
    "MLFLOW_TRACKING_USERNAME": "bob",
    "MLFLOW_TRACKING_PASSWORD": PLANTED["mlflow password"],
}


class World:
    """A project whose logs and versions are in S3, and all output collected from it."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.collected: dict[str, str] = {}
        secret = folder / "secret"
        secret.mkdir(mode=0o700)
        s3 = {"key": PLANTED["s3 key"], "secret": PLANTED["s3 secret"], "token": PLANTED["s3 session"]}
        header = {"Authorization": f"Bearer {PLANTED['http header']}"}
        credentials = {"s3": s3, "http": {"client_kwargs": {"headers": header}}}
        (secret / "stores.yaml").write_text(yaml.safe_dump(credentials))
        (secret / "stores.yaml").chmod(0o600)
        (secret / "token").write_text(PLANTED["serve token"] + "\n")
        (secret / "studio-token").write_text(PLANTED["studio token"] + "\n")
        private, _ = make_keys(secret / "signing")
        # For another host: the studio calls the local server by 127.0.0.1, whatever host its certificate names.
        self.certificate, key = certificate_in(secret, "ads.example")
        self.secrets = {
            **PLANTED,
            "signing key": private.read_text().splitlines()[1],
            "TLS key": key.read_text().splitlines()[1],
        }
        self.ports = dict(zip(("grpc", "http", "metrics", "lookup", "studio"), free_ports(5), strict=True))
        tls = {"certificate": "secret/certificate.pem", "key": "secret/key.pem"}
        options = {"s3": {"client_kwargs": {"endpoint_url": endpoint}}}
        config = {
            "name": "ctr",
            "data": {"train": "s3://logs/train.tsv", "eval": "s3://logs/eval.tsv", "shard_size": "64KiB"},
            "cache": {"dir": "cache"},
            "storage": {"options": options, "credentials_file": "secret/stores.yaml"},
            "model": {"embedding_dim": 4, "hidden": [8]},
            "train": {"batch_size": 256},
            "gate": {"auc": 0.51, "extra_epochs": 0},
            "tracking": {"uri": "http://127.0.0.1:1"},
            "publish": {
                "registry": "s3://models/ads",
                "signing_key_file": "secret/signing/signing-key.pem",
            },
            "serve": {
                **{f"{name}_port": self.ports[name] for name in ("grpc", "http", "metrics", "lookup")},
                "host": "0.0.0.0",
                "processes": 1,
                "tls": tls,
                "token_file": "secret/token",
                "trusted_keys_file": "secret/signing/public-key.pem",
            },
            "studio": {
                "host": "0.0.0.0",
                "port": self.ports["studio"],
                "tls": tls,
                "token_file": "secret/studio-token",
            },
            "deploy": {
                "secrets": {
                    "files": {
                        f"secret/{name}": f"ads/{name.replace('/', '-')}"
                        for name in (
                            "stores.yaml",
                            "token",
                            "studio-token",
                            "certificate.pem",
                            "key.pem",
                            "signing/signing-key.pem",
                            "signing/public-key.pem",
                        )
                    }
                }
            },
        }
        (folder / "clickline.yaml").write_text(yaml.safe_dump(config))
        self.storage = Storage(options, secret / "stores.yaml")
        for bucket in ("logs", "models"):
            self.storage._drivers.open("s3://x/x").mkdir(bucket)
        generate(
            SampleOptions(format="criteo", rows=4000, out=folder / "made", seed=3, cardinality=500),
            Progress(),
        )
        for name in ("train.tsv", "eval.tsv"):
            self.storage.put(f"s3://logs/{name}", (folder / "made" / name).read_bytes())

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command and collect its output."""
        done = subprocess.run(
            [SCRIPT, *arguments],
            cwd=self.folder,
            env={**os.environ, **ENVIRONMENT, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        output = done.stdout + done.stderr
        self.collect(" ".join(arguments[:2]), output)
        assert done.returncode == code, output
        return output

    def collect(self, source: str, output: str) -> None:
        self.collected[f"{source} ({len(self.collected)})"] = output

    def everything(self) -> Iterator[tuple[str, bytes]]:
        """All content of the home, the stores and the collected output."""
        yield from ((source, output.encode()) for source, output in self.collected.items())
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_relative_to(self.folder / "secret"):
                yield str(path.relative_to(self.folder)), path.read_bytes()
        filesystem = self.storage._drivers.open("s3://x/x")
        for bucket in ("logs", "models"):
            yield from ((place, filesystem.cat_file(place)) for place in filesystem.find(bucket))

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False
        return context


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as endpoint:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield World(tmp_path_factory.mktemp("secrets"), endpoint)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen commands, some with PyTorch, on a machine that others use too
def test_no_secret_is_written_anywhere(world: World) -> None:
    try:
        world.run("up", "--detach", "--wait", "--json")
        query_server(world)
        query_studio(world)
        collect_command_lines(world)
        world.run("status", "--json")
        world.run(
            "predict", "--json", "--input", "s3://logs/eval.tsv", "--ca", "secret/certificate.pem", code=1
        )
    finally:
        world.run("down")
    commands(world)
    failures(world)
    assert not leaks(world), "\n".join(leaks(world))
    sources = [source for source, _ in world.everything()]
    for expected in (
        ".clickline/up/state.json",
        ".clickline/up/logs/serve.log",
        "resolved.yaml",
        "report.html",
        "manifests/",
        "models/ads/versions/000000001/manifest.json",
        "logs/train.tsv",
    ):
        assert any(expected in source for source in sources), f"{expected} was not searched"
    (world.folder / "cache" / "canary").write_text(PLANTED["s3 secret"])
    assert leaks(world) == ["s3 secret in cache/canary"], "this test can fail"


def leaks(world: World) -> list[str]:
    return sorted(
        f"{name} in {source}"
        for source, content in world.everything()
        for name, secret in world.secrets.items()
        if secret.encode() in content
    )


def query_server(world: World) -> None:
    """Send requests over HTTP, gRPC and the metrics port, with the right token, a wrong one and none."""
    body = {"instances": [{"I1": 1}]}
    for token, status in (("serve token", 200), ("wrong token", 401), (None, 401)):
        headers = {} if token is None else {"authorization": f"Bearer {PLANTED[token]}"}
        with httpx.Client(verify=world.tls(), headers=headers, timeout=30) as client:
            predicted = client.post(
                f"https://127.0.0.1:{world.ports['http']}/v1/models/ctr:predict", json=body
            )
            measured = client.get(f"https://127.0.0.1:{world.ports['metrics']}/metrics")
            assert (predicted.status_code, measured.status_code) == (status, status)
            assert client.get(f"https://127.0.0.1:{world.ports['metrics']}/readyz").status_code == 200
            world.collect(
                "server", predicted.text + measured.text + str(predicted.headers) + str(measured.headers)
            )
        trusted = grpc.ssl_channel_credentials(world.certificate.read_bytes())
        options = [("grpc.ssl_target_name_override", "ads.example")]
        with grpc.secure_channel(f"127.0.0.1:{world.ports['grpc']}", trusted, options) as channel:
            call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
            call_options = {"timeout": 30, "metadata": list(headers.items())}
            if status == 200:
                call(predict_request(name="ctr"), **call_options)
                continue
            with pytest.raises(grpc.RpcError) as refused:
                call(predict_request(name="ctr"), **call_options)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            world.collect("gRPC", str(refused.value))
    with pytest.raises(httpx.HTTPError):  # without TLS there is no answer at all
        httpx.get(f"http://127.0.0.1:{world.ports['http']}/v1/models/ctr", timeout=10)


def query_studio(world: World) -> None:
    """Send every GET of its API, and a request to the model through it, which needs TLS and a token."""
    url = f"https://127.0.0.1:{world.ports['studio']}"
    bearer = {"authorization": f"Bearer {PLANTED['studio token']}"}
    with httpx.Client(base_url=url, verify=world.tls(), timeout=30) as client:

        def get(path: str, **headers: str) -> httpx.Response:
            answer = client.get(path, headers=headers)
            world.collect(f"studio {path}", answer.text + str(answer.headers))
            return answer

        assert get("/api/homes").status_code == 401
        assert get("/api/homes", authorization=f"Bearer {PLANTED['wrong token']}").status_code == 401
        run = get("/api/homes/ctr/runs", **bearer).json()[0]["run"]
        for path in get("/api/openapi.json", **bearer).json()["paths"]:
            place = path.replace("{home}", "ctr").replace("{id}", "ctr").replace("{run}", run)
            if (
                "get" not in client.get("/api/openapi.json", headers=bearer).json()["paths"][path]
                or "events" in path
            ):
                continue
            for stage in ("up", "prepare", "train", "serve", "studio") if "{stage}" in place else ("",):
                query = "?a=1&b=1" if place.endswith("diff") else ""
                answer = get(place.replace("{stage}", stage) + query, **bearer)
                assert answer.status_code == 200, (place, answer.text)
        with client.stream("GET", "/api/homes/ctr/events", headers=bearer) as events:
            lines = events.iter_lines()
            world.collect("studio events", "".join(next(lines) for _ in range(3)))
        eventually(lambda: get("/api/homes/ctr/serving", **bearer).json()["alive"])
        form = get("/api/homes/ctr/form", **bearer).json()
        tried = client.post(
            "/api/homes/ctr/try", json={"rows": form["examples"][:1], "explain": True}, headers=bearer
        )
        assert tried.status_code == 200, tried.text
        assert 0 < tried.json()["rows"][0]["probability"] < 1
        world.collect("studio try", tried.text)


def collect_command_lines(world: World) -> None:
    """Collect the command lines, which every user of the machine can read."""
    pid = yaml.safe_load((world.folder / ".clickline/up/state.json").read_text())["pid"]
    running = [pid, *(one.pid for one in descendants(pid))]
    assert len(running) > 2
    for one in running:
        world.collect(f"command line {one}", Path(f"/proc/{one}/cmdline").read_text())


def commands(world: World) -> None:
    """Run the other commands that print a config, a run or a version."""
    world.run("check", "--json")
    world.run("plan", "--json", "--no-probe")
    world.run("deploy", "render", "--output", "manifests")
    world.run("report", "--out", "report.html")
    world.run("versions", "show", "--json")
    world.run("versions", "verify", "--json")
    world.run("logs", "--lines", "10000")


@pytest.mark.parametrize(
    "setting",
    [
        "data.train=s3://bob:{}@logs/train.tsv",
        "data.train=https://{}@logs.example/train.tsv",
        "data.train=https://logs.example/train.tsv?X-Amz-Signature={}",
        "data.train=https://logs.example/train.tsv?x=1&api_key={}",
        "data.train=https://logs.example/train.tsv?sv=1&sig={}",
        "publish.registry=s3://bob:{}@models/ads",
        "home=s3://bob:{}@models/ads",
        "tracking.uri=http://bob:{}@mlflow.example",
        "tracking.uri=https://mlflow.example/?token={}",
        "storage.options={{s3: {{secret: {}}}}}",
        "storage.options={{http: {{client_kwargs: {{headers: {{Authorization: Bearer {}}}}}}}}}",
    ],
)
def test_misplaced_secret_is_refused_without_printing_it(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text("data: {train: train.tsv}\n")
    secret = "hush" * 3
    with pytest.raises(ConfigError) as caught:
        load_config(file, [setting.format(secret)])
    message = repr(caught.value.mistakes) + "".join(traceback.format_exception(caught.value))
    assert secret not in message
    assert "secret" in message or "password" in message


def failures(world: World) -> None:
    """Run with unreachable or empty stores, with --debug."""
    away = (
        "{client_kwargs: {endpoint_url: 'http://127.0.0.1:1'}, config_kwargs: {retries: {max_attempts: 0}}}"
    )
    for setting, code in (
        (f"storage.options={{s3: {away}}}", 1),
        ("data.train=http://127.0.0.1:1/train.tsv", 1),
        ("data.train=s3://nothing/here.tsv", 4),
    ):
        assert "Traceback" in world.run("prepare", "--debug", "--set", setting, code=code)
