"""Derives features and targets from the config: the fields of the format, overridden by the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from clickline.config import DataSection, FieldConfig
from clickline.config.sections import is_glob
from clickline.data.readers.paddlerec_lines import NamedTokens
from clickline.data.readers.slot_lines import DEFAULT_COLUMNS
from clickline.data.targets import TargetFields
from clickline.errors import ConfigError, Mistake
from clickline.features import DenseField, FeatureSpec, SlotField, slot_number
from clickline.records import TimeUnit


@dataclass(frozen=True)
class Schema:
    """What the columns of a source mean: features, targets, dense values."""

    features: FeatureSpec
    targets: TargetFields
    dense: int = 0  # dense values in a paddlerec line, whether used or not

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read from the source."""
        return tuple(dict.fromkeys((*self.targets.columns, *self.features.columns)))


@dataclass(frozen=True)
class _Field:
    """A complete field: the format's default, overridden by the user."""

    name: str
    kind: Literal["slot", "dense", "label", "weight", "time", "ignore"] = "slot"
    column: str = ""
    transform: Literal["none", "log1p", "minmax", "zscore", "robust", "bucket"] = "robust"
    buckets: int = 0  # 0: log2
    separator: str | None = None
    multi: bool = False
    encoding: Literal["text", "feasign"] = "text"
    slot: int | None = None
    positive: tuple[str, ...] = ()
    time_format: str = ""
    unit: TimeUnit | None = None

    def overridden(self, by: FieldConfig) -> _Field:
        overrides = {key: value for key, value in by.model_dump().items() if value is not None}
        if overrides.get("buckets") == "log2":
            overrides["buckets"] = 0
        return replace(self, **overrides)


def build_schema(data: DataSection, slots: Iterable[int] = (), dense: int = 0) -> Schema:
    """Features and targets of a config; `slots` and `dense` describe a slots or paddlerec source."""
    fields = _fields(data, slots, dense)
    features = FeatureSpec(
        dense=tuple(
            DenseField(field.name, field.column or field.name, field.transform)
            for field in fields
            if field.kind == "dense" and field.transform != "bucket"
        ),
        slots=tuple(_slot_field(field) for field in fields if _is_sparse(field)),
        missing=data.missing,
    )
    if not features.dense and not features.slots:
        remedy = "Declare at least one, or remove the `ignore`."
        raise ConfigError([Mistake("data", 0, "fields", "leaves no slot and no dense field.", remedy)])
    return Schema(features, _targets(data, fields), dense)


def target_fields(data: DataSection) -> TargetFields:
    """The targets of a config, for callers that already have the features of a model."""
    return _targets(data, _fields(data, (), 0))


def _fields(data: DataSection, slots: Iterable[int], dense: int) -> list[_Field]:
    fields = {field.name: field for field in _built_in(data.format, slots, dense)}
    exact = {name: change for name, change in data.fields.items() if not is_glob(name)}
    for name, change in data.fields.items():
        if is_glob(name):  # matches the format's own fields, except those that are named
            for known in [known for known in fields if fnmatchcase(known, name) and known not in exact]:
                fields[known] = fields[known].overridden(change)
    for name, change in exact.items():
        fields[name] = fields.get(name, _default_field(name, data.format)).overridden(change)
    return list(fields.values())


def _targets(data: DataSection, fields: list[_Field]) -> TargetFields:
    targets = TargetFields(label="click" if data.format == "slots" else "")
    for field in fields:
        column = field.column or field.name
        if field.kind == "label":
            targets = replace(targets, label=column, positive=field.positive)
        elif field.kind == "weight":
            targets = replace(targets, weight=column)
        elif field.kind == "time":
            targets = replace(targets, time=column, time_format=field.time_format, time_unit=field.unit)
    if data.format == "slots" and "show" in (data.columns or DEFAULT_COLUMNS):
        return replace(targets, label="", impressions="show", clicks=targets.label)
    return targets


def _built_in(format_name: str | None, slots: Iterable[int], dense: int) -> list[_Field]:
    if format_name in ("criteo", "intel_tfrecord"):
        # Intel's preprocessing has scaled the numbers to 0 … 1.
        transform: Literal["log1p", "none"] = "log1p" if format_name == "criteo" else "none"
        return [
            _Field("label", "label"),
            *(_Field(f"I{n}", "dense", transform=transform) for n in range(1, 14)),
            *(_Field(f"C{n}", slot=n) for n in range(1, 27)),
        ]
    numbered = [_Field(str(n), encoding="feasign", multi=True, slot=n) for n in slots]
    if format_name == "slots":
        return numbered
    if format_name == "paddlerec":
        numbers = [_Field(f"dense_{n}", "dense") for n in range(1, dense + 1)]
        return [_Field("click", "label"), *numbers, *numbered]
    return []


def _default_field(name: str, format_name: str | None) -> _Field:
    if format_name in ("slots", "paddlerec"):
        return _Field(name, encoding="feasign", multi=True)
    return _Field(name)


def _is_sparse(field: _Field) -> bool:
    return field.kind == "slot" or (field.kind == "dense" and field.transform == "bucket")


def _slot_field(field: _Field) -> SlotField:
    number = slot_number(field.name) if field.slot is None else field.slot
    column = field.column or field.name
    if field.kind == "dense":
        source: Literal["log2", "quantiles"] = "quantiles" if field.buckets else "log2"
        return SlotField(field.name, column, number, source, buckets=field.buckets)
    multi = field.multi or field.separator is not None
    return SlotField(field.name, column, number, field.encoding, multi, field.separator)


def named_tokens(data: DataSection, features: FeatureSpec | None = None) -> NamedTokens:
    """The tokens of paddlerec lines that are known by name: those of the config, and of `features`."""
    targets: list[str] = []
    dense = [] if features is None else [field.column for field in features.dense]
    slots = (
        [] if features is None else [field.column for field in features.slots if field.source == "feasign"]
    )
    ignored: list[str] = []
    kinds = {"slot": slots, "dense": dense, "ignore": ignored}
    for field in _fields(data, (), 0):
        kinds.get(field.kind, targets).append(field.column or field.name)

    def names(columns: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in columns if not _NUMBERED.fullmatch(name)))

    return NamedTokens(names(targets), names(dense), names(slots), names(ignored), data.columns or ())


_NUMBERED = re.compile(r"(dense_)?[0-9]+")


def named_slots(fields: Mapping[str, FieldConfig]) -> set[int]:
    """Slot numbers that the user's fields of a slots or paddlerec source refer to."""
    columns = (field.column or name for name, field in fields.items())
    return {int(column) for column in columns if column.isascii() and column.isdigit()}
