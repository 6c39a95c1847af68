"""The sections of clickline.yaml: one frozen model per section, with a description for each key and its checks.

A check of a single key is the key's type. A check of several keys is in `checks` of the section; it yields
complaints instead of raising, so that all of them are reported at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, model_validator

from clickline.config.deploy_sections import DeploySection
from clickline.config.value_types import (
    BYTES,
    Address,
    Complaint,
    Donefile,
    Hour,
    LocalPath,
    ModelAlias,
    Name,
    Patterns,
    Place,
    Port,
    Seconds,
    Section,
    Separator,
    Size,
    Texts,
    TimeFormat,
    as_type,
    complain,
    holds_password,
    is_loopback,
    looks_secret,
    only_for,
    ordered,
    parse_bytes,
)

Format = Literal["criteo", "slots", "paddlerec", "csv", "parquet", "recordio", "tfrecord", "intel_tfrecord"]
Kind = Literal["slot", "dense", "label", "weight", "time", "ignore"]
Transform = Literal["none", "log1p", "minmax", "zscore", "robust", "bucket"]
ModelName = Literal[
    "lr", "fm", "wide_deep", "deepfm", "dcn_v2", "xdeepfm", "autoint", "dlrm", "finalmlp", "masknet"
]

Pooling = Literal["sum", "mean", "max"]
RowOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]

SHORT_FORMS = (*get_args(Kind), *get_args(Transform))
"""The one-word forms of a field: a kind, or a transform, which implies kind: dense."""

FORMATS_WITH_FIELDS = ("criteo", "slots", "paddlerec", "intel_tfrecord")
"""Formats with built-in fields."""

RESERVED_NAMES = ("label", "weight", "impression", "click", "event_hour")
"""Columns of every dataset; a slot or dense field must not use these names."""

_PLACEHOLDER = re.compile(r"\{(?!\])([^{}]*)\}")  # [{] is a literal brace in a folder's name


class Dates(Section):
    """The hours of a {date}/{hour} pattern to read."""

    first: Hour = Field(alias="from", description="First date or hour, UTC.")
    last: Hour | None = Field(
        None, alias="to", description="Last date or hour, inclusive; only `up --follow` works without it."
    )
    wait: Seconds = Field(0, description="How long to wait for hours without a donefile.")

    def checks(self) -> Iterator[Complaint]:
        if self.last is None:
            return
        end = self.last if "/" in self.last else f"{self.last}/23"
        if self.first > end:  # YYYYMMDD/HH sorts by time as text
            yield Complaint(
                ("from",),
                f"is {self.first}, after `to`, which is {self.last}.",
                "Lower from or raise to.",
                ("to",),
            )


class FieldConfig(Section):
    """One field: its meaning, and how its raw value is read and encoded."""

    kind: Kind | None = Field(
        None, description="Kind of the field. Default: that of the format; slot for a new field."
    )
    column: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Column of the source. Default: the field's name."
    )
    transform: Transform | None = Field(
        None,
        description="How a dense number is transformed; none: not at all; bucket turns it into ids. Default: that of "
        "the format (criteo: log1p), else robust.",
    )
    buckets: Annotated[
        Literal["log2"] | Annotated[int, Field(ge=2, le=1000)] | None,
        as_type(["string", "integer", "null"], "log2, or a whole number of quantiles from 2 to 1000"),
    ] = Field(None, description="Buckets of `transform: bucket`. Default: log2.")
    separator: Separator | None = Field(None, description="Splits the text of a slot into values.")
    multi: bool | None = Field(
        None, description="Whether a slot may have several values. Default: that of the format."
    )
    encoding: Literal["text", "feasign"] | None = Field(
        None,
        description="text: hash the value; feasign: the value is a 64-bit id. Default: that of the format.",
    )
    slot: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = Field(
        None, description="Slot number mixed into the ids. Default: derived from the field's name."
    )
    positive: Texts | None = Field(
        None, description="Label values that mean a click. Default: the label is 0 or 1."
    )
    time_format: TimeFormat | None = Field(
        None, description="Format of the time. Default: a Unix timestamp, or YYYY-MM-DD HH:MM:SS."
    )
    unit: Literal["s", "ms", "us", "ns"] | None = Field(
        None, description="Unit of Unix timestamps. Default: that of most timestamps in a file."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            if raw in get_args(Kind):
                raw = {"kind": raw}
            elif raw in get_args(Transform):
                raw = {"transform": raw}
            else:
                near = get_close_matches(raw, SHORT_FORMS, n=1)
                remedy = f"Did you mean {near[0]}?" if near else "Use one of them, or write the field's keys."
                problem = f"is {raw}. Allowed in one word: {', '.join(SHORT_FORMS)}."
                raise complain([Complaint((), problem, remedy)])
        if isinstance(raw, Mapping) and raw.get("transform") is not None:
            raw = {**raw, "kind": raw.get("kind") or "dense"}
            if raw["transform"] == "bucket":
                raw["buckets"] = raw.get("buckets") or "log2"
        return raw

    def checks(self) -> Iterator[Complaint]:
        if self.kind is not None:
            yield from self.keys_of_other_kinds(self.kind)
        if self.buckets is not None and self.transform != "bucket":
            yield Complaint(
                ("buckets",),
                f"is {self.buckets}, but the transform is {self.transform or 'not given'}.",
                "Set transform: bucket, or remove buckets.",
                ("transform",),
            )
        if self.unit is not None and self.time_format is not None:
            yield Complaint(
                ("unit",), "is given, but time_format too.", "Remove one of the two.", ("time_format",)
            )
        if self.separator is not None and self.multi is False:
            yield Complaint(
                ("multi",), "is false, but a separator is given.", "Remove one of the two.", ("separator",)
            )

    def keys_of_other_kinds(self, kind: Kind) -> Iterator[Complaint]:
        """Complaints about keys that do not apply to this kind."""
        keys = {
            "transform": ["dense"],
            "separator": ["slot"],
            "multi": ["slot"],
            "encoding": ["slot"],
            "slot": ["slot", "dense with transform: bucket"],
            "positive": ["label"],
            "time_format": ["time"],
            "unit": ["time"],
        }
        if self.transform == "bucket":
            del keys["slot"]
        yield from only_for(self, "kind", kind, keys)


class DataSection(Section):
    """Where the logs are and what they contain."""

    format: Format | None = Field(
        None,
        description="Format of the logs.",
        json_schema_extra={"default": "criteo", "x-allowed": ", ".join(get_args(Format))},
    )
    reader: LocalPath | None = Field(
        None, description="Instead of format: a Python file with a function that yields the rows."
    )
    train: Patterns = Field((), description="Logs to train on.")
    eval: Patterns | None = Field(None, description="Logs to evaluate on, later in time than train.")
    dates: Dates | None = Field(None, description="Hours of a {date}/{hour} pattern in train.")
    eval_dates: Dates | None = Field(None, description="Hours of a {date}/{hour} pattern in eval.")
    donefile: Donefile | None = Field(
        "donefile",
        description="Name of the empty file that marks an hour's folder as complete; or the path of one file that "
        "lists the complete folders; null: all hours are complete.",
    )
    slot_conf: Place | None = Field(
        None, description="File with one slot number per line: the slots to use (slots, paddlerec)."
    )
    modulo: Annotated[int, Field(ge=1, le=2**64 - 1)] | None = Field(
        None, description="Take feasigns modulo this number before anything else (slots, paddlerec)."
    )
    max_bad_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Largest allowed fraction of bad rows; above it prepare stops with exit code 4.",
    )
    shard_size: Annotated[
        int,
        Field(ge=64 * 1024),
        BeforeValidator(parse_bytes),
        as_type(["string", "integer"], f"at least 64KiB: {BYTES}"),
    ] = Field(
        64 * 1024**2,
        description="Amount of input per shard of the dataset.",
        json_schema_extra={"default": "64MiB"},
    )
    delimiter: Separator = Field(",", description="Column separator (csv).")
    header: bool = Field(True, description="Whether the first line names the columns (csv).")
    columns: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="Column names, if header is false (csv); names of the values before the first slot of a line "
        "(slots, where null is [show, click]; paddlerec).",
    )
    missing: Texts = Field((), description="Texts that mean a missing value, besides the empty text (csv).")
    fields: dict[str, FieldConfig] = Field(
        {},
        description="Fields by name, or a glob such as I* for the remaining fields of the format.",
        json_schema_extra={"x-allowed": "a group of keys, one per field"},
    )

    @model_validator(mode="before")
    @classmethod
    def _default_format(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and raw.get("format") is None and raw.get("reader") is None:
            return {**raw, "format": "criteo"}
        return raw

    def checks(self) -> Iterator[Complaint]:
        if self.format is not None and self.reader is not None:
            yield Complaint(
                ("reader",),
                f"is given together with format: {self.format}. Allowed: one of the two.",
                "Remove format to use your reader, or remove reader.",
                ("format",),
            )
        if not self.train:
            yield Complaint(
                ("train",), "is missing.", "Give the path, glob or URI of the logs, such as data/train.tsv."
            )
        yield from self._check_hours("train", self.train, "dates", self.dates)
        yield from self._check_hours("eval", self.eval or (), "eval_dates", self.eval_dates)
        yield from self._check_format_keys()
        yield from self._check_fields()

    def _check_hours(
        self, key: str, patterns: tuple[str, ...], dates_key: str, dates: Dates | None
    ) -> Iterator[Complaint]:
        placeholders = {name for pattern in patterns for name in _PLACEHOLDER.findall(pattern)}
        for name in sorted(placeholders - {"date", "hour"}):
            yield Complaint(
                (key,),
                f"contains {{{name}}}. Allowed in braces: {{date}} and {{hour}}.",
                "Use one of them, or * to match any text. Write a literal brace as [{].",
            )
        if "hour" in placeholders and "date" not in placeholders:
            yield Complaint(
                (key,),
                "contains {hour} but no {date}.",
                "Put {date} into the pattern, such as {date}/{hour}.",
            )
        if dates is None:
            if placeholders & {"date", "hour"}:
                yield Complaint(
                    (dates_key,),
                    f"is missing, but {key} is a {{date}}/{{hour}} pattern.",
                    f"Give {dates_key}: {{from: YYYYMMDD, to: YYYYMMDD}}.",
                    (key,),
                )
        elif "date" not in placeholders:
            yield Complaint(
                (dates_key,),
                f"is given, but {key} contains no {{date}}.",
                f"Put {{date}}/{{hour}} into {key}, or remove {dates_key}.",
                (key,),
            )
        elif "hour" not in placeholders and ("/" in dates.first or "/" in (dates.last or "")):
            yield Complaint(
                (dates_key,),
                f"names hours, but {key} contains no {{hour}}.",
                f"Put {{hour}} into {key}, or give plain dates.",
                (key,),
            )

    def _check_format_keys(self) -> Iterator[Complaint]:
        keys = {
            "slot_conf": ["slots", "paddlerec"],
            "modulo": ["slots", "paddlerec"],
            "delimiter": ["csv"],
            "header": ["csv"],
            "columns": ["csv", "slots", "paddlerec"],
            "missing": ["csv"],
        }
        for c in only_for(self, "format", self.format or "a custom reader", keys):
            yield c._replace(also=("format", "reader"))
        if self.format == "csv" and self.header and self.columns is not None:
            yield Complaint(
                ("columns",),
                "is given, but the header already names the columns.",
                "Remove columns, or set header: false if the first line is a row.",
                ("header", "format"),
            )
        if self.format == "csv" and not self.header and self.columns is None:
            yield Complaint(
                ("columns",),
                "is missing, but header is false.",
                "Give the column names in order, such as [click, age, city].",
                ("header", "format"),
            )
        repeated = sorted(name for name, count in Counter(self.columns or ()).items() if count > 1)
        for name in repeated:
            yield Complaint(("columns",), f"names {name} twice.", "Give every column its own name.")

    def _check_fields(self) -> Iterator[Complaint]:
        declared = self.format not in FORMATS_WITH_FIELDS
        for name, field in self.fields.items():
            if declared and is_glob(name):
                yield Complaint(
                    ("fields", name),
                    f"is a glob. Allowed only for formats with built-in fields: {', '.join(FORMATS_WITH_FIELDS)}.",
                    "Name each column; for a column whose name contains such a character, use column:.",
                    ("format", "reader"),
                )
            elif not declared and field.column is not None and is_glob(name):
                yield Complaint(
                    ("fields", name, "column"),
                    "is given for a glob, which matches many fields.",
                    "Remove it, or name one field.",
                    ("format", "reader"),
                )
            yield from self._check_column(name, field)
        effective = self._effective_fields()
        for key, field in self.fields.items():
            if field.kind is not None:
                continue  # FieldConfig has checked it
            for kind in sorted({one.kind for one in effective.values() if one.key == key}):
                for c in field.keys_of_other_kinds(kind):
                    yield c._replace(key=("fields", key, *c.key), also=("format", "reader"))
        yield from self._check_names(effective)
        yield from self._check_kinds(effective)
        yield from self._check_targets_of_lines(effective)

    def _effective_fields(self) -> dict[str, _EffectiveField]:
        """Every field that is known before reading. A glob matches the format's fields that are not named."""
        effective = {name: _EffectiveField(kind, name, name) for name, kind in _built_in_fields(self.format)}
        for key, field in self.fields.items():
            if is_glob(key) and self.format in FORMATS_WITH_FIELDS:
                for name in [n for n in effective if fnmatchcase(n, key) and n not in self.fields]:
                    kind = field.kind or effective[name].kind
                    effective[name] = effective[name]._replace(kind=kind, key=key)
        for key, field in self.fields.items():
            if not is_glob(key) or self.format not in FORMATS_WITH_FIELDS:
                before = effective.get(key) or _EffectiveField(_default_kind(key, self.format), key, key)
                effective[key] = _EffectiveField(
                    field.kind or before.kind, field.column or before.column, key
                )
        return effective

    def _check_names(self, effective: Mapping[str, _EffectiveField]) -> Iterator[Complaint]:
        """Check for names that clash with the columns of every dataset."""
        for name, (kind, column, key) in effective.items():
            if kind in ("slot", "dense") and name in RESERVED_NAMES:
                if name == key:
                    problem = f"is a {kind} field with a name that is reserved in every dataset."
                    remedy = f"Give it another name and set column: {column}."
                else:
                    problem = f"makes {name} a {kind} field, but that name is reserved in every dataset."
                    remedy = f"Narrow the glob, or declare {name} by name."
                yield Complaint(("fields", key), problem, remedy, ("format", "reader"))

    def _check_kinds(self, effective: Mapping[str, _EffectiveField]) -> Iterator[Complaint]:
        """Check for one label, at most one weight and time, and at least one feature."""
        for kind, what in (("label", "clicks"), ("weight", "weights"), ("time", "times")):
            names = [name for name, one in effective.items() if one.kind == kind]
            if len(names) > 1:
                few = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                yield Complaint(
                    ("fields",),
                    f"has {len(names)} fields of kind {kind}: {few}. Allowed: one.",
                    f"Keep the one with the {what} and set the others to ignore.",
                    ("format", "reader"),
                )
        labels = {name: one for name, one in effective.items() if one.kind == "label"}
        built_in = next((name for name, kind in _built_in_fields(self.format) if kind == "label"), None)
        if not labels and built_in is not None:
            key = effective[built_in].key
            yield Complaint(
                ("fields", key),
                f"sets {built_in} to {effective[built_in].kind}, which leaves no label.",
                "Remove it." if key == built_in else f"Narrow the glob, or add {built_in}: label.",
                ("format", "reader"),
            )
        elif not labels and (self.format != "slots" or "click" not in self._first_columns):
            yield Complaint(
                ("fields",),
                "has no label, and this format has none of its own.",
                "Declare the column with the clicks, such as click: label.",
                ("format", "reader"),
            )
        known = self.format not in ("slots", "paddlerec")  # their slots are only known from the data
        if known and not {"slot", "dense"} & {one.kind for one in effective.values()}:
            yield Complaint(
                ("fields",),
                "has no slot and no dense field, so the model would have no features.",
                "Declare at least one, such as city: slot or age: log1p.",
                ("format", "reader"),
            )

    @property
    def _first_columns(self) -> tuple[str, ...]:
        """The values before the first slot of a line of slots."""
        return self.columns or ("show", "click")

    def _check_targets_of_lines(self, effective: Mapping[str, _EffectiveField]) -> Iterator[Complaint]:
        """Check that a line can hold the label, weight and time: by name, or before its first slot."""
        first = self._first_columns
        for name, one in effective.items():
            if one.kind not in ("label", "weight", "time"):
                continue
            if self.format == "paddlerec" and one.column.isdigit():
                yield Complaint(
                    ("fields", one.key),
                    f"makes {name} a {one.kind}, but {one.column} is a slot. Allowed: the name of a token.",
                    "Remove it, or give column: the name before its colon, such as conversion.",
                    ("format",),
                )
            elif self.format == "slots" and one.column not in first:
                yield Complaint(
                    ("fields", one.key),
                    f"makes {name} a {one.kind}, but a line of slots begins with {', '.join(first)}.",
                    "Remove it, or name all values before the first slot: "
                    f"columns: [{', '.join((*first, one.column))}].",
                    ("format", "columns"),
                )

    def _check_column(self, name: str, field: FieldConfig) -> Iterator[Complaint]:
        """Check that a field's column exists, if the columns are known before reading."""
        known = self.columns if self.format == "csv" else None
        if self.format in ("criteo", "intel_tfrecord"):
            known = tuple(name for name, _ in _built_in_fields(self.format))
        column = field.column or name
        if known is None or column in known:
            return
        if self.format != "csv" and field.column is None and any(fnmatchcase(k, name) for k in known):
            return
        near = get_close_matches(column, known, n=1, cutoff=0.6)
        yield Complaint(
            ("fields", name),
            f"comes from column {column}, which does not exist.",
            f"Did you mean {near[0]}?" if near else f"Allowed: {', '.join(known)}.",
            ("format", "reader", "columns"),
        )


