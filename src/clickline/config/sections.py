"""The sections of clickline.yaml: one frozen model each, one doc line a key, each with its own checks.

A check that looks at one key is the key's type. A check that looks at several is in `checks` of its
section: it yields complaints instead of raising, so that all of them are reported at once.
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
    parse_bytes,
)

Format = Literal["criteo", "slots", "paddlerec", "csv", "parquet", "recordio", "tfrecord"]
Kind = Literal["slot", "dense", "label", "weight", "time", "ignore"]
Transform = Literal["none", "log1p", "minmax", "zscore", "robust", "bucket"]
ModelName = Literal[
    "lr", "fm", "wide_deep", "deepfm", "dcn_v2", "xdeepfm", "autoint", "dlrm", "finalmlp", "masknet"
]

Pooling = Literal["sum", "mean", "max"]
RowOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]

SHORT_FORMS = (*get_args(Kind), *get_args(Transform))
"""What a field may be written as in one word: a kind, or a transform, which means dense with it."""

FORMATS_WITH_FIELDS = ("criteo", "slots", "paddlerec")
"""Formats that have fields without being told."""

RESERVED_NAMES = ("label", "weight", "show", "click", "event_hour")
"""Columns that every dataset has; a slot or dense field would overwrite them."""

_PLACEHOLDER = re.compile(r"\{(?!\])([^{}]*)\}")  # [{] is the sign itself, of a folder's name


class Dates(Section):
    """Which hours of a {date}/{hour} pattern to read."""

    first: Hour = Field(alias="from", description="First date or hour, UTC.")
    last: Hour | None = Field(
        None, alias="to", description="Last date or hour, itself included; only `up --follow` can do without."
    )
    wait: Seconds = Field(0, description="How long to wait for hours that have no donefile yet.")

    def checks(self) -> Iterator[Complaint]:
        if self.last is None:
            return
        end = self.last if "/" in self.last else f"{self.last}/23"
        if self.first > end:  # year, month, day, hour: as texts they are in the order of time
            yield Complaint(
                ("from",),
                f"is {self.first}, after `to`, which is {self.last}.",
                "Lower from or raise to.",
                ("to",),
            )


class FieldConfig(Section):
    """One field: what it means, and how its raw value is read and encoded."""

    kind: Kind | None = Field(
        None, description="What the field is. Left out: as the format has it; slot for a new field."
    )
    column: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Column of the source. Left out: the field's own name."
    )
    transform: Transform | None = Field(
        None,
        description="How a dense number is changed; none: not at all; bucket turns it into ids. Left out: as the "
        "format has it (criteo: log1p), else robust.",
    )
    buckets: Annotated[
        Literal["log2"] | Annotated[int, Field(ge=2, le=1000)] | None,
        as_type(["string", "integer", "null"], "log2, or a whole number of quantiles from 2 to 1000"),
    ] = Field(None, description="Buckets of `transform: bucket`; log2 if left out.")
    separator: Separator | None = Field(None, description="Splits the text of a slot into several values.")
    multi: bool | None = Field(
        None, description="Whether a slot may hold several values. Left out: as the format has it."
    )
    encoding: Literal["text", "feasign"] | None = Field(
        None,
        description="text: hash the value; feasign: it is a 64-bit id. Left out: as the format has it.",
    )
    slot: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = Field(
        None, description="Slot number mixed into the ids. Left out: from the field's name."
    )
    positive: Texts | None = Field(
        None, description="Texts of the label that mean a click. Left out: the label is 0 or 1."
    )
    time_format: TimeFormat | None = Field(
        None, description="How the time is written. Left out: a number since 1970, or YYYY-MM-DD HH:MM:SS."
    )
    unit: Literal["s", "ms", "us", "ns"] | None = Field(
        None, description="Of times since 1970. Left out: what most times of a file are."
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
        """Keys that mean nothing for this kind."""
        makes_ids = kind == "slot" or self.transform == "bucket"
        for key, value, wanted, fits in (
            ("transform", self.transform, "dense", kind == "dense"),
            ("separator", self.separator, "slot", kind == "slot"),
            ("multi", self.multi, "slot", kind == "slot"),
            ("encoding", self.encoding, "slot", kind == "slot"),
            ("slot", self.slot, "slot (or transform: bucket)", makes_ids),
            ("positive", self.positive, "label", kind == "label"),
            ("time_format", self.time_format, "time", kind == "time"),
            ("unit", self.unit, "time", kind == "time"),
        ):
            if value is not None and not fits:
                yield Complaint(
                    (key,),
                    f"is given, but the field's kind is {kind}. Allowed only for kind: {wanted}.",
                    f"Remove {key}, or change the kind.",
                    ("kind",),
                )


class DataSection(Section):
    """Where the logs are and what they hold."""

    format: Format | None = Field(
        None,
        description="Layout of the logs.",
        json_schema_extra={"default": "criteo", "x-allowed": ", ".join(get_args(Format))},
    )
    reader: LocalPath | None = Field(
        None, description="Instead of format: a Python file whose function yields the rows."
    )
    train: Patterns = Field((), description="Logs to learn from.")
    eval: Patterns | None = Field(None, description="Logs to measure on, later in time than train.")
    dates: Dates | None = Field(None, description="Hours of a {date}/{hour} pattern in train.")
    eval_dates: Dates | None = Field(None, description="Hours of a {date}/{hour} pattern in eval.")
    donefile: Annotated[str, Field(min_length=1)] | None = Field(
        "donefile", description="Empty file that marks an hour as complete; null: all hours are."
    )
    slot_conf: Place | None = Field(
        None, description="File with one slot number a line: the slots to use (slots, paddlerec)."
    )
    modulo: Annotated[int, Field(ge=1, le=2**64 - 1)] | None = Field(
        None, description="Reduce feasigns by this before anything else (slots, paddlerec)."
    )
    max_bad_ratio: float = Field(
        0.01, ge=0, le=1, description="Largest share of bad rows; above it prepare stops with exit 4."
    )
    shard_size: Annotated[
        int,
        Field(ge=64 * 1024),
        BeforeValidator(parse_bytes),
        as_type(["string", "integer"], f"at least 64KiB: {BYTES}"),
    ] = Field(
        64 * 1024**2,
        description="Input that goes into one shard of the dataset.",
        json_schema_extra={"default": "64MiB"},
    )
    delimiter: Separator = Field(",", description="Between two columns (csv).")
    header: bool = Field(True, description="Whether the first line names the columns (csv).")
    columns: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="Names of the columns, when header is false (csv)."
    )
    missing: Texts = Field((), description="Texts that mean a missing value, beside the empty one (csv).")
    fields: dict[str, FieldConfig] = Field(
        {},
        description="Fields by name; or a glob such as I* for the format's own fields that are not named.",
        json_schema_extra={"x-allowed": "a group of keys, one a field"},
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
                f"is given beside format: {self.format}. Allowed: one of the two.",
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
        holes = {hole for pattern in patterns for hole in _PLACEHOLDER.findall(pattern)}
        for hole in sorted(holes - {"date", "hour"}):
            yield Complaint(
                (key,),
                f"holds {{{hole}}}. Allowed between braces: {{date}} and {{hour}}.",
                "Use one of them, or a * to match any text. Write a brace of the name itself as [{].",
            )
        if "hour" in holes and "date" not in holes:
            yield Complaint(
                (key,), "holds {hour} but no {date}.", "Put {date} into the pattern, such as {date}/{hour}."
            )
        if dates is None:
            if holes & {"date", "hour"}:
                yield Complaint(
                    (dates_key,),
                    f"is missing, but {key} is a {{date}}/{{hour}} pattern.",
                    f"Give {dates_key}: {{from: YYYYMMDD, to: YYYYMMDD}}.",
                    (key,),
                )
        elif "date" not in holes:
            yield Complaint(
                (dates_key,),
                f"is given, but {key} holds no {{date}}.",
                f"Put {{date}}/{{hour}} into {key}, or remove {dates_key}.",
                (key,),
            )
        elif "hour" not in holes and ("/" in dates.first or "/" in (dates.last or "")):
            yield Complaint(
                (dates_key,),
                f"names hours, but {key} holds no {{hour}}.",
                f"Put {{hour}} into {key}, or give plain dates.",
                (key,),
            )

    def _check_format_keys(self) -> Iterator[Complaint]:
        source = self.format or "a custom reader"
        for key, value, formats in (
            ("slot_conf", self.slot_conf, ("slots", "paddlerec")),
            ("modulo", self.modulo, ("slots", "paddlerec")),
            ("delimiter", self.delimiter if self.delimiter != "," else None, ("csv",)),
            ("header", self.header if not self.header else None, ("csv",)),
            ("columns", self.columns, ("csv",)),
            ("missing", self.missing or None, ("csv",)),
        ):
            if value is not None and self.format not in formats:
                yield Complaint(
                    (key,),
                    f"is given, but the format is {source}. Allowed only for format: {' or '.join(formats)}.",
                    f"Remove {key}, or change the format.",
                    ("format", "reader"),
                )
        if self.format == "csv" and self.header and self.columns is not None:
            yield Complaint(
                ("columns",),
                "is given, but the header names the columns already.",
                "Remove columns, or set header: false if the first line is a row.",
                ("header", "format"),
            )
        if self.format == "csv" and not self.header and self.columns is None:
            yield Complaint(
                ("columns",),
                "is missing, but header is false.",
                "Give the columns' names in their order, such as [click, age, city].",
                ("header", "format"),
            )
        repeated = sorted(name for name, count in Counter(self.columns or ()).items() if count > 1)
        for name in repeated:
            yield Complaint(("columns",), f"names {name} twice.", "Give every column a name of its own.")

    def _check_fields(self) -> Iterator[Complaint]:
        declared = self.format not in FORMATS_WITH_FIELDS
        for name, field in self.fields.items():
            if declared and is_glob(name):
                yield Complaint(
                    ("fields", name),
                    f"is a glob. Allowed only for formats with fields of their own: {', '.join(FORMATS_WITH_FIELDS)}.",
                    "Name each column; one whose own name holds such a sign is given by column:.",
                    ("format", "reader"),
                )
            elif not declared and field.column is not None and is_glob(name):
                yield Complaint(
                    ("fields", name, "column"),
                    "is given for a glob, which stands for many fields.",
                    "Remove it, or name one field.",
                    ("format", "reader"),
                )
            yield from self._check_column(name, field)
        meant = self._meant()
        for key, field in self.fields.items():
            if field.kind is not None:
                continue  # then it has looked at itself
            for kind in sorted({m.kind for m in meant.values() if m.said_by == key}):
                for c in field.keys_of_other_kinds(kind):
                    yield c._replace(key=("fields", key, *c.key), also=("format", "reader"))
        yield from self._check_names(meant)
        yield from self._check_kinds(meant)

    def _meant(self) -> dict[str, _Meant]:
        """Every field that is known before reading. A glob stands for the format's own that are not named."""
        meant = {name: _Meant(kind, name, name) for name, kind in _own_fields(self.format)}
        for key, field in self.fields.items():
            if is_glob(key) and self.format in FORMATS_WITH_FIELDS:
                for name in [n for n in meant if fnmatchcase(n, key) and n not in self.fields]:
                    meant[name] = meant[name]._replace(kind=field.kind or meant[name].kind, said_by=key)
        for key, field in self.fields.items():
            if not is_glob(key) or self.format not in FORMATS_WITH_FIELDS:
                before = meant.get(key) or _Meant(_kind_of_new(key, self.format), key, key)
                meant[key] = _Meant(field.kind or before.kind, field.column or before.column, key)
        return meant

    def _check_names(self, meant: Mapping[str, _Meant]) -> Iterator[Complaint]:
        """Names of the dataset's own columns."""
        for name, (kind, column, key) in meant.items():
            if kind in ("slot", "dense") and name in RESERVED_NAMES:
                if name == key:
                    problem = f"is a {kind} field under a name that every dataset uses itself."
                    remedy = f"Give it another name and set column: {column}."
                else:
                    problem = f"makes {name} a {kind} field, and every dataset uses that name itself."
                    remedy = f"Narrow the glob, or say what {name} is."
                yield Complaint(("fields", key), problem, remedy, ("format", "reader"))

    def _check_kinds(self, meant: Mapping[str, _Meant]) -> Iterator[Complaint]:
        """One label, at most one weight and time, and something to learn from."""
        for kind, what in (("label", "clicks"), ("weight", "weights"), ("time", "times")):
            names = [name for name, m in meant.items() if m.kind == kind]
            if len(names) > 1:
                few = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                yield Complaint(
                    ("fields",),
                    f"has {len(names)} fields of kind {kind}: {few}. Allowed: one.",
                    f"Keep the one that holds the {what} and set the others to ignore.",
                    ("format", "reader"),
                )
        labels = {name: m for name, m in meant.items() if m.kind == "label"}
        source = {"slots": "show and click", "paddlerec": "click"}.get(self.format or "")
        for name, label in labels.items():
            if source is not None and label.column != source:
                yield Complaint(
                    ("fields", label.said_by),
                    f"makes {name} a label, but a line of the format {self.format} has its own: {source}.",
                    "Remove it.",
                    ("format", "reader"),
                )
        own = next((name for name, kind in _own_fields(self.format) if kind == "label"), None)
        if not labels and own is not None:
            key = meant[own].said_by
            yield Complaint(
                ("fields", key),
                f"sets {own} to {meant[own].kind}, and so no label is left.",
                "Remove it." if key == own else f"Narrow the glob, or add {own}: label.",
                ("format", "reader"),
            )
        elif not labels and self.format != "slots":
            yield Complaint(
                ("fields",),
                "has no label, and this format has none of its own.",
                "Declare the column that tells a click, such as click: label.",
                ("format", "reader"),
            )
        known = self.format not in ("slots", "paddlerec")  # of the slots of those two only the data know
        if known and not {"slot", "dense"} & {m.kind for m in meant.values()}:
            yield Complaint(
                ("fields",),
                "has no slot and no dense field, so there is nothing to learn from.",
                "Declare at least one, such as city: slot or age: log1p.",
                ("format", "reader"),
            )

    def _check_column(self, name: str, field: FieldConfig) -> Iterator[Complaint]:
        """A field must come from a column that exists, where the columns are known before reading."""
        known = self.columns
        if self.format == "criteo":
            known = tuple(own for own, _ in _own_fields(self.format))
        column = field.column or name
        if known is None or column in known:
            return
        if self.format == "criteo" and field.column is None and any(fnmatchcase(k, name) for k in known):
            return
        near = get_close_matches(column, known, n=1, cutoff=0.6)
        yield Complaint(
            ("fields", name),
            f"comes from column {column}, which is not there.",
            f"Did you mean {near[0]}?" if near else f"Allowed: {', '.join(known)}.",
            ("format", "reader", "columns"),
        )


