"""The presets are valid configs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clickline import config as package
from clickline.config import load_config

PRESETS = sorted((Path(package.__file__).parent / "presets").glob("*.yaml"))


def test_each_preset_name_has_a_file() -> None:
    assert [preset.stem for preset in PRESETS] == ["criteo", "csv", "slots"]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_preset_loads_and_reads_what_sample_writes(preset: Path, tmp_path: Path) -> None:
    target = tmp_path / "clickline.yaml"
    target.write_bytes(preset.read_bytes())
    config = load_config(target)
    ending = {"criteo": "tsv", "slots": "txt", "csv": "csv"}[preset.stem]
    assert config.data.format == preset.stem
    assert config.data.train == (f"{tmp_path}/data/train.{ending}",)
    assert config.data.eval == (f"{tmp_path}/data/eval.{ending}",)
    assert all(len(line) <= 110 for line in target.read_text().splitlines())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_commented_options_of_a_preset_load(preset: Path, tmp_path: Path) -> None:
    """A line `  # key: value` with the indentation of a key is an offer to uncomment."""
    text = preset.read_text()
    offers = re.findall(r"^  # ((?:  )?[\w\"*]+:.*)$", text, re.MULTILINE)
    for offer in offers:
        key = offer.split(":")[0]
        text = re.sub(rf"^  {re.escape(key)}:.*\n", "", text, flags=re.MULTILINE)
    target = tmp_path / "clickline.yaml"
    target.write_text(text.replace("data:\n", "data:\n" + "".join(f"  {offer}\n" for offer in offers), 1))
    config = load_config(target)
    if preset.stem == "slots":
        assert config.data.dates is not None
        assert config.data.dates.wait == 1800
        assert config.data.modulo == 100000001
    if preset.stem == "criteo":
        assert {name: field.transform for name, field in config.data.fields.items()} == {
            f"B{number}": "bucket" for number in range(1, 14)
        }