class _EffectiveField(NamedTuple):
    """A field after all of `fields` was applied, and the key of `fields` that decided it."""

    kind: Kind
    column: str
    key: str


def _built_in_fields(format_name: Format | None) -> list[tuple[str, Kind]]:
    """The built-in fields of a format, as far as they are known before reading."""
    if format_name == "paddlerec":
        return [("click", "label")]
    if format_name not in ("criteo", "intel_tfrecord"):
        return []
    from clickline.records import CRITEO_FIELDS  # imports numpy, which other configs do not need

    kinds: dict[str, Kind] = {"l": "label", "I": "dense", "C": "slot"}
    return [(name, kinds[name[0]]) for name in CRITEO_FIELDS]


def _default_kind(name: str, format_name: Format | None) -> Kind:
    return "dense" if format_name == "paddlerec" and name.startswith("dense_") else "slot"


def is_glob(name: str) -> bool:
    """Whether the name of a field is a pattern for several."""
    return any(sign in name for sign in "*?[")


class CacheSection(Section):
    """Local copies of remote data."""

    dir: LocalPath = Field("~/.cache/clickline", description="Folder of the copies.")
    size: Size = Field(
        50 * 1024**3,
        description="Largest size; the least recently used files are removed first.",
        json_schema_extra={"default": "50GiB"},
    )


