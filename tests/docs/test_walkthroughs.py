"""The tutorial and the how-tos, done as a reader would: files saved, commands typed, in their order."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from docs.pages import DOCS, Reader, blocks
from servers.s3 import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def shop(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Who has done the tutorial, up to whatever test needs him."""
    reader = Reader(tmp_path_factory.mktemp("shop"), {**KEYS, "AWS_ENDPOINT_URL": store})
    yield reader
    reader.run("clickline down", "in the end")  # where a page stopped half way


@pytest.fixture(scope="module")
def tutorial(shop: Reader) -> list[str]:
    return done(shop, DOCS / "tutorial.md")


def done(reader: Reader, page: Path) -> list[str]:
    """What each command block of a page printed."""
    printed = []
    for block in blocks(page):
        if block.file:
            reader.save(block)
        elif block.language == "sh" and not block.not_run and (not block.needs or shutil.which(block.needs)):
            printed.append(reader.type(block))
    return printed


def test_the_tutorial_ends_with_two_versions_and_the_first_one_live(tutorial: list[str]) -> None:
    head, check, up, predicted, ranked, asked, looked, published, back, down = tutorial
    assert head.splitlines()[0] in (DOCS / "tutorial.md").read_text()
    assert check.startswith("clickline.yaml: no mistakes")
    assert "try it:" in up
    assert 0 < json.loads(predicted)["predictions"][0]["logistic"][0] < 1
    assert len(json.loads(ranked)["indices"]) == 2
    assert re.match(r"version 1 says 0\.\d", asked)
    assert "health     ready" in looked and "report.html" in looked
    evaluated, served = re.findall(r"^AUC +([0-9.]+)", looked, re.MULTILINE)
    assert abs(float(evaluated) - float(served)) < 6e-5 and float(served) > 0.7
    assert re.search(r"^2 .* current$", published, re.MULTILINE)
    assert re.search(r"^1 .* current$", back, re.MULTILINE)
    assert re.search(r"^stopped \d+ process", down, re.MULTILINE)


def test_what_the_tutorial_shows_of_its_logs_is_what_they_are(shop: Reader, tutorial: list[str]) -> None:
    rows = "\n".join((shop.folder / "data/2026-11-01.csv").read_text().splitlines()[:3])
    assert rows in (DOCS / "tutorial.md").read_text()


def test_a_network_of_ones_own(shop: Reader, tutorial: list[str]) -> None:
    (printed,) = done(shop, DOCS / "howto/custom-model.md")
    assert "gate         passed" in printed and "version   3" in printed


def test_a_custom_reader(tmp_path: Path) -> None:
    *_, printed = done(Reader(tmp_path, {}), DOCS / "howto/custom-reader.md")
    assert "train     1,500 rows" in printed and "1 dense, 2 slots" in printed


def test_logs_and_versions_in_a_store(shop: Reader, tutorial: list[str], store: str) -> None:
    client = boto3.client(
        "s3", endpoint_url=store, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
    )
    for bucket in ("logs", "models"):
        client.create_bucket(Bucket=bucket)
    for file in (shop.folder / "data").glob("*.csv"):
        client.upload_file(str(file), "logs", file.name)
    prepared, published = done(shop, DOCS / "howto/s3.md")
    assert "28,800 rows" in prepared
    assert "current" in published
    assert client.list_objects_v2(Bucket="models", Prefix="shop/moves/")["KeyCount"] == 1


def test_hours_as_they_arrive(tmp_path: Path) -> None:
    reader = Reader(tmp_path, {})
    try:
        *_, following, arrived = done(reader, DOCS / "howto/continuous.md")
    finally:
        reader.run("clickline down", "in the end")
    assert "health     ready" in following
    assert re.search(r"^5 .* current$", arrived, re.MULTILINE) and "\nstopped " in arrived


@pytest.mark.soak  # half a minute of Ray; tests/training/cluster and tests/pipeline type the same commands every day
def test_several_processes(shop: Reader, tutorial: list[str]) -> None:
    (printed,) = done(shop, DOCS / "howto/cluster.md")
    assert "gate         passed" in printed and "current" in printed


def test_manifests(shop: Reader, tutorial: list[str]) -> None:
    (printed,) = done(shop, DOCS / "howto/kubernetes.md")
    assert "base" in printed


def test_clients(shop: Reader, tutorial: list[str]) -> None:
    up, asked, *programs, down = done(shop, DOCS / "howto/clients.md")
    assert "try it:" in up and "stopped " in down
    assert "clickline-version: " in asked and '"logistic"' in asked
    python, *others = programs
    assert re.match(r"\[0\.\d+ +0\.\d+\]\n\[[01]\]\n", python)
    assert len(others) == sum(shutil.which(program) is not None for program in ("go", "java"))
    for printed in others:
        assert len(re.findall(r"^version \d says 0\.\d+$", printed, re.MULTILINE)) == 2
