"""Clients of every protocol at a real server: their scores are those of the published version."""

from __future__ import annotations

import asyncio
import csv
import datetime
import ipaddress
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import Live, serving
from numpy.typing import NDArray

from clickline.artifacts.from_config import registry_of
from clickline.client import AsyncClient, Client
from clickline.client.client import ProtocolName
from clickline.config import load_config
from clickline.errors import ClicklineError, RequestRefused
from clickline.features import Encoder
from clickline.publishing.run import publish
from clickline.records import CRITEO_FIELDS, LabelledRows
from clickline.scoring.open_scorer import open_scorer

pytestmark = pytest.mark.slow

TYPED: list[ProtocolName] = ["grpc", "http", "v2-grpc", "v2-http"]


@pytest.fixture(scope="session")
def rows(published: Path) -> list[dict[str, str]]:
    with (published / "data" / "eval.tsv").open() as file:
        lines = list(csv.reader(file, delimiter="\t"))[:200]
    return [dict(zip(CRITEO_FIELDS[1:], line[1:], strict=True)) for line in lines]


@pytest.fixture(scope="session")
def expected(published: Path, rows: list[dict[str, str]]) -> NDArray[np.float32]:
    """The scores of the rows, computed directly by the version."""
    config = load_config(published / "clickline.yaml")
    registry = registry_of(config)
    scorer = open_scorer(registry, registry.version(1), Path(config.cache.dir), 1)
    try:
        encoded, errors = Encoder(scorer.features).encode_values(rows)
        assert not errors
        nothing = np.zeros(len(rows), dtype=np.float32)
        counts = np.zeros(len(rows), dtype=np.uint32)
        hours = np.zeros(len(rows), dtype=np.int32)
        found: NDArray[np.float32] = scorer.probabilities(
            LabelledRows(nothing, nothing, counts, counts, hours, encoded)
        )
        return found
    finally:
        scorer.close()