class StorageSection(Section):
    """How to access remote stores. Secrets come from the environment or the credentials file."""

    options: dict[str, dict[str, Any]] = Field(
        {},
        description="fsspec options by protocol, such as s3: {endpoint_url: …}; no secrets.",
        json_schema_extra={"x-allowed": "a group of protocols (s3, gs, https, …), each a group of options"},
    )
    credentials_file: LocalPath | None = Field(
        None, description="File with the secret options of the stores; never copied or printed."
    )

    def checks(self) -> Iterator[Complaint]:
        for protocol, options in self.options.items():
            for path in _secrets(options, ("options", protocol)):
                yield Complaint(
                    path,
                    "looks like a secret, and a copy of this file is stored with every dataset.",
                    "Put it into the environment or the file named by storage.credentials_file.",
                )


def _secrets(options: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in options.items():
        if looks_secret(str(key)) or (isinstance(value, str) and holds_password(value)):
            yield (*path, str(key))
        elif isinstance(value, Mapping):
            yield from _secrets(value, (*path, str(key)))


class SlotModel(Section):
    """Model settings of one slot."""

    dim: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Embedding dimension of the slot. Default: model.embedding_dim."
    )
    pooling: Pooling | None = Field(
        None, description="How the ids of one row are pooled into one vector. Default: model.pooling."
    )


