"""The brpc port of a real server: calls, errors, limits, other protocols, TLS, token and shutdown."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import ssl
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pyarrow
import pytest
from service import Service, standing_in
from standin import FEATURES, publish
from test_service import certificate

from clickline.wire.client_config import client_config
from servers.paddle_messages import CTR, ELASTIC, ELASTIC_CTR, GENERAL, V0_6, V0_9, BrpcClient, frame
from servers.waiting import eventually, free_ports

pytestmark = pytest.mark.slow

ENOSERVICE, ENOMETHOD, EREQUEST, ERPCAUTH, ERPCTIMEDOUT = 1001, 1002, 1003, 1004, 1008
EINTERNAL, ELOGOFF, ELIMIT = 2001, 2002, 2004


def rows(milliseconds: float = 0.0, count: int = 1) -> bytes:
    """A request of v0.9 whose first row takes this long to score."""
    request = V0_9["Request"](fetch_var_names=["logistic"])
    request.tensor.add(
        name="dense_input", elem_type=1, shape=[count, 1], float_data=[milliseconds] + [0.0] * (count - 1)
    )
    return request.SerializeToString()


def version(body: bytes) -> int:
    """The version that answered: all its scores are its number / 1024."""
    scores = V0_9["Response"].FromString(body).outputs[0].tensor[0].float_data
    assert len(set(scores)) == 1
    return int(scores[0] * 1024)


class BrpcService:
    """A server with a brpc port."""

    def __init__(self, service: Service, port: int) -> None:
        self.service = service
        self.port = port

    def client(self) -> BrpcClient:
        return BrpcClient(self.port)

    def count(self, protocol: str, code: str) -> float:
        name = f'clickline_requests_total{{code="{code}",protocol="{protocol}"}}'
        return self.service.metrics().get(name, 0)


@pytest.fixture(scope="module")
def brpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrpcService]:
    folder = tmp_path_factory.mktemp("brpc")
    publish(folder / "versions", 3)
    (port,) = free_ports(1)
    with standing_in(folder, brpc_port=port, max_body="1MiB", queue_size=4) as service:
        service.wait_up()
        yield BrpcService(service, port)


def test_calls_of_one_connection(brpc: BrpcService) -> None:
    before = brpc.count("paddle_brpc", "OK")
    with brpc.client() as client:
        for call in (1, 8589934594, -1):
            assert version(client.call(rows(count=3), call=call)) == 3
        request = V0_6["Request"](fetch_var_names=["logistic"])
        inst = request.insts.add()
        for values in ([1], [2, 3]):
            inst.tensor_array.add(elem_type=0, shape=[-1], int64_data=values)
        inst.tensor_array.add(elem_type=1, shape=[1], float_data=[0.0])
        answer = V0_6["Response"].FromString(client.call(request.SerializeToString()))
        assert list(answer.outputs[0].insts[0].tensor_array[0].float_data) == [3 / 1024]
        slots = ELASTIC_CTR["Request"]()
        slots.instances.add().slots.add(slot_name="C1", feasigns=[5])
        for name in (ELASTIC, "ElasticCTRPredictionService"):  # brpc also takes the name without its package
            scored = ELASTIC_CTR["Response"].FromString(client.call(slots.SerializeToString(), service=name))
            assert [one.prob1 for one in scored.predictions] == [3 / 1024]
    assert brpc.count("paddle_brpc", "OK") == before + 4
    assert brpc.service.metrics()['clickline_rows_total{protocol="elasticctr_brpc"}'] == 2


def test_pipelined_calls_are_matched_by_their_ids(brpc: BrpcService) -> None:
    with brpc.client() as client:
        client.send(b"".join(frame(rows(count=n), call=n) for n in (1, 2, 3)))
        found = {}
        for _ in range(3):
            meta, body = client.receive()
            found[meta.correlation_id] = len(
                V0_9["Response"].FromString(body).outputs[0].tensor[0].float_data
            )
        assert found == {1: 1, 2: 2, 3: 3}


def test_frames_that_arrive_byte_by_byte(brpc: BrpcService) -> None:
    with brpc.client() as client:
        client.socket.setsockopt(6, 1, 1)  # TCP_NODELAY
        data = frame(rows(), call=5) + frame(rows(), call=6)
        for at in range(len(data)):
            client.send(data[at : at + 1])
        assert [client.receive()[0].correlation_id for _ in range(2)] == [5, 6]


@pytest.mark.parametrize(
    ("kind", "compressed"),
    [
        (1, pyarrow.Codec("snappy").compress(rows(count=9), asbytes=True)),
        (2, gzip.compress(rows(count=9))),
        (3, zlib.compress(rows(count=9))),
    ],
)
def test_compressed_calls(brpc: BrpcService, kind: int, compressed: bytes) -> None:
    with brpc.client() as client:
        assert version(client.call(compressed, compress_type=kind)) == 3
        attached = client.call(compressed + b"attachment", compress_type=kind, attachment_size=10)
        assert version(attached) == 3
        code, text = client.error(compressed[:-9], compress_type=kind)
        assert code == EREQUEST and ("decompressed" in text or "truncated" in text)
        assert version(client.call(rows())) == 3


def test_errors(brpc: BrpcService) -> None:
    bomb = gzip.compress(bytes(2**21))
    snappy_bomb = b"\xff\xff\xff\xff\x0f" + bytes(20)
    with brpc.client() as client:
        assert client.error(rows(), service="a.B")[0] == ENOSERVICE
        code, text = client.error(rows(), method="debug")
        assert (code, text) == (ENOMETHOD, f"{GENERAL} has no method debug. Available: inference.")
        for body, more, message in (
            (b"\xff", {}, "malformed"),
            (rows(), {"compress_type": 4}, "compress_type is 4; allowed: 0"),
            (bomb, {"compress_type": 2}, "more than 1048576 bytes (serve.max_body)"),
            (snappy_bomb, {"compress_type": 1}, "more than 1048576 bytes (serve.max_body)"),
            (rows(), {"attachment_size": 1 << 20}, "attachment_size is 1048576"),
            (rows(), {"attachment_size": -1}, "attachment_size is -1"),
            (rows(), {"chunk_info": {"stream_id": 1, "chunk_id": 2}}, "The call has chunk_info"),
            (rows(), {"stream_settings": {"stream_id": 1, "chunk_id": 2}}, "The call has stream_settings"),
            (b"", {"service": GENERAL}, "no rows"),
        ):
            code, text = client.error(body, **more)
            assert code == EREQUEST and message in text
        code, text = client.error(rows(666))
        assert code == EINTERNAL and text.startswith("Internal error ")
        assert version(client.call(rows())) == 3
    assert brpc.count("brpc", "ENOSERVICE") >= 1
    assert any(line["protocol"] == "paddle_brpc" for line in brpc.service.log("refused"))


def test_elasticctr_reports_an_invalid_request_in_its_answer(brpc: BrpcService) -> None:
    request = ELASTIC_CTR["Request"]()
    request.instances.add().slots.add(slot_name="77", feasigns=[5])
    with brpc.client() as client:
        for service, message in ((ELASTIC, '"77" is not a field of this model'), (CTR, "Python 2's hashes")):
            answer = ELASTIC_CTR["Response"].FromString(
                client.call(request.SerializeToString(), service=service)
            )
            assert (answer.err_code, len(answer.predictions)) == (-1, 0)
            assert message in answer.err_msg


def test_large_frame_is_refused_and_the_connection_stays_usable(brpc: BrpcService) -> None:
    with brpc.client() as client:
        code, text = client.error(bytes(2**21))
        assert code == EREQUEST and "1048576 are allowed (serve.max_body)" in text
        code, text = client.error(bytes(2**20 + 5))
        assert code == EREQUEST and "more than 1048576 bytes" in text
        assert version(client.call(rows())) == 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",
        b"prpc" + bytes(8),
        frame(rows())[:4] + struct.pack(">II", 4, 5),
        frame(rows())[:4] + struct.pack(">II", 2**31, 2**17),
        frame(rows())[:4] + struct.pack(">II", 4, 4) + b"\xff\xff\xff\xff",
        frame(rows())[:4] + struct.pack(">II", 0, 0),
        frame(rows()) + b"PRPX" + bytes(8),
    ],
)
def test_garbage_closes_the_connection_and_is_counted(brpc: BrpcService, garbage: bytes) -> None:
    before = brpc.count("brpc", "CLOSED")
    with brpc.client() as client:
        client.send(garbage)
        if garbage.startswith(frame(rows())):
            assert client.is_closed() or client.is_closed()
        else:
            assert client.is_closed()
    eventually(lambda: brpc.count("brpc", "CLOSED") == before + 1)
    with brpc.client() as client:
        assert version(client.call(rows())) == 3


def test_overload_and_deadlines(brpc: BrpcService) -> None:
    before = brpc.service.begun()
    with brpc.client() as client, brpc.client() as other:
        client.send(frame(rows(400), call=1))
        eventually(lambda: brpc.service.begun() == before + 1)
        client.send(b"".join(frame(rows(), call=call) for call in range(2, 6)))
        client.send(frame(rows(), call=6, timeout_ms=1) + frame(rows(), call=7))
        other.send(frame(rows(), call=8))
        answers = {}
        for _ in range(7):
            meta, _ = client.receive()
            answers[meta.correlation_id] = meta.response.error_code
        # All arrived while the first was scored: four are queued, the others are refused.
        assert [answers[call] for call in range(1, 6)] == [0] * 5
        assert answers[6] in (ELIMIT, ERPCTIMEDOUT) and answers[7] in (ELIMIT, 0)
        assert other.receive()[0].response.error_code in (ELIMIT, 0)
        client.send(frame(rows(300), call=1) + frame(rows(), call=2, timeout_ms=50))
        found = [client.receive()[0] for _ in range(2)]
        assert [one.response.error_code for one in found] == [0, ERPCTIMEDOUT]


def test_call_whose_client_is_gone_is_not_scored(brpc: BrpcService) -> None:
    before, begun = brpc.count("paddle_brpc", "CANCELLED"), brpc.service.begun()
    with brpc.client() as slow:
        slow.send(frame(rows(300), call=1))
        eventually(lambda: brpc.service.begun() == begun + 1)
        with brpc.client() as gone:
            gone.send(b"".join(frame(rows(100), call=call) for call in range(2, 6)))
        slow.receive()
        eventually(lambda: brpc.count("paddle_brpc", "CANCELLED") >= before + 1)


def test_the_port_also_speaks_http_and_grpc(brpc: BrpcService) -> None:
    url = f"http://127.0.0.1:{brpc.port}"
    document = {"tensor": [{"name": "dense_input", "elem_type": 1, "shape": [1, 1], "float_data": [0]}]}
    with httpx.Client(timeout=20) as client:
        assert client.get(f"{url}/health").text == "OK\n"
        assert f"[{GENERAL}]\ninference\n" in client.get(f"{url}/status").text
        answer = client.post(f"{url}/GeneralModelService/inference", json=document).json()
        assert answer["outputs"][0]["tensor"][0]["float_data"] == [3 / 1024]
        reply = client.post(
            brpc.service.url("/GeneralModelService/inference"),
            content=rows(),
            headers={"content-type": "application/proto"},
        )
        assert version(reply.content) == 3
        assert client.post(f"{url}/GeneralModelService/inference", content=b"{").status_code == 400
    for port in (brpc.port, brpc.service.grpc_port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert version(channel.unary_unary(f"/{GENERAL}/inference")(rows(), timeout=20)) == 3
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{ELASTIC}/inference")(b"", timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with brpc.client() as split:  # the first bytes may come one by one
        for byte in b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n":
            split.send(bytes([byte]))
        assert split.socket.recv(100).startswith(b"HTTP/1.1 200")


def test_tls_and_token(tmp_path: Path) -> None:
    publish(tmp_path / "versions", 1)
    certificate(tmp_path)
    (tmp_path / "token").write_text("open sesame\n")
    (port,) = free_ports(1)
    tls = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    with standing_in(tmp_path, brpc_port=port, tls=tls, token_file=str(tmp_path / "token")) as service:
        service.wait_up()
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        context.check_hostname = False
        with BrpcClient(port, context) as client:
            for wrong in (b"", b"open", b"Bearer open"):
                code, text = client.error(rows(), authentication_data=wrong)
                assert code == ERPCAUTH and "token is missing or wrong" in text
            assert client.error(rows(), service="a.B")[0] == ERPCAUTH
            assert version(client.call(rows(), authentication_data=b"open sesame")) == 1
            assert version(client.call(rows())) == 1  # brpc's clients send it only once
        with BrpcClient(port, context) as client:
            assert client.error(rows())[0] == ERPCAUTH
            assert version(client.call(rows(), authentication_data=b"Bearer open sesame")) == 1
        url = f"https://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health", verify=context, timeout=20).status_code == 200
        assert httpx.get(f"{url}/status", verify=context, timeout=20).status_code == 401
        credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            metadata = (("authorization", "Bearer open sesame"),)
            call = channel.unary_unary(f"/{GENERAL}/inference")
            assert version(call(rows(), timeout=20, metadata=metadata)) == 1
        with BrpcClient(port) as plain:
            plain.send(frame(rows()))
            assert plain.is_closed()
        assert "open sesame" not in service.errors()


def test_shutdown_answers_open_calls_and_sends_new_ones_elsewhere(tmp_path: Path) -> None:
    publish(tmp_path / "versions", 1)
    (port,) = free_ports(1)
    with standing_in(tmp_path, brpc_port=port) as service:
        service.wait_up()
        with BrpcClient(port) as client, BrpcClient(port) as other, BrpcClient(port) as incomplete:
            assert version(other.call(rows())) == 1
            incomplete.send(frame(rows())[:20])
            client.send(frame(rows(700), call=1) + frame(rows(), call=2))
            eventually(lambda: service.begun() == 1)
            service.process.send_signal(signal.SIGTERM)
            first, second = client.receive(), client.receive()
            assert version(first[1]) == version(second[1]) == 1
            codes = [0]
            while codes[-1] == 0:  # until the server has heard of it
                other.send(frame(rows(), call=3))
                codes.append(other.receive()[0].response.error_code)
            assert codes[-1] == ELOGOFF
            assert service.process.wait(20) == 0
            assert client.is_closed() and other.is_closed() and incomplete.is_closed()


def test_port_in_use_is_reported(tmp_path: Path, brpc: BrpcService) -> None:
    with standing_in(tmp_path, brpc_port=brpc.port) as service:
        assert service.process.wait(60) != 0
        assert f"serve.brpc_port: 127.0.0.1:{brpc.port} cannot be listened on" in service.errors()


# ── other clients ──────────────────────────────────────────────────────────────────────────────


def test_the_client_of_the_documentation(brpc: BrpcService) -> None:
    script = Path(__file__).parents[2] / "docs" / "examples" / "clients" / "brpc_client.py"
    command = [sys.executable, script, f"127.0.0.1:{brpc.port}"]
    feed = '{"C1": [7], "C2": [-3, 4], "dense_input": [0.0]}'
    done = subprocess.run([*command, feed], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{3 / 1024}\n", "")
    done = subprocess.run([*command, '{"C9": [7]}'], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith('error 1003: "C9" is not a field of this model')


_PADDLE_PYTHON = "CLICKLINE_PADDLE_PYTHON"
_PREDICT = """
import json, sys
from paddle_serving_client import Client
client = Client()
client.load_client_config(sys.argv[1])
client.connect([sys.argv[2]])
rows = [{"C1": [1], "C2": [2, 3], "dense_input": [0.0]}, {"C1": [-4], "C2": [5], "dense_input": [0.5]}]
score, *more = [client.predict(feed=rows, fetch=[name])[name].tolist() for name in ("score", "class_ids")]
alone = client.predict(feed=rows[0], fetch=["score"])["score"].tolist()
wrong = client.predict(feed={**rows[0], "dense_input": [float("inf")]}, fetch=["score"])
print(json.dumps([score, more, alone, wrong]))
"""
_PRELOADED = """
#define _GNU_SOURCE
#include <dlfcn.h>
void *_dl_sym(void *handle, const char *name, void *who) { return dlsym(dlopen("libc.so.6", RTLD_LAZY), name); }
"""


def test_the_unmodified_paddle_serving_client(tmp_path: Path, brpc: BrpcService) -> None:
    """Release 0.2.1, whose extension is built for CPython 3.6."""
    python = os.environ.get(_PADDLE_PYTHON)
    if python is None:
        pytest.skip(f"{_PADDLE_PYTHON} is not set: a Python 3.6 with paddle-serving-client==0.2.1")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for what the client expects of glibc")
    (tmp_path / "dl_sym.c").write_text(_PRELOADED)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "dl_sym.so", tmp_path / "dl_sym.c"], check=True
    )
    found = subprocess.run(
        [python, "-c", "import paddle_serving_client as p; print(p.__path__[0])"],
        capture_output=True,
        text=True,
    )
    for name in ("libcrypto.so.10", "libssl.so.10"):
        (tmp_path / name).symlink_to(Path(found.stdout.strip(), "lib", name))
    outputs = {"logistic": (1, False), "class_ids": (1, True)}
    (tmp_path / "client.prototxt").write_text(
        client_config(FEATURES, outputs, {"logistic": "score"}, per_field=False)
    )
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "dl_sym.so"), "LD_LIBRARY_PATH": str(tmp_path)}
    (tmp_path / "predict.py").write_text(_PREDICT)
    publish(tmp_path / "versions", 7)
    (port,) = free_ports(1)
    with standing_in(tmp_path, brpc_port=port, brpc_names={"logistic": "score"}) as service:
        service.wait_up()
        done = subprocess.run(
            [python, tmp_path / "predict.py", tmp_path / "client.prototxt", f"127.0.0.1:{port}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        one = [7 / 1024]
        assert done.stdout.splitlines()[-1] == str([[one, one], [[[0], [0]]], [one], None]).replace(
            "None", "null"
        )
        assert "[E1003]dense_input contains infinity" in done.stderr
