"""`clickline import`: where it writes, what it never overwrites, its exit codes; no source can break the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clickline.config import load_config
from clickline.importers.config_draft import WIDTH, ConfigDraft
from clickline.importers.run import valid_yaml
from clickline.importers.source_files import Origin

SCRIPT = Path(sys.executable).parent / "clickline"
COMMAND = "train --training_data=data/train.tsv --validation_data=data/eval.tsv"


def typed(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "import", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_import_writes_prints_and_refuses_to_overwrite(tmp_path: Path) -> None:
    written = typed("elasticdl", COMMAND, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert written.stdout == "wrote clickline.yaml: 4 keys, 0 without a counterpart\n"
    text = (tmp_path / "clickline.yaml").read_text()
    printed = typed("elasticdl", COMMAND, "-o", "-", cwd=tmp_path)
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, text, "")
    (tmp_path / "clickline.yaml").write_text("mine")
    refused = typed("elasticdl", COMMAND, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        "clickline.yaml already exists. Name another file with -o, or overwrite it with --force.\n"
    )
    assert (tmp_path / "clickline.yaml").read_text() == "mine"
    assert typed("elasticdl", COMMAND, "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "clickline.yaml").read_text() == text
    assert typed("elasticdl", COMMAND, "-o", "deep/er/x.yaml", cwd=tmp_path).returncode == 0
    assert load_config(tmp_path / "deep" / "er" / "x.yaml").name == "ads"


@pytest.mark.slow
def test_malformed_source_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "params").write_text("DATASET_DIR=/d\nREPLICAS=none\n")
    done = typed("tfserving-intel", "params", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(
        "params:2 REPLICAS would become deploy.serving.replicas, which is none. Allowed:"
    )
    assert not (tmp_path / "clickline.yaml").exists()
    (tmp_path / "config.yaml").write_text("runner: {train_data_dir: rows, epochs: 0}\n")
    done = typed("paddlerec", "config.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "config.yaml:1 runner.epochs would become train.epochs" in done.stderr
    done = typed("elasticrec", "data.config", "slot.conf", cwd=tmp_path)
    assert done.returncode == 2 and "data.config cannot be read: No such file" in done.stderr


@pytest.mark.slow
@given(
    key=st.text(max_size=60),
    # With a slash it would be a path.
    value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=60),
    why=st.text(max_size=200),
)
def test_source_text_cannot_break_out_of_a_value_or_a_comment(
    key: str, value: str, why: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draft = ConfigDraft(key)
    draft.put("data.train", "rows")
    draft.put("data.donefile", value, Origin("file", 1, key), why=why)
    draft.skip(Origin(key, 1, key), why)
    draft.hint(why)
    text = draft.text()
    document = yaml.safe_load(text)
    assert document.keys() == {"data"} and document["data"].keys() == {"train", "donefile"}
    valid_yaml(draft, tmp_path_factory.getbasetemp())
    file = tmp_path_factory.getbasetemp() / "hostile.yaml"
    file.write_text(text)
    assert load_config(file).data.donefile == value


def test_lines_are_at_most_the_maximum_width() -> None:
    draft = ConfigDraft("a system")
    draft.put("data.train", "x" * 60, Origin("file", 7, "KEY"), why="words " * 40)
    draft.skip(Origin("file", 8, "OTHER"), "words " * 40)
    assert max(map(len, draft.text().splitlines())) <= WIDTH
