"""A clickline.yaml in the making: each key with a comment that says where it comes from, and why others are not there.

Whatever a source holds, it cannot break out of a comment or a value, and no password of it lands in the file.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Any

import yaml

from clickline.config import Config
from clickline.config.value_types import holds_password
from clickline.importers.source_files import Origin

WIDTH = 110

_USER_INFO = re.compile(r"(\w+://)[^/@]*@")
_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)
_LONGEST_WORD = 300
_PASSWORD_LEFT_OUT = "its password was left out: it belongs into the file that storage.credentials names"


@dataclass(frozen=True)
class Entry:
    """One key of the result. Without origins, it is the choice of the import."""

    value: Any
    origins: tuple[Origin, ...]
    why: str

    @property
    def comment(self) -> str:
        source = " and ".join(map(str, self.origins))
        said = f"from {source}" if source else "by the import"
        return f"{said}: {self.why}" if self.why else said


class Draft:
    """Keys are put under dotted names; what has no counterpart is left, with the reason."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.entries: dict[str, Entry] = {}
        self.left: list[tuple[Origin, str]] = []
        self.hints: list[str] = []

    def put(self, key: str, value: Any, *origins: Origin, why: str = "") -> None:
        """Gives `key` a value; a later one wins."""
        plain = _without_passwords(value)
        if plain != value:
            why = f"{why}; {_PASSWORD_LEFT_OUT}" if why else _PASSWORD_LEFT_OUT
        self.entries.pop(key, None)
        self.entries[key] = Entry(plain, origins, why)

    def leave(self, origin: Origin, why: str) -> None:
        """Says why a key of the source is not in the result, and what to do instead."""
        self.left.append((origin, why))

    def hint(self, text: str) -> None:
        """Says at the end what nothing in the source asks for, but its user will want to know."""
        self.hints.append(text)

    def text(self) -> str:
        """The file."""
        lines = [
            *_paragraph(f"Written by `clickline import` from {self.system}.", "# ", "# "),
            "# Every key says where it comes from. What has no counterpart is listed at the end.",
            "# Next: clickline check; every key and its default: docs/config.md.",
        ]
        for section in Config.model_fields:
            inside = {key: one for key, one in self.entries.items() if key.split(".")[0] == section}
            if inside:
                lines += ["", *_block(inside, ())]
        lines.append("")
        if self.left:
            lines.append("# Without a counterpart:")
            for origin, why in sorted(self.left, key=lambda one: one[0][:2]):
                lines += _paragraph(f"{origin}: {why}", "# - ", "#   ")
        else:
            lines.append("# Everything in the source has a counterpart.")
        for hint in self.hints:
            lines += ["#", *_paragraph(hint, "# ", "# ")]
        return "\n".join(lines) + "\n"


def _block(entries: dict[str, Entry], path: tuple[str, ...]) -> list[str]:
    """The lines of all entries below `path`, in the order in which they were put."""
    indent = "  " * len(path)
    lines: list[str] = []
    for name in dict.fromkeys(key.split(".")[len(path)] for key in entries):
        here = (*path, name)
        own = entries.get(".".join(here))
        if own is not None:
            lines += _entry(name, own, indent)
        else:
            below = {key: one for key, one in entries.items() if tuple(key.split("."))[: len(here)] == here}
            lines += [f"{indent}{name}:", *_block(below, here)]
    return lines


def _entry(name: str, entry: Entry, indent: str) -> list[str]:
    if isinstance(entry.value, dict):
        items = [f"{indent}  {_scalar(key)}: {_flow(value)}" for key, value in entry.value.items()]
        return [*_paragraph(entry.comment, f"{indent}# ", f"{indent}# "), f"{indent}{name}:", *items]
    line = f"{indent}{name}: {_flow(entry.value)}"
    comment = f"# {_plain(entry.comment)}"
    column = max(len(line) + 2, 40)
    if column + len(comment) <= WIDTH:
        return [f"{line:<{column}}{comment}"]
    return [*_paragraph(entry.comment, f"{indent}# ", f"{indent}# "), line]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(one) for one in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """As YAML writes it between brackets; a ${ of the source means nothing here."""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            return value  # the schema, not YAML, says what it is
        value = value.replace("${", "$${")
    written: str = yaml.safe_dump([value], default_flow_style=True, width=10**9)
    return written.strip()[1:-1]


def _paragraph(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        _plain(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    """One line of signs that end no comment, whatever the source called its keys."""
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
    return " ".join(
        word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}…" for word in shown.split()
    )


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str) and holds_password(value):
        bare = _USER_INFO.sub(r"\1", value)
        return bare.partition("?")[0] if holds_password(bare) else bare
    if isinstance(value, list | tuple):
        return [_without_passwords(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_passwords(one) for key, one in value.items()}
    return value
