"""Every page is found, leads somewhere, and has no command that nobody runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from clickline.config import load_config
from clickline.deploy.render import render
from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.raw_columns import raw_column
from clickline.records import RawRows
from docs.pages import DOCS, ROOT, Block, blocks, pages

# Pages whose unmarked commands these tests run: test_walkthroughs.py here, tests/importers/test_coming_from.py, and
# tests/package/test_docs.py.
RUN_WHOLE = ("docs/tutorial.md", "docs/howto/", "docs/coming-from/")
RUN_BY_PACKAGE = ("docs/serving.md",)

FRONT = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"]


def every_block() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


def test_every_command_is_run_or_says_why_not() -> None:
    commands = [block for block in every_block() if block.language == "sh"]
    assert len(commands) > 50
    run = RUN_WHOLE + RUN_BY_PACKAGE
    assert [str(one) for one in commands if not one.not_run and not one.page.startswith(run)] == []
    for one in commands:
        assert not one.not_run or len(one.not_run.split()) > 2, f"{one}: says no reason"


def test_commands_are_in_blocks_that_are_looked_at() -> None:
    """A block without a language shows what is printed or how things hang together, not what to type."""
    for one in every_block():
        if one.language == "" and one.page != "docs/cli.md" and not set("─→") & set(one.text):
            assert not re.search(r"^(clickline|curl|kubectl|docker|pip) ", one.text, re.MULTILINE), str(one)


def test_every_marked_block_is_a_command() -> None:
    """A comment that stands before anything else marks nothing."""
    for page in pages():
        marks = re.findall(r"<!-- (?:not run|needs): ", page.read_text())
        assert len(marks) == sum(bool(one.not_run or one.needs) for one in blocks(page)), page.name


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    linked = {DOCS / target for target in re.findall(r"\]\(([^)#:]+\.md)\)", index)}
    assert linked == set(pages()) - {DOCS / "README.md"}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*FRONT, *pages()], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page", [page for page in pages() if page.parent.name == "howto"], ids=lambda page: page.stem
)
def test_every_config_of_a_recipe_passes_the_check(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    for block in blocks(page):
        if block.language == "yaml":
            (tmp_path / "clickline.yaml").write_text(block.text)
            assert load_config(tmp_path / "clickline.yaml").data.train
            if "\ndeploy:" in block.text:
                assert render(tmp_path / "clickline.yaml").objects


def test_keys_that_a_page_names_are_keys() -> None:
    known = (DOCS / "config.md").read_text()
    sections = "data|cache|storage|model|train|tracking|gate|publish|serve|follow|studio|cluster|deploy"
    for page in (DOCS / "tutorial.md", *(DOCS / "howto").glob("*.md"), *(DOCS / "explanation").glob("*.md")):
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)[`:]", page.read_text()):
            if not key.endswith((".py", ".yaml", ".md")):
                assert f"`{key}`" in known or f"`{key}." in known, f"{page.name}: {key}"


def test_figures_of_the_front_page_are_those_of_the_benchmarks() -> None:
    measured = (DOCS / "benchmarks.md").read_text()
    for page in FRONT[:2]:
        rows = [line for line in page.read_text().splitlines() if "docs/benchmarks.md#" in line]
        assert len(rows) == 7
        for row in rows:
            _, _, ours, theirs, _ = row.split("|")
            figures = re.findall(r"\d[\d,.]*\d(?: M)?", ours + theirs)
            assert figures, row
            for figure in figures:
                assert figure in measured, f"{page.name}: {figure}"


def test_tests_that_the_pages_name_exist() -> None:
    for page in (DOCS / "explanation").glob("*.md"):
        for name in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)`", page.read_text()):
            assert list((ROOT / "tests").rglob(name)), f"{page.name}: {name}"


def test_the_encoder_in_a_few_lines_is_the_encoder() -> None:
    (program,) = [one.text for one in blocks(DOCS / "explanation/id-encoder.md") if one.language == "python"]
    names: dict[str, object] = {}
    exec(compile(program, "docs", "exec"), names)
    simple = names["clickline_id"]
    assert callable(simple)
    values = ["", "68fd1e64", "åß", "x" * 200, "7.0", "-0.00", " trail\t", "1.10", "007.0"]
    spec = FeatureSpec(dense=(), slots=(SlotField("C1", "C1", 1), SlotField("C9", "C1", 9)))
    encoded, _ = Encoder(spec).encode(
        RawRows(len(values), {"C1": raw_column(values, "C1")}, np.arange(len(values)))
    )
    for slot, number in enumerate((1, 9)):
        assert [simple(value, number) for value in values] == list(encoded.slots[slot].ids_N)


def test_the_picture_of_the_flow_shows_commands() -> None:
    stages = re.findall(r'fill="#fff">(\w+)<', (DOCS / "images" / "flow.svg").read_text())
    assert stages == ["prepare", "train", "evaluate", "gate", "publish", "serve"]
    commands = (DOCS / "cli.md").read_text()
    assert [stage for stage in stages if f"## clickline {stage}\n" not in commands] == ["gate"]
