"""The pages in docs/coming-from: their commands run as written, in an empty folder, up to a scored request."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickline.config import load_config
from deploy.schemas.schemas import pod_specs, problems, restricted_problems
from servers.waiting import free_ports

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONWARNINGS": "ignore",
}
PORTS = ("8500", "8501", "8502")
SECONDS = 600  # for one block, on a machine that may be busy

GUIDES = sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "README")


def blocks(page: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)


def typed(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def use(ports: dict[str, int], file: Path) -> None:
    """Set free ports, since other tests may hold the default ones; the rest of the file is unchanged."""
    own = {"grpc_port": ports["8500"], "http_port": ports["8501"], "metrics_port": ports["8502"]}
    more = {"serve": own, "studio": {"enabled": False}, "tracking": {"enabled": False}}
    assert not more.keys() & yaml.safe_load(file.read_text()).keys()
    file.write_text(file.read_text() + yaml.safe_dump(more))


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [
        one
        for file in sorted(folder.rglob("*.yaml"))
        if file.name != "kustomization.yaml"
        for one in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader)
        if one
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", GUIDES)
def test_tutorial_ends_with_a_scored_request(page: str, tmp_path: Path) -> None:
    ports, file = dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), tmp_path / "clickline.yaml"
    printed = []
    try:
        for block in blocks(page):
            before = file.exists()
            script = re.sub("|".join(PORTS), lambda port: str(ports[port[0]]), block) if before else block
            printed.append(typed(script, tmp_path))
            if file.exists() and not before:
                use(ports, file)
                assert load_config(file).data.train
    finally:
        # If a block failed, the endpoint is still running.
        subprocess.run(
            ["clickline", "down"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=False, timeout=60
        )
    (measured,) = [text for text in printed if re.search(r"^AUC ", text, re.MULTILINE)]
    auc = re.search(r"^AUC +([0-9.]+)", measured, re.MULTILINE)
    assert auc is not None and 0.55 < float(auc[1].rstrip(".")) < 0.95
    # curl prints no newline at the end, so more text may follow on the same line.
    answer, _ = json.JSONDecoder().raw_decode(measured[measured.index('{"predictions"') :])
    (prediction,) = answer["predictions"]
    score = prediction["prob1"] if page == "elasticrec" else prediction["logistic"][0]
    assert 0 < score < 1
    rendered = manifests(tmp_path / "k8s")
    assert len(rendered) > 5
    assert [problem for one in rendered for problem in problems(one)] == []
    assert [
        problem for one in rendered for spec in pod_specs(one) for problem in restricted_problems(spec)
    ] == []


def test_every_system_has_a_page_with_its_steps_and_missing_counterparts() -> None:
    assert GUIDES == ["elasticctr", "elasticdl", "elasticrec", "intel-wide-deep", "paddleflow"]
    index = (PAGES / "README.md").read_text()
    for page in GUIDES:
        text = (PAGES / f"{page}.md").read_text()
        assert f"({page}.md)" in index
        assert "| their step | ours |" in text and "## A scored request" in text
        table = text.partition("## Without a counterpart")[2]
        assert "| theirs | why, and what instead |" in table and table.count("\n|") > 7


def test_links_between_the_pages_exist() -> None:
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_key_on_a_page_exists() -> None:
    """Every `section.key` on a page is in docs/config.md."""
    known = (PAGES.parent / "config.md").read_text()
    sections = "data|cache|storage|model|train|tracking|gate|publish|serve|follow|studio|cluster|deploy"
    for page in PAGES.glob("*.md"):
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)", page.read_text()):
            if not key.endswith((".py", ".yaml", ".config", ".csv")):
                assert f"`{key.rstrip('.')}`" in known, f"{page.name}: {key}"