class _Meant(NamedTuple):
    """What a field is in the end, and which key of `fields` said so last."""

    kind: Kind
    column: str
    said_by: str


def _own_fields(format_name: Format | None) -> list[tuple[str, Kind]]:
    """The fields that a format has itself, as far as they are known before reading."""
    if format_name == "paddlerec":
        return [("click", "label")]
    if format_name != "criteo":
        return []
    from clickline.records import CRITEO_FIELDS  # brings numpy, which other configs need not wait for

    kinds: dict[str, Kind] = {"l": "label", "I": "dense", "C": "slot"}
    return [(name, kinds[name[0]]) for name in CRITEO_FIELDS]


def _kind_of_new(name: str, format_name: Format | None) -> Kind:
    return "dense" if format_name == "paddlerec" and name.startswith("dense_") else "slot"


def is_glob(name: str) -> bool:
    """Whether a field's name stands for several."""
    return any(mark in name for mark in "*?[")


class CacheSection(Section):
    """Local copies of remote data."""

    dir: LocalPath = Field("~/.cache/clickline", description="Folder that holds them.")
    size: Size = Field(
        50 * 1024**3,
        description="How much it may hold; the files used longest ago go first.",
        json_schema_extra={"default": "50GiB"},
    )


class StorageSection(Section):
    """How remote stores are reached. Secrets come from the environment or the credentials file."""

    options: dict[str, dict[str, Any]] = Field(
        {},
        description="fsspec options by protocol, such as s3: {endpoint_url: …}; no secrets.",
        json_schema_extra={"x-allowed": "a group of protocols (s3, gs, https, …), each a group of options"},
    )
    credentials_file: LocalPath | None = Field(
        None, description="File with the secret options of the stores; read, never copied or printed."
    )

    def checks(self) -> Iterator[Complaint]:
        for protocol, options in self.options.items():
            for path in _secrets(options, ("options", protocol)):
                yield Complaint(
                    path,
                    "looks like a secret, and this file is stored with every dataset.",
                    "Put it into the environment or the file named by storage.credentials_file.",
                )


