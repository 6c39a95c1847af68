"""The pages in docs/coming-from: their commands run as written, in an empty folder, up to a scored request."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickline.config import load_config
from clickline.deploy.render import render
from deploy.schemas.schemas import pod_specs, problems, restricted_problems
from servers.waiting import free_ports

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONWARNINGS": "ignore",
}
PORTS = ("8500", "8501", "8502", "8510")
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
    shutil.copy(PAGES.parent / "examples" / "clients" / "brpc_client.py", tmp_path)
    try:
        for block in blocks(page):
            before = file.exists()
            script = re.sub("|".join(PORTS), lambda port: str(ports[port[0]]), block) if before else block
            printed.append(typed(script, tmp_path))
            if file.exists() and str(ports["8501"]) not in file.read_text():  # written, or written again
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
    if page == "paddleflow":
        text = "".join(printed)
        general, _ = json.JSONDecoder().raw_decode(text[text.index('{"outputs"') :])
        assert 0 < general["outputs"][0]["tensor"][0]["float_data"][0] < 1
        assert "feed_var" in (tmp_path / "serving_client_conf.prototxt").read_text()
    if page == "elasticctr":
        assert any(re.fullmatch(r"0\.[0-9]+", line) for text in printed for line in text.splitlines())
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


def flag_rows() -> list[tuple[str, str, str]]:
    """(theirs, ours, result) of each line of the table of fields and flags."""
    table = (
        (PAGES / "README.md")
        .read_text()
        .partition("## Their fields and flags")[2]
        .partition("\nModels are")[0]
    )
    rows = [
        tuple(cell.strip() for cell in line.split(" | "))
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ("| theirs", "ours", "result |") and len(rows) > 15
    return [(theirs[2:], re.findall("`([^`]+)`", ours)[0], result[1:-3]) for theirs, ours, result in rows[1:]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the table's commands read."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "data").mkdir()
    (folder / "data/rows.tsv").write_text("0" + "\t" * 39 + "\n")
    training = "train: {mode: cluster}\ndeploy: {training: {kind: volcano}, storage: {models: {access: ReadWriteMany}}}\n"
    (folder / "clickline.yaml").write_text(
        f"data: {{train: data/rows.tsv}}\ncache: {{dir: cache}}\n{training}"
    )
    (folder / "params").write_text("DATASET_DIR=/datasets\nREPLICAS=3\n")
    (folder / "data.config").write_text("export START_DATE_HR=20260101/00\nexport DATASET_PATH=data\n")
    (folder / "slot.conf").write_text("0\n1\n")
    return folder


@pytest.mark.parametrize(("theirs", "ours", "result"), flag_rows())
def test_fields_and_flags_become_what_the_table_says(
    theirs: str, ours: str, result: str, project: Path
) -> None:
    arguments = shlex.split(ours)
    if arguments[0] == "clickline":
        assert result in typed(ours, project), f"{theirs}: {ours}"
        return
    overrides = [
        value for flag, value in zip(arguments[::2], arguments[1::2], strict=True) if flag == "--set"
    ]
    plain, changed = (render(project / "clickline.yaml", values).objects for values in ((), overrides))
    assert [problem for one in changed for problem in problems(one)] == []
    assert result not in yaml.safe_dump_all(plain)
    assert result in yaml.safe_dump_all(changed), f"{theirs}: {ours}"


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
