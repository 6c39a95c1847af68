"""Wheel and source archive of the last commit, the same bytes wherever and whenever they are built.

    python release/build.py [DIR]        by default dist/

What is not committed is left out. Times are the commit's, owners and permissions are fixed; SHA256SUMS lies beside.
setuptools must be installed in the version that constraints.txt names: it puts its own name into the wheel.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which setuptools changes
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    _check_setuptools()
    os.umask(0o022)  # permissions of files go into both archives
    when = int(_git("log", "-1", "--format=%ct").decode())
    left_out = _git("status", "--porcelain", "--untracked-files=no").decode().splitlines()
    if left_out:
        _say(f"release: {len(left_out)} changed files are not committed and are left out")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made")
        made.mkdir()
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", "HEAD"))) as archive:
            archive.extractall(source, filter="data")
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(when), "PYTHONHASHSEED": "0"}
        subprocess.run(
            [sys.executable, "-c", BUILD, str(made)],
            cwd=source,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        [wheel], [sdist] = made.glob("*.whl"), made.glob("*.tar.gz")
        files = {wheel.name: wheel.read_bytes(), sdist.name: _fixed(sdist, when)}
    for old in (*out.glob("clickline-*.whl"), *out.glob("clickline-*.tar.gz")):
        old.unlink()
    lines = []
    for name, content in sorted(files.items()):
        (out / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (out / "SHA256SUMS").write_text("".join(lines))
    _say(f"release: {out}\n{''.join(lines)}".rstrip())


def _fixed(sdist: Path, when: int) -> bytes:
    """The archive with the commit's time and nobody's name: setuptools writes those of whoever builds."""
    packed = io.BytesIO()
    with (
        tarfile.open(sdist) as old,
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=when) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            fixed = tarfile.TarInfo(member.name)
            fixed.type, fixed.size, fixed.mtime = member.type, member.size, when
            fixed.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(fixed, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def _check_setuptools() -> None:
    from importlib.metadata import version

    wanted = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("setuptools==")
    ]
    if wanted != [f"setuptools=={version('setuptools')}"]:
        sys.exit(
            f"release: constraints.txt names {wanted}, installed is {version('setuptools')}. Run `make setup`."
        )


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")


if __name__ == "__main__":
    main()