def _secrets(options: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in options.items():
        if looks_secret(str(key)) or (isinstance(value, str) and holds_password(value)):
            yield (*path, str(key))
        elif isinstance(value, Mapping):
            yield from _secrets(value, (*path, str(key)))


class SlotModel(Section):
    """What is different for one slot."""

    dim: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Numbers learned for every id of the slot. Left out: embedding_dim."
    )
    pooling: Pooling | None = Field(
        None, description="How several ids of one row become one vector. Left out: as model.pooling."
    )


class ModelSection(Section):
    """The network."""

    name: ModelName | None = Field(
        None,
        description="One of the built-in networks.",
        json_schema_extra={"default": "wide_deep", "x-allowed": ", ".join(get_args(ModelName))},
    )
    file: LocalPath | None = Field(
        None, description="Instead of name: a Python file with a network of yours."
    )
    embedding_dim: int = Field(9, ge=1, le=1024, description="Numbers learned for every id.")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (512, 256, 128, 32), description="Widths of the hidden layers."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of a hidden layer's outputs dropped while learning."
    )
    batch_norm: bool = Field(False, description="Whether hidden layers have batch norm.")
    pooling: Pooling = Field("sum", description="How several ids of one row become one vector.")
    slots: dict[str, SlotModel] = Field(
        {},
        description="Slots that differ: a dim or a pooling of their own.",
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
                f"is given beside name: {self.name}. Allowed: one of the two.",
                "Remove name to use your file, or remove file.",
                ("name",),
            )


