"""YAML text as a tree that knows the file and line of each value.

Values stay texts here: the schema, not YAML's guess, decides whether `no`, `010` or `1e3` is a text or a number. Only
null is recognized, because a text cannot express it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from clickline.config.value_types import looks_secret
from clickline.errors import Mistake

OVERRIDE = "--set"
"""The `file` of a value given on the command line."""

# Aliases count each time they are used, so a few lines cannot expand to gigabytes. Values without aliases are always
# fewer than the characters of the text, so a config with 10,000 fields is accepted.
MAX_NODES = 20_000
MAX_DEPTH = 30

_VARIABLE = re.compile(r"\$(\$\{)|\$\{(?:([A-Za-z_]\w*)(?::-((?:[^{}]|\{[^{}]*\})*))?\})?", re.ASCII)
_TYPED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTE_HINT = "Check the indentation, and quote a text that begins with * & { [ ! % @ ` or contains ': '."


@dataclass(frozen=True)
class Node:
    """A value with its file and line; a value in a mapping has the line of its key."""

    value: dict[str, Node] | list[Node] | str | None
    file: str
    line: int
    plain: bool = True  # written without quotes
    hidden: bool = False  # came from a variable whose name looks like a secret
    broken: bool = False  # contains a variable that could not be expanded; already reported

    @property
    def is_broken(self) -> bool:
        """Whether it, or anything in it, could not be read."""
        below: Iterable[Node] = ()
        if isinstance(self.value, dict):
            below = self.value.values()
        elif isinstance(self.value, list):
            below = self.value
        return self.broken or any(node.is_broken for node in below)

    def to_python(self, *, typed: bool = False) -> Any:
        """The plain Python value; with `typed`, numbers and true/false as YAML reads them."""
        if isinstance(self.value, dict):
            return {key: node.to_python(typed=typed) for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.to_python(typed=typed) for node in self.value]
        if typed and self.plain and self.value is not None:
            return _typed(self.value)
        return self.value

    def at(self, path: Sequence[str | int]) -> tuple[Node, int]:
        """The node at `path`, or its nearest existing ancestor, and its depth."""
        node = self
        for depth, step in enumerate(path):
            below: Node | None = None
            if isinstance(node.value, dict):
                below = node.value.get(str(step))
            elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
                below = node.value[step]
            if below is None:
                return node, depth
            node = below
        return node, len(path)


def _typed(text: str) -> Any:
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    if tag not in _TYPED:
        return text
    try:
        return yaml.SafeLoader("").construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # more digits than Python parses
        return text


def parse(text: str, file: str, mistakes: list[Mistake]) -> Node:
    """The tree of a YAML text. Errors are added to `mistakes`; the tree contains everything that could be read."""
    walk = _TreeBuilder(file, mistakes, max(MAX_NODES, len(text)))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            return walk.node(root, "", 0)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"contains the character {chr(error.character)!a}, which YAML does not allow."
        walk.complain(line, "", problem, "Remove it.")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        tab = "\\t" in what or "'\t'" in what
        remedy = "Indent with spaces, not with tabs." if tab else _QUOTE_HINT
        walk.complain(mark.line + 1 if mark else 0, "", f"is not YAML: {what}.", remedy)
    except yaml.YAMLError as error:
        walk.complain(0, "", f"is not YAML: {error}.", _QUOTE_HINT)
    except ValueError:  # an escape such as "\U00110000"
        walk.complain(0, "", "contains an escaped character that does not exist.", "Correct the escape.")
    except (RecursionError, _TooBig):
        walk.complain(
            0,
            "",
            f"is nested more than {MAX_DEPTH} levels deep or contains more than {walk.max_nodes} values.",
            "Shorten it.",
        )
    return Node({}, file, 0)


def set_key(root: Node, override: str, mistakes: list[Mistake]) -> None:
    """Set `a.b=value` in the tree. `[…]` and `{…}` are parsed as YAML, anything else is one value."""
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        remedy = "Write --set section.key=value."
        mistakes.append(Mistake(OVERRIDE, 0, name, "is not of the form section.key=value.", remedy))
        return
    group = root
    for depth, step in enumerate(path[:-1], 1):
        assert isinstance(group.value, dict)
        below = group.value.get(step)
        if below is None or below.value is None:
            below = group.value[step] = Node({}, OVERRIDE, 0)
        if not isinstance(below.value, dict):
            inner = ".".join(path[:depth])
            problem = f"cannot be set: {inner} is one value, not a group of keys."
            mistakes.append(
                Mistake(OVERRIDE, 0, name, problem, f"Write --set {inner}=… with the whole value.")
            )
            return
        group = below
    assert isinstance(group.value, dict)
    group.value[path[-1]] = _override_value(name, text, mistakes)


def _override_value(name: str, text: str, mistakes: list[Mistake]) -> Node:
    if not text.lstrip().startswith(("[", "{")):
        return Node(None if text in ("null", "~") else text, OVERRIDE, 0)
    errors: list[Mistake] = []
    node = parse(text, OVERRIDE, errors)
    mistakes += [replace(m, line=0, key=f"{name}.{m.key}".rstrip(".")) for m in errors]
    return _without_lines(node) if not errors else Node(None, OVERRIDE, 0, broken=True)


def _without_lines(node: Node) -> Node:
    """The node with all lines 0: line numbers inside an override mean nothing to the user."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _without_lines(below) for key, below in value.items()}
    elif isinstance(value, list):
        value = [_without_lines(below) for below in value]
    return replace(node, value=value, line=0)


