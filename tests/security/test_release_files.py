"""Release files are reproducible from another folder and with another umask; an audit that could not run fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="a release is made of a commit"
)


def build(root: Path, out: Path, umask: int) -> dict[str, bytes]:
    subprocess.run(
        [sys.executable, root / "release" / "build.py", out],
        cwd=out.parent,
        umask=umask,
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "TZ": "Asia/Tokyo" if umask else "UTC"},
    )
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.mark.slow
def test_two_builds_are_identical(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", ROOT, elsewhere], check=True, umask=0o077, timeout=60)
    shutil.copytree(ROOT / "release", elsewhere / "release", dirs_exist_ok=True)
    shutil.copy(ROOT / "constraints.txt", elsewhere)
    here = build(ROOT, tmp_path / "here", 0o022)
    there = build(elsewhere, tmp_path / "there", 0o077)
    wheel, sdist = sorted(name for name in here if name != "SHA256SUMS")
    assert (wheel.endswith(".whl"), sdist.endswith(".tar.gz")) == (True, True)
    assert here == there
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in here.items()}
    assert here["SHA256SUMS"].decode() == f"{sums[wheel]}  {wheel}\n{sums[sdist]}  {sdist}\n"
    names = zipfile.ZipFile(tmp_path / "here" / wheel).namelist()
    assert "clickline/cli/main.py" in names
    assert not [name for name in names if not name.startswith("clickline")]


def test_audit_that_cannot_run_fails(tmp_path: Path) -> None:
    """With a pip-audit that fails, and one that could not check anything."""
    (tmp_path / "pip_audit.py").write_text("import sys; sys.exit('no such host')")
    for script, message in (
        ("import sys; sys.exit('no such host')", "the audit could NOT run: no such host"),
        (
            'print(\'{"dependencies": [{"name": "a", "skip_reason": "not found."}]}\')',
            "1 of 1 packages could NOT be audited (a)",
        ),
    ):
        (tmp_path / "pip_audit.py").write_text(script)
        done = audit(tmp_path)
        assert done.returncode == 2
        assert message in done.stdout
    fine = '{"name": "a", "version": "1", "vulns": []}'
    known = '{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}'
    (tmp_path / "pip_audit.py").write_text(f"print('{{\"dependencies\": [{fine}]}}')")
    assert (audit(tmp_path).returncode, audit(tmp_path).stdout) == (
        0,
        "audit: no known vulnerability in 1 packages.\n",
    )
    bad = fine.replace("[]", f"[{known}]")
    (tmp_path / "pip_audit.py").write_text(f"print('{{\"dependencies\": [{bad}]}}')")
    done = audit(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("a 1: PYSEC-1, CVE-1; fixed in 2\naudit: 1 of 1 packages are vulnerable")


def audit(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "release" / "audit.py"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