class ScheduleSection(Section):
    """How a step size changes over the steps."""

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
    """How the vectors of ids learn."""

    optimizer: RowOptimizerName = Field("adagrad", description="Their optimizer.")
    learning_rate: float = Field(0.05, gt=0, le=10, description="Their step size.")
    init_scale: float = Field(
        0.01, ge=0, le=10, description="They start uniform within ± this / √dim, from seed and id alone."
    )
    initial_accumulator: float = Field(
        0.001,
        gt=0,
        le=10,
        description="What AdaGrad starts from; the smaller, the farther an id's first gradients move it.",
    )
    l2: float = Field(0.0, ge=0, le=10, description="Pulls the vectors of a batch towards zero.")
    schedule: ScheduleSection = Field(
        ScheduleSection(kind="linear_tail"),
        description="Learning rate schedule of embeddings and wide weights.",
    )


class WideSection(Section):
    """How the wide weights of ids learn."""

    optimizer: RowOptimizerName = Field("ftrl", description="Their optimizer.")
    learning_rate: float = Field(0.05, gt=0, le=10, description="Their step size; alpha of FTRL.")
    l1: float = Field(0.0, ge=0, le=1000, description="Keeps weights with little evidence at 0 (FTRL).")
    l2: float = Field(0.0, ge=0, le=1000, description="Pulls weights towards 0 (FTRL).")

    def checks(self) -> Iterator[Complaint]:
        for key in ("l1", "l2"):
            value = getattr(self, key)
            if value and self.optimizer != "ftrl":
                yield Complaint(
                    (key,),
                    f"is {value:g}, but the optimizer is {self.optimizer}. Allowed only for ftrl.",
                    f"Remove {key}, or set optimizer: ftrl.",
                    ("optimizer",),
                )


