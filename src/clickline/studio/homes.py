"""The homes that the studio shows: those of configs, and folders, which contain the config of their last run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from clickline.config import Config, load_config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.serving.auth import read_token
from clickline.storage.redaction import Redactor, secrets_in
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class Home:
    """One home and its config."""

    id: str  # unique, used in URLs
    name: str
    config: Config
    file: str | None  # of the config, if it was given by one
    from_home: bool = False  # the config is the copy that the home's last run stored

    @property
    def folder(self) -> Path:
        return Path(self.config.home)

    @property
    def requires_token(self) -> bool:
        """Whether a token is configured for the studio, or for the server whose scores and metrics it shows. The stored
        copy of a config may be older than the token, so for it the answer is yes."""
        has_token = self.config.studio.token_file is not None or self.config.serve.token_file is not None
        return has_token or self.from_home

    def redactor(self, *secrets: str) -> Redactor:
        """Redacts `secrets`, and those of the config's stores and server."""
        values = list(secrets)
        with suppress(ClicklineError):
            token = read_token(self.config.serve.token_file)
            values += [] if token is None else [token]
        if self.config.storage.credentials_file is not None:
            with suppress(OSError, ValueError, yaml.YAMLError):
                values += secrets_in(yaml.safe_load(Path(self.config.storage.credentials_file).read_text()))
        return Redactor(values)


def open_homes(files: Sequence[Path], folders: Sequence[Path], overrides: Sequence[str] = ()) -> list[Home]:
    """The homes of the configs, then those of the folders. Raises ConfigError for a config with mistakes."""
    taken: set[str] = set()
    homes = []
    for file in files:
        homes.append(home_of(load_config(file, overrides), str(file), taken))
    for folder in folders:
        homes.append(home_of(_last_config(folder), None, taken, from_home=True))
    return homes


def home_of(config: Config, file: str | None, taken: set[str], *, from_home: bool = False) -> Home:
    """The home of a config, with an id that is not in `taken`; the id is added to it."""
    slug = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-") or "home"
    number, home_id = 1, slug
    while home_id in taken:
        number += 1
        home_id = f"{slug}-{number}"
    taken.add(home_id)
    return Home(home_id, config.name, config, file, from_home)


def _last_config(folder: Path) -> Config:
    """The config of the newest run or dataset in a home; for an empty home, a minimal one."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError([Mistake("", 0, "--home", f"is {folder}, a file.", "Name the folder of a home.")])
    stored = [*folder.glob("runs/*/resolved.yaml"), *folder.glob("datasets/*/resolved.yaml")]
    for file in sorted(stored, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(ConfigError):
            return load_config(file, [f"home={folder}"], folder=folder)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.parent.name if folder.name[:1] == "." else folder.name)
    document = {"data": {"train": Storage.join(str(folder), "no-config")}, "home": str(folder)}
    try:
        return Config.model_validate({**document, "name": name})
    except ValueError:  # the folder's name is not a valid service name
        return Config.model_validate(document)
