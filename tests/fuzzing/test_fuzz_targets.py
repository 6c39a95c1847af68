"""Every fuzz target, briefly: on its seeds and on mutated seeds. `make fuzz` runs them for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.surfaces import SURFACES, load
from fuzz.target import Choices, mutated
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def mutated_seeds(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A mutated seed; its first bytes are the target's choices."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=4))
            case 1:
                del data[at : at + draw(st.integers(1, 20))]
            case 2:
                data[at:at] = draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"\0" * 8, b"\x7f", b"\n", b'"', b"../"])
                )
            case 3:
                data[: min(len(data), 12)] = draw(st.binary(min_size=12, max_size=12))
            case 4:
                data += draw(st.binary(max_size=40))
    return bytes(data)


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in SURFACES])
def test_target_has_no_finding(name: str) -> None:
    target = load(name)
    seeds = list(target.seeds())
    for seed in seeds:
        target.run(seed)

    @settings(max_examples=25)
    @given(mutated_seeds(seeds))
    def run(data: bytes) -> None:
        target.run(data)

    run()


@given(st.binary(max_size=40))
def test_mutation_does_not_change_the_original(data: bytes) -> None:
    document = {"a": [1, {"b": None}], "c": "x"}
    mutated(document, Choices(data))
    assert document == {"a": [1, {"b": None}], "c": "x"}


@pytest.mark.slow
def test_finding_is_reported_and_its_input_saved(tmp_path: Path) -> None:
    """Run the whole fuzzer with a target that has a finding at one byte."""
    pytest.importorskip("atheris")
    (tmp_path / "fuzz_broken.py").write_text(
        "from fuzz import surfaces, __main__\n"
        "from fuzz.target import Target\n"
        "def run(data):\n"
        "    if data[:1] == b'!': raise ZeroDivisionError('found')\n"
        "surfaces.SURFACES['broken'] = 'broken'\n"
        "__main__.load = lambda name: Target(run, lambda: [b'?', b'abc'])\n"
        "__main__.main()\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, tmp_path / "fuzz_broken.py", "broken", "--inside", "--seconds", "60"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert b"ZeroDivisionError: found" in done.stdout + done.stderr
    (kept,) = tmp_path.glob("finding-crash-*")
    assert kept.read_bytes()[:1] == b"!"
