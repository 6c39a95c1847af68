"""clickline.yaml to a `Config`, or all its mistakes at once: file, line, key, what is wrong, what to do."""

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
from clickline.config.schema_text import allowed, alternatives, dotted, shown
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
    """Reads and checks a config. `overrides` are `section.key=value` texts; they win over the file.

    Relative paths begin in the file's folder; `folder` is another, of a machine where the config will be used: whether
    the files that it names are there is not asked then.
    """
    mistakes: list[Mistake] = []
    root = parse(_read(Path(path)), str(path), mistakes)
    if root.value is None:
        root = Node({}, str(path), root.line)
    if not isinstance(root.value, dict):
        problem = f"is {shown(root.plainly())}. Allowed: a group of keys ({', '.join(Config.model_fields)})."
        raise ConfigError([Mistake(str(path), root.line, "", problem, "Begin with data:")])
    unreadable = bool(mistakes) and not root.value
    for override in overrides:
        set_key(root, override, mistakes)
    if unreadable:  # what the file lacks now is no news
        raise ConfigError(mistakes)
    config = _validate(root, folder or Path(path).absolute().parent, mistakes)
    if config is not None and folder is None:
        mistakes += _absent_files(config, root)
    if config is None or mistakes:
        raise ConfigError(sorted(mistakes, key=lambda m: (m.line == 0, m.line)))
    return config


def resolved(config: Config) -> str:
    """The config as YAML with every default filled in. It holds no secrets and loads to the same config.

    What a field does not say is left out: there may be 10,000 of them, and a config has a largest size."""
    document = config.model_dump(mode="json", by_alias=True)
    for name, field in document["data"]["fields"].items():
        document["data"]["fields"][name] = {key: value for key, value in field.items() if value is not None}
    return yaml.safe_dump(_escaped(document), sort_keys=False, allow_unicode=True)


def json_schema(*, with_variables: bool = True) -> dict[str, Any]:
    """The JSON Schema of clickline.yaml, for editors; they see the file before ${…} is replaced."""
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
    """Every section on its own, so that a mistake in one hides none in another; then all together."""
    assert isinstance(root.value, dict)
    whole: dict[str, Any] = {key: node.plainly() for key, node in root.value.items() if not node.is_broken}
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            node = root.value.get(name, Node({}, root.file, 0))
            # Options of a store have no schema, so YAML's own types count there.
            raw = node.plainly(typed=name == "storage")
            whole[name] = _validate_section(section, raw, root, (name,), base, mistakes)
    config = _try(Config, whole, root, (), base, "all", mistakes)
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
        # What is wrong by itself is known now; without it the other keys can still disagree.
        mended = _mended_fields(raw.get("fields"), base) if "fields" in checked else None
        if mended is not None:
            raw, checked = {**raw, "fields": mended}, checked - {"fields"}
        checked = _try(section, raw, root, path, base, broken | checked, mistakes)
    return checked if isinstance(checked, Section) else section.model_construct()


def _mended_fields(fields: Any, base: Path) -> dict[str, Any] | None:
    """The fields with each wrong one cut down to its kind, so that they can be compared with each other.

    None when a kind itself is wrong: then nobody knows what the field was meant to be.
    """
    if not isinstance(fields, Mapping):
        return None
    mended: dict[str, Any] = {}
    for name, spec in fields.items():
        mended[name] = spec
        try:
            FieldConfig.model_validate(spec, context={"base": base})
        except ValidationError:
            mended[name] = spec.get("kind") if isinstance(spec, Mapping) else None
            if mended[name] not in get_args(Kind):
                return None
    return mended


def _try(
    section: type[Section],
    raw: Mapping[str, Any],
    root: Node,
    path: KeyPath,
    base: Path,
    broken: frozenset[str] | Literal["all"],
    mistakes: list[Mistake],
) -> Section | frozenset[str]:
    """The section, or which of its keys are wrong by themselves."""
    try:
        return section.model_validate(
            {key: value for key, value in raw.items() if broken == "all" or key not in broken},
            context={"base": base, "broken": broken},
        )
    except ValidationError as error:
        details = error.errors(include_url=False)
    told = {(m.file, m.line, m.key) for m in mistakes}
    for detail in details:
        for mistake in _mistakes(detail, root, path):
            place = (mistake.file, mistake.line, mistake.key)
            # The branches of a union complain one by one about the same value.
            if detail["type"] == "complaints" or place not in told:
                mistakes.append(mistake)
                told.add(place)
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    meant = {near for key in wrong for near in get_close_matches(key, section.model_fields, n=1)}
    renamed = {RENAMED_KEYS.get(dotted((*path, key)), "").rpartition(".")[2] for key in wrong}
    return frozenset(wrong | meant | renamed)


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
        # Beyond the value itself a location names branches of a union.
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
    value = node.plainly()
    if isinstance(value, str) and "://" in value:
        secret = True  # it may carry a password, and that may be why it is wrong
    if isinstance(value, str) and holds_password(value):
        return _mistake(
            root,
            path,
            "holds a password or a signature, and this file is stored with every dataset.",
            "Leave it out of the URI and put it into the environment or the file named by storage.credentials_file.",
        )
    problem = f"{'has a wrong value' if secret else f'is {shown(value)}'}. Allowed: {_allowed(path)}."
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


def _absent_files(config: Config, root: Node) -> Iterator[Mistake]:
    for path, file in (
        (("data", "reader"), config.data.reader),
        (("model", "file"), config.model.file),
        (("storage", "credentials_file"), config.storage.credentials_file),
    ):
        if file is not None and not Path(file).is_file():
            yield _mistake(
                root, path, f"is {shown(file)}, and there is no such file.", "Create it, or correct the path."
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
    """Where a number, a choice or true/false stands, ${VARIABLE} may stand as well."""
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
    """${ in a resolved value is meant as it stands."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
