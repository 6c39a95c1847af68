"""Properties of the image, read from the files that build it."""

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
    """(INSTRUCTION, rest) of the Dockerfile, with joined lines and without comments."""
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
def test_scripts_pass_a_syntax_check_of_their_shell(script: Path):
    shell = script.read_text().splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", str(script)], check=True, timeout=30)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


@pytest.mark.parametrize("arguments", [[], ["install"], ["kernels", "prefix"], ["all", "prefix"]])
def test_script_prints_its_usage(arguments: list[str]):
    command = ["bash", str(ROOT / "image" / "build.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "usage: image/build.sh install PREFIX | kernels PREFIX KERNELS" in done.stderr


def test_script_installs_everything():
    build = [rest for word, rest in stages()[0] if word == "RUN"]
    assert [re.search(r"image/build.sh (\w+) (.*)", line).groups() for line in build] == [
        ("install", "/opt/clickline/venv"),
        ("kernels", "/opt/clickline/venv /opt/clickline/kernels"),
    ]
    assert "pip" not in " ".join(rest for stage in stages() for word, rest in stage if word == "RUN")


def test_script_installs_every_extra_that_a_role_needs():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    script = (ROOT / "image" / "build.sh").read_text()
    installed = set(re.search(r"/source\[([a-z0-9,-]+)\]", script).group(1).split(","))
    assert extras - installed == {"dev"}
    assert "'ray[default]'" in script


def test_final_stage_has_no_compiler_and_copies_two_folders():
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


def test_both_stages_share_a_slim_base_with_the_supported_python():
    assert ("ARG", "PYTHON=python:3.11-slim-bookworm") in instructions()
    assert [stage[0][1] for stage in stages()] == ["${PYTHON} AS build", "${PYTHON}"]


def test_image_runs_as_the_numeric_non_root_user_of_deploy():
    from clickline.config.deploy_sections import IdentitySection

    (user,) = [rest for word, rest in stages()[-1] if word == "USER"]
    assert user == f"{IdentitySection().user}:{IdentitySection().group}"
    assert stages()[-1].index(("USER", user)) > max(
        i for i, (word, _) in enumerate(stages()[-1]) if word in ("RUN", "COPY")
    )


def test_dockerfile_downloads_nothing_and_names_no_secrets():
    assert not [word for word, _ in instructions() if word == "ADD"]
    text = "\n".join(f"{word} {rest}" for word, rest in instructions())
    assert not re.search(r"https?://|password|secret|credential|_KEY|TOKEN=", text, re.IGNORECASE)


def test_login_shell_finds_the_commands():
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


def test_kernels_are_compiled_for_the_cpu_they_run_on():
    arguments = {rest for word, rest in instructions() if word == "ARG" and rest.startswith("CPU")}
    assert arguments == {"CPU=x86-64-v3"}
    assert ("ARG", "CPU=x86-64-v3") in stages()[0] and ("ARG", "CPU=x86-64-v3") in stages()[-1]
    settings = environment()
    assert settings["NUMBA_CPU_NAME"] == "${CPU}" and settings["NUMBA_CPU_FEATURES"] == ""
    assert settings["CLICKLINE_KERNELS"] == "/opt/clickline/kernels"
    assert "CPU:=x86-64-v3" in (ROOT / "image" / "build.sh").read_text()


def test_image_label_has_the_package_version():
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"RELEASE={release}") in stages()[-1]
    labels = next(rest for word, rest in stages()[-1] if word == "LABEL")
    names = ("title", "description", "licenses", "version", "revision")
    assert all(f"org.opencontainers.image.{name}=" in labels for name in names)


def test_kubernetes_command_replaces_the_entrypoint_and_args_extend_it():
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
def test_build_context_excludes(path: str):
    assert ignored(path)


@pytest.mark.parametrize(
    "path", ["src/clickline/cli/main.py", "pyproject.toml", "constraints.txt", "image/build.sh"]
)
def test_build_context_includes(path: str):
    assert not ignored(path)


def test_build_context_includes_everything_that_is_copied():
    sources = [
        source
        for stage in stages()
        for word, rest in stage
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert sources and not [source for source in sources if ignored(source) or not (ROOT / source).exists()]


def ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last line that matches the path or one of its parents decides."""
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