class ModelSection(Section):
    """The network."""

    name: ModelName | None = Field(
        None,
        description="One of the built-in networks.",
        json_schema_extra={"default": "wide_deep", "x-allowed": ", ".join(get_args(ModelName))},
    )
    file: LocalPath | None = Field(None, description="Instead of name: a Python file with your own network.")
    embedding_dim: int = Field(9, ge=1, le=1024, description="Embedding dimension of an id.")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (512, 256, 128, 32), description="Widths of the hidden layers."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout rate of the hidden layers while training.")
    batch_norm: bool = Field(False, description="Whether hidden layers use batch normalization.")
    pooling: Pooling = Field("sum", description="How the ids of one row are pooled into one vector.")
    slots: dict[str, SlotModel] = Field(
        {},
        description="Slots with their own dim or pooling.",
        json_schema_extra={"x-allowed": "a group of slots, each a group with dim, pooling or both"},
    )

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and raw.get("name") is None and raw.get("file") is None:
            return {**raw, "name": "wide_deep"}
        return raw

    def checks(self) -> Iterator[Complaint]:
        if self.name is not None and self.file is not None:
            yield Complaint(
                ("file",),
                f"is given together with name: {self.name}. Allowed: one of the two.",
                "Remove name to use your file, or remove file.",
                ("name",),
            )