class AdmissionSection(Section):
    """Which ids get a vector of their own; until then they share their slot's default row."""

    min_impressions: int = Field(1, ge=1, description="Shows after which an id is admitted; 1: at once.")
    probability: float = Field(1.0, gt=0, le=1, description="Chance at each show from then on.")


class EvictionSection(Section):
    """Which ids are forgotten, at the end of each epoch."""

    decay: float = Field(
        1.0, gt=0, le=1, description="What all show and click counters are multiplied by first."
    )
    threshold: float = Field(
        0.0, ge=0, description="Ids worth less go: click_weight x clicks + nonclick_weight x other shows."
    )
    max_idle_hours: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Ids go that were not seen for so many hours before the newest hour."
    )
    click_weight: float = Field(1.0, ge=0, description="Worth of a click.")
    nonclick_weight: float = Field(0.1, ge=0, description="Worth of a show without a click.")


class ClassWeights(Section):
    """How much an impression counts in the loss. Scores are put right again: they stay probabilities."""

    click: float = Field(1.0, gt=0, le=1000, description="Weight of an impression with a click.")
    no_click: float = Field(1.0, gt=0, le=1000, description="Weight of an impression without.")


class CalibrationSection(Section):
    """A last step that puts scores right, fitted on rows that are held out of training."""

    method: Literal["isotonic", "platt"] = Field(
        "isotonic", description="Any rising curve, or a shifted one."
    )
    holdout: float = Field(
        0.05, gt=0, le=0.5, description="Share of the training rows that is held out for it."
    )


