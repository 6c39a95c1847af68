"""ElasticCTR's HTTP interface: slots by number, values as feasigns, probabilities back.

    {"instances": [{"slots": [{"slot_name": "3", "feasigns": [7, 9]}]}]}
    {"predictions": [{"prob0": 0.9, "prob1": 0.1}], "err_code": 0, "err_msg": ""}

A feasign is 64 bits, as a number or as decimal text; 0 is "no value", which its clients send for absent slots.
A slot is named by its number, its name or its column. In a slot of texts the feasign is the text's hash (XXH64),
as in ElasticCTR's logs; a field of numbers takes it as the number. A column that is read as text and as a number
is refused, because the number cannot be recovered from a hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from clickline.errors import Refusal, RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.http_common import (
    STATUS,
    HttpRequest,
    error_response,
    format_numbers,
    json_response,
    kind_name,
    method_not_allowed,
    parse_json,
    preview,
    similar_name,
    version_header,
)
from clickline.serving.protocols.json_rows import RowsBuilder, check_rows, fields_of
from clickline.serving.protocols.request import OUTPUTS, Call, Response


@dataclass(frozen=True)
class _Slot:
    column: str
    hashed: bool  # its values are texts, so a feasign is the hash of a text
    number: bool  # its values are only numbers
    both: bool  # its values are read both as texts and as numbers


_slots: WeakKeyDictionary[Any, Mapping[str, _Slot]] = WeakKeyDictionary()


def _slots_of(model: ScorerLike) -> Mapping[str, _Slot]:
    """Return a model's slots by all their names; a name takes precedence over a number."""
    by_any_name = _slots.get(model)
    if by_any_name is None:
        slots = model.features.slots
        texts = {slot.column for slot in slots if slot.source == "text"}
        categories = {slot.column for slot in slots if slot.source in ("text", "feasign")}
        numbers = {field.column for field in model.features.dense}
        numbers |= {slot.column for slot in slots if slot.source not in ("text", "feasign")}
        by_column = {
            column: _Slot(column, column in texts, column not in categories, column in texts & numbers)
            for column in model.columns
        }
        by_name = {field.name: by_column[field.column] for field in model.features.fields}
        by_number = {str(slot.number): by_column[slot.column] for slot in slots if slot.column in categories}
        by_any_name = _slots[model] = {**by_number, **by_column, **by_name}
    return by_any_name


class Inference(HttpRequest):
    """Scores instances of slots and feasigns."""

    protocol = "elasticctr_rest"

    def read(self, model: ScorerLike) -> Call:
        document = parse_json(self.body)
        if type(document) is not dict or type(document.get("instances")) is not list:
            raise RequestRefused("invalid", "the body must be an object with a list of instances.")
        instances = document["instances"]
        check_rows(len(instances), self.limits)
        known = _slots_of(model)
        by_column: dict[str, tuple[_Slot, list[list[int]]]] = {}  # the feasigns of each row, by column
        for row, instance in enumerate(instances):
            for slot in _given_slots(instance, row):
                name = slot.get("slot_name")
                field = known.get(name if type(name) is str else _as_text(name, row))
                if field is not None:
                    if field.both:
                        raise _not_a_number(field.column, row)
                    if field.column not in by_column:
                        by_column[field.column] = (field, [[] for _ in instances])
                    by_column[field.column][1][row].extend(_feasigns(slot, row))
                elif not self.limits.ignore_unknown:
                    hint = similar_name(str(name), known)
                    raise RequestRefused(
                        "invalid", f"the model has no slot {preview(name)} (instances[{row}]).{hint}"
                    )
        builder = RowsBuilder(fields_of(model), len(instances))
        for field, values in by_column.values():
            if field.number:
                builder.values(field.column, values)
            else:
                builder.feature_ids(field.column, values, field.hashed)
        return Call(builder.build())

    def encode(self, answer: Scores) -> Response:
        return json_response(predictions_json(answer), headers=[version_header(answer)])


def predictions_json(answer: Scores) -> bytes:
    """The probabilities of each row."""
    both_B2 = OUTPUTS["probabilities"].values(answer)
    pairs = zip(format_numbers(both_B2[:, 0]), format_numbers(both_B2[:, 1]), strict=True)
    rows = b",".join(map(b'{"prob0":%b,"prob1":%b}'.__mod__, pairs))
    return b'{"predictions":[%b],"err_code":0,"err_msg":""}' % rows


def _not_a_number(column: str, row: int) -> RequestRefused:
    return RequestRefused(
        "invalid",
        f"{preview(column)} has a feasign in instances[{row}], but this model reads it as a category and as a number: "
        "a feasign is a hash of the category, from which the number cannot be recovered. Use a protocol that takes the "
        "value itself (/v1/models/NAME:predict, /v2/models/NAME/infer or gRPC), or leave the slot out.",
    )


def refuse_method(method: str, path: str) -> Response:
    """The response to a method other than POST."""
    return method_not_allowed(method, path, ("POST",), {"predictions": [], "err_code": 405}, "err_msg")


def refuse_inference(kind: Refusal, message: str) -> Response:
    """An error response; `err_code` is the HTTP status."""
    return error_response(kind, message, {"predictions": [], "err_code": STATUS[kind]}, "err_msg")


def _given_slots(instance: Any, row: int) -> list[dict[str, Any]]:
    slots = instance.get("slots") if type(instance) is dict else None
    if type(slots) is not list or not all(type(slot) is dict for slot in slots):
        raise RequestRefused(
            "invalid",
            f'instances[{row}] must be {{"slots": [{{"slot_name": …, "feasigns": […]}}, …]}}.',
        )
    return slots


def _as_text(name: Any, row: int) -> str:
    if type(name) is int:
        return str(name)
    raise RequestRefused(
        "invalid", f"slot_name is {kind_name(name)} in instances[{row}]; it must be text or a number."
    )


def _feasigns(slot: dict[str, Any], row: int) -> list[int]:
    feasigns = slot.get("feasigns")
    if type(feasigns) is not list:
        name = preview(slot["slot_name"])
        raise RequestRefused(
            "invalid",
            f"feasigns of slot {name} is {kind_name(feasigns)} in instances[{row}]; it must be a list.",
        )
    for index, value in enumerate(feasigns):
        if type(value) is not int:  # the JSON parser returns an int only within 64 bits
            feasigns[index] = _feasign(value, slot["slot_name"], row)
    return feasigns


def _feasign(given: Any, slot: Any, row: int) -> int:
    if type(given) is str and len(given) <= 20 and given.isascii() and given.removeprefix("-").isdigit():
        value = int(given)
        if -(2**63) <= value < 2**64:
            return value
    raise RequestRefused(
        "invalid",
        f"slot {preview(slot)} has the feasign {preview(given)} in instances[{row}]; "
        "it must be a 64-bit whole number.",
    )
