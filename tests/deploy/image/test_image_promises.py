"""What the image promises, read from the files that make it."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "image").glob("*.sh"))


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of the Dockerfile: lines joined, comments left out."""
    text = "\n".join(
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.strip().startswith("#")
    )
    joined = re.sub(r"\\\n", " ", text)
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def environment() -> dict[str, str]:
    text = " ".join(rest for word, rest in stages()[-1] if word == "ENV")
    return dict(re.findall(r"(\w+)=(\S*)", text))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_what_their_shell_reads(script: Path):
    shell = script.read_text().splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", str(script)], check=True, timeout=30)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


@pytest.mark.parametrize("arguments", [[], ["install"], ["kernels", "prefix"], ["all", "prefix"]])
def test_the_script_says_how_it_is_called(arguments: list[str]):
    command = ["bash", str(ROOT / "image" / "build.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "usage: image/build.sh install PREFIX | kernels PREFIX KERNELS" in done.stderr


def test_the_script_does_all_that_is_installed():
    build = [rest for word, rest in stages()[0] if word == "RUN"]
    assert [re.search(r"image/build.sh (\w+) (.*)", line).groups() for line in build] == [
        ("install", "/opt/clickline/venv"),
        ("kernels", "/opt/clickline/venv /opt/clickline/kernels"),
    ]
    assert "pip" not in " ".join(rest for stage in stages() for word, rest in stage if word == "RUN")


def test_the_script_installs_every_extra_that_a_role_may_need():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    script = (ROOT / "image" / "build.sh").read_text()
    installed = set(re.search(r"/source\[([a-z0-9,-]+)\]", script).group(1).split(","))
    assert extras - installed == {"dev"}
    assert "'ray[default]'" in script


def test_the_final_stage_has_no_compiler_and_takes_two_things_from_the_first():
    final = stages()[-1]
    packages = re.search(
        r"apt-get install (.*?)&&", " ".join(rest for word, rest in final if word == "RUN")
    ).group(1)
    assert {word for word in packages.split() if not word.startswith("-")} == {"ca-certificates", "wget"}
    copied = [rest for word, rest in final if word == "COPY"]
    assert copied == [
        "--from=build /opt/clickline /opt/clickline",
        "image/health.sh /opt/clickline/health.sh",
    ]


def test_both_stages_have_one_slim_base_with_our_python():
    assert ("ARG", "PYTHON=python:3.11-slim-bookworm") in instructions()
    assert [stage[0][1] for stage in stages()] == ["${PYTHON} AS build", "${PYTHON}"]


def test_it_runs_as_a_number_that_is_not_root_and_that_deploy_sets_too():
    from clickline.config.deploy_sections import IdentitySection

    (user,) = [rest for word, rest in stages()[-1] if word == "USER"]
    assert user == f"{IdentitySection().user}:{IdentitySection().group}"
    assert stages()[-1].index(("USER", user)) > max(
        i for i, (word, _) in enumerate(stages()[-1]) if word in ("RUN", "COPY")
    )


def test_nothing_is_fetched_by_the_dockerfile_itself_and_nothing_secret_is_named():
    assert not [word for word, _ in instructions() if word == "ADD"]
    text = "\n".join(f"{word} {rest}" for word, rest in instructions())
    assert not re.search(r"https?://|password|secret|credential|_KEY|TOKEN=", text, re.IGNORECASE)


def test_a_login_shell_finds_the_commands_too():
    run = " ".join(rest for word, rest in stages()[-1] if word == "RUN")
    (line,) = re.findall(r"echo '(.*?)' > /etc/profile.d/clickline.sh", run)
    found = subprocess.run(
        ["bash", "-c", f"PATH=/usr/bin; {line}; echo $PATH"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert found.stdout == "/opt/clickline/venv/bin:/usr/bin\n"
    assert environment()["PATH"] == "/opt/clickline/venv/bin:$PATH"


def test_kernels_run_with_the_cpu_they_are_compiled_for():
    arguments = {rest for word, rest in instructions() if word == "ARG" and rest.startswith("CPU")}
    assert arguments == {"CPU=x86-64-v3"}
    assert ("ARG", "CPU=x86-64-v3") in stages()[0] and ("ARG", "CPU=x86-64-v3") in stages()[-1]
    settings = environment()
    assert settings["NUMBA_CPU_NAME"] == "${CPU}" and settings["NUMBA_CPU_FEATURES"] == ""
    assert settings["CLICKLINE_KERNELS"] == "/opt/clickline/kernels"
    assert "CPU:=x86-64-v3" in (ROOT / "image" / "build.sh").read_text()


def test_the_release_of_the_label_is_the_package_s():
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"RELEASE={release}") in stages()[-1]
    labels = next(rest for word, rest in stages()[-1] if word == "LABEL")
    names = ("title", "description", "licenses", "version", "revision")
    assert all(f"org.opencontainers.image.{name}=" in labels for name in names)


def test_a_command_of_kubernetes_replaces_the_entrypoint_and_args_extend_it():
    final = dict(stages()[-1])
    assert (final["ENTRYPOINT"], final["CMD"]) == ('["clickline"]', '["--help"]')
    assert "/opt/clickline/health.sh" in final["HEALTHCHECK"]


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", ".venv-peers/x", "data/train.tsv", "demo/clickline.yaml", ".clickline/runs/a",
        "src/.clickline/runs/a", "tests/conftest.py", "docs/image.md", "bench/run.py", ".ci/x", "tls/server.key",
        "clickline.yaml", "src/clickline/__pycache__/a.pyc", "src/clickline.egg-info/PKG-INFO",
    ],
)  # fmt: skip
def test_the_builder_never_gets(path: str):
    assert ignored(path)


@pytest.mark.parametrize(
    "path", ["src/clickline/cli/main.py", "pyproject.toml", "constraints.txt", "image/build.sh"]
)
def test_the_builder_gets(path: str):
    assert not ignored(path)


def test_the_builder_gets_all_that_is_copied_from_it():
    sources = [
        source
        for stage in stages()
        for word, rest in stage
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert sources and not [source for source in sources if ignored(source) or not (ROOT / source).exists()]


def ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last line that fits the path, or a folder above it, decides."""
    parts = Path(path).parts
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts)
        else:
            fits = any(fnmatch.fnmatch(prefix, pattern) for prefix in above)
        if fits:
            verdict = not line.startswith("!")
    return verdict
