"""One real `up` with the studio beside it, for all tests that only look or ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from studio_world import SECRETS, Shown, clickline, configure, eventually, free_ports, write_logs


@pytest.fixture(scope="session")
def ads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project whose `up` runs: two versions, bad rows, a server that asks for a token, and secrets."""
    folder = tmp_path_factory.mktemp("up") / "ads"
    folder.mkdir()
    write_logs(folder)
    (port,) = free_ports(1)
    (folder / "credentials.yaml").write_text(yaml.safe_dump({"s3": {"key": "user", "secret": SECRETS[0]}}))
    (folder / "serve-token").write_text(f"{SECRETS[1]}\n")
    file = configure(
        folder,
        storage={"credentials_file": "credentials.yaml"},
        serve={"token_file": "serve-token"},
        studio={"enabled": True, "port": port},
    )
    done = clickline("up", "--detach", "--wait", "--json", cwd=folder)
    try:
        assert done.returncode == 0, done.stderr
        # Another model, published beside the run: the version before is one to compare with.
        other = yaml.safe_load(file.read_text()) | {"train": {"batch_size": 128, "epochs": 2}}
        (folder / "other.yaml").write_text(yaml.safe_dump(other))
        for command in ("train", "publish"):
            made = clickline(command, "-q", "-c", "other.yaml", cwd=folder)
            assert made.returncode == 0, made.stderr
        yield folder
    finally:
        ended = clickline("down", cwd=folder)
        assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="session")
def studio(ads: Path) -> Iterator[Shown]:
    """The studio of that `up`, once its server has the second version."""

    def state() -> dict[str, object]:
        found: dict[str, object] = json.loads((ads / ".clickline/up/state.json").read_text())
        return found

    where = eventually(lambda: state()["studio"])
    assert isinstance(where, dict)
    shown = Shown(where["url"], Path(where["token_file"]))
    shown.client.headers.update(shown.bearer)  # its server has a token, so looking takes one
    with closing(shown.client):
        eventually(lambda: shown.of("ads", "serving")["version"] == 2)
        yield shown
