"""`clickline evaluate` as a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "clickline"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [SCRIPT, "evaluate", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_command_prints_the_metrics(project):
    lines = (project / "data" / "eval.tsv").read_bytes().splitlines(keepends=True)
    (project / "some.tsv").write_bytes(b"".join([*lines[:500], b"only\ttwo\n"]))
    done = run("--data", "some.tsv", "--slice", "C1", "--importance", "--out", "mine.json", cwd=project)
    assert done.returncode == 0, done.stderr
    measured = json.loads((project / "mine.json").read_text())
    shown = dict(line.split("  ", 1) for line in done.stdout.split("\n\n")[0].splitlines() if "  " in line)
    shown = {name: value.strip() for name, value in shown.items()}
    auc, (low, high) = measured["evaluation"]["auc"], measured["evaluation"]["auc_interval"]
    assert shown["AUC"] == f"{auc:.5f} (95 %: {low:.4f} to {high:.4f}), exact"
    assert shown["log loss"].startswith(f"{measured['evaluation']['logloss']:.4f} (95 %: ")
    assert shown["rows"] == "500; skipped as bad: 1 wrong column count"
    for name in ("normalised entropy", "accuracy", "calibration", "ECE", "clicks", "gate", "report"):
        assert shown[name], name
    assert "\nBy C1, the values with most impressions\n" in done.stdout
    first = measured["evaluation"]["slices"]["C1"][0]
    assert any(
        line.startswith(first["value"]) and f"{first['rows']}" in line for line in done.stdout.splitlines()
    )
    assert "\nAUC lost when a field is shuffled\n" in done.stdout
    top = measured["importance"][0]
    assert any(
        line.split() == [top["name"], top["kind"], f"{top['lost']:+.5f}", f"{top['auc']:.4f}"]
        for line in done.stdout.splitlines()
    )
    assert "By hour" not in done.stdout  # these logs do not tell the time
    assert "evaluate: " in done.stderr


@pytest.mark.slow
def test_escape_sequences_in_log_values_are_not_printed(project):
    hostile = "\x1b[2J\x1b]0;owned\x07\u202egnp\x9b31m"
    lines = (project / "data" / "eval.tsv").read_text().splitlines()[:300]
    cells = [line.split("\t") for line in lines]
    text = "".join("\t".join([*row[:14], hostile, *row[15:]]) + "\n" for row in cells)  # C1
    (project / "hostile.tsv").write_text(text + f"{hostile}\ttwo\n")
    done = run("--data", "hostile.tsv", "--slice", "C1", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "\\x1b[2J\\x1b]0;owned\\x07\\u202egnp\\x9b31m   300" in done.stdout
    (project / "bad.tsv").write_text(f"{hostile}\t{hostile}\n" * 10)
    refused = run("--data", "bad.tsv", cwd=project)
    assert refused.returncode == 4
    for told in (done.stdout, done.stderr, refused.stdout, refused.stderr):
        assert all(one.isprintable() or one in "\n\t" for one in told), repr(told)


@pytest.mark.slow
def test_json_output_is_one_document_and_a_refusal_exits_zero(project):
    done = run("--json", "--split", "train", "--set", "gate.auc=0.999", cwd=project)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["evaluation"]["rows"] == 6400
    assert document["gate"]["passed"] is False
    assert "below gate.auc 0.999" in document["gate"]["reasons"][0]
    written = json.loads(Path(document["report"]).read_text())
    assert {name: document[name] for name in written} == written


@pytest.mark.slow
def test_evaluate_errors_have_their_exit_codes(project):
    unknown = run("--slice", "C99", "--json", cwd=project)
    assert unknown.returncode == 2
    assert "--slice C99 is not a slot of the model. Its slots: I4, I5, C1," in unknown.stderr
    assert json.loads(unknown.stdout)["error"]["kind"] == "ConfigError"
    (project / "bad.tsv").write_text("x\n" * 10)
    assert run("--data", "bad.tsv", cwd=project).returncode == 4
    nowhere = run("--model", "nowhere", cwd=project)
    assert nowhere.returncode == 1
    assert "nowhere is neither a checkpoint nor a run with one" in nowhere.stderr
    assert "Traceback" not in unknown.stderr + nowhere.stderr
