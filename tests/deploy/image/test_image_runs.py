"""The image without a container engine: built by its script, run like a pod."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = "/usr/bin/python3.11"  # one that every user may run; the tests' own may be in a home folder

pytestmark = [
    pytest.mark.faults,  # a quarter of an hour, most of it installing and compiling
    pytest.mark.timeout(3000),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and become another user"),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"there is no {PYTHON}"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv"),
]

PIPELINE = """
set -euo pipefail
clickline init . --preset criteo
clickline deploy check-pod
find $NUMBA_CACHE_DIR -name '*.nb?' | sort > /tmp/before
touch /tmp/mark
clickline sample --quiet --rows 20000 --out data
clickline up --no-serve --quiet --set train.mode=cluster --set train.workers.max=2 --set gate.auc=0.51
clickline up --no-serve --quiet --set model.name=deepfm --set gate.auc=0.51
clickline serve --set serve.processes=2 2> serve.log &
served=$!
timeout 120 bash -c 'until wget -q -O- localhost:8502/readyz; do sleep 0.5; done' || { cat serve.log; exit 1; }
for protocol in grpc http v2-grpc v2-http elasticctr; do
    clickline predict --quiet --protocol $protocol -n 20 -i data/eval.tsv
done
kill $served
wait $served
echo "newly stored:"
find $NUMBA_CACHE_DIR -name '*.nb?' -newer /tmp/mark
find $NUMBA_CACHE_DIR -name '*.nb?' | sort | comm -13 /tmp/before -
"""

# What KubeRay puts into pods and submitters: its start command, its probes, and the loop of its submitter.
KUBERAY = """
set -euo pipefail
clickline init . --preset criteo
clickline deploy check-pod
/bin/bash -lc 'ulimit -n 65536; PATH={image}/venv/bin:$PATH; ray start --head --block --dashboard-host=0.0.0.0 --num-cpus=1 --metrics-export-port=8080' > head.log 2>&1 &
probe() {{ wget --tries 1 -T 2 -q -O- "http://localhost:$1" | grep -q success; }}
export -f probe
timeout 120 bash -c 'until probe 52365/api/local_raylet_healthz && probe 8265/api/gcs_healthz; do sleep 1; done' || {{ cat head.log; exit 1; }}
ray health-check --address 127.0.0.1:6379
if ! ray job status --address http://127.0.0.1:8265 one > /dev/null 2>&1; then
    ray job submit --address http://127.0.0.1:8265 --no-wait --submission-id one -- clickline --version
fi
ray job logs --address http://127.0.0.1:8265 --follow one
ray job status --address http://127.0.0.1:8265 one
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="clickline-image-"))
    folder.chmod(0o755)
    try:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        for stage in (
            ["install", str(folder / "venv")],
            ["kernels", str(folder / "venv"), str(folder / "kernels")],
        ):
            done = subprocess.run(
                ["bash", str(ROOT / "image" / "build.sh"), *stage],
                env={**environment, "PYTHON": PYTHON},
                capture_output=True,
                text=True,
                timeout=1800,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        yield folder
    finally:
        shutil.rmtree(folder)


def in_pod(image: Path, *command: str) -> str:
    user = str(random.randint(100_000, 2_000_000_000))
    done = subprocess.run(
        ["bash", str(Path(__file__).with_name("pod.sh")), str(image), user, *command],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_commands_work_for_any_user(image: Path):
    assert in_pod(image, "clickline", "--version").startswith("clickline ")
    assert in_pod(image, "ray", "--version").startswith("ray, version ")


def test_container_has_a_read_only_root_and_a_user_without_a_name(image: Path):
    said = in_pod(
        image, "bash", "-c", f"whoami 2>&1; touch /etc/x {image}/venv/x 2>&1; touch /tmp/x && echo tmp"
    )
    assert (
        "cannot find name for user ID" in said and said.count("Read-only file system") == 2 and "tmp" in said
    )


def test_pipeline_runs_in_the_image_without_compiling_kernels(image: Path):
    said = in_pod(image, "bash", "-c", PIPELINE)
    assert said.count("requests    20 over 1 connection") == 5
    assert said.endswith("newly stored:\n"), said[-3000:]


def test_commands_that_kuberay_runs_work_in_the_image(image: Path):
    said = in_pod(image, "bash", "-c", KUBERAY.format(image=image))
    assert "Job 'one' succeeded" in said