class _TooBig(Exception):
    pass


class _TreeBuilder:
    """Builds `Node` trees from PyYAML's nodes."""

    def __init__(self, file: str, mistakes: list[Mistake], max_nodes: int) -> None:
        self.file = file
        self.mistakes = mistakes
        self.max_nodes = max_nodes
        self.nodes = 0

    def complain(self, line: int, key: str, problem: str, remedy: str) -> None:
        self.mistakes.append(Mistake(self.file, line, key, problem, remedy))

    def node(self, node: yaml.Node, key: str, depth: int, line: int | None = None) -> Node:
        self.nodes += 1
        if self.nodes > self.max_nodes or depth > MAX_DEPTH:
            raise _TooBig
        line = node.start_mark.line + 1 if line is None else line
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            self.complain(line, key, f"has the tag {node.tag}. Allowed: no tags.", "Remove the tag.")
        if isinstance(node, yaml.MappingNode):
            return Node(self.mapping(node, key, depth), self.file, line)
        if isinstance(node, yaml.SequenceNode):
            items = [self.node(item, f"{key}[{n}]", depth + 1) for n, item in enumerate(node.value)]
            return Node(items, self.file, line)
        return self.scalar(node, key, line)

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Node]:
        values: dict[str, Node] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode):
                self.complain(line, key, "has a key that is a list or a group.", "Use plain texts as keys.")
                continue
            name = name_node.value
            inner = f"{key}.{name}" if key else name
            value = self.node(value_node, inner, depth + 1, line)
            if name in values:
                first = values[name].line
                self.complain(line, inner, f"is given twice, first in line {first}.", "Remove one of them.")
            else:
                values[name] = value
        return values

    def scalar(self, node: yaml.Node, key: str, line: int) -> Node:
        text = str(node.value)
        plain = getattr(node, "style", None) is None
        hidden = any(looks_secret(match[2] or "") for match in _VARIABLE.finditer(text))
        already = len(self.mistakes)
        text = _VARIABLE.sub(lambda match: self.variable(match, key, line), text)
        value = None if plain and text in _NULLS else text
        return Node(value, self.file, line, plain, hidden, broken=len(self.mistakes) > already)

    def variable(self, match: re.Match[str], key: str, line: int) -> str:
        """The value of a ${…}; as in a shell, the default also replaces an empty variable."""
        escaped, name, default = match.groups()
        if escaped:
            return "${"
        value = os.environ.get(name) if name else None
        if value or (value is not None and default is None):
            return value
        if default is not None:
            return str(default)
        if name:
            self.complain(
                line,
                key,
                f"uses the environment variable {name}, which is not set.",
                f"Set {name}, or give a default: ${{{name}:-value}}.",
            )
        else:
            problem = "contains a ${ without a variable name."
            self.complain(line, key, problem, "Write ${NAME} or ${NAME:-default}; $${ is a literal ${.")
        return ""
