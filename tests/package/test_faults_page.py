"""docs/faults.md names existing tests, says how they are run, and lists all kinds of faults."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [line for line in LINES if not line.startswith("| what dies")]
PROOF = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`(?: \(\*(faults|soak)\*\))?")


@cache
def known_tests(file: str) -> dict[str, set[str]]:
    """By name, those of a class as Class::name: the marks that keep a test out of `make test`."""
    tree = ast.parse((ROOT / file).read_text())
    found: dict[str, set[str]] = {}
    whole = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = marks(ast.unparse(node.value))
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for one in members:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test_"):
                decorated = " ".join(map(ast.unparse, one.decorator_list))
                # The cases of tests/faults carry the mark one by one; `make test` runs a few of them.
                cases = {"faults"} if re.search(r"\b(case|in_both)\(", decorated) else set()
                found[before + one.name] = whole | marks(decorated) | cases
    return found


def marks(text: str) -> set[str]:
    return set(re.findall(r"mark\.(faults|soak)\b", text))


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_line_names_existing_tests(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 4 and all(cells), f"four columns, none of them empty: {row}"
    proofs = PROOF.findall(cells[3])
    assert proofs and PROOF.sub("", cells[3]).strip(" ,") == "", (
        f"not only tests in the last column: {cells[3]}"
    )
    for file, name, said in proofs:
        assert (ROOT / file).exists(), f"{file} does not exist"
        there = known_tests(file)
        assert name in there, f"{file} has no {name}"
        assert ({said} if said else set()) == there[name], (
            f"{file}::{name} is run by {there[name] or 'make test'}"
        )


@pytest.mark.parametrize(
    ("area", "faults"),
    {
        "Preparing": ["prepare worker", "disk is full", "hangs", "slow network", "is killed"],
        "Training on one machine": ["trainer", "disk is full", "disk is slow", "clock"],
        "Training on a cluster": [
            "Ray worker",
            "an embedding server",
            "driver",
            "whole node",
            "partitioned by the network",
            "hangs (SIGSTOP)",
            "disk is full",
            "clock",
        ],
        "Publishing and the registry": [
            "publisher is killed",
            "store is gone",
            "store fails",
            "store is slow",
            "partly written",
            "hangs (SIGSTOP)",
            "disk is full",
            "clock",
        ],
        "Serving and lookup": [
            "server process is killed",
            "server process hangs",
            "lookup replica is killed",
            "lookup replica hangs",
            "registry is unreachable",
            "disk is slow",
            "disk of the cache is full",
            "connection to a client is slow",
            "clock jumps",
            "clock went back",
        ],
        "Continuous training (`up`, follow)": [
            "work process is killed",
            "parent is killed",
            "disk is full",
            "clock",
            "hangs",
        ],
        "Tracking and the studio": [
            "tracking server hangs",
            "tracking server dies",
            "studio dies",
            "studio hangs",
        ],
        "The machine itself": [
            "power",
            "memory",
            "disk is full",
            "disk is slow",
            "network is slow",
            "clock",
            "hangs",
        ],
    }.items(),
)
def test_all_kinds_of_faults_are_listed(area: str, faults: list[str]) -> None:
    section = re.search(rf"^## {re.escape(area)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None, f"no part {area}"
    named = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| ")]
    for fault in faults:
        assert any(fault in one for one in named), f"{area} says nothing of {fault!r}"


def test_all_fault_tests_are_on_the_page() -> None:
    """A test of tests/faults_machine proves a line, or the page has a gap."""
    for path in sorted((ROOT / "tests" / "faults_machine").glob("test_*.py")):
        file = str(path.relative_to(ROOT))
        for name in known_tests(file):
            assert f"`{file}::{name}`" in PAGE, f"{file}::{name}"
