"""Describes in English what a key may contain; used by error messages and docs/config.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def alternatives(schema: Schema, definitions: Schema) -> list[Schema]:
    """The schemas of which one must match, with references resolved."""
    if "$ref" in schema:
        return alternatives(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return [a for one in schema["anyOf"] for a in alternatives(one, definitions)]
    return [schema]


def allowed(schema: Schema, definitions: Schema) -> str:
    """What a schema allows, such as `a whole number of at least 1, or null`."""
    if "x-allowed" in schema:
        choices = [schema["x-allowed"]]
        if "null" in schema.get("type", ()):
            choices.append("null")
    else:
        choices = [_allowed_by(one, definitions) for one in alternatives(schema, definitions)]
    return ", or ".join(dict.fromkeys(choices))


def _allowed_by(schema: Schema, definitions: Schema) -> str:
    if "x-allowed" in schema:
        return str(schema["x-allowed"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"a list, each {allowed(schema['items'], definitions)}"
    if kind == "object":
        keys = schema.get("properties")
        return f"a group of keys ({', '.join(keys)})" if keys else "a group of keys"
    plain = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
    return plain.get(str(kind), "a text") + _limits(schema)


def _limits(schema: Schema) -> str:
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if above is not None and high is not None:
        return f" above {above} and up to {high}"
    if low is not None:
        return f" of at least {low}"
    return ""


def dotted(path: Sequence[str | int]) -> str:
    """A path as dotted text, such as model.hidden[2]."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def shorten(value: Any) -> str:
    """A value as one short line for a message."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "…"
    if text != text.strip() or not text.isprintable() or not any(c.isalnum() for c in text):
        text = '"' + text.encode("unicode_escape").decode() + '"'
    return text