class ScheduleSection(Section):
    """How a learning rate changes over the steps."""

    kind: Literal["constant", "cosine", "linear_tail", "step"] = Field(
        "constant",
        description="constant; cosine: decays to min_lr_ratio by the end of the run; linear_tail: constant, then "
        "decays linearly to min_lr_ratio over the last tenth; step: multiplied by gamma every step_size steps.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warmup at the start.")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Where cosine and linear_tail end, as a fraction of the learning rate. Default: 0.01 for cosine, "
        "0.1 for linear_tail.",
    )
    step_size: Annotated[int, Field(ge=1)] | None = Field(None, description="step: steps between two decays.")
    gamma: float = Field(0.1, gt=0, le=1, description="step: factor of each decay.")

    def checks(self) -> Iterator[Complaint]:
        if self.kind == "step" and self.step_size is None:
            yield Complaint(
                ("step_size",),
                "is not given, and kind: step needs it.",
                "Set step_size to a number of steps.",
                ("kind",),
            )


class EmbeddingSection(Section):
    """How the embeddings are trained."""

    optimizer: RowOptimizerName = Field("adagrad", description="Optimizer of the embeddings.")
    learning_rate: float = Field(0.05, gt=0, le=10, description="Learning rate of the embeddings.")
    init_scale: float = Field(
        0.01,
        ge=0,
        le=10,
        description="Embeddings start uniform within ± this / √dim, determined by seed and id.",
    )
    initial_accumulator: float = Field(
        0.001,
        gt=0,
        le=10,
        description="Initial value of AdaGrad's accumulator; the smaller, the larger the first updates of an id.",
    )
    l2: float = Field(0.0, ge=0, le=10, description="L2 regularization of the embeddings in a batch.")
    schedule: ScheduleSection = Field(
        ScheduleSection(kind="linear_tail"),
        description="Learning rate schedule of embeddings and wide weights.",
    )


class WideSection(Section):
    """How the wide weights are trained."""

    optimizer: RowOptimizerName = Field("ftrl", description="Optimizer of the wide weights.")
    learning_rate: float = Field(0.05, gt=0, le=10, description="Learning rate; alpha of FTRL.")
    l1: float = Field(0.0, ge=0, le=1000, description="L1 regularization: keeps rare ids at 0 (FTRL).")
    l2: float = Field(0.0, ge=0, le=1000, description="L2 regularization (FTRL).")

    def checks(self) -> Iterator[Complaint]:
        yield from only_for(self, "optimizer", self.optimizer, {"l1": ["ftrl"], "l2": ["ftrl"]})


class AdmissionSection(Section):
    """Which ids get their own embedding; until then they share the default row of their slot."""

    min_impressions: int = Field(1, ge=1, description="Impressions before an id is admitted; 1: at once.")
    probability: float = Field(
        1.0, gt=0, le=1, description="Probability of admission at each impression from then on."
    )


class EvictionSection(Section):
    """Which ids are evicted at the end of each epoch."""

    decay: float = Field(
        1.0, gt=0, le=1, description="Factor applied to all impression and click counters first."
    )
    threshold: float = Field(
        0.0,
        ge=0,
        description="Ids with a lower score go: click_weight x clicks + nonclick_weight x other impressions.",
    )
    max_idle_hours: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Ids not seen within this many hours before the newest hour go."
    )
    click_weight: float = Field(1.0, ge=0, description="Weight of a click in the score.")
    nonclick_weight: float = Field(
        0.1, ge=0, description="Weight of an impression without a click in the score."
    )


class ClassWeights(Section):
    """Weights of impressions in the loss. Scores are corrected for them, so they stay probabilities."""

    click: float = Field(1.0, gt=0, le=1000, description="Weight of an impression with a click.")
    no_click: float = Field(1.0, gt=0, le=1000, description="Weight of an impression without.")


class CalibrationSection(Section):
    """A final step that calibrates scores, fitted on rows held out of training."""

    method: Literal["isotonic", "platt"] = Field(
        "isotonic", description="isotonic: any monotone curve; platt: a shifted and scaled logit."
    )
    holdout: float = Field(0.05, gt=0, le=0.5, description="Fraction of the training rows held out for it.")


