"""A trained, published model answers every protocol over real sockets, to third-party clients."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import xxhash
from numpy.typing import NDArray
from service import Service, command
from tritonclient.utils import InferenceServerException

from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.publishing.run import publish
from clickline.wire.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    PredictRequest,
    PredictResponse,
    RankRequest,
    RankResponse,
)
from servers.waiting import eventually, free_ports

pytestmark = pytest.mark.slow

ROWS = 40
NUMBERS = [f"I{n}" for n in range(1, 14)]
TEXTS = [f"C{n}" for n in range(1, 27)]
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with version 1 published."""
    folder = tmp_path_factory.mktemp("protocols") / "ads"
    shutil.copytree(trained, folder)
    publish(load_config(folder / "clickline.yaml"))
    return folder


@pytest.fixture(scope="module")
def service(project: Path) -> Iterator[Service]:
    with command(project, processes=2) as service:
        up = service.wait_up()
        assert (up["version"], up["processes"], up["grpc_port"]) == (1, 2, service.grpc_port)
        yield service


@pytest.fixture(scope="module")
def rows(project: Path) -> list[dict[str, str]]:
    """Rows of the log, as it has them; missing values are empty."""
    lines = (project / "data" / "eval.tsv").read_text().splitlines()[:ROWS]
    return [dict(zip(NUMBERS + TEXTS, line.split("\t")[1:], strict=True)) for line in lines]


@pytest.fixture(scope="module")
def expected(service: Service, rows: list[dict[str, str]]) -> Floats:
    """Scores of the rows, requested one at a time over REST."""
    scores = []
    for row in rows:
        reply = httpx.post(
            service.url("/v1/models/ctr:predict"), json={"instances": [as_json(row)]}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        scores.append(reply.json()["predictions"][0]["logistic"][0])
    found = np.array(scores, dtype=np.float32)
    assert len(np.unique(found)) > ROWS // 2  # a real model, not a constant
    return found


def as_json(row: dict[str, str]) -> dict[str, float | str | None]:
    return {name: _number(row[name]) for name in NUMBERS} | {name: row[name] for name in TEXTS}


def _number(text: str) -> float | None:
    return float(text) if text else None


def numbers(rows: list[dict[str, str]], name: str) -> Floats:
    return np.array([float(row[name] or "nan") for row in rows], dtype=np.float32)


def texts(rows: list[dict[str, str]], name: str) -> NDArray[np.object_]:
    return np.array([row[name].encode() for row in rows], dtype=object)


def fill(tensors: Any, rows: list[dict[str, str]], names: list[str]) -> None:
    for name in names:
        tensor = tensors[name]
        tensor.tensor_shape.dim.add().size = len(rows)
        if name in NUMBERS:
            tensor.dtype = 1
            tensor.float_val.extend(numbers(rows, name).tolist())
        else:
            tensor.dtype = 7
            tensor.string_val.extend(texts(rows, name))


def call(service: Service, method: str, request: Any, response: Any) -> Any:
    with service.channel() as channel:
        return response.FromString(channel.unary_unary(method)(request.SerializeToString(), timeout=60))


class TestTensorFlowServing:
    def test_predict(self, service: Service, rows: list[dict[str, str]], expected: Floats) -> None:
        request = PredictRequest()
        request.model_spec.name = "ctr"
        request.model_spec.signature_name = "serving_default"
        fill(request.inputs, rows, NUMBERS + TEXTS)
        answer = call(service, "/tensorflow.serving.PredictionService/Predict", request, PredictResponse)
        assert np.array_equal(np.float32(answer.outputs["logistic"].float_val), expected)
        both = np.float32(answer.outputs["probabilities"].float_val).reshape(-1, 2)
        assert np.array_equal(both[:, 1], expected)
        assert [dim.size for dim in answer.outputs["probabilities"].tensor_shape.dim] == [ROWS, 2]
        assert answer.model_spec.version.value == 1

    def test_metadata_and_status(self, service: Service) -> None:
        request = GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = "ctr"
        method = "/tensorflow.serving.PredictionService/GetModelMetadata"
        answer = call(service, method, request, GetModelMetadataResponse)
        assert answer.model_spec.version.value == 1 and "signature_def" in answer.metadata
        asked = GetModelStatusRequest()
        asked.model_spec.name = "ctr"
        status = call(
            service, "/tensorflow.serving.ModelService/GetModelStatus", asked, GetModelStatusResponse
        )
        assert [(one.version, one.state) for one in status.model_version_status] == [(1, 30)]

    def test_rest(self, service: Service, rows: list[dict[str, str]], expected: Floats) -> None:
        url = service.url("/v1/models/ctr/versions/1:predict")
        by_row = httpx.post(url, json={"instances": [as_json(row) for row in rows]}, timeout=60)
        scores = [row["logistic"][0] for row in by_row.json()["predictions"]]
        assert np.array_equal(np.float32(scores), expected)
        columns = {name: [as_json(row)[name] for row in rows] for name in NUMBERS + TEXTS}
        by_column = httpx.post(url, json={"inputs": columns}, timeout=60)
        assert np.array_equal(np.float32(by_column.json()["outputs"]["logistic"]).ravel(), expected)
        status = httpx.get(service.url("/v1/models/ctr"), timeout=60).json()
        assert status["model_version_status"][0]["state"] == "AVAILABLE"
        metadata = httpx.get(service.url("/v1/models/ctr/metadata"), timeout=60).json()
        assert metadata["model_spec"]["name"] == "ctr"


class TestOpenInference:
    def inputs(self, library: Any, rows: list[dict[str, str]], **how: Any) -> list[Any]:
        made = []
        for name in NUMBERS + TEXTS:
            one = library.InferInput(name, [len(rows)], "FP32" if name in NUMBERS else "BYTES")
            values = numbers(rows, name) if name in NUMBERS else texts(rows, name)
            one.set_data_from_numpy(values, **how)
            made.append(one)
        return made

    def test_triton_grpc(self, service: Service, rows: list[dict[str, str]], expected: Floats) -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{service.grpc_port}") as client:
            assert client.is_server_live() and client.is_server_ready()
            assert client.is_model_ready("ctr") and not client.is_model_ready("other")
            assert client.get_server_metadata().name == "clickline"
            metadata = client.get_model_metadata("ctr")
            assert {one.name for one in metadata.inputs} == {*NUMBERS, *TEXTS}
            result = client.infer("ctr", self.inputs(tritonclient.grpc, rows), request_id="7")
            assert np.array_equal(result.as_numpy("logistic").ravel(), expected)
            assert result.get_response().model_version == "1"
            with pytest.raises(InferenceServerException, match='no model "other"'):
                client.infer("other", self.inputs(tritonclient.grpc, rows))

    @pytest.mark.parametrize("binary", [True, False])
    def test_triton_http(
        self, service: Service, rows: list[dict[str, str]], expected: Floats, binary: bool
    ) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{service.http_port}") as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ctr")
            outputs = [tritonclient.http.InferRequestedOutput("logistic", binary_data=binary)]
            result = client.infer(
                "ctr", self.inputs(tritonclient.http, rows, binary_data=binary), outputs=outputs
            )
            assert np.array_equal(result.as_numpy("logistic").ravel(), expected)
            with pytest.raises(InferenceServerException, match="other"):
                client.infer("other", self.inputs(tritonclient.http, rows))


