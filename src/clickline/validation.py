"""Validates JSON documents against our dataclasses, and turns dataclasses into such documents."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from clickline.errors import ArtifactError

Kind = TypeVar("Kind")


def validate(kind: type[Kind], document: Any, what: str) -> Kind:
    """`document` as a `kind`, a dataclass or a container of dataclasses; ArtifactError names the first invalid part.
    Values are never converted: "1" is not a number, and 1 is not true.

    `what` begins the message: what the document belongs to.
    """
    try:
        validated: Kind = _validator(cast("Any", kind)).validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ArtifactError(
            f"{what} is invalid: {where}: {first['msg']} ({error.error_count()} in all). "
            "It was damaged, or written by another release: create it again."
        ) from error
    return validated


def document_of(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON document, keys in the order of its fields. Faster than `asdict`, which copies each leaf."""
    document: dict[str, Any] = _adapter(cast("Any", type(value))).dump_python(value)
    return document


@cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_with_strict_values(_adapter(kind).core_schema))


def _with_strict_values(schema: Any) -> Any:
    """Strict only for plain values: a strict dataclass or tuple would refuse the dicts and lists of JSON."""
    if isinstance(schema, dict):
        strict = {"strict": True} if schema.get("type") in ("bool", "float", "int", "str") else {}
        return {key: _with_strict_values(part) for key, part in schema.items()} | strict
    return [_with_strict_values(part) for part in schema] if isinstance(schema, list) else schema


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