class EarlyStop(Section):
    """Stop when more epochs no longer help; the result is the checkpoint of the best epoch."""

    patience: int = Field(1, ge=1, description="Epochs in a row without improvement before training stops.")
    metric: Literal["logloss", "auc"] = Field("logloss", description="Metric on the eval rows.")


class WorkersSection(Section):
    """Number of workers when training runs on a cluster."""

    min: int = Field(1, ge=1, le=4096, description="Training starts once this many workers fit.")
    max: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description="It grows to this many while the cluster has room; null: as many as there is room for.",
    )

    def checks(self) -> Iterator[Complaint]:
        yield from ordered(self, "min", "max")


class TrainSection(Section):
    """How the model is trained."""

    mode: Literal["local", "cluster"] = Field(
        "local", description="Train on this machine, or on a Ray cluster."
    )
    workers: WorkersSection = WorkersSection()
    embedding_servers: int = Field(
        2, ge=1, le=64, description="Cluster: number of processes that hold the embedding tables."
    )
    sync: bool = Field(
        True,
        description="Cluster: synchronous training, in which all workers share each batch; false: asynchronous.",
    )
    max_staleness: int = Field(
        8,
        ge=1,
        le=1024,
        description="With sync: false: how many steps of other workers a gradient may be behind.",
    )
    scale_lr_by_staleness: bool = Field(
        False,
        description="With sync: false: divide the learning rate of a stale gradient by 1 + its staleness.",
    )
    batch_size: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)],
        as_type(["string", "integer"], "auto, or a whole number of rows of at least 1"),
    ] = Field(
        "auto", description="Rows per step; auto: 4096, or halved down to 128 until an epoch has 200 steps."
    )
    epochs: int = Field(1, ge=1, description="Passes over the training rows.")
    order: Literal["shuffled", "time"] = Field(
        "shuffled", description="Order of the rows; time: as stored, shuffled within each hour."
    )
    learning_rate: float = Field(0.001, gt=0, le=1, description="Learning rate of the network (Adam).")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled weight decay of the network (AdamW).")
    embedding: EmbeddingSection = EmbeddingSection()
    wide: WideSection = WideSection()
    schedule: ScheduleSection = Field(
        ScheduleSection(kind="cosine"), description="Learning rate schedule of the network."
    )
    admission: AdmissionSection = AdmissionSection()
    eviction: EvictionSection | None = Field(None, description="Which ids are evicted; null: none.")
    class_weights: ClassWeights = ClassWeights()
    negative_sampling: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the rows without a click that is used; scores are corrected for it.",
    )
    calibration: CalibrationSection | None = Field(
        None, description="A final step that calibrates scores; null: none."
    )
    early_stopping: EarlyStop | None = Field(None, description="When to stop before `epochs`; null: never.")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Precision of the network while training; bf16 is faster on CPUs that support it.",
    )
    warm_start: LocalPath | None = Field(
        None, description="A checkpoint, or a run (its newest checkpoint), to start training from."
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Random seed of initial weights and row order.")
    checkpoint_every: Seconds = Field(
        300, description="Time between two checkpoints.", json_schema_extra={"default": "5m"}
    )
    checkpoint_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Also write a checkpoint every N steps; null: by time only."
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=1000, description="Checkpoints of a run to keep, besides that of the best epoch."
    )


class RoleSection(Section):
    """Resources of one process of a role."""

    cpus: float = Field(1.0, ge=0, le=1024, description="Reserved cores.")
    memory: Annotated[
        Literal["auto"] | Size,
        as_type(["string", "integer"], f"auto, or at least 1MiB: {BYTES}"),
    ] = Field("auto", description="Memory limit; auto: a share of the node's memory, not reserved.")


class ShardRoleSection(RoleSection):
    """Resources of one embedding server."""

    cpus: float = Field(
        0.0, ge=0, le=1024, description="Reserved cores; it computes little compared with a worker."
    )


class ClusterSection(Section):
    """The Ray cluster of `train.mode: cluster`."""

    address: str | None = Field(
        None, description="host:port of an existing cluster, or auto; null: start one on this machine."
    )
    worker: RoleSection = RoleSection()
    embedding_server: ShardRoleSection = ShardRoleSection()
    max_failures: int = Field(
        3,
        ge=1,
        le=100,
        description="Failures of the same process or step without progress before training gives up.",
    )


class TrackingSection(Section):
    """Where parameters, metrics and reports of runs are tracked with MLflow."""

    enabled: bool | None = Field(
        None, description="Whether to track runs. Default: if the extra `tracking` is installed."
    )
    uri: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Tracking server or store of MLflow. Default: mlflow.db in home."
    )
    experiment: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Name of the experiment. Default: the name of the service."
    )

    def checks(self) -> Iterator[Complaint]:
        if self.uri is not None and holds_password(self.uri):
            yield Complaint(
                ("uri",),
                "contains a password or token, and a copy of this file is stored with every run.",
                "Put it into the environment: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD or _TOKEN.",
            )


