"""No message shows a credential, and every failure says what to do."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from clickline.errors import StorageError
from clickline.storage.redaction import Redactor, redacted, secrets_in
from clickline.storage.storage import Storage
from servers.web import Web
from servers.webhdfs import NameNode

from .conftest import Store

SECRET = "planted/secret+42"


def _credentials(tmp_path: Path, tree: object) -> Path:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(tree))
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("webhdfs://user:pass@host:9870/a", "webhdfs://***@host:9870/a"),
        ("https://b.example/a?X-Amz-Signature=abc&x=1", "https://b.example/a?***"),
        ("url: /webhdfs/v1/a?delegation=abc&op=OPEN (caused", "url: /webhdfs/v1/a?*** (caused"),
        ("s3://bucket/part-?.gz", "s3://bucket/part-?.gz"),
        ("s3://bucket/part-?/day=1/a.gz", "s3://bucket/part-?/day=1/a.gz"),
        ("data/a.tsv", "data/a.tsv"),
    ],
)
def test_redacted(text: str, allowed: str) -> None:
    assert redacted(text) == allowed


def test_redactor_strikes_out_all_spellings() -> None:
    tree = {"http": {"headers": {"Authorization": f"Bearer {SECRET}"}}, "s3": {"user": "bob", "pin": 123456}}
    redact = Redactor(secrets_in(tree))
    struck = redact(f"{SECRET} planted%2Fsecret%2B42 bob 123456")
    assert struck == "*** *** bob ***"


def test_s3_keys_are_in_no_message(s3_endpoint: str, tmp_path: Path) -> None:
    file = _credentials(tmp_path, {"s3": {"key": "AKIAPLANTED", "secret": SECRET, "token": "planted-token"}})
    storage = Storage({"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}, file)
    with pytest.raises(StorageError) as caught:
        storage.put("s3://nowhere/AKIAPLANTED/planted-token/a", b"x")
    assert "s3://nowhere/***/***/a: there is no such" in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_token_in_the_address_is_in_no_message(web: Web) -> None:
    web.status = 500
    address = f"http://bob:{SECRET.replace('/', '')}@{web.url[7:]}/a.tsv?X-Amz-Signature=planted"
    with pytest.raises(StorageError) as caught:
        Storage({}, None).list(address)
    assert "planted" not in str(caught.value)
    assert "status 500" in str(caught.value)


def test_a_webhdfs_delegation_token_is_in_no_message(name_node: NameNode, tmp_path: Path) -> None:
    address, name_node_is_gone = name_node.address, "webhdfs://127.0.0.1:1/a"
    storage = Storage({}, _credentials(tmp_path, {"webhdfs": {"token": SECRET}}))
    name_node.write("/a", b"12345")
    name_node.failing_reads = True
    for uri in (f"webhdfs://{address}/a", name_node_is_gone):
        with pytest.raises(StorageError) as caught:
            storage.read(uri)
        assert "planted" not in str(caught.value)
        assert str(caught.value).startswith(uri)


def test_credentials_of_the_file_reach_the_store(web: Web, tmp_path: Path) -> None:
    web.files["/a.tsv"] = b"x"
    web.password = SECRET
    with pytest.raises(StorageError, match=r"access was refused .* storage\.credentials"):
        Storage({}, None).list(f"{web.url}/a.tsv")
    headers = {"Authorization": f"Bearer {SECRET}"}
    storage = Storage({}, _credentials(tmp_path, {"http": {"client_kwargs": {"headers": headers}}}))
    assert storage.read(f"{web.url}/a.tsv") == b"x"


def test_two_storages_do_not_share_credentials(web: Web, tmp_path: Path) -> None:
    web.files["/a.tsv"] = b"x"
    web.password = SECRET
    headers = {"Authorization": f"Bearer {SECRET}"}
    knowing = Storage({}, _credentials(tmp_path, {"http": {"client_kwargs": {"headers": headers}}}))
    ignorant = Storage({}, None)
    assert knowing.read(f"{web.url}/a.tsv") == b"x"
    with pytest.raises(StorageError, match="access was refused"):
        ignorant.read(f"{web.url}/a.tsv")


def test_options_and_credentials_are_merged_at_depth(s3: Store, s3_endpoint: str, tmp_path: Path) -> None:
    credentials = {"s3": {"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}}
    options = {"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}
    storage = Storage(options, _credentials(tmp_path, credentials))
    s3.storage.put(f"{s3.base}/a", b"x")
    assert storage.read(f"{s3.base}/a") == b"x"
    assert options == {"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"s3: {{key: {SECRET}", r":1: the credentials file is not valid YAML or JSON"),
        (f"s3:\n  key: a\n {SECRET}: [", r"the credentials file is not valid YAML or JSON"),
        (f"{SECRET}: x", "has the wrong structure"),
        (f"- {SECRET}", "has the wrong structure"),
        (f"s3: {SECRET}", "has the wrong structure"),
    ],
)
def test_a_broken_credentials_file_is_named_and_not_quoted(
    tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(StorageError, match=problem) as caught:
        Storage({}, file)
    assert str(caught.value).startswith(str(file))
    assert "planted" not in str(caught.value)
    assert "like s3: {key" in str(caught.value)


def test_an_absent_credentials_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.yaml: the credentials file cannot be read \(No such file"):
        Storage({}, tmp_path / "none.yaml")


def test_a_credentials_file_readable_by_others_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _credentials(tmp_path, {"s3": {"key": SECRET}})
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Storage({}, file)
    assert f"is readable by other users: chmod 600 {file}" in caplog.text
    assert "planted" not in caplog.text


@pytest.mark.parametrize(
    ("uri", "package", "extra"),
    [("s3://b/a", "s3fs", "s3"), ("http://h/a", "aiohttp", "http"), ("webhdfs://h/a", "requests", "webhdfs")],
)
def test_a_missing_driver_is_named(uri: str, package: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from clickline.errors import StorageError
from clickline.storage.storage import Storage
try:
    Storage({{}}, None).list({uri!r})
except StorageError as error:
    sys.stdout.write(str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    protocol = uri.partition(":")[0]
    assert done.stdout == f"{protocol}:// needs the package {package}: pip install 'clickline[{extra}]'"


def test_an_unknown_store_is_named() -> None:
    with pytest.raises(
        StorageError, match=r"the protocol ftp:// is not supported\. Use a local path or one of s3://"
    ):
        Storage({}, None).list("ftp://host/a")
    with pytest.raises(StorageError, match=r"storage\.options has s4, which is not a known store"):
        Storage({"s4": {}}, None)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAPLANTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def test_s3_credentials_of_the_environment(s3: Store, s3_endpoint: str, aws: None) -> None:
    storage = Storage({"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}, None)
    storage.put(f"{s3.base}/a", b"x")
    assert s3.storage.read(f"{s3.base}/a") == b"x"
    with pytest.raises(StorageError) as caught:
        storage.read("s3://nowhere/AKIAPLANTED/planted/secret+42")
    assert str(caught.value).startswith("s3://nowhere/***/***: there is no such")


def test_an_s3_that_does_not_answer(aws: None) -> None:
    options = {
        "s3": {
            "client_kwargs": {"endpoint_url": "http://127.0.0.1:1"},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
    }
    with pytest.raises(StorageError, match=r"s3://b/a: the store did not answer .* Check the address"):
        Storage(options, None).read("s3://b/a")


def test_s3_without_credentials(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    storage = Storage({"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}, None)
    with pytest.raises(StorageError, match=r"no usable credentials .* AWS_ACCESS_KEY_ID"):
        storage.read("s3://b/a")


def test_drivers_are_closed_without_complaint(s3_endpoint: str, web: Web) -> None:
    """With every warning an error, a process that used S3 and HTTP ends without a word on stderr."""
    web.files["/a.tsv"] = b"x" * 100_000
    code = f"""
import gc, os
from clickline.storage.storage import Storage
os.environ.update(AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s")
storage = Storage({{"s3": {{"client_kwargs": {{"endpoint_url": {s3_endpoint!r}}}}}}}, None)
assert storage.list("s3://no-such-bucket-at-all/*") == []
assert len(storage.read({web.url!r} + "/a.tsv")) == 100_000
[file] = storage.list({web.url!r} + "/a.tsv")
next(storage.stream(file))  # left in the middle
first = storage
storage = Storage({{}}, None)
del first
gc.collect()
storage.read({web.url!r} + "/a.tsv")  # still open when the process ends
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