class EarlyStop(Section):
    """Stop when more epochs no longer help; the best epoch's checkpoint is the result."""

    patience: int = Field(1, ge=1, description="Epochs in a row that may fail to be the best.")
    metric: Literal["logloss", "auc"] = Field("logloss", description="Measured on the eval rows.")


class WorkersSection(Section):
    """How many processes compute when training runs on a cluster."""

    min: int = Field(1, ge=1, le=4096, description="Training begins as soon as so many fit.")
    max: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description="It grows to so many while the cluster has room; null: as many as there is room for.",
    )

    def checks(self) -> Iterator[Complaint]:
        if self.max is not None and self.max < self.min:
            yield Complaint(
                ("max",), f"is {self.max}, below min {self.min}.", "Raise max or lower min.", ("min",)
            )


class TrainSection(Section):
    """How the model learns."""

    mode: Literal["local", "cluster"] = Field("local", description="On this machine, or on a Ray cluster.")
    workers: WorkersSection = WorkersSection()
    embedding_servers: int = Field(
        2, ge=1, le=64, description="Processes that hold the sparse rows, when training runs on a cluster."
    )
    sync: bool = Field(
        True,
        description="Cluster: all workers share each batch and step together. false: each takes batches of its own.",
    )
    max_staleness: int = Field(
        8, ge=1, le=1024, description="With sync false: how many steps of others a gradient may be behind."
    )
    scale_lr_by_staleness: bool = Field(
        False,
        description="With sync false: divide a late gradient's step size by 1 + the steps it is behind.",
    )
    batch_size: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)],
        as_type(["string", "integer"], "auto, or a whole number of rows of at least 1"),
    ] = Field(
        "auto", description="Rows a step; auto: 4096, or halved down to 128 until an epoch has 200 steps."
    )
    epochs: int = Field(1, ge=1, description="How often each row is learned.")
    order: Literal["shuffled", "time"] = Field(
        "shuffled", description="Of the rows; time: as they are stored, shuffled within an hour."
    )
    learning_rate: float = Field(0.001, gt=0, le=1, description="Step size of the dense part (Adam).")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Of the dense part, decoupled (AdamW).")
    embedding: EmbeddingSection = EmbeddingSection()
    wide: WideSection = WideSection()
    schedule: ScheduleSection = Field(
        ScheduleSection(kind="cosine"), description="Of the dense part's step size."
    )
    admission: AdmissionSection = AdmissionSection()
    eviction: EvictionSection | None = Field(None, description="Which ids are forgotten; null: none.")
    class_weights: ClassWeights = ClassWeights()
    negative_sampling: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the rows without a click that is learned; scores are put right.",
    )
    calibration: CalibrationSection | None = Field(
        None, description="A last step that puts scores right; null: none."
    )
    early_stopping: EarlyStop | None = Field(None, description="When to stop before `epochs`; null: never.")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Numbers of the dense part while learning; bf16 is faster on processors that have it.",
    )
    warm_start: LocalPath | None = Field(
        None, description="A checkpoint, or a run whose newest is meant, to learn on from."
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Fixes first weights and the order of the rows.")
    checkpoint_every: Seconds = Field(
        300, description="Time between two checkpoints.", json_schema_extra={"default": "5m"}
    )
    checkpoint_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Steps between two checkpoints, beside the time; null: time alone."
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=1000, description="How many checkpoints of a run are kept, beside the best epoch's."
    )


class RoleSection(Section):
    """What one process of a role asks the cluster for."""

    cpus: float = Field(1.0, ge=0, le=1024, description="Cores that are reserved for it.")
    memory: Annotated[
        Literal["auto"] | Size,
        as_type(["string", "integer"], f"auto, or at least 1MiB: {BYTES}"),
    ] = Field("auto", description="Memory it may use; auto: a share of its node's, none of it reserved.")


class ShardRoleSection(RoleSection):
    """What a shard asks the cluster for."""

    cpus: float = Field(
        0.0, ge=0, le=1024, description="Cores that are reserved for it; it computes little beside a worker."
    )


class ClusterSection(Section):
    """The Ray cluster of `train.mode: cluster`."""

    address: str | None = Field(
        None, description="host:port of an existing cluster, or auto; null: one is started on this machine."
    )
    worker: RoleSection = RoleSection()
    embedding_server: ShardRoleSection = ShardRoleSection()
    max_failures: int = Field(
        3,
        ge=1,
        le=100,
        description="How often the same place may fail, with no progress, before training gives up.",
    )


