"""The base class of the sections of clickline.yaml, and the types of their values."""

from __future__ import annotations

import glob
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

_SECRET = re.compile(
    r"secret|token|passw|pwd|credential|authoriz|signature|connection_string"
    r"|(api|access|account|private|shared)_?key|(^|[^a-z])(key|auth|sas|sig)s?([^a-z]|$)",
    re.IGNORECASE,
)
_URI = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_USER_INFO = re.compile(
    r"://[^/@]*:[^/@]*@|^https?://[^/@]*@", re.IGNORECASE
)  # over HTTP a user name alone may be a token
_QUERY_NAME = re.compile(r"[?&]([^=&]*)=")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+)\s*([smhd])?")
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def looks_secret(name: str) -> bool:
    """Whether the value of a key or variable of this name must never be printed or stored."""
    return _SECRET.search(name) is not None


def holds_password(uri: str) -> bool:
    """Whether a URI contains a password, a token or a signature."""
    if _URI.match(uri) is None:
        return False
    return _USER_INFO.search(uri) is not None or any(map(looks_secret, _QUERY_NAME.findall(uri)))


class Complaint(NamedTuple):
    """Keys of one section that contradict each other. `also` names the other keys that the check involved."""

    key: tuple[str, ...]
    problem: str
    remedy: str
    also: tuple[str, ...] = ()


def ordered(
    section: Section, low: str, high: str, size: Callable[[Any], float] = float
) -> Iterator[Complaint]:
    """The complaint about a maximum that is below the minimum."""
    least, most = getattr(section, low), getattr(section, high)
    if most is not None and size(most) < size(least):
        yield Complaint((high,), f"is {most}, below {low} {least}.", f"Raise {high} or lower {low}.", (low,))