class TestRanking:
    SHARED, OWN = NUMBERS + TEXTS[:13], TEXTS[13:]

    def joined(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Each candidate joined with the context of the first row."""
        context = {name: as_json(rows[0])[name] for name in self.SHARED}
        return [context | {name: as_json(row)[name] for name in self.OWN} for row in rows]

    def scores(self, service: Service, rows: list[dict[str, str]]) -> Floats:
        url = service.url("/v1/models/ctr:predict")
        reply = httpx.post(url, json={"instances": self.joined(rows)}, timeout=60)
        return np.float32([row["logistic"][0] for row in reply.json()["predictions"]])

    def test_grpc(self, service: Service, rows: list[dict[str, str]]) -> None:
        request = RankRequest(top_k=5)
        request.model_spec.name = "ctr"
        fill(request.context, rows[:1], self.SHARED)
        fill(request.candidates, rows, self.OWN)
        answer = call(service, "/clickline.v1.Ranking/Rank", request, RankResponse)
        wanted = self.scores(service, rows)
        assert len(answer.indices) == 5
        assert np.allclose(np.float32(answer.scores), wanted[list(answer.indices)], atol=1e-6)
        assert np.allclose(np.sort(wanted)[::-1][:5], answer.scores, atol=1e-6)

    def test_rest(self, service: Service, rows: list[dict[str, str]]) -> None:
        joined = self.joined(rows)
        body = {
            "context": {name: joined[0][name] for name in self.SHARED},
            "candidates": [{name: row[name] for name in self.OWN} for row in joined],
        }
        reply = httpx.post(service.url("/v1/models/ctr:rank"), json=body, timeout=60)
        assert np.allclose(reply.json()["scores"], self.scores(service, rows), atol=1e-6)
        assert reply.json()["version"] == 1


def test_elasticctr(service: Service, rows: list[dict[str, str]]) -> None:
    instances = [
        {
            "slots": [
                {"slot_name": name[1:], "feasigns": [xxhash.xxh64_intdigest(row[name].encode())]}
                for name in TEXTS
            ]
        }
        for row in rows
    ]
    url = service.url("/ElasticCTRPredictionService/inference")
    answer = httpx.post(url, json={"instances": instances}, timeout=60).json()
    assert (answer["err_code"], answer["err_msg"]) == (0, "")
    plain = [{name: row[name] for name in TEXTS} for row in rows]
    reply = httpx.post(service.url("/v1/models/ctr:predict"), json={"instances": plain}, timeout=60)
    wanted = [row["logistic"][0] for row in reply.json()["predictions"]]
    assert [one["prob1"] for one in answer["predictions"]] == wanted


def test_http_and_grpc_errors_name_the_wrong_field(service: Service) -> None:
    request = PredictRequest()
    request.model_spec.name = "ctr"
    request.inputs["I99"].dtype = 1
    request.inputs["I99"].tensor_shape.dim.add().size = 1
    request.inputs["I99"].float_val.append(1.0)
    with pytest.raises(grpc.RpcError) as caught:
        call(service, "/tensorflow.serving.PredictionService/Predict", request, PredictResponse)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "I99" in caught.value.details()
    reply = httpx.post(service.url("/v1/models/ctr:predict"), json={"instances": [{"I99": 1}]}, timeout=60)
    assert reply.status_code == 400 and "I99" in reply.json()["error"]


def test_metrics_have_every_protocol(service: Service, expected: Floats) -> None:
    page = service.admin("/metrics").text
    for protocol in ("tfserving_grpc", "tfserving_rest", "inference_grpc", "inference_rest"):
        assert f'protocol="{protocol}"' in page
    assert 'clickline_lookups_total{slot="C1"}' in page


def test_published_version_goes_live_and_damaged_one_does_not(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "ads")
    config = load_config(tmp_path / "ads" / "clickline.yaml")
    registry = registry_of(config)
    publish(config)
    otherwise = load_config(tmp_path / "ads" / "clickline.yaml", ["publish.sample_rows=100"])
    damaged = publish(otherwise).version
    registry.move(1, "back", after=registry.current())
    sample = Path(damaged.folder) / "sample.npz"
    sample.write_bytes(sample.read_bytes()[:-100])
    with command(tmp_path / "ads") as service:
        assert service.wait_up()["version"] == 1
        registry.move(damaged.number, "forward", after=registry.current())
        refused = eventually(lambda: service.log("a version was refused"))
        assert (refused[0]["version"], refused[0]["current"]) == (2, 1) and "sample.npz" in refused[0][
            "reason"
        ]
        assert service.metrics()["clickline_version"] == 1
        publish(otherwise, base=True)
        eventually(lambda: service.metrics()["clickline_version"] == 3)
        reply = httpx.post(service.url("/v1/models/ctr:predict"), json={"instances": [{}]}, timeout=60)
        assert (reply.status_code, reply.headers["clickline-version"]) == (200, "3")


def test_data_age_is_reported_if_known(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "ads")
    config = load_config(tmp_path / "ads" / "clickline.yaml")
    manifest = Path(publish(config).version.folder, "manifest.json")
    body = json.loads(manifest.read_text())
    body["model"]["data_until"] = time.time() - 7200.0  # as written by `up --follow`
    manifest.write_text(json.dumps(body))
    with command(tmp_path / "ads") as service:
        assert service.wait_up()["version"] == 1
        first = service.metrics()
        assert 7200 <= first["clickline_data_age_seconds"] < 7400
        assert first["clickline_version_age_seconds"] < 300
        publish(config, base=True)  # from rows without a known time
        eventually(lambda: service.metrics()["clickline_version"] == 2)
        assert "clickline_data_age_seconds" not in service.metrics()


def test_lookup_servers_give_the_same_scores(
    project: Path, service: Service, rows: list[dict[str, str]], expected: Floats, tmp_path: Path
) -> None:
    shutil.copytree(project, tmp_path / "ads")
    here = tmp_path / "ads"
    script = (
        "import sys; from pathlib import Path; from clickline.config import load_config\n"
        "from clickline.serving.lookup.run import lookup\n"
        "lookup(load_config(Path('clickline.yaml'), ['serve.poll_interval=0.05', f'serve.metrics_port={sys.argv[2]}']),"
        " int(sys.argv[1]), 0, lambda up: print(up.address, flush=True))"
    )
    shards = []
    servers = []
    try:
        for shard, port in enumerate(free_ports(2)):
            command_line = [sys.executable, "-c", script, str(shard), str(port)]
            server = subprocess.Popen(
                command_line, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            servers.append(server)
        for server in servers:
            assert server.stdout is not None
            shards.append([server.stdout.readline().strip()])
        with command(here, lookup={"shards": shards, "on_missing_shard": "unavailable"}) as remote:
            assert remote.wait_up()["version"] == 1
            url = remote.url("/v1/models/ctr:predict")
            body = {"instances": [as_json(row) for row in rows]}
            reply = httpx.post(url, json=body, timeout=60)
            scores = [row["logistic"][0] for row in reply.json()["predictions"]]
            assert np.array_equal(np.float32(scores), expected)
            config = load_config(here / "clickline.yaml", ["publish.sample_rows=100"])
            published = publish(config, base=True).version.number
            eventually(lambda: remote.metrics()["clickline_version"] == published)
            assert remote.metrics()['clickline_remote_total{what="keys"}'] > 0
            servers[0].kill()
            servers[0].wait()
            reply = httpx.post(url, json=body, timeout=60)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert remote.metrics()['clickline_remote_total{what="shards_lost"}'] > 0
    finally:
        for server in servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
