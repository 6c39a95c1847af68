"""clickline versions: what is published, which version is current, and moving between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickline.cli.console import emit, facts, note, table
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.progress import human_size

if TYPE_CHECKING:
    from clickline.artifacts.registry import Move, Registry
    from clickline.artifacts.version import Version
    from clickline.config import Config

__all__ = ["versions"]

versions = typer.Typer(
    help="Show the published versions, choose the current one, remove old ones.", no_args_is_help=False
)

Number = Annotated[int, typer.Argument(metavar="N", help="The number of a version.", min=1)]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the history.", show_default=False)
]

_SHOWN_MOVES = 10
_MEASURES = ("auc", "logloss", "normalised_entropy", "accuracy", "calibration", "ece", "brier", "base_rate")
_PLAIN = ("table", "parent", "rows", "tombstones", "precision", "dense", "shards", "parts", "width")
_ALSO_COMPARED = ("logit_shift", "calibration", "model", "cost")


@versions.command("list")
def list_versions(
    config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None, as_json: Json = False
) -> None:
    """Show all versions."""
    from clickline.errors import ArtifactError
    from clickline.storage.redaction import shown

    _, registry = _open(config_file, overrides)
    current = registry.current()
    listed: list[dict[str, Any]] = []
    for number in registry.numbers():
        state = _state(number, current)
        try:
            version = registry.version(number)
        except ArtifactError as error:
            note(str(error))
            listed.append({"version": number, "state": [*state, "damaged"]})
            continue
        listed.append(
            {
                "version": number,
                "table": version.body.get("table"),
                "parent": version.parent,
                "created": version.created,
                "rows": version.body.get("rows"),
                "tombstones": version.body.get("tombstones"),
                "bytes": version.size,
                "auc": _measures(version).get("auc"),
                "state": state,
            }
        )
    if as_json:
        emit(listed)
    elif not listed:
        note(f"{shown(registry.uri)} has no versions yet: `clickline publish` makes one.")
    else:
        header = ("VERSION", "TABLE", "CREATED", "ROWS", "SIZE", "AUC", "STATE")
        table(header, [_line(entry) for entry in listed])
    if current is not None and current.version not in [entry["version"] for entry in listed]:
        note(f"version {current.version} is current and is gone. `clickline versions rollback` leaves it.")


@versions.command()
def show(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="N", help="The number of a version.", min=1, show_default="the current version"
        ),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the config that it was made with, and nothing else.")
    ] = False,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show all that is known of a version."""
    _, registry = _open(config_file, overrides)
    current = registry.current()
    version = registry.version(number if number is not None else _current(registry, current).version)
    if resolved:
        typer.echo(str(version.body.get("config") or "").rstrip("\n"))
        return
    moves = [move for move in registry.moves() if move.version == version.number][-_SHOWN_MOVES:]
    chain = [one.number for one in registry.chain(version)]
    if as_json:
        state = _state(version.number, current)
        emit({**version.body, "chain": chain, "state": state, "moves": [asdict(move) for move in moves]})
        return
    facts(_facts(version, chain, current))
    typer.echo()
    files = version.files.items()
    table(
        ("FILE", "SIZE", "SHA-256"),
        [(name, human_size(file["size"]), file["sha256"]) for name, file in files],
    )
    if moves:
        typer.echo()
        _show_moves(moves)