def only_for(
    section: Section, chooser: str, chosen: str, keys: Mapping[str, Sequence[str]]
) -> Iterator[Complaint]:
    """Complaints about keys that are given although they do not apply to what the key `chooser` has chosen. `keys`
    maps each to the choices that it applies to."""
    for key, choices in keys.items():
        if chosen not in choices and getattr(section, key) != type(section).model_fields[key].default:
            yield Complaint(
                (key,),
                f"is given, but the {chooser} is {chosen}. Allowed only for {chooser}: {' or '.join(choices)}.",
                f"Remove {key}, or change the {chooser}.",
                (chooser,),
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a port on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def complain(complaints: list[Complaint]) -> PydanticCustomError:
    """The error that carries the complaints through Pydantic."""
    text = "\n".join(" ".join((".".join(c.key), c.problem, c.remedy)) for c in complaints)
    return PydanticCustomError("complaints", "{text}", {"text": text, "complaints": complaints})


class Section(BaseModel):
    """A group of keys in clickline.yaml; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a value may be a secret in the wrong place
    )

    def checks(self) -> Iterator[Complaint]:
        """Complaints about keys of this section that contradict each other."""
        yield from ()

    @model_validator(mode="after")
    def _keys_agree(self, info: ValidationInfo) -> Self:
        # An invalid key has its default here, so a contradiction with it means nothing.
        broken = (info.context or {}).get("broken", frozenset())
        if broken == "all":
            return self
        complaints = [c for c in self.checks() if broken.isdisjoint((c.key[0], *c.also))]
        if complaints:
            raise complain(complaints)
        return self


def _absolute(text: str, info: ValidationInfo) -> str:
    """An absolute path: paths are relative to the folder of the config, `~` is the home folder, URIs are unchanged."""
    if _URI.match(text):
        if holds_password(text):
            raise ValueError(text)
        return text
    folder, rest = _base_folder(text, info)
    return str(Path(folder, *rest))


def _absolute_pattern(text: str, info: ValidationInfo) -> str:
    """Like `_absolute`, with the folder, which the user did not write, escaped so that it is not a pattern."""
    if _URI.match(text):
        return _absolute(text, info)
    folder, rest = _base_folder(text, info)
    return str(Path(glob.escape(str(folder)).replace("{", "[{]"), *rest))


def _base_folder(text: str, info: ValidationInfo) -> tuple[Path, tuple[str, ...]]:
    """The folder that a path is relative to, and the rest of the path."""
    first, *rest = Path(text).parts or ("",)
    if not first.startswith("~"):
        return Path((info.context or {}).get("base") or ""), (first, *rest)
    try:
        return Path(first).expanduser(), tuple(rest)
    except RuntimeError as error:  # ~user, but that user does not exist
        raise ValueError(text) from error


def _local(text: str) -> str:
    if _URI.match(text):
        raise ValueError(text)
    return text


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def parse_bytes(value: Any) -> Any:
    """A size such as 12MiB in bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(value)
    number, unit, binary = match.groups()
    step = 1024 if binary else 1000
    return int(Fraction(number) * step ** (" KMGT".index(unit.upper()) if unit else 0))


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(value)
    return int(match[1]) * _SECONDS[match[2]]


def _hour_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _calendar(text: str) -> str:
    if re.fullmatch(r"[0-9]{8}(/[0-9]{2})?", text) is None:
        raise ValueError(text)
    datetime.strptime(text, "%Y%m%d/%H" if "/" in text else "%Y%m%d")
    return text


def _time_format(text: str) -> str:
    # A format that cannot parse its own output cannot parse the user's file either.
    if "%" not in text:
        raise ValueError(text)
    sample = datetime(2024, 2, 29, 23, 58, 59, tzinfo=UTC)
    datetime.strptime(sample.strftime(text), text)
    return text


def as_type(name: str | list[str], allowed: str, **more: Any) -> Any:
    """JSON Schema of a key whose text we parse ourselves; `x-allowed` describes it in messages and docs."""
    extra: dict[str, Any] = {"type": name, "x-allowed": allowed, **more}
    return Field(json_schema_extra=extra)


_PLACE = "a path (~ is the home folder) or a URI without password or signature"
_PATTERN = "a path, glob, URI without password or signature, or {date}/{hour} pattern; or a list of them"
BYTES = "a whole number of bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB"

Place = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_absolute),
    as_type("string", _PLACE),
]
Donefile = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(lambda text, info: _absolute(text, info) if "/" in text else text),
    as_type("string", "the name of a file, or a path (with a slash) or URI"),
]
LocalPath = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_local),
    AfterValidator(_absolute),
    as_type("string", "a path on this machine (~ is the home folder)"),
]
Pattern = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_absolute_pattern),
    as_type("string", _PLACE),
]
Patterns = Annotated[
    tuple[Pattern, ...],
    BeforeValidator(_one_or_many),
    as_type(["string", "array"], _PATTERN, minItems=1),
]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_one_or_many),
    as_type(["string", "array"], "a text or a list of texts"),
]
Seconds = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(_seconds),
    as_type(["string", "integer"], "a duration such as 90s, 30m, 2h or 1d, or whole seconds"),
]
Hour = Annotated[
    str,
    BeforeValidator(_hour_text),
    AfterValidator(_calendar),
    as_type(["string", "integer"], "a date YYYYMMDD or an hour YYYYMMDD/HH of the calendar"),
]
Separator = Annotated[
    str,
    Field(pattern=r"^[\x01-\x09\x0b\x0c\x0e-\x21\x23-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]$"),
    as_type("string", 'one ASCII character: no letter, digit, quote or line end ("\\t" in quotes is a tab)'),
]
TimeFormat = Annotated[
    str, AfterValidator(_time_format), as_type("string", "a format of Python's strptime, such as %Y-%m-%d")
]
Name = Annotated[
    str,
    Field(pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"),
    as_type("string", "lower-case letters, digits and inner hyphens"),
]
ModelAlias = Annotated[
    str, Field(pattern="^[A-Za-z0-9_.-]+$"), as_type("string", "letters, digits, _, . and -")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(pattern=r"^[^\s]+:[0-9]{1,5}$"), as_type("string", "host:port")]
Size = Annotated[
    int,
    Field(ge=1024**2),
    BeforeValidator(parse_bytes),
    as_type(["string", "integer"], f"at least 1MiB: {BYTES}"),
]