class GateSection(Section):
    """The quality a model must reach before it can be published; null: not checked."""

    auc: Annotated[float, Field(gt=0.5, le=1)] | None = Field(None, description="Smallest AUC.")
    logloss: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Largest log loss.")
    accuracy: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Smallest accuracy.")
    calibration: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Largest distance of predicted / actual clicks from 1."
    )
    vs_current: Annotated[float, Field(ge=-1, le=1)] | None = Field(
        None, description="Smallest AUC gain over the current version; below 0: the largest allowed loss."
    )
    extra_epochs: int = Field(
        3,
        ge=0,
        description="Epochs to train beyond train.epochs, one at a time, while the gate rejects the model.",
    )


class PublishSection(Section):
    """How versions are packaged, and which are kept."""

    registry: Place | None = Field(
        None, description="Folder or URI of the versions. Default: registry/ in home."
    )
    shards: int = Field(2, ge=1, le=4096, description="Number of shards of the embedding table.")
    table_precision: Literal["fp32", "fp16", "int8"] = Field(
        "fp32", description="Precision of the embedding table; its effect on AUC is measured at publish."
    )
    dense_precision: Literal["fp32", "int8"] = Field(
        "fp32", description="Precision of the network; its effect on AUC is measured at publish."
    )
    max_deltas: int = Field(
        24, ge=0, le=1000, description="Deltas on one base before the next base; 0: only bases."
    )
    keep_versions: int = Field(5, ge=1, description="Number of newest versions that `versions gc` keeps.")
    sample_rows: int = Field(
        256, ge=1, le=65536, description="Sample rows stored with their scores in each version."
    )
    signing_key_file: LocalPath | None = Field(
        None,
        description="PEM file of the Ed25519 key that signs versions (`versions keygen`); null: unsigned.",
    )


class TlsSection(Section):
    """Certificate and key of the servers, as PEM files."""

    certificate: LocalPath = Field(description="PEM file of the certificate, with its chain.")
    key: LocalPath = Field(description="PEM file of the certificate's private key.")
    ca: LocalPath | None = Field(
        None, description="PEM file of the CA certificate, for predictors that call lookup servers."
    )


def unguarded(host: str, tls: TlsSection | None, token_file: str | None) -> list[str]:
    """Which of `tls` and `token_file` are missing for a port that other machines can reach."""
    if is_loopback(host):
        return []
    return [key for key, given in (("tls", tls), ("token_file", token_file)) if given is None]


def _unguarded_complaints(
    section: str, server: ServeSection | StudioSection, instead: str
) -> Iterator[Complaint]:
    missing = unguarded(server.host, server.tls, server.token_file)
    if missing:
        yield Complaint(
            ("host",),
            f"is {server.host}, which other machines can reach, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Allowed: a loopback address "
            "(127.0.0.1, ::1, localhost), or any address with TLS and a token.",
            f"Set {' and '.join(f'{section}.{key}' for key in missing)}, {instead}.",
            ("tls", "token_file", "allow_unauthenticated"),
        )


class BatchingSection(Section):
    """Dynamic batching: small requests are scored together."""

    rows: int = Field(64, ge=2, le=65536, description="Rows that are enough to start a batch.")
    max_wait_ms: float = Field(
        1.0, gt=0, le=1000, description="Longest time a request waits for others, in milliseconds."
    )


class LookupSection(Section):
    """Embedding tables on other machines: the lookup servers of each shard."""

    shards: Annotated[
        tuple[Annotated[tuple[Address, ...], Field(min_length=1)], ...],
        Field(min_length=1),
        as_type("array", "a list of shards, each a list of host:port"),
    ] = Field(description="For each shard, the addresses of its replicas.")
    timeout_ms: int = Field(200, ge=1, le=60_000, description="Timeout of a lookup in milliseconds.")
    hedge_after_ms: int = Field(
        20, ge=1, le=60_000, description="Milliseconds after which another replica is asked as well."
    )
    on_missing_shard: Literal["default", "unavailable"] = Field(
        "default",
        description="If all replicas of a shard are down: use default rows, or fail with UNAVAILABLE.",
    )
    cache_rows: int = Field(0, ge=0, description="Hot rows cached in each predictor process; 0: none.")


