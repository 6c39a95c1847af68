"""Stores to test against: a folder, memory, an S3 server, a WebHDFS server, a web server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clickline.progress import Progress
from clickline.storage.storage import Storage
from servers.s3 import s3_server
from servers.web import Web, web_server
from servers.webhdfs import NameNode, webhdfs_server


@dataclass
class Store:
    """A place to put files in, and the Storage that reaches it."""

    storage: Storage
    base: str


@dataclass
class Heard(Progress):
    """Keeps what it is told."""

    said: list[str] = field(default_factory=list)
    begun: list[tuple[str, int | None]] = field(default_factory=list)
    advanced: int = 0
    ended: int = 0

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.begun.append((title, total_bytes))

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.advanced += size

    def end(self) -> None:
        self.ended += 1

    def log(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_options(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a Storage needs to reach the server: options, and a file of credentials."""
    credentials = tmp_path_factory.mktemp("credentials") / "credentials.yaml"
    credentials.write_text("s3: {key: AKIATESTTESTTEST, secret: a-secret-for-the-tests}")
    credentials.chmod(0o600)
    return {"s3": {"client_kwargs": {"endpoint_url": s3_endpoint}}}, credentials


@pytest.fixture(scope="session")
def s3_storage(s3_options: tuple[dict[str, Any], Path]) -> Storage:
    return Storage(*s3_options)


@pytest.fixture
def s3(s3_storage: Storage) -> Store:
    """A bucket of its own."""
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_storage._drivers.open("s3://x").mkdir(bucket)
    return Store(s3_storage, f"s3://{bucket}/logs")


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as web:
        yield web


@pytest.fixture
def name_node() -> Iterator[NameNode]:
    with webhdfs_server() as node:
        yield node


@pytest.fixture
def hdfs(name_node: NameNode) -> Store:
    return Store(Storage({}, None), f"{name_node.uri}/logs")


@pytest.fixture
def memory() -> Iterator[Store]:
    storage = Storage({}, None)
    base = f"memory://{uuid.uuid4().hex}"
    yield Store(storage, base)
    storage.delete(base)


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store(Storage({}, None), str(tmp_path / "logs"))


@pytest.fixture(params=["folder", "memory", "s3", "hdfs"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each store that can be written, in turn."""
    made: Store = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def filled() -> Callable[[Store, dict[str, bytes]], None]:
    """Puts files, by their path below the store's base."""

    def fill(store: Store, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            store.storage.put(store.storage.join(store.base, path), content)

    return fill
