"""Loads clickline.yaml as a `Config`, or reports all its mistakes at once: file, line, key, problem, remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clickline.config.renamed_keys import RENAMED_KEYS, RENAMED_VALUES
from clickline.config.schema_text import allowed, alternatives, dotted, shorten
from clickline.config.sections import (
    SHORT_FORMS,
    Config,
    FieldConfig,
    Kind,
)
from clickline.config.value_types import Section, holds_password, looks_secret
from clickline.config.yaml_tree import Node, parse, set_key
from clickline.errors import ConfigError, Mistake

MAX_BYTES = 2**20

KeyPath = tuple[str | int, ...]


def load_config(
    path: str | Path = "clickline.yaml", overrides: Sequence[str] = (), *, folder: Path | None = None
) -> Config:
    """Read and check a config. `overrides` are `section.key=value` texts, which take precedence over the file.

    Relative paths are relative to the file's folder, or to `folder` on another machine where the config will be used;
    then the files that it names are not checked.
    """
    mistakes: list[Mistake] = []
    root = parse(_read(Path(path)), str(path), mistakes)
    if root.value is None:
        root = Node({}, str(path), root.line)
    if not isinstance(root.value, dict):
        problem = (
            f"is {shorten(root.to_python())}. Allowed: a group of keys ({', '.join(Config.model_fields)})."
        )
        raise ConfigError([Mistake(str(path), root.line, "", problem, "Begin with data:")])
    unreadable = bool(mistakes) and not root.value
    for override in overrides:
        set_key(root, override, mistakes)
    if unreadable:  # missing keys would only be a consequence
        raise ConfigError(mistakes)
    config = _validate(root, folder or Path(path).absolute().parent, mistakes)
    if config is not None and folder is None:
        mistakes += _missing_files(config, root)
    if config is None or mistakes:
        raise ConfigError(sorted(mistakes, key=lambda m: (m.line == 0, m.line)))
    return config


def resolved(config: Config) -> str:
    """The config as YAML with every default filled in. It contains no secrets and loads to the same config.

    Keys of fields that are not set are omitted: there may be 10,000 fields, and the size of a config is limited."""
    document = config.model_dump(mode="json", by_alias=True)
    for name, field in document["data"]["fields"].items():
        document["data"]["fields"][name] = {key: value for key, value in field.items() if value is not None}
    return yaml.safe_dump(_escaped(document), sort_keys=False, allow_unicode=True)


def json_schema(*, with_variables: bool = True) -> dict[str, Any]:
    """The JSON Schema of clickline.yaml, for editors, which see the file before ${…} is expanded."""
    schema: dict[str, Any] = _with_variables(_schema()) if with_variables else _schema()
    return schema


def _read(path: Path) -> str:
    def mistake(problem: str, remedy: str, line: int = 0) -> ConfigError:
        return ConfigError([Mistake(str(path), line, "", problem, remedy)])

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise mistake("does not exist.", "Name it with -c, or run `clickline init` to write one.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise mistake(f"cannot be read: {reason}.", "Name a readable file with -c.") from None
    if len(content) > MAX_BYTES:
        raise mistake(f"is larger than {MAX_BYTES} bytes.", "Name a config with -c, not data.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise mistake("is not UTF-8 text.", "Save the file as UTF-8.", line) from None


def _validate(root: Node, base: Path, mistakes: list[Mistake]) -> Config | None:
    """Validate every section on its own, so that a mistake in one does not hide one in another; then the whole."""
    assert isinstance(root.value, dict)
    document: dict[str, Any] = {
        key: node.to_python() for key, node in root.value.items() if not node.is_broken
    }
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            node = root.value.get(name, Node({}, root.file, 0))
            # Options of a store have no schema, so YAML's types apply there.
            raw = node.to_python(typed=name == "storage")
            document[name] = _validate_section(section, raw, root, (name,), base, mistakes)
    config = _try(Config, document, root, (), base, "all", mistakes)
    return config if isinstance(config, Config) else None


def _validate_section(
    section: type[Section], raw: Any, root: Node, path: KeyPath, base: Path, mistakes: list[Mistake]
) -> Section:
    if raw is None:  # `gate:` with nothing below it
        raw = {}
    if not isinstance(raw, Mapping):
        mistakes.append(_wrong_value(root, path))
        return section.model_construct()
    broken = frozenset(str(key) for key in raw if root.at((*path, key))[0].is_broken)
    checked = _try(section, raw, root, path, base, broken, mistakes)
    if isinstance(checked, frozenset) and checked:
        # Invalid keys are known now; without them the other keys can still contradict each other.
        reduced = _reduced_fields(raw.get("fields"), base) if "fields" in checked else None
        if reduced is not None:
            raw, checked = {**raw, "fields": reduced}, checked - {"fields"}
        checked = _try(section, raw, root, path, base, broken | checked, mistakes)
    return checked if isinstance(checked, Section) else section.model_construct()


def _reduced_fields(fields: Any, base: Path) -> dict[str, Any] | None:
    """The fields with each invalid one reduced to its kind, so that they can be checked against each other.

    None if a kind itself is invalid: then the intended field is unknown.
    """
    if not isinstance(fields, Mapping):
        return None
    reduced: dict[str, Any] = {}
    for name, spec in fields.items():
        reduced[name] = spec
        try:
            FieldConfig.model_validate(spec, context={"base": base})
        except ValidationError:
            reduced[name] = spec.get("kind") if isinstance(spec, Mapping) else None
            if reduced[name] not in get_args(Kind):
                return None
    return reduced


def _try(
    section: type[Section],
    raw: Mapping[str, Any],
    root: Node,
    path: KeyPath,
    base: Path,
    broken: frozenset[str] | Literal["all"],
    mistakes: list[Mistake],
) -> Section | frozenset[str]:
    """The section, or which of its keys are invalid by themselves."""
    try:
        return section.model_validate(
            {key: value for key, value in raw.items() if broken == "all" or key not in broken},
            context={"base": base, "broken": broken},
        )
    except ValidationError as error:
        details = error.errors(include_url=False)
    reported = {(m.file, m.line, m.key) for m in mistakes}
    for detail in details:
        for mistake in _mistakes(detail, root, path):
            place = (mistake.file, mistake.line, mistake.key)
            # Each branch of a union reports the same value.
            if detail["type"] == "complaints" or place not in reported:
                mistakes.append(mistake)
                reported.add(place)
    invalid = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    intended = {near for key in invalid for near in get_close_matches(key, section.model_fields, n=1)}
    renamed = {RENAMED_KEYS.get(dotted((*path, key)), "").rpartition(".")[2] for key in invalid}
    return frozenset(invalid | intended | renamed)


def _mistakes(detail: ErrorDetails, root: Node, path: KeyPath) -> Iterator[Mistake]:
    location = (*path, *detail["loc"])
    if detail["type"] == "complaints":
        for complaint in detail["ctx"]["complaints"]:
            yield _mistake(root, (*location, *complaint.key), complaint.problem, complaint.remedy)
    elif detail["type"] == "extra_forbidden":
        yield _unknown_key(root, location)
    elif detail["type"] == "missing":
        yield _mistake(root, location, f"is missing. Allowed: {_allowed(location)}.", "Give it.")
    else:
        # The rest of the location names branches of a union.
        yield _wrong_value(root, location[: root.at(location)[1]])


def _mistake(root: Node, path: KeyPath, problem: str, remedy: str) -> Mistake:
    node = root.at(path)[0]
    return Mistake(node.file, node.line, dotted(path), problem, remedy)


def _unknown_key(root: Node, path: KeyPath) -> Mistake:
    *group, name = path
    renamed = RENAMED_KEYS.get(dotted(path))
    if renamed is not None:
        return _mistake(root, path, f"was renamed to {renamed}.", f"Write {renamed} instead.")
    known = list(_properties(group))
    near = get_close_matches(str(name), known, n=1)
    elsewhere = [s for s in Config.model_fields if str(name) in _properties([s])]
    if near:
        remedy = f"Did you mean {near[0]}?"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}.{name}?"
    else:
        remedy = f"Allowed here: {', '.join(known)}."
    return _mistake(root, path, "is not a known key.", remedy)


def _wrong_value(root: Node, path: KeyPath) -> Mistake:
    node = root.at(path)[0]
    secret = node.hidden or any(looks_secret(str(step)) for step in path) or path[:1] == ("storage",)
    value = node.to_python()
    if isinstance(value, str) and "://" in value:
        secret = True  # it may contain a password, which may be why it is invalid
    if isinstance(value, str) and holds_password(value):
        return _mistake(
            root,
            path,
            "contains a password or a signature, and a copy of this file is stored with every dataset.",
            "Remove it from the URI and put it into the environment or the file named by storage.credentials_file.",
        )
    problem = f"{'has an invalid value' if secret else f'is {shorten(value)}'}. Allowed: {_allowed(path)}."
    schema = _schema_at(path)
    choices = [c for one in alternatives(schema, _schema()["$defs"]) for c in one.get("enum", ())]
    renamed = RENAMED_VALUES.get((dotted(path), str(value)))
    near = [renamed] if renamed is not None else get_close_matches(str(value), choices, n=1)
    if near:
        remedy = f"Did you mean {near[0]}?"
    elif schema.get("default") is not None and not isinstance(schema["default"], dict | list):
        remedy = f"Correct it, or remove it to get the default, {schema['default']}."
    else:
        remedy = "Correct it."
    return _mistake(root, path, problem, remedy)


def _missing_files(config: Config, root: Node) -> Iterator[Mistake]:
    for path, file in (
        (("data", "reader"), config.data.reader),
        (("model", "file"), config.model.file),
        (("storage", "credentials_file"), config.storage.credentials_file),
    ):
        if file is not None and not Path(file).is_file():
            yield _mistake(
                root, path, f"is {shorten(file)}, which does not exist.", "Create it, or correct the path."
            )


@cache
def _schema() -> dict[str, Any]:
    schema = Config.model_json_schema()
    data = schema["$defs"]["DataSection"]
    data["required"] = ["train"]
    del data["properties"]["train"]["default"]
    fields = data["properties"]["fields"]
    fields["additionalProperties"] = {
        "anyOf": [{"type": "string", "enum": list(SHORT_FORMS)}, fields["additionalProperties"]]
    }
    return schema


def _schema_at(path: Sequence[str | int]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = _schema()
    for step in path:
        for one in alternatives(schema, _schema()["$defs"]):
            below = one.get("properties", {}).get(step)
            below = below or (one.get("items") if isinstance(step, int) else one.get("additionalProperties"))
            if below:
                schema = below if isinstance(below, dict) else {}
                break
        else:
            return {}
    return schema


def _properties(path: Sequence[str | int]) -> Mapping[str, Any]:
    for one in alternatives(_schema_at(path), _schema()["$defs"]):
        if "properties" in one:
            return dict(one["properties"])
    return {}


def _allowed(path: Sequence[str | int]) -> str:
    return allowed(_schema_at(path), _schema()["$defs"])


def _with_variables(schema: Any) -> Any:
    """The schema, with ${VARIABLE} allowed wherever a number, a choice or true/false is."""
    if isinstance(schema, list):
        return [_with_variables(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("integer", "number", "boolean") or "enum" in schema:
        notes = {key: schema[key] for key in ("title", "description", "default") if key in schema}
        rest = {key: value for key, value in schema.items() if key not in notes}
        return {**notes, "anyOf": [rest, {"type": "string", "pattern": r"\$\{"}]}
    return {key: _with_variables(value) for key, value in schema.items()}


def _escaped(value: Any) -> Any:
    """The value with each ${ escaped: in a resolved config it is literal."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
