"""`clickline report` as a separate process, on real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_documents import document, old, refused

SCRIPT = Path(sys.executable).parent / "clickline"


def run(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", **more}
    return subprocess.run(
        [SCRIPT, "report", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A home with three runs, the newest of them refused, and an evaluation."""
    (tmp_path / "clickline.yaml").write_text("data: {train: data/train.tsv}\n")
    home = tmp_path / ".clickline"
    for age, (name, found) in enumerate([("aaa111", refused()), ("bbb222", document()), ("ccc333", old())]):
        path = home / "runs" / name / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(found))
        os.utime(path, (1_790_000_000 - 1000 * age,) * 2)
    (home / "evaluations").mkdir()
    (home / "evaluations" / "version-3-eval.json").write_text(json.dumps(document(seed=2, skill=0.8)))
    return tmp_path


@pytest.mark.slow
def test_report_without_a_name_is_that_of_the_newest_run(project):
    done = run(cwd=project)
    assert done.returncode == 0, done.stderr
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    shown = {name: value.strip() for name, value in shown.items()}
    measured, live = refused()["evaluation"], refused()["current"]["evaluation"]
    low, high = measured["auc_interval"]
    assert shown["report of"] == "aaa111"
    assert shown["AUC"] == (
        f"{measured['auc']:.4f} (95 %: {low:.4f} to {high:.4f}), "
        f"{measured['auc'] - live['auc']:+.4f} against version 3"
    )
    assert shown["gate"] == "refused"
    assert f"note: {refused()['gate']['reasons'][0]}" in done.stdout
    page = project / ".clickline" / "runs" / "aaa111" / "report.html"
    assert (project / shown["page"]) == page
    assert "✗ The gate refused the model" in page.read_text()
    # A run that was up to date touches the manifest of its checkpoint, and nothing else.
    manifest = project / ".clickline" / "runs" / "bbb222" / "step-000004600" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text("{}")
    assert "bbb222" in run(cwd=project).stdout


@pytest.mark.parametrize(
    ("named", "page"),
    [
        ("bbb222", ".clickline/runs/bbb222/report.html"),
        (".clickline/runs/bbb222", ".clickline/runs/bbb222/report.html"),
        (".clickline/runs/bbb222/", ".clickline/runs/bbb222/report.html"),
        (".clickline/runs/bbb222/report.json", ".clickline/runs/bbb222/report.html"),
        ("version-3-eval", ".clickline/evaluations/version-3-eval.html"),
        ("ccc333", ".clickline/runs/ccc333/report.html"),  # of an earlier release
    ],
)
def test_report_is_found_by_run_folder_or_file(project, named, page):
    done = run(named, "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["name"] == Path(page).parent.name if "runs" in page else "version-3-eval"
    assert (project / told["page"]).resolve() == (project / page).resolve()
    written = json.loads((project / told["document"]).read_text())
    assert told["gate"] == written["gate"]
    assert told["evaluation"]["auc"] == written["evaluation"]["auc"]
    assert "hours" not in told["evaluation"]
    assert (project / page).read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_two_reports_are_compared(project):
    done = run("bbb222", "version-3-eval", cwd=project)
    assert done.returncode == 0, done.stderr
    page = project / ".clickline" / "comparisons" / "bbb222-version-3-eval.html"
    assert "Comparison of two reports" in page.read_text()
    a, b = document()["evaluation"]["auc"], document(seed=2, skill=0.8)["evaluation"]["auc"]
    auc = next(line.split() for line in done.stdout.splitlines() if line.startswith("AUC"))
    assert auc[:4] == ["AUC", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"]
    told = json.loads(run("bbb222", "version-3-eval", "-o", "mine.html", "--json", cwd=project).stdout)
    assert told["page"] == "mine.html" and (project / "mine.html").exists()
    assert told["measures"]["auc"]["change"] == b - a
    assert told["config"] == {"model.embedding_dim": [9, 10]}
    assert told["names"] == ["bbb222", "version-3-eval"]


@pytest.mark.slow
def test_unknown_report_name_lists_existing_names(project):
    done = run("bbb22", cwd=project)
    assert done.returncode == 1
    assert "bbb22 is not a run, an evaluation or a report file; did you mean bbb222?" in done.stderr
    assert "newest first: aaa111, bbb222, ccc333. Evaluations: version-3-eval." in done.stderr
    assert "Traceback" not in done.stderr
    (project / "other.json").write_text("[1]")
    assert "other.json is not the report of an evaluation" in run("other.json", cwd=project).stderr
    (project / "torn.json").write_text('{"evaluation": ')
    assert "torn.json is not a JSON document" in run("torn.json", cwd=project).stderr


def test_empty_home_error_names_the_command_to_run(tmp_path):
    (tmp_path / "clickline.yaml").write_text("data: {train: data/train.tsv}\n")
    done = run(cwd=tmp_path)
    assert done.returncode == 1
    assert "has no run with a report.json yet. Run `clickline train` first" in done.stderr
    assert "newest first: none. Evaluations: none." in run("x", cwd=tmp_path).stderr


def test_missing_plotly_error_names_the_extra(project):
    (project / "without" / "plotly").mkdir(parents=True)
    (project / "without" / "plotly" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'plotly'\", name='plotly')"
    )
    done = run("bbb222", cwd=project, PYTHONPATH=str(project / "without"))
    assert done.returncode == 1
    assert "need the package plotly: pip install 'clickline[report]'" in done.stderr