class ServeSection(Section):
    """The prediction endpoint."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on, 0.0.0.0 for all; addresses beyond this machine need TLS and a token.",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="Allow other machines without TLS and token: for ports behind a firewall, mesh or NetworkPolicy.",
    )
    http_port: Port = Field(8501, description="Port of the HTTP interface.")
    grpc_port: Port = Field(8500, description="Port of the gRPC interface.")
    brpc_port: Port | None = Field(
        None, description="Port of the brpc interface (baidu_std) for Paddle Serving's clients; null: off."
    )
    brpc_names: dict[str, ModelAlias] = Field(
        {}, description="What Paddle Serving's clients call an output, such as {logistic: sigmoid_0.tmp_0}."
    )
    metrics_port: Port = Field(8502, description="Port of /metrics, /healthz and /readyz.")
    lookup_port: Port = Field(8600, description="Port of `clickline lookup`.")
    processes: int | None = Field(
        None, ge=1, le=1024, description="Processes on the same ports. Default: one per core."
    )
    threads: int = Field(1, ge=1, le=256, description="Threads for the network in each process.")
    aliases: tuple[ModelAlias, ...] = Field((), description="Other model names to answer to, besides `name`.")
    unknown_fields: Literal["error", "ignore"] = Field(
        "error", description="What to do with request fields that the model does not have."
    )
    max_rows: int = Field(10_000, ge=1, description="Largest number of rows in a request.")
    max_body: Size = Field(
        16 * 1024**2, description="Largest size of a request.", json_schema_extra={"default": "16MiB"}
    )
    queue_size: int = Field(
        64, ge=1, le=65536, description="Requests that can wait in each process; more are rejected."
    )
    drain_timeout: Seconds = Field(10, description="Longest time for running requests to finish at SIGTERM.")
    poll_interval: float = Field(
        1.0, gt=0, le=3600, description="Seconds between two checks of the registry."
    )
    batching: BatchingSection | None = Field(None, description="Dynamic batching; null: off.")
    tls: TlsSection | None = Field(None, description="TLS certificate and key for all ports; null: off.")
    token_file: LocalPath | None = Field(
        None, description="File whose first line is the bearer token that all ports require; null: none."
    )
    lookup: LookupSection | None = Field(
        None, description="Embedding tables on other machines; null: mapped from the version's files."
    )
    trusted_keys_file: LocalPath | None = Field(
        None,
        description="PEM file of public keys: only versions signed with one of them are served; null: any version.",
    )

    def checks(self) -> Iterator[Complaint]:
        if not self.allow_unauthenticated:
            yield from _unguarded_complaints(
                "serve",
                self,
                "or serve.allow_unauthenticated: true if a firewall, mesh or NetworkPolicy protects the ports",
            )
        outputs = ("logistic", "probabilities", "logits", "class_ids")
        for output, name in self.brpc_names.items():
            if output not in outputs:
                yield Complaint(
                    ("brpc_names", output),
                    f"is not an output. Allowed: {', '.join(outputs)}.",
                    "Name one of them.",
                )
            elif list(self.brpc_names.values()).count(name) > 1 or (name in outputs and name != output):
                yield Complaint(
                    ("brpc_names", output),
                    f"is {name}, which names another output too. Allowed: different names.",
                    "Change one of them.",
                )
        named = ("http_port", "grpc_port", "brpc_port", "metrics_port", "lookup_port")
        for n, key in enumerate(named):
            for other in named[:n]:
                if getattr(self, key) == getattr(self, other):
                    yield Complaint(
                        (key,),
                        f"is {getattr(self, key)}, and so is {other}. Allowed: different ports.",
                        "Change one of them.",
                        (other,),
                    )


class StudioSection(Section):
    """The web UI."""

    enabled: bool = Field(True, description="Whether `clickline up` starts it.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on; addresses beyond this machine need TLS and a token."
    )
    port: Port = Field(8503, description="Port to listen on.")
    tls: TlsSection | None = Field(None, description="TLS certificate and key; null: off.")
    token_file: LocalPath | None = Field(
        None,
        description="File whose first line is the bearer token for actions, and from other machines also for reading; "
        "null: one is created in `home`, for actions.",
    )

    def checks(self) -> Iterator[Complaint]:
        yield from _unguarded_complaints("studio", self, "or use an SSH tunnel")


class FollowSection(Section):
    """How `up --follow` trains on hours as they arrive."""

    poll_interval: float = Field(
        5.0, gt=0, le=3600, description="Seconds between two checks for the next hour."
    )
    missing_after: Seconds = Field(
        7200,
        description="Time after which a missing hour is reported.",
        json_schema_extra={"default": "2h"},
    )
    on_missing_hour: Literal["wait", "skip", "stop"] = Field(
        "wait",
        description="What to do then: keep waiting; skip to the next hours (--backfill trains on it later); stop.",
    )
    on_corrupt_hour: Literal["skip", "stop"] = Field(
        "skip", description="What to do with an hour that cannot be used."
    )
    holdout: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Fraction of an hour's rows that the gate evaluates on before they are trained on.",
    )
    lr_scale: float = Field(
        1.0, gt=0, le=10, description="Factor applied to all learning rates, which stay constant."
    )
    max_table_memory: Annotated[
        Literal["auto"] | Size,
        as_type(["string", "integer"], f"auto, or at least 1MiB: {BYTES}"),
    ] = Field(
        "auto",
        description="Memory limit of the embedding tables, above which ids are evicted; auto: half of the machine's.",
    )


class Config(Section):
    """A whole clickline.yaml."""

    name: Name = Field("clickline", description="Name of the service.")
    data: DataSection
    cache: CacheSection = CacheSection()
    storage: StorageSection = StorageSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    tracking: TrackingSection = TrackingSection()
    gate: GateSection = GateSection()
    publish: PublishSection = PublishSection()
    serve: ServeSection = ServeSection()
    follow: FollowSection = FollowSection()
    studio: StudioSection = StudioSection()
    cluster: ClusterSection = ClusterSection()
    deploy: DeploySection = DeploySection()
    home: Place = Field(
        ".clickline", description="Folder or URI for datasets, checkpoints, versions, logs and state."
    )

    def without_eval(self) -> str | None:
        """What `train` lacks because data.eval is not set; `up --follow` holds out rows instead."""
        if self.data.eval is not None:
            return None
        needing = [f"gate.{key}" for key, value in self.gate if key != "extra_epochs" and value is not None]
        if self.train.early_stopping is not None:
            needing.append("train.early_stopping")
        if not needing:
            return None
        verb = "needs" if len(needing) == 1 else "need"
        return f"is not set, but {' and '.join(needing)} {verb} metrics, which are measured on it."
