"""clickline versions: what it prints, what it changes, and its errors."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clickline_process import run

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import VersionManifest
from clickline.cli import main
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.storage.storage import Storage
from version_manifests import version_manifest

Versions = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = "data: {train: data/train.tsv}\nmodel: {name: lr}\n"


def field(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "column": name, "statistics": None, **more}


def manifest(number: int, parent: int | None = None, **changes: Any) -> VersionManifest:
    slot = {"dim": 8, "pooling": "sum", "part": 0, "wide": 0.0, "vector": [0.0] * 8}
    described = {
        "rows": 1000 * number,
        "shards": 2,
        "parts": [{"dim": 8, "wide": True}],
        "slots": [{"name": "C1", **slot}, {"name": "C2", **slot}],
        "features": {
            "dense": [field("I1", transform="log")],
            "slots": [field("C1"), field("C2")],
            "missing": [],
        },
        "model": {"checkpoint": f"step-{number:09d}", "step": number, "dataset": "abc", "snapshot": "5a5a"},
        "config": f"train: {{epochs: {number}, seed: 7}}\n",
        "report": {"evaluation": {"auc": 0.75 + number / 1000, "logloss": 0.5, "rows": 10}},
        "cost": {"rows": 10, "auc": -0.0001, "logloss": 0.0},
        "sample": {"requested_rows": 256, "rows": 256, "tolerance": 1e-6, "difference": 2e-8},
    }
    return version_manifest(parent, **(described | changes))


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Versions:
    """Runs the command in this process, which saves half a second for each start."""
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def versions(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main._run(["versions", *arguments])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return versions


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Storage(), str(tmp_path / ".clickline" / "registry"))


def publish(registry: Registry, parent: int | None = None, *, moved: bool = True, **changes: Any) -> int:
    with registry.draft(parent) as draft:
        (draft.folder / "table-00000-of-00001.bin").write_bytes(b"x" * 2048)
        draft.commit(manifest(draft.number, parent, **changes))
    if moved:
        registry.move(draft.number, "publish", after=registry.current())
    return draft.number


def current(registry: Registry) -> tuple[int, bool, str]:
    move = Registry(Storage(), registry.uri).current()
    assert move is not None
    return move.version, move.pinned, move.reason


# ── list and show ──────────────────────────────────────────────────────────────────────────────


def test_list(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry, 1), publish(registry, 2, report=None, moved=False)
    done = versions("list")
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["VERSION", "TABLE", "CREATED", "ROWS", "SIZE", "AUC", "STATE"]
    cells = [re.split(r" {3,}", line) for line in lines]
    assert [[cell for n, cell in enumerate(row) if n != 2] for row in cells] == [
        ["1", "base", "1,000", "2.0 KiB", "0.751"],
        ["2", "delta of 1", "2,000", "2.0 KiB", "0.752", "current"],
        ["3", "delta of 2", "3,000", "2.0 KiB", "-"],
    ]
    assert all(re.fullmatch(r"\d+ (s|min) ago", row[2]) for row in cells)
    document = json.loads(versions("list", "--json").stdout)
    assert [entry["version"] for entry in document] == [1, 2, 3]
    assert document[1]["state"] == ["current"]
    assert (document[1]["auc"], document[1]["bytes"], document[1]["parent"]) == (0.752, 2048, 1)


def test_list_marks_pinned_and_damaged_versions(
    versions: Versions, registry: Registry, tmp_path: Path
) -> None:
    publish(registry), publish(registry)
    registry.move(1, "hold", after=registry.current(), pinned=True)
    Path(registry.uri, "versions", "000000002", "manifest.json").write_text("{")
    done = versions("list")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].endswith("   current, pinned")
    assert re.split(r" {3,}", done.stdout.splitlines()[2]) == ["2", "-", "-", "-", "-", "-", "damaged"]
    assert "000000002/manifest.json is not a manifest" in done.stderr


def test_list_of_an_empty_registry(versions: Versions, registry: Registry) -> None:
    done = versions("list")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{registry.uri} has no versions yet: `clickline publish` creates one.\n"
    assert json.loads(versions("list", "--json").stdout) == []
    for command in (["show"], ["rollback"], ["unpin"], ["diff", "1"]):
        done = versions(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "`clickline publish` creates" in done.stderr
    done = versions("gc")
    assert (done.returncode, done.stdout) == (0, "removed no versions\n")


def test_versions_without_a_current_one(versions: Versions, registry: Registry) -> None:
    publish(registry, moved=False), publish(registry, moved=False)
    done = versions("show")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "has no current version yet. Versions 1, 2 exist; `clickline versions pin N` makes one current.\n"
    )
    assert versions("pin", "2").returncode == 0
    assert current(registry) == (2, True, "pinned")


def test_show(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry, 1)
    registry.move(1, "clicks fell", after=registry.current())
    registry.move(2, "better now", after=registry.current())
    done = versions("show")
    assert (done.returncode, done.stderr) == (0, "")
    shown = dict(re.split(r" {2,}", line, maxsplit=1) for line in done.stdout.split("\n\n")[0].splitlines())
    created = shown.pop("created")
    assert re.fullmatch(r"20\S+ \(\d+ (s|min) ago\)", created)
    assert shown == {
        "version": "2 (current)",
        "table": "delta of 1",
        "chain": "1 < 2",
        "rows": "2,000",
        "tombstones": "0",
        "size": "2.0 KiB",
        "table precision": "fp32",
        "dense precision": "fp32",
        "shards": "2",
        "fields": "1 dense, 2 slots",
        "model checkpoint": "step-000000002",
        "model step": "2",
        "model snapshot": "5a5a",
        "model dataset": "abc",
        "auc": "0.752",
        "logloss": "0.5",
        "cost rows": "10",
        "cost auc": "-0.0001",
        "cost logloss": "0",
        "sample requested rows": "256",
        "sample rows": "256",
        "sample tolerance": "1e-06",
        "sample difference": "2e-08",
    }
    files, moves = done.stdout.split("\n\n")[1:]
    assert re.search(r"table-00000-of-00001\.bin   2\.0 KiB   [0-9a-f]{64}", files)
    assert [re.split(r" {3,}", line)[-1] for line in moves.splitlines()] == [
        "REASON",
        "better now",
        "publish",
    ]
    assert "1 (" not in versions("show", "1").stdout
    document = json.loads(versions("show", "1", "--json").stdout)
    assert (document["number"], document["chain"], document["state"]) == (1, [1], [])
    assert [move["reason"] for move in document["moves"]] == ["publish", "clicks fell"]


def test_show_resolved_prints_the_config(versions: Versions, registry: Registry) -> None:
    publish(registry)
    assert versions("show", "--resolved").stdout == "train: {epochs: 1, seed: 7}\n"


def test_unknown_versions_and_wrong_arguments_are_errors(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry)
    for command in (
        ["show", "9"],
        ["pin", "9"],
        ["rollback", "--to", "9"],
        ["diff", "9"],
        ["diff", "1", "9"],
    ):
        done = versions(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"{registry.uri} has no version 9. It has 1, 2.\n"
    document = json.loads(versions("show", "9", "--json").stdout)
    assert document["error"]["kind"] == "ArtifactError"
    for command, said in (
        (["show", "x"], "Invalid value for 'N': it should be a valid integer"),
        (["show", "0"], "Invalid value for 'N'"),
        (["pin"], "Missing argument 'N'"),
        (["diff"], "Missing argument 'A'"),
        (["gc", "--keep", "0"], "Invalid value for '--keep'"),
        (["lst"], "lst"),
        ([], "Missing command"),
    ):
        done = versions(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert current(registry)[0] == 2


def test_registry_comes_from_the_config(versions: Versions, tmp_path: Path) -> None:
    publish(Registry(Storage(), str(tmp_path / "elsewhere")))
    assert "   current" in versions("list", "--set", "publish.registry=elsewhere").stdout
    home = Registry(Storage(), str(tmp_path / "home" / "registry"))
    publish(home)
    assert "   current" in versions("list", "--set", "home=home").stdout
    assert versions("list").stdout == ""


# ── diff ───────────────────────────────────────────────────────────────────────────────────────


def test_diff(versions: Versions, registry: Registry) -> None:
    publish(registry)
    features = {"dense": [field("I1", transform="none")], "slots": [field("C1"), field("C3")], "missing": []}
    publish(
        registry,
        table_precision="int8",
        features=features,
        config="train: {epochs: 1, seed: 8, order: time}\n",
    )
    done = versions("diff", "1", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split(r" {3,}", line.strip()) for line in done.stdout.splitlines()]
    for line in (
        ["VERSION 1", "VERSION 2"],
        ["table_precision", "fp32", "int8"],
        ["rows", "1,000", "2,000 (+1,000)"],
        ["model.step", "1", "2 (+1)"],
        ["auc", "0.751", "0.752 (+0.001)"],
        ["slot C2", "present", "-"],
        ["slot C3", "-", "present"],
        ["dense I1.transform", "log", "none"],
        ["train.seed", "7", "8 (+1)"],
        ["train.order", "-", "time"],
    ):
        assert line in lines
    assert not [line for line in lines if line[0] in ("logloss", "shards", "train.epochs")]
    assert versions("diff", "1").stdout == done.stdout, "the current version is the other one by default"
    document = json.loads(versions("diff", "1", "2", "--json").stdout)
    assert document["versions"] == [1, 2]
    assert document["config"] == {"train.seed": [7, 8], "train.order": [None, "time"]}
    assert versions("diff", "1", "1").stdout == (
        "contents: the same\nmeasures: the same\nfeatures: the same\nconfig: the same\n"
    )


# ── rollback, pin, unpin ───────────────────────────────────────────────────────────────────────


def test_rollback_goes_back_and_promote_goes_forward(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry), publish(registry)
    done = versions("rollback", "--reason", "clicks fell")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "version 2 is current (was 3). "
        "The next publish replaces it; to prevent that: `clickline versions pin 2`.\n"
    )
    assert current(registry) == (2, False, "clicks fell")
    document = json.loads(versions("rollback", "--json").stdout)
    assert (document["version"], document["reason"]) == (1, "rollback from 2")
    done = versions("rollback")
    assert done.returncode == 1
    assert done.stderr == (
        "no version that was current before version 1 still exists to roll back to. "
        "Versions 2, 3 exist: `clickline versions promote N` makes a newer one current, "
        "`clickline versions rollback --to N` an older one.\n"
    )
    done = versions("rollback", "--to", "3")
    assert (done.returncode, "run `clickline versions promote 3`" in done.stderr) == (1, True)
    assert versions("promote", "3").returncode == 0
    assert current(registry) == (3, False, "promotion from 1")
    assert versions("promote", "3").stdout == "version 3 is already current\n"
    assert [move.version for move in registry.moves()] == [1, 2, 3, 2, 1, 3]


def test_rollback_skips_versions_that_gc_removed(versions: Versions, registry: Registry) -> None:
    for _ in range(3):
        publish(registry)
    Storage().delete(f"{registry.uri}/versions/000000002")
    assert versions("rollback").stdout.startswith("version 1 is current (was 3).")


def test_rollback_from_a_deleted_version(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry)
    Storage().delete(f"{registry.uri}/versions/000000002")
    assert versions("list").stderr == (
        "the current version 2 no longer exists. Run `clickline versions rollback`.\n"
    )
    assert versions("rollback").returncode == 0
    assert current(registry)[0] == 1


@pytest.mark.parametrize("command", [["rollback"], ["rollback", "--to", "2"], ["pin", "2"]])
def test_damaged_version_cannot_become_current(
    versions: Versions, registry: Registry, command: list[str]
) -> None:
    publish(registry), publish(registry, 1), publish(registry)
    Path(registry.uri, "versions", "000000001", "table-00000-of-00001.bin").write_bytes(b"x")
    done = versions(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert "version 2 is incomplete: " in done.stderr
    assert "000000001/table-00000-of-00001.bin has 1 bytes, its manifest says 2,048" in done.stderr
    assert current(registry) == (3, False, "publish")


def test_pin_lasts_until_unpin(versions: Versions, registry: Registry) -> None:
    publish(registry), publish(registry), publish(registry)
    done = versions("pin", "1", "--reason", "campaign")
    assert done.stdout == (
        "version 1 is current (was 3) and stays current until `clickline versions unpin`.\n"
    )
    assert current(registry) == (1, True, "campaign")
    assert versions("pin", "1").stdout == "version 1 is already current and pinned\n"

    done = versions("rollback")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"version 1 is pinned since \S+ \(campaign\), so nothing was changed\. To leave it, name a version, "
        r"`clickline versions rollback --to N` or `clickline versions promote N`, which is then pinned; "
        r"or run `clickline versions unpin` first\.\n",
        done.stderr,
    )
    done = versions("promote", "2")
    assert done.stdout == (
        "version 2 is current (was 1). "
        "It stays pinned: publishing does not change it until `clickline versions unpin`.\n"
    )
    assert current(registry) == (2, True, "promotion from 1")

    done = versions("unpin")
    assert done.stdout == (
        "version 2 stays current until the next publish. "
        "Version 3 is newer: `clickline versions promote 3` makes it current now.\n"
    )
    assert current(registry) == (2, False, "unpinned")
    assert versions("unpin").stdout == "no version is pinned; version 2 is current\n"
    assert versions("pin", "2").stdout == (
        "version 2 is current and stays current until `clickline versions unpin`.\n"
    )


# ── gc ─────────────────────────────────────────────────────────────────────────────────────────


def test_gc_keeps_the_number_of_versions_in_the_config(versions: Versions, registry: Registry) -> None:
    for _ in range(6):
        publish(registry)
    publish(registry, 6)
    done = versions("gc", "--dry-run", "--keep", "1")
    assert done.stdout == "would remove 5 versions (1, 2, 3, 4, 5), 10.0 KiB\n"
    assert registry.numbers() == [1, 2, 3, 4, 5, 6, 7]
    assert versions("gc").stdout == "removed 2 versions (1, 2), 4.0 KiB\n"
    assert versions("gc", "--set", "publish.keep_versions=4").stdout == "removed 1 version (3), 2.0 KiB\n"
    assert json.loads(versions("gc", "--keep", "1", "--json").stdout) == {
        "dry_run": False,
        "versions": [4, 5],
        "drafts": [],
        "bytes": 4096,
    }
    assert registry.numbers() == [6, 7]
    assert versions("gc", "--keep", "1").stdout == "removed no versions\n"


def test_gc_reports_unfinished_versions(versions: Versions, registry: Registry) -> None:
    publish(registry)
    with registry.draft():
        pass
    publish(registry)
    assert versions("gc", "--dry-run").stdout == "would remove no versions; 1 unfinished version\n"
    assert versions("gc").stdout == "removed no versions; 1 unfinished version\n"
    assert versions("gc").stdout == "removed no versions\n"


def test_client_config_is_that_of_paddle_serving(
    versions: Versions, registry: Registry, tmp_path: Path
) -> None:
    features = FeatureSpec(
        (DenseField("I1", "I1", "log1p"), DenseField("I2", "I2", "none")),
        (
            SlotField("C1", "C1", 1),
            SlotField("7", "7", 7, "feasign", multi=True),
            SlotField("b", "I3", 9, "log2"),
        ),
    )
    publish(registry, features=features.to_json())
    done = versions("client-config", "1")
    assert done.returncode == 0
    assert re.findall(r"(\w+)_var {\n  name: \"(\w+)\"", done.stdout) == [
        ("feed", "C1"),
        ("feed", "7"),
        ("feed", "dense_input"),
        ("fetch", "logistic"),
        ("fetch", "probabilities"),
        ("fetch", "logits"),
        ("fetch", "class_ids"),
    ]
    assert "#   I1 I2 I3\n" in done.stdout
    assert (
        'feed_var {\n  name: "7"\n  alias_name: "7"\n  is_lod_tensor: true\n  feed_type: 0\n  shape: -1\n}\n'
        in done.stdout
    )
    assert 'alias_name: "dense_input"\n  is_lod_tensor: false\n  feed_type: 1\n  shape: 3\n' in done.stdout
    chosen = ("--set", "serve.brpc_names={logistic: sigmoid_0.tmp_0}")
    done = versions("client-config", "1", "--per-field", "-o", "client.prototxt", *chosen)
    assert (done.returncode, done.stdout) == (0, "")
    written = (tmp_path / "client.prototxt").read_text()
    assert re.findall(r"feed_var {\n  name: \"(\w+)\"", written) == ["C1", "7", "I1", "I2", "I3"]
    assert 'fetch_var {\n  name: "logistic"\n  alias_name: "sigmoid_0.tmp_0"\n' in written
    for names, message in (
        ("{click: a}", "serve.brpc_names.click is not an output. Allowed: logistic, probabilities, logits"),
        ("{logistic: logits}", "serve.brpc_names.logistic is logits, which names another output too"),
    ):
        done = versions("client-config", "1", "--set", f"serve.brpc_names={names}")
        assert done.returncode == 2 and message in done.stderr


def test_installed_command_lists_versions(versions: Versions, registry: Registry, tmp_path: Path) -> None:
    publish(registry)
    done = run("versions", "list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].endswith("   current")
    done = run("versions", "pin", "7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{registry.uri} has no version 7. It has 1.\n"


def test_help_names_every_command(versions: Versions) -> None:
    done = versions("--help")
    assert done.returncode == 0
    for command in ("list", "show", "diff", "rollback", "promote", "pin", "unpin", "gc"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
