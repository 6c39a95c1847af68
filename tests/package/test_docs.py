"""README and docs say what is true: their commands and programs are run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clickline.config import load_config

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / page).read_text()) if kind == language]


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def ads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the README's commands were typed as written."""
    folder = tmp_path_factory.mktemp("readme")
    _, by_hand = blocks("README.md", "sh")
    done = shell(by_hand, folder)
    assert done.returncode == 0, done.stderr
    assert "click rate" in done.stdout
    return folder / "ads"


def test_the_two_languages_have_the_same_commands_and_programs():
    for language in ("sh", "yaml", "python"):
        assert blocks("README.md", language) == blocks("README.zh.md", language)


@pytest.mark.slow
def test_the_python_program_of_the_readme(ads, monkeypatch, capsys):
    monkeypatch.chdir(ads)
    (program,) = blocks("README.md", "python")
    exec(compile(program, "README.md", "exec"), {})
    rows, auc = capsys.readouterr().out.splitlines()
    assert rows.startswith("80000 ")
    assert 0.6 < float(auc) < 0.9


@pytest.mark.parametrize("page", ["README.md", "docs/data.md", "docs/training.md", "docs/serving.md"])
def test_every_yaml_example_passes_the_check(page, tmp_path):
    for text in blocks(page, "yaml"):
        (tmp_path / "my_reader.py").write_text("def read(path):\n    yield\n")
        (tmp_path / "clickline.yaml").write_text(text)
        config = load_config(tmp_path / "clickline.yaml")
        assert config.data.train, yaml.safe_load(text)


@pytest.mark.slow
def test_duckdb_and_pandas_read_the_dataset_as_the_docs_show(ads, monkeypatch, capsys):
    (ads.parent / "demo").symlink_to(ads)
    monkeypatch.chdir(ads.parent)
    _, with_duckdb, with_pandas = blocks("docs/data.md", "python")
    names: dict[str, object] = {}
    exec(compile(with_duckdb, "docs/data.md", "exec"), names)
    assert "80000" in capsys.readouterr().out
    exec(compile(with_pandas, "docs/data.md", "exec"), names)
    assert "mean" in capsys.readouterr().out


def test_links_between_the_pages_lead_somewhere():
    for page in [
        ROOT / "README.md",
        ROOT / "README.zh.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tour_names_files_and_functions_that_exist():
    tour = (ROOT / "docs" / "tour.md").read_text()
    stops = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", tour)
    assert len(stops) > 12
    for file, function in stops:
        source = (ROOT / "src" / "clickline" / file).read_text()
        for name in function.split(".") if function else []:
            assert re.search(rf"(def|class) {name}\b", source), f"{file}: {function}"
