"""Writes docs/config.md, docs/cli.md and docs/errors.md from the program itself.

Run it after a change: `.venv/bin/python docs/generate.py`. The tests compare the files with what it writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from clickline import errors
from clickline.cli.app import app
from clickline.cli.exit_codes import ExitCode, exit_code
from clickline.config.loader import json_schema
from clickline.config.schema_text import allowed, alternatives

__all__ = ["main", "pages"]

HEAD = "<!-- Written by docs/generate.py. Change the program, then run it again. -->\n\n"


def pages() -> dict[str, str]:
    """The generated pages: file name to text."""
    written = {"config.md": _config(), "cli.md": _cli(), "errors.md": _errors()}
    return {name: HEAD + "\n".join(lines).rstrip() + "\n" for name, lines in written.items()}


def main() -> None:
    for name, text in pages().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")


# ── config.md ──────────────────────────────────────────────────────────────────────────────────


def _config() -> Iterator[str]:
    schema = json_schema(with_variables=False)
    definitions = schema["$defs"]
    top = {name: one for name, one in schema["properties"].items() if not _group(one, definitions)}
    yield "# clickline.yaml"
    yield ""
    yield "Every key, what it may hold and its default. `clickline check` reports every mistake at once;"
    yield "`clickline check --schema` prints a JSON Schema for editors."
    yield ""
    yield "- `${NAME}` and `${NAME:-default}` in a value come from the environment; `$${` stands for `${`."
    yield "- Relative paths are relative to the folder of the file, also when given with `--set`."
    yield "- `--set section.key=value` changes a key for one run; `[…]`, `{…}` and `null` are read as YAML."
    yield "- Secrets stand in the environment or the file named by `storage.credentials_file`, never in this file."
    yield ""
    yield from _table("", top, definitions, [])
    for name in schema["properties"]:
        group = _group(schema["properties"][name], definitions)
        if group:
            yield f"## {name}"
            yield ""
            yield group["description"]
            yield ""
            yield from _table(f"{name}.", group["properties"], definitions, group.get("required", []))
    yield "## data.dates, data.eval_dates"
    yield ""
    yield definitions["Dates"]["description"]
    yield ""
    yield from _table("", definitions["Dates"]["properties"], definitions, definitions["Dates"]["required"])
    yield "## A field of data.fields"
    yield ""
    yield definitions["FieldConfig"]["description"]
    yield "In short, one word: a kind (`city: slot`), or a transform, which means a dense field"
    yield "with it (`age: log1p`)."
    yield ""
    yield from _table("", definitions["FieldConfig"]["properties"], definitions, [])


def _group(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section that a key of the top level holds, if it holds one."""
    return definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}


def _table(
    prefix: str, properties: Mapping[str, Any], definitions: Mapping[str, Any], required: list[str]
) -> Iterator[str]:
    yield "| key | meaning | allowed | default |"
    yield "|---|---|---|---|"
    for cells in _rows(prefix, properties, definitions, required):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _rows(
    prefix: str, properties: Mapping[str, Any], definitions: Mapping[str, Any], required: list[str]
) -> Iterator[tuple[str, str, str, str]]:
    """A line for each key; the keys of a group within follow it, except for those that have their own table."""
    for name, schema in properties.items():
        default = "required" if name in required else f"`{_yaml(schema.get('default'))}`"
        groups = [one for one in alternatives(schema, definitions) if "properties" in one]
        words = allowed(schema, definitions)
        if groups:
            nullable = schema.get("default") is None and "$ref" not in schema
            below = "see below" if groups[0]["title"] == "Dates" else "the next lines"
            words = f"a group of keys, {below}" + (", or null" if nullable else "")
            default = "`null`" if nullable else ""
        yield f"`{prefix}{name}`", schema.get("description") or groups[0]["description"], words, default
        if groups and groups[0]["title"] != "Dates":
            # What the group is set to as a whole wins over what each of its keys would be alone.
            given = schema.get("default") or {}
            keys = {key: {**one, **_default(given, key)} for key, one in groups[0]["properties"].items()}
            yield from _rows(f"{prefix}{name}.", keys, definitions, groups[0].get("required", []))


def _default(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {"default": given[key]} if key in given else {}


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


# ── cli.md ─────────────────────────────────────────────────────────────────────────────────────


def _cli() -> Iterator[str]:
    yield "# The command line"
    yield ""
    yield "| exit code | meaning |"
    yield "|---|---|"
    for code, meaning in (
        (ExitCode.DONE, "done"),
        (ExitCode.FAILED, "failed"),
        (ExitCode.BAD_CONFIG, "bad config or arguments"),
        (ExitCode.GATE_REFUSED, "the gate refused the model"),
        (ExitCode.BAD_DATA, "bad data"),
        (ExitCode.INTERRUPTED, "interrupted; run the same command again to resume"),
    ):
        yield f"| {code:d} | {meaning} |"
    yield ""
    yield "Results go to stdout, progress and errors to stderr. With `--json` stdout holds one JSON document,"
    yield 'nothing else; an error is `{"error": {"kind", "message", …}}` there. `--debug` may stand anywhere.'
    yield ""
    root: Any = typer.main.get_command(app)
    yield from _command(root, "clickline", None)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    path = context.command_path
    yield f"## {path}"
    yield ""
    yield inspect.cleandoc(command.help or "")
    yield ""
    yield "```"
    yield " ".join([path, *command.collect_usage_pieces(context)])
    yield "```"
    yield ""
    yield "| option | meaning |"
    yield "|---|---|"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            option, meaning = (cell.replace("|", "\\|") for cell in record)
            yield f"| `{option}` | {meaning} |"
    yield ""
    for below in getattr(command, "commands", {}).values():
        yield from _command(below, below.name, context)


# ── errors.md ──────────────────────────────────────────────────────────────────────────────────


def _errors() -> Iterator[str]:
    summary, _, rest = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")
    tree, _, remark = rest.partition("\n\n")
    yield "# Errors"
    yield ""
    yield summary
    yield ""
    yield "```"
    yield inspect.cleandoc(tree)
    yield "```"
    yield ""
    yield remark
    yield ""
    yield "| error | meaning | exit code |"
    yield "|---|---|---|"
    for name, kind in sorted(vars(errors).items()):
        if isinstance(kind, type) and issubclass(kind, errors.ClicklineError):
            # Only the class decides, so an instance without a message will do.
            code = exit_code(kind.__new__(kind))
            yield f"| `{name}` | {inspect.cleandoc(kind.__doc__ or '')} | {code:d} |"


if __name__ == "__main__":
    main()