class TrackingSection(Section):
    """Where MLflow keeps parameters, metrics and reports of runs."""

    enabled: bool | None = Field(
        None, description="Whether runs are tracked. Left out: if the extra `tracking` is installed."
    )
    uri: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Tracking server or store of MLflow. Left out: mlflow.db in home."
    )
    experiment: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Name of the experiment. Left out: the service's name."
    )

    def checks(self) -> Iterator[Complaint]:
        if self.uri is not None and holds_password(self.uri):
            yield Complaint(
                ("uri",),
                "holds a password or token, and this file is stored with every run.",
                "Put it into the environment: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD or _TOKEN.",
            )


class GateSection(Section):
    """What a model must reach before it may be published; null: not asked for."""

    auc: Annotated[float, Field(gt=0.5, le=1)] | None = Field(None, description="Smallest AUC.")
    logloss: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Largest log loss.")
    accuracy: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Smallest accuracy.")
    calibration: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Largest distance from 1 of predicted clicks / real clicks."
    )
    vs_current: Annotated[float, Field(ge=-1, le=1)] | None = Field(
        None, description="Smallest gain in AUC over the current version; below 0: the largest loss."
    )
    extra_epochs: int = Field(
        3,
        ge=0,
        description="Epochs to train beyond train.epochs, one at a time, while the gate rejects the model.",
    )


class PublishSection(Section):
    """How a version is packed, and which are kept."""

    registry: Place | None = Field(
        None, description="Folder or URI of the versions; by default registry/ in home."
    )
    shards: int = Field(2, ge=1, le=4096, description="Pieces of the sparse table.")
    table_precision: Literal["fp32", "fp16", "int8"] = Field(
        "fp32", description="Of the vectors in the sparse table; its cost is measured at publish."
    )
    dense_precision: Literal["fp32", "int8"] = Field(
        "fp32", description="Of the network's weights; its cost is measured at publish."
    )
    max_deltas: int = Field(
        24, ge=0, le=1000, description="Deltas on one base before a new base is made; 0: only bases."
    )
    keep_versions: int = Field(5, ge=1, description="Newest versions that `versions gc` keeps.")
    sample_rows: int = Field(
        256, ge=1, le=65536, description="Rows stored with their scores in each version."
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
        None, description="PEM file of the authority that signed it, for predictors that call lookup servers."
    )


def unguarded(host: str, tls: TlsSection | None, token_file: str | None) -> list[str]:
    """What a port lacks that other machines can reach: the keys `tls` and `token_file`."""
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
            f"is {server.host}, which others can reach, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given. Allowed: an address of this machine alone "
            "(127.0.0.1, ::1, localhost), or any with TLS and a token.",
            f"Set {' and '.join(f'{section}.{key}' for key in missing)}, {instead}.",
            ("tls", "token_file", "allow_unauthenticated"),
        )


class BatchingSection(Section):
    """Small requests that are scored together."""

    rows: int = Field(64, ge=2, le=65536, description="Rows that are enough to begin.")
    max_wait_ms: float = Field(
        1.0, gt=0, le=1000, description="Milliseconds that a request waits for others at most."
    )


class LookupSection(Section):
    """Sparse tables on other machines: the servers of each shard, each `host:port`."""

    shards: Annotated[
        tuple[Annotated[tuple[Address, ...], Field(min_length=1)], ...],
        Field(min_length=1),
        as_type("array", "a list of shards, each a list of host:port"),
    ] = Field(description="For each shard the addresses of its replicas.")
    timeout_ms: int = Field(
        200, ge=1, le=60_000, description="Milliseconds after which a lookup is given up."
    )
    hedge_after_ms: int = Field(
        20, ge=1, le=60_000, description="Milliseconds after which another replica is asked too."
    )
    on_missing_shard: Literal["default", "unavailable"] = Field(
        "default", description="With all replicas of a shard gone: answer with default rows, or UNAVAILABLE."
    )
    cache_rows: int = Field(0, ge=0, description="Hot rows that each predictor process keeps; 0: none.")


