"""JSON that was read from a file, as our own dataclasses: each value is of the kind it must be, or there are words."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from clickline.errors import ArtifactError

Kind = TypeVar("Kind")


def checked(kind: type[Kind], document: Any, what: str) -> Kind:
    """`document` as a `kind`, a dataclass or a container of them; ArtifactError names the first part that is not.

    `what` begins the message: what the document is the manifest of.
    """
    try:
        found: Kind = _adapter(cast("Any", kind)).validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ArtifactError(
            f"{what} lacks or misnames a part: {where}: {first['msg']} ({error.error_count()} in all). "
            "It was damaged, or written by another release: make it again."
        ) from error
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
