"""The commands and programs in the README and the docs run as written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clickline.config import load_config
from clickline.deploy.render import render
from servers.waiting import free_ports

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / page).read_text()) if kind == language]


def shell(script: str, folder: Path) -> str:
    """What a script prints."""
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(program: str, names: dict[str, object] | None = None) -> str:
    """What a program prints, which may use and leave names."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "docs", "exec"), {} if names is None else names)
    return out.getvalue()


def with_own_ports(text: str) -> str:
    """Other tests may hold the ports that the pages name."""
    return re.sub("850[012]", lambda port: str(PORTS[port[0]]), text)


def own_ports() -> dict[str, int]:
    return dict(zip(("8500", "8501", "8502"), free_ports(3), strict=True))


PORTS = own_ports()


@pytest.fixture(scope="module")
def ads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder after the README's commands were typed as written; the last one is still running."""
    folder = tmp_path_factory.mktemp("readme")
    by_hand = blocks("README.md", "sh")[1].splitlines()
    assert by_hand[-1] == "clickline up"
    assert "click rate" in shell("\n".join(by_hand[:-1]), folder)
    use_ports(folder / "ads", PORTS)
    with subprocess.Popen(
        by_hand[-1].split(), cwd=folder / "ads", env=ENVIRONMENT, stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()  # it is up
            yield folder / "ads"
        finally:
            server.terminate()


def use_ports(project: Path, ports: dict[str, int]) -> None:
    file = project / "clickline.yaml"
    own = {"grpc_port": ports["8500"], "http_port": ports["8501"], "metrics_port": ports["8502"]}
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "serve": own}))


def test_both_readmes_have_the_same_commands_and_programs():
    for language in ("sh", "yaml", "python"):
        english, chinese = (
            [re.sub("#.*", "", text) for text in blocks(page, language)]
            for page in ("README.md", "README.zh-CN.md")
        )
        assert english == chinese


@pytest.mark.slow
def test_server_answers_match_the_docs(ads):
    *measured, scored = shell(with_own_ports(blocks("README.md", "sh")[2]), ads).splitlines()
    (auc,) = [line.split()[1].rstrip(";") for line in measured if line.startswith("AUC ")]
    assert 0.6 < float(auc) < 0.9
    assert any(line.startswith("ads: running since") for line in measured)
    assert 0 < json.loads(scored)["predictions"][0]["logistic"][0] < 1
    answers = shell(with_own_ports(blocks("docs/serving.md", "sh")[1]), ads)
    assert '{"predictions":[{"probabilities":[' in answers and '{"version":1,"scores":[' in answers
    scores, indices = printed(with_own_ports(blocks("docs/serving.md", "python")[0])).splitlines()
    assert 0 < float(scores.strip("[]")) < 1 and indices in ("[0]", "[1]")


@pytest.mark.slow
def test_python_program_and_single_stages_of_the_readme_run(ads, monkeypatch, tmp_path):
    project = tmp_path / "ads"
    shutil.copytree(ads, project, ignore=shutil.ignore_patterns(".clickline"))
    use_ports(project, own_ports())
    monkeypatch.chdir(project)
    (program,) = blocks("README.md", "python")
    served, rows, auc, version = printed(program).splitlines()
    assert 0.6 < float(served.split()[0]) < 0.9 and 0 < float(served.split()[1].strip("[]")) < 1
    assert rows.startswith("80000 ")
    assert float(auc) == float(served.split()[0])
    assert version == "1"
    *stages, last = blocks("README.md", "sh")[3].splitlines()
    assert last == "clickline serve"
    shell("\n".join(stages), project)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/cluster.md",
        "docs/data.md",
        "docs/training.md",
        "docs/serving.md",
        "docs/continuous.md",
        "docs/kubernetes.md",
    ],
)
def test_all_yaml_examples_are_valid(page, tmp_path):
    for text in blocks(page, "yaml"):
        (tmp_path / "my_reader.py").write_text("def read(path):\n    yield\n")
        (tmp_path / "s3.yaml").write_text("")
        (tmp_path / "clickline.yaml").write_text(text)
        config = load_config(tmp_path / "clickline.yaml")
        assert config.data.train, yaml.safe_load(text)
        if "\ndeploy:" in text:
            assert render(tmp_path / "clickline.yaml").objects


@pytest.mark.slow
def test_duckdb_and_pandas_read_the_dataset_as_the_docs_show(ads, monkeypatch):
    (ads.parent / "demo").symlink_to(ads)
    monkeypatch.chdir(ads.parent)
    _, with_duckdb, with_pandas = blocks("docs/data.md", "python")
    names: dict[str, object] = {}
    assert "80000" in printed(with_duckdb, names)
    assert "mean" in printed(with_pandas, names)


def test_tour_names_existing_files_and_functions():
    tour = (ROOT / "docs" / "tour.md").read_text()
    stops = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", tour)
    assert len(stops) > 12
    for file, function in stops:
        source = (ROOT / "src" / "clickline" / file).read_text()
        for name in function.split(".") if function else []:
            assert re.search(rf"(def|class) {name}\b", source), f"{file}: {function}"