class ServeSection(Section):
    """The endpoint."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on, 0.0.0.0 for all; others than this machine need TLS and a token.",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="Whether others may come in without: for ports that a firewall, mesh or NetworkPolicy guards.",
    )
    http_port: Port = Field(8501, description="Port of the HTTP interface.")
    grpc_port: Port = Field(8500, description="Port of the gRPC interface.")
    metrics_port: Port = Field(8502, description="Port of /metrics, /healthz and /readyz.")
    lookup_port: Port = Field(8600, description="Port of `clickline lookup`.")
    processes: int | None = Field(
        None, ge=1, le=1024, description="Processes on the same ports; by default one for each core."
    )
    threads: int = Field(1, ge=1, le=256, description="Threads of the network in each process.")
    aliases: tuple[ModelAlias, ...] = Field(
        (), description="Other model names that are answered, beside `name`."
    )
    unknown_fields: Literal["error", "ignore"] = Field(
        "error", description="What is done with a field that the model does not have."
    )
    max_rows: int = Field(10_000, ge=1, description="Rows in one request.")
    max_body: Size = Field(
        16 * 1024**2, description="Bytes of one request.", json_schema_extra={"default": "16MiB"}
    )
    queue_size: int = Field(
        64, ge=1, le=65536, description="Requests that wait in each process; more are refused."
    )
    drain_timeout: Seconds = Field(10, description="Longest time that running requests get at SIGTERM.")
    poll_interval: float = Field(1.0, gt=0, le=3600, description="Seconds between two looks at the registry.")
    batching: BatchingSection | None = Field(None, description="Scores small requests together; null: off.")
    tls: TlsSection | None = Field(None, description="Encrypts all ports; null: off.")
    token_file: LocalPath | None = Field(
        None, description="File whose first line is the bearer token that all ports ask for; null: none."
    )
    lookup: LookupSection | None = Field(
        None, description="Sparse tables on other machines; null: mapped from the version's files."
    )
    trusted_keys_file: LocalPath | None = Field(
        None,
        description="PEM file of public keys: only versions that one of them has signed are used; null: any version.",
    )

    def checks(self) -> Iterator[Complaint]:
        if not self.allow_unauthenticated:
            yield from _unguarded_complaints(
                "serve",
                self,
                "or serve.allow_unauthenticated: true if a firewall, mesh or NetworkPolicy protects the ports",
            )
        named = ("http_port", "grpc_port", "metrics_port", "lookup_port")
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
    """The web page."""

    enabled: bool = Field(True, description="Whether `clickline up` shows it too.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on; others than this machine need TLS and a token."
    )
    port: Port = Field(8503, description="Port of the page.")
    tls: TlsSection | None = Field(None, description="Encrypts the page; null: off.")
    token_file: LocalPath | None = Field(
        None,
        description="File whose first line is the bearer token for actions, and beyond this machine for reading; "
        "null: one is made in `home`, for actions.",
    )

    def checks(self) -> Iterator[Complaint]:
        yield from _unguarded_complaints("studio", self, "or reach it by an SSH tunnel")


class FollowSection(Section):
    """How `up --follow` learns hours as they arrive."""

    poll_interval: float = Field(
        5.0, gt=0, le=3600, description="Seconds between two looks for the next hour."
    )
    missing_after: Seconds = Field(
        7200,
        description="Time after which an hour that is missing is reported.",
        json_schema_extra={"default": "2h"},
    )
    on_missing_hour: Literal["wait", "skip", "stop"] = Field(
        "wait",
        description="What then: wait on; skip: go on with the hours behind it (--backfill learns it later); stop.",
    )
    on_corrupt_hour: Literal["skip", "stop"] = Field(
        "skip", description="What is done with an hour that cannot be used: go on without it, or stop."
    )
    holdout: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of an hour's rows that the gate judges by before they are learned.",
    )
    lr_scale: float = Field(
        1.0, gt=0, le=10, description="Factor on all step sizes; they stay the same for ever."
    )
    max_table_memory: Annotated[
        Literal["auto"] | Size,
        as_type(["string", "integer"], f"auto, or at least 1MiB: {BYTES}"),
    ] = Field(
        "auto", description="Bound on the sparse tables: beyond it ids go; auto: half of the machine's."
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
        ".clickline", description="Where datasets, checkpoints, versions, logs and state live."
    )

    def without_eval(self) -> str | None:
        """What `train` would miss because data.eval is not given; of hours that are followed, rows are held out."""
        if self.data.eval is not None:
            return None
        asking = [f"gate.{key}" for key, value in self.gate if key != "extra_epochs" and value is not None]
        if self.train.early_stopping is not None:
            asking.append("train.early_stopping")
        if not asking:
            return None
        verb = "asks" if len(asking) == 1 else "ask"
        return f"is not given, but {' and '.join(asking)} {verb} for figures, which are measured on its rows."
