"""Writes the config of Paddle Serving's clients: a GeneralModelConfig in protobuf's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clickline.errors import ClicklineError
from clickline.features import FeatureSpec
from clickline.wire.feed_reader import VECTOR, FeedColumns

_INT64, _FLOAT32 = 0, 1  # values of feed_type and fetch_type


def client_config(
    features: FeatureSpec,
    outputs: Mapping[str, tuple[int, bool]],
    names: Mapping[str, str],
    *,
    per_field: bool,
) -> str:
    """The feed variables of a model, and its outputs: name to width and whether they are integers. `names`: what
    clients call an output, if not by its name."""
    found = FeedColumns.of(features)
    if found.ambiguous:
        raise ClicklineError(
            f"{', '.join(found.ambiguous)}: this model reads it as a category and as a number, and a feasign is a hash "
            "of the category, from which the number cannot be recovered. Paddle Serving's clients cannot feed this "
            "model: use gRPC or HTTP, or define the field only once."
        )
    blocks = [_variable("feed", name, name, _INT64, -1) for name in found.categories(features)]
    if per_field:
        blocks += [_variable("feed", name, name, _FLOAT32, 1) for name in found.numbers]
    elif found.numbers:
        blocks.append(_variable("feed", VECTOR, VECTOR, _FLOAT32, len(found.numbers)))
    for name, (width, is_integer) in outputs.items():
        kind = _INT64 if is_integer else _FLOAT32
        blocks.append(_variable("fetch", name, names.get(name, name), kind, width))
    return "\n".join([*_comments(found), *blocks])


def _comments(found: FeedColumns) -> Iterator[str]:
    if found.hashed:
        yield "# A feasign of these variables is the XXH64 (seed 0) of the text in the log:"
        yield f"#   {' '.join(found.hashed)}"
    if found.feasigns:
        yield "# A feasign of these variables is the number in the log:"
        yield f"#   {' '.join(found.feasigns)}"
    if found.numbers:
        yield "# Numbers, raw as in the log, NaN for missing:"
        yield f"#   {' '.join(found.numbers)}"


def _variable(what: str, name: str, alias: str, kind: int, size: int) -> str:
    return (
        f"{what}_var {{\n"
        f"  name: {_quoted(name)}\n"
        f"  alias_name: {_quoted(alias)}\n"
        f"  is_lod_tensor: {'true' if size < 0 else 'false'}\n"
        f"  {what}_type: {kind}\n"
        f"  shape: {size}\n"
        "}\n"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
