"""A clickline.yaml under construction: each key has a comment with its origin, and skipped keys have a reason.

Nothing in a source can break out of a comment or a value, and no password from it is written to the file.
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
_PASSWORD_LEFT_OUT = "its password was left out: put it in the file that storage.credentials_file names"


@dataclass(frozen=True)
class Entry:
    """One key of the result. An entry without origins was chosen by the importer."""

    value: Any
    origins: tuple[Origin, ...]
    why: str

    @property
    def comment(self) -> str:
        source = " and ".join(map(str, self.origins))
        origin = f"from {source}" if source else "set by the importer"
        return f"{origin}: {self.why}" if self.why else origin


class ConfigDraft:
    """Collects keys by their dotted names, and source keys without a counterpart with the reason."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.entries: dict[str, Entry] = {}
        self.skipped: list[tuple[Origin, str]] = []
        self.hints: list[str] = []

    def put(self, key: str, value: Any, *origins: Origin, why: str = "") -> None:
        """Set `key`; a later value replaces an earlier one."""
        plain = _without_passwords(value)
        if plain != value:
            why = f"{why}; {_PASSWORD_LEFT_OUT}" if why else _PASSWORD_LEFT_OUT
        self.entries.pop(key, None)
        self.entries[key] = Entry(plain, origins, why)

    def skip(self, origin: Origin, why: str) -> None:
        """Record why a source key is not in the result, and what to do instead."""
        self.skipped.append((origin, why))

    def hint(self, text: str) -> None:
        """Add a closing remark that no key of the source calls for, but its user will want to know."""
        self.hints.append(text)

    def text(self) -> str:
        """The text of the file."""
        lines = [
            *_paragraph(f"Written by `clickline import` from {self.system}.", "# ", "# "),
            "# Every key says where it comes from. Keys without a counterpart are listed at the end.",
            "# Next: clickline check; every key and its default: docs/config.md.",
        ]
        for section in Config.model_fields:
            inside = {key: one for key, one in self.entries.items() if key.split(".")[0] == section}
            if inside:
                lines += ["", *_block(inside, ())]
        lines.append("")
        if self.skipped:
            lines.append("# Without a counterpart:")
            for origin, why in sorted(self.skipped, key=lambda one: one[0][:2]):
                lines += _paragraph(f"{origin}: {why}", "# - ", "#   ")
        else:
            lines.append("# Everything in the source has a counterpart.")
        for hint in self.hints:
            lines += ["#", *_paragraph(hint, "# ", "# ")]
        return "\n".join(lines) + "\n"


def _block(entries: dict[str, Entry], path: tuple[str, ...]) -> list[str]:
    """The lines of all entries below `path`, in insertion order."""
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
    comment = f"# {_one_line(entry.comment)}"
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
    """The value as YAML writes it inside brackets; a ${ in the source is escaped, since it has no meaning here."""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            return value  # the schema, not YAML, decides its type
        value = value.replace("${", "$${")
    written: str = yaml.safe_dump([value], default_flow_style=True, width=10**9)
    return written.strip()[1:-1]


def _paragraph(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        _one_line(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _one_line(text: str) -> str:
    """The text as one line of printable characters, so that no source key can end a comment."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return " ".join(
        word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}…" for word in printable.split()
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