def run_client(live: Live, protocol: ProtocolName, blocking: bool, call: Any, **options: Any) -> Any:
    """The result of `call(client)` with a blocking or an async client."""
    options = {"protocol": protocol, "model": "ads", **options}
    if blocking:
        with Client(live.address(protocol), **options) as client:
            return call(client)

    async def run() -> Any:
        async with AsyncClient(live.address(protocol), **options) as client:
            return await call(client)

    return asyncio.run(run())


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("protocol", TYPED)
def test_scores_equal_the_published_version(
    live: Live,
    rows: list[dict[str, str]],
    expected: NDArray[np.float32],
    protocol: ProtocolName,
    blocking: bool,
) -> None:
    found = run_client(live, protocol, blocking, lambda client: client.predict(rows))
    assert found.version == 1
    np.testing.assert_allclose(found.probability, expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(1 / (1 + np.exp(-found.logits)), expected, atol=1e-6, rtol=0)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    again = run_client(live, protocol, blocking, lambda client: client.predict(columns, version=1))
    assert again.probability.tobytes() == found.probability.tobytes()
    numbers = {
        name: [float(value) if value else None for value in values] if name[0] == "I" else np.array(values)
        for name, values in columns.items()
    }
    typed = run_client(live, protocol, blocking, lambda client: client.predict(numbers))
    assert typed.probability.tobytes() == found.probability.tobytes()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("protocol", TYPED)
def test_ranking(live: Live, rows: list[dict[str, str]], protocol: ProtocolName, blocking: bool) -> None:
    shared = ("I1", "I3", "I4", "C1", "C5", "C9")
    context = {name: rows[0][name] for name in shared}
    candidates = [{name: value for name, value in row.items() if name not in shared} for row in rows[:50]]
    whole = [{**context, **candidate} for candidate in candidates]
    wanted = run_client(live, protocol, blocking, lambda client: client.predict(whole)).probability
    found = run_client(live, protocol, blocking, lambda client: client.rank(context, candidates))
    np.testing.assert_allclose(found.scores, wanted, atol=1e-6, rtol=0)
    assert (found.version, found.indices.tolist()) == (1, list(range(50)))
    best = run_client(live, protocol, blocking, lambda client: client.rank(context, candidates, top_k=5))
    assert best.indices.tolist() == np.argsort(-found.scores, kind="stable")[:5].tolist()
    assert best.scores.tolist() == found.scores[best.indices].tolist()
    alone = run_client(live, protocol, blocking, lambda client: client.rank({}, whole))
    np.testing.assert_allclose(alone.scores, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("protocol", [*TYPED, "elasticctr"])
def test_metadata_and_readiness(live: Live, protocol: ProtocolName, blocking: bool) -> None:
    info = run_client(live, protocol, blocking, lambda client: client.metadata())
    assert (info.name, info.versions) == ("ads", (1,))
    assert set(info.inputs) == set(CRITEO_FIELDS[1:])
    assert (info.inputs["I1"].datatype, info.inputs["C1"].datatype) == ("FP32", "BYTES")
    assert run_client(live, protocol, blocking, lambda client: client.ready()) is True


@pytest.mark.parametrize("protocol", TYPED)
def test_refusals_have_the_servers_message(live: Live, protocol: ProtocolName) -> None:
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        (lambda client: client.predict([{"C99": "x"}]), {}, "invalid", "C99"),
        (lambda client: client.predict([{"I1": "x"}]), {}, "invalid", "I1"),
        (lambda client: client.predict([{"I1": [1, 2]}]), {}, "invalid", "I1"),
        (lambda client: client.predict([{"I1": 1}]), {"model": "other"}, "not_found", "other"),
        (lambda client: client.predict([{"I1": 1}], version=77), {}, "not_found", "77"),
        (lambda client: client.metadata(), {"model": "other"}, "not_found", "other"),
        (lambda client: client.rank({"I1": 1}, [{"I1": 2}]), {}, "invalid", "I1"),
        (lambda client: client.predict({"I1": [1] * 10_001}), {}, "invalid", "10000"),
    ]
    for call, options, kind, word in cases:
        with pytest.raises(RequestRefused, match=word) as refused:
            run_client(live, protocol, True, call, **options)
        assert refused.value.kind == kind


def test_concurrent_requests(live: Live, rows: list[dict[str, str]], expected: NDArray[np.float32]) -> None:
    async def run(protocol: ProtocolName) -> None:
        async with AsyncClient(live.address(protocol), protocol=protocol, model="ads") as client:
            answers = await asyncio.gather(*(client.predict([row]) for row in rows[:60]))
        found = np.concatenate([answer.probability for answer in answers])
        np.testing.assert_allclose(found, expected[:60], atol=1e-6, rtol=0)

    for protocol in TYPED:
        asyncio.run(run(protocol))


def test_next_version_answers_on_the_same_connection(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ads"
    shutil.copytree(published, folder)
    with serving(folder) as service, Client(service.grpc) as client:
        assert client.predict([{"I1": 1}]).version == 1
        publish(load_config(folder / "clickline.yaml", ["publish.sample_rows=100"]))
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=60)
        while client.predict([{"I1": 1}]).version != 2:
            assert datetime.datetime.now() < deadline


def certificate(folder: Path) -> None:
    """Write a self-signed cert.pem for 127.0.0.1, and its key.pem."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


@pytest.fixture(scope="module")
def guarded(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with TLS and a token."""
    folder = tmp_path_factory.mktemp("guarded") / "ads"
    shutil.copytree(published, folder)
    certificate(folder)
    certificate(folder.parent)  # an untrusted one
    (folder / "token").write_text("open sesame\n")
    (folder / "wrong").write_text("open barley\n")
    with serving(folder, tls={"certificate": "cert.pem", "key": "key.pem"}, token_file="token") as service:
        yield service


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tls_and_token(guarded: Live, protocol: ProtocolName, blocking: bool) -> None:
    def call(client: Any) -> Any:
        return client.predict([{"I1": 1}])

    own, other = str(guarded.folder / "cert.pem"), str(guarded.folder.parent / "cert.pem")
    assert run_client(guarded, protocol, blocking, call, tls=own, token="open sesame").version == 1
    for token in (None, "open barley"):
        with pytest.raises(RequestRefused, match="token") as refused:
            run_client(guarded, protocol, blocking, call, tls=own, token=token)
        assert refused.value.kind == "unauthenticated"
    for wrong in (True, other):
        with pytest.raises(ClicklineError, match=r"certificate of .* is not trusted"):
            run_client(guarded, protocol, blocking, call, tls=wrong, token="open sesame")
    with pytest.raises(ClicklineError, match=r"cannot be reached.* does it require TLS \(serve.tls\)\?"):
        run_client(guarded, protocol, blocking, call, token="open sesame")
    if protocol == "http":  # health is not protected: probes have no token
        assert run_client(guarded, protocol, blocking, lambda client: client.ready(), tls=own)
        return
    with pytest.raises(RequestRefused) as refused:
        run_client(guarded, protocol, blocking, lambda client: client.ready(), tls=own)
    assert refused.value.kind == "unauthenticated"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_invalid_ca_files_are_refused(protocol: ProtocolName, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    (tmp_path / "words.pem").write_text("hello")
    (tmp_path / "bytes.pem").write_bytes(b"\xff\x00")
    for name in ("empty.pem", "words.pem", "bytes.pem", "absent.pem"):
        with pytest.raises(ClicklineError, match=name):
            Client("127.0.0.1:1", protocol=protocol, tls=str(tmp_path / name))