@versions.command()
def diff(
    first: Annotated[int, typer.Argument(metavar="A", help="The number of a version.", min=1)],
    second: Annotated[
        int | None,
        typer.Argument(metavar="B", help="Another one.", min=1, show_default="the current version"),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show what differs between two versions: contents, measures, features, config."""
    _, registry = _open(config_file, overrides)
    old = registry.version(first)
    new = registry.version(second if second is not None else _current(registry, registry.current()).version)
    found = {
        "contents": _differing(_contents(old), _contents(new)),
        "measures": _differing(_measures(old), _measures(new)),
        "features": _differing_features(old, new),
        "config": _differing(_config(old), _config(new)),
    }
    if as_json:
        emit({"versions": [old.number, new.number], **found})
        return
    for title, pairs in found.items():
        if not pairs:
            typer.echo(f"{title}: the same")
            continue
        typer.echo(f"{title}:")
        rows = [(f"  {key}", _cell(a), f"{_cell(b)}{_change(a, b)}") for key, (a, b) in pairs.items()]
        table(("  ", f"VERSION {old.number}", f"VERSION {new.number}"), rows)


@versions.command()
def rollback(
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="N",
            help="Another version.",
            min=1,
            show_default="the one that was current before",
        ),
    ] = None,
    reason: Reason = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make an earlier version the current one; servers follow within seconds."""
    from clickline.errors import ArtifactError

    _, registry = _open(config_file, overrides)
    current = _current(registry, registry.current())
    if to is None and current.pinned:
        raise ArtifactError(
            f"version {current.version} is pinned since {current.at} ({current.reason}), so nothing was changed. "
            "To leave it, name the version: `clickline versions rollback --to N`, which is pinned then; "
            "or run `clickline versions unpin` first."
        )
    target = to if to is not None else _previous(registry, current)
    if target == current.version:
        _told(current, as_json, f"version {target} is current already")
        return
    registry.check(registry.version(target))
    move = registry.move(
        target, reason or f"rollback from {current.version}", after=current, pinned=current.pinned
    )
    if move.pinned:
        hold = "It stays pinned: publishes leave it current until `clickline versions unpin`."
    else:
        hold = f"The next publish moves on from it; to prevent that: `clickline versions pin {target}`."
    _told(move, as_json, f"version {target} is current, it was {current.version}. {hold}")


@versions.command()
def pin(
    number: Number,
    reason: Reason = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make a version the current one and hold it: publishes do not move on until `unpin`."""
    _, registry = _open(config_file, overrides)
    version = registry.version(number)
    current = registry.current()
    if current is not None and (current.version, current.pinned) == (number, True):
        _told(current, as_json, f"version {number} is current and pinned already")
        return
    registry.check(version)
    move = registry.move(number, reason or "pinned", after=current, pinned=True)
    was = "" if current is None or current.version == number else f", it was {current.version}"
    _told(
        move,
        as_json,
        f"version {number} is current{was}. Publishes leave it so until `clickline versions unpin`.",
    )


@versions.command()
def unpin(
    reason: Reason = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Let publishes move the pointer again. The current version stays."""
    _, registry = _open(config_file, overrides)
    current = _current(registry, registry.current())
    if not current.pinned:
        _told(current, as_json, f"no version is pinned; version {current.version} is current")
        return
    move = registry.move(current.version, reason or "unpinned", after=current)
    newest = max(registry.numbers())
    newer = (
        f" Version {newest} is newer: `clickline versions rollback --to {newest}` makes it current now."
        if newest > move.version
        else ""
    )
    _told(move, as_json, f"version {move.version} stays current until the next publish.{newer}")


@versions.command()
def gc(
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="K", help="How many of the newest to keep.", min=1, show_default="publish.keep"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Remove old versions; the current, the one before it and all that kept ones build on stay."""
    config, registry = _open(config_file, overrides)
    kept = config.publish.keep if keep is None else keep
    garbage = registry.garbage(kept)
    removed = list(garbage.versions) if dry_run else registry.gc(kept)
    if as_json:
        emit({"dry_run": dry_run, "versions": removed, "drafts": garbage.drafts, "bytes": garbage.size})
        return
    verb = "would remove" if dry_run else "removed"
    numbers = ", ".join(map(str, removed))
    typer.echo(
        f"{verb} {_count(len(removed), 'version')}"
        + (f" ({numbers}), {human_size(garbage.size)}" if removed else "")
        + (f"; {_count(len(garbage.drafts), 'unfinished version')}" if garbage.drafts else "")
    )


# ── the registry ───────────────────────────────────────────────────────────────────────────────


def _open(config_file: Path, overrides: list[str] | None) -> tuple[Config, Registry]:
    from clickline.artifacts.registry import Registry
    from clickline.config import load_config
    from clickline.storage.stores import Storage

    config = load_config(config_file, overrides or ())
    credentials = config.storage.credentials
    storage = Storage(config.storage.options, Path(credentials) if credentials else None)
    return config, Registry(storage, config.publish.registry or Storage.join(config.home, "registry"))


def _current(registry: Registry, current: Move | None) -> Move:
    from clickline.errors import ArtifactError
    from clickline.storage.redaction import shown

    if current is not None:
        return current
    numbers = ", ".join(map(str, registry.numbers()))
    remedy = (
        f"There are versions {numbers}; `clickline versions pin N` makes one current."
        if numbers
        else "`clickline publish` makes the first version."
    )
    raise ArtifactError(f"{shown(registry.uri)} has no current version yet. {remedy}")


def _previous(registry: Registry, current: Move) -> int:
    """The version that was current before, as far back as there still is one."""
    from clickline.errors import ArtifactError

    numbers = registry.numbers()
    there = [number for number in current.before if number in numbers]
    if there:
        return there[-1]
    others = ", ".join(str(number) for number in numbers if number != current.version)
    raise ArtifactError(
        f"no version that was current before {current.version} is left, so there is none to go back to. "
        + (
            f"There are versions {others}: name one with --to."
            if others
            else "There are no others: publish a better one."
        )
    )


def _told(move: Move, as_json: bool, message: str) -> None:
    """The move that holds now, for a program or for a person."""
    if as_json:
        emit(asdict(move))
    else:
        typer.echo(message)


# ── what is shown ──────────────────────────────────────────────────────────────────────────────


def _state(number: int, current: Move | None) -> list[str]:
    if current is None or current.version != number:
        return []
    return ["current", "pinned"] if current.pinned else ["current"]


def _line(entry: Mapping[str, Any]) -> tuple[str, ...]:
    state = ", ".join(entry["state"])
    if "created" not in entry:
        return (str(entry["version"]), "-", "-", "-", "-", "-", state)
    return (
        str(entry["version"]),
        _table(entry["table"], entry["parent"]),
        _age(entry["created"]),
        _cell(entry["rows"]),
        human_size(entry["bytes"]),
        _cell(entry["auc"]),
        state,
    )


def _facts(version: Version, chain: Sequence[int], current: Move | None) -> dict[str, object]:
    body = version.body
    features = body.get("features") or {}
    model = body.get("model") or {}
    sample = body.get("sample") or {}
    state = ", ".join(_state(version.number, current))
    named: dict[str, object] = {
        "version": f"{version.number}{f' ({state})' if state else ''}",
        "created": f"{version.created} ({_age(version.created)})",
        "table": _table(body.get("table"), version.parent),
        "chain": " < ".join(map(str, chain)) if len(chain) > 1 else None,
        "rows": body.get("rows"),
        "tombstones": body.get("tombstones"),
        "size": human_size(version.size),
        "precision": body.get("precision"),
        "dense": body.get("dense"),
        "shards": body.get("shards"),
        "fields": f"{len(features.get('dense', ()))} dense, {len(features.get('slots', ()))} slots",
        **{f"model {name}": value for name, value in model.items()},
        **{name.replace("_", " "): value for name, value in _measures(version).items()},
        **{f"cost {name}": value for name, value in (body.get("cost") or {}).items()},
        **{f"sample {name}": value for name, value in sample.items()},
    }
    return {name: _cell(value) for name, value in named.items() if value is not None}


def _show_moves(moves: Sequence[Move]) -> None:
    table(
        ("MOVE", "AT", "BY", "PINNED", "REASON"),
        [(m.sequence, m.at, m.by, "yes" if m.pinned else "-", m.reason) for m in reversed(moves)],
    )


def _table(kind: object, parent: int | None) -> str:
    return f"{kind or '-'}" if parent is None else f"{kind or 'delta'} of {parent}"


def _age(created: str) -> str:
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return created
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _change(old: object, new: object) -> str:
    """By how much a measure or a count has changed."""
    numbers = [
        value for value in (old, new) if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if len(numbers) < 2:
        return ""
    change = numbers[1] - numbers[0]
    return f" ({change:+,})" if isinstance(change, int) else f" ({change:+.6g})"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


# ── what is compared ───────────────────────────────────────────────────────────────────────────


def _measures(version: Version) -> dict[str, float]:
    """The figures of the report that the version was judged by."""
    report = version.body.get("report") or {}
    found = report.get("evaluation") or report
    return {name: found[name] for name in _MEASURES if isinstance(found.get(name), int | float)}


def _contents(version: Version) -> dict[str, object]:
    plain = {name: version.body.get(name) for name in _PLAIN}
    more = {name: version.body.get(name) for name in _ALSO_COMPARED}
    return {**plain, "bytes": version.size, **dict(_flat(more))}


def _fields(version: Version) -> dict[str, object]:
    features = version.body.get("features") or {}
    return {
        f"{kind} {field['name']}": field
        for kind, fields in (("dense", features.get("dense", ())), ("slot", features.get("slots", ())))
        for field in fields
    }


def _differing_features(old: Version, new: Version) -> dict[str, tuple[object, object]]:
    """Fields that one of them lacks, and what differs in those that both have."""
    before, after = _fields(old), _fields(new)
    both = before.keys() & after.keys()
    lone = {
        name: ("there" if name in before else None, "there" if name in after else None)
        for name in dict.fromkeys((*before, *after))
        if name not in both
    }
    shared = [dict(_flat({name: tree[name] for name in tree if name in both})) for tree in (before, after)]
    return {**lone, **_differing(*shared)}


def _config(version: Version) -> dict[str, object]:
    import yaml

    return dict(_flat(yaml.safe_load(version.body.get("config") or "") or {}))


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a document by their dotted paths."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    keys = dict.fromkeys((*old, *new))
    pairs = {key: (old.get(key), new.get(key)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}
