"""The same model packed in the same way is one version; a rollback is not undone by publishing it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.errors import RegistryMoved
from clickline.pipeline.flow import train
from clickline.progress import Progress
from clickline.publishing import run as publishing
from clickline.publishing.run import PublishResult, publish


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, message: str) -> None:
        self.messages.append(message)


class Publisher:
    """Publishes a project, and fails if it opens a checkpoint although there is nothing to do."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.registry = registry_of(load_config(project / "clickline.yaml"))
        self.messages: list[str] = []

    def publish(self, *overrides: str, **options: object) -> PublishResult:
        progress = RecordingProgress()
        try:
            config = load_config(self.project / "clickline.yaml", list(overrides))
            return publish(config, progress, **options)  # type: ignore[arg-type]
        finally:
            self.messages = progress.messages

    @property
    def current(self) -> int:
        move = self.registry.current()
        assert move is not None
        return move.version


@pytest.fixture
def publisher(project: Path) -> Publisher:
    return Publisher(project)


def test_the_same_model_is_published_once(publisher, monkeypatch):
    first = publisher.publish(reason="first")
    assert not first.reused
    monkeypatch.setattr(publishing, "open_checkpoint", lambda *args: pytest.fail("a checkpoint was opened"))
    again = publisher.publish(reason="second")
    assert again.reused
    assert (again.version, again.move) == (first.version, first.move)
    assert publisher.messages == ["version 1 is up to date: same model, packed the same way"]
    assert publisher.publish(base=True).reused  # it is one
    assert [version.number for version in publisher.registry.versions()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["table_precision=fp16", "dense_precision=int8", "shards=3", "sample_rows=100"]
)
def test_another_packing_is_another_version(publisher, change):
    publisher.publish()
    other = publisher.publish(f"publish.{change}")
    assert (other.reused, other.version.number, publisher.current) == (False, 2, 2)
    assert publisher.publish(f"publish.{change}").reused
    assert (
        publisher.publish(
            "publish.keep_versions=2", "publish.max_deltas=1", "serve.aliases=[a]"
        ).version.number
        == 3
    )


@pytest.mark.slow
def test_another_model_is_another_version_and_back_again(publisher):
    first = publisher.publish()
    config = load_config(publisher.project / "clickline.yaml", ["train.seed=8"])
    train(config)
    second = publisher.publish()
    assert (second.reused, second.version.number) == (False, 2)
    model = first.version.manifest.model.checkpoint.split("/")[0]
    back = publisher.publish(model=model)  # requested by name: not a rollback, and not the newest
    assert (back.reused, back.version.number, publisher.current) == (False, 3, 3)


@pytest.mark.slow
def test_a_delta_is_up_to_date_unless_a_base_is_requested(publisher):
    publisher.publish()
    delta = publisher.publish("publish.sample_rows=100")
    assert delta.version.parent == 1
    assert publisher.publish("publish.sample_rows=100").version == delta.version
    base = publisher.publish("publish.sample_rows=100", base=True)
    assert (base.reused, base.version.number, base.version.parent) == (False, 3, None)


@pytest.mark.slow
def test_a_rollback_is_not_undone(publisher):
    publisher.publish()
    publisher.publish("publish.sample_rows=100")
    registry = publisher.registry
    registry.move(1, "clicks fell", after=registry.current())
    again = publisher.publish("publish.sample_rows=100")
    assert (again.reused, again.version.number, again.move) == (True, 2, None)
    assert publisher.current == 1
    assert len(publisher.messages) == 2
    assert publisher.messages[1].startswith("version 2 is not current: version 1 is, since ")
    assert "(clicks fell). `clickline versions promote 2` makes it current." in publisher.messages[1]
    assert publisher.publish().version.number == 1  # the current version is up to date


@pytest.mark.slow
def test_a_pin_is_kept_when_publishing_again(publisher):
    publisher.publish()
    registry = publisher.registry
    registry.move(1, "holding", after=registry.current(), pinned=True)
    waiting = publisher.publish("publish.sample_rows=100")
    assert (waiting.reused, waiting.move) == (False, None)
    again = publisher.publish("publish.sample_rows=100")
    assert (again.reused, again.version.number, again.move, publisher.current) == (True, 2, None, 1)
    assert "version 2 is not current: version 1 is pinned" in publisher.messages[1]
    registry.move(1, "let go", after=registry.current())
    assert publisher.publish("publish.sample_rows=100").move.version == publisher.current == 2


@pytest.mark.slow
def test_a_stored_version_that_was_never_current_becomes_current(publisher, monkeypatch):
    publisher.publish()
    registry = publisher.registry
    with monkeypatch.context() as patch:
        prove = publishing._verify_scores

        def overtaken(*args):
            registry.move(1, "somebody else", after=registry.current())
            return prove(*args)

        patch.setattr(publishing, "_verify_scores", overtaken)
        with pytest.raises(RegistryMoved):
            publisher.publish("publish.sample_rows=100")
    again = publisher.publish("publish.sample_rows=100", reason="second try")
    assert (again.reused, again.version.number, publisher.current) == (True, 2, 2)
    assert again.move.reason == "second try"


@pytest.mark.parametrize("name", ["dense.onnx", "table-00001-of-00002.bin", "sample.npz", ""])
def test_a_damaged_version_is_published_again(publisher, name):
    folder = Path(publisher.publish().version.folder)
    if name:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:100] + bytes([whole[100] ^ 4]) + whole[101:])
    else:
        shutil.rmtree(folder)
    again = publisher.publish()
    assert (again.reused, again.version.number, again.version.parent) == (False, 2, None)
    assert publisher.current == 2


@pytest.mark.slow
def test_a_delta_on_a_damaged_base_is_published_again(publisher):
    first = Path(publisher.publish().version.folder)
    assert publisher.publish("publish.sample_rows=100").version.parent == 1
    (first / "dense.onnx").unlink()
    again = publisher.publish("publish.sample_rows=100")
    assert (again.reused, again.version.number, again.version.parent) == (False, 3, None)
