"""The YAML loader: any text is a config or a list of errors; it executes nothing and needs little memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clickline.config import load_config
from clickline.config.loader import resolved
from clickline.errors import ClicklineError
from clickline.storage.filesystems import _load_credentials
from fuzz.target import Choices, Target, scratch

_PRESETS = Path(__file__).parents[1] / "src" / "clickline" / "config" / "presets"
_SETS = (
    "data.train=x",
    "model.hidden=[8, 8]",
    "serve={port: 1}",
    "a.b.c",
    "=",
    "storage.s3.key={{}",
    "name=${HOME}",
)


def _config(data: bytes) -> None:
    choices = Choices(data)
    overrides = [choices.one_of(_SETS) for _ in range(choices.number(3))]
    path = scratch() / "clickline.yaml"
    path.write_bytes(choices.rest())
    try:
        config = load_config(path, overrides)
    except ClicklineError as error:
        assert str(error)
        return
    again = scratch() / "again.yaml"
    again.write_text(resolved(config))
    assert resolved(load_config(again)) == again.read_text()


def _credentials(data: bytes) -> None:
    path = scratch() / "credentials.yaml"
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        _load_credentials(path)
    except ClicklineError as error:
        assert str(error)


def _config_seeds() -> Sequence[bytes]:
    texts = [path.read_bytes() for path in sorted(_PRESETS.glob("*.yaml"))]
    texts += [
        b"data: {train: a.tsv, fields: {C1: {multi: true, separator: '|'}, I1: log1p}}\nmodel: {hidden: [8]}\n",
        b"data: &a {train: x}\nother: *a\nname: ${X:-y}\nstorage: {options: {s3: {port: 0x1F, on: yes}}}\n",
        b"data: !!python/object/apply:os.system ['true']\n",
        b"- 1\n- {a: [b, &x c, *x]}\n",
        b'data:\n  train: "\\U00110000"\n? [1, 2]\n: x\n',
    ]
    return [bytes(4) + text for text in texts] + [b"\1\0\2\0" + texts[-5]]


def _credentials_seeds() -> Sequence[bytes]:
    return [
        b"s3: {key: a, secret: b}\n",
        b'{"s3": {"port": 0x10, "at": 2001-12-14}}',
        b"gs: &a [*a]\n",
        b"<<: {s3: {}}\n",
        b"!!binary x",
        b"a: !!timestamp 2001-99-99\n",
    ]


TARGETS = {
    "config": Target(_config, _config_seeds),
    "credentials": Target(_credentials, _credentials_seeds),
}
