"""clickline versions: what is published, which version is current, and moving between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

versions = typer.Typer(
    help="Show the published versions, choose the current one, remove old ones.", no_args_is_help=False
)

Number = Annotated[int, typer.Argument(metavar="N", help="The number of a version.", min=1)]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the history.", show_default=False)
]

_SHOWN_MOVES = 10


@versions.command("list")
def list_versions(
    config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None, as_json: Json = False
) -> None:
    """Show all versions."""
    from clickline.artifacts.diff import state_of, summary
    from clickline.errors import ArtifactError
    from clickline.storage.redaction import shown

    _, registry = _open(config_file, overrides)
    current = registry.current()
    listed: list[dict[str, Any]] = []
    for number in registry.numbers():
        state = state_of(number, current)
        try:
            version = registry.version(number)
        except ArtifactError as error:
            note(str(error))
            listed.append({"version": number, "state": [*state, "damaged"]})
            continue
        listed.append({**summary(version), "state": state})
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
    from clickline.artifacts.diff import state_of
    from clickline.artifacts.promotion import current_of

    _, registry = _open(config_file, overrides)
    current = registry.current()
    version = registry.version(number if number is not None else current_of(registry).version)
    if resolved:
        typer.echo(str(version.body.get("config") or "").rstrip("\n"))
        return
    moves = [move for move in registry.moves() if move.version == version.number][-_SHOWN_MOVES:]
    chain = [one.number for one in registry.chain(version)]
    if as_json:
        state = state_of(version.number, current)
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
    from clickline.artifacts.diff import differences
    from clickline.artifacts.promotion import current_of

    _, registry = _open(config_file, overrides)
    old = registry.version(first)
    new = registry.version(second if second is not None else current_of(registry).version)
    found = differences(old, new)
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
    from clickline.artifacts.promotion import roll_back

    _, registry = _open(config_file, overrides, any_version=False)
    moved = roll_back(registry, to, reason)
    now = moved.now
    if moved.before is None or not moved.changed:
        _told(now, as_json, f"version {now.version} is current already")
        return
    if now.pinned:
        hold = "It stays pinned: publishes leave it current until `clickline versions unpin`."
    else:
        hold = f"The next publish moves on from it; to prevent that: `clickline versions pin {now.version}`."
    _told(now, as_json, f"version {now.version} is current, it was {moved.before.version}. {hold}")


@versions.command()
def pin(
    number: Number,
    reason: Reason = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make a version the current one and hold it: publishes do not move on until `unpin`."""
    from clickline.artifacts.promotion import pin as hold

    _, registry = _open(config_file, overrides, any_version=False)
    moved = hold(registry, number, reason)
    if not moved.changed:
        _told(moved.now, as_json, f"version {number} is current and pinned already")
        return
    before = moved.before
    was = "" if before is None or before.version == number else f", it was {before.version}"
    _told(
        moved.now,
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
    from clickline.artifacts.promotion import unpin as let_go

    _, registry = _open(config_file, overrides)
    moved = let_go(registry, reason)
    move = moved.now
    if not moved.changed:
        _told(move, as_json, f"no version is pinned; version {move.version} is current")
        return
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


@versions.command()
def verify(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="N", help="The number of a version.", min=1, show_default="the current version"
        ),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Read every file of a version, and of those it builds on, and hold it against its manifest; check signatures.

    Signatures are asked for where serve.trusted_keys_file names the keys.
    """
    from clickline.artifacts.promotion import current_of

    config, registry = _open(config_file, overrides, any_version=False)
    version = registry.version(number if number is not None else current_of(registry).version)
    chain = registry.chain(version)
    for one in chain:
        registry.verify(one, registry.fetch(one, Path(config.cache.dir, "versions")))
    signed = config.serve.trusted_keys_file is not None
    files = sum(len(one.files) for one in chain)
    if as_json:
        numbers = [one.number for one in chain]
        emit({"version": version.number, "chain": numbers, "files": files, "signed": signed or None})
        return
    typer.echo(
        f"version {version.number} is whole: {_count(files, 'file')} of {_count(len(chain), 'version')} read. "
        + (
            "Signed by a trusted key."
            if signed
            else "Signatures were not asked for: serve.trusted_keys_file is not set."
        )
    )


@versions.command()
def keygen(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the two files.")],
    as_json: Json = False,
) -> None:
    """Make a pair of keys: the private one signs versions, servers trust what the public one confirms."""
    from clickline.artifacts.signing import make_keys

    private, public = make_keys(out)
    if as_json:
        emit({"private": str(private), "public": str(public)})
        return
    facts(
        {
            "private key": f"{private}: name it in publish.signing_key_file, keep it where versions are published",
            "public key": f"{public}: name it in serve.trusted_keys_file, copy it to every server",
        }
    )


# ── the registry ───────────────────────────────────────────────────────────────────────────────


def _open(
    config_file: Path, overrides: list[str] | None, *, any_version: bool = True
) -> tuple[Config, Registry]:
    """`any_version`: also those that servers would refuse for their signature."""
    from clickline.artifacts.from_config import registry_of
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    return config, registry_of(config, any_version=any_version)


def _told(move: Move, as_json: bool, message: str) -> None:
    """The move that holds now, for a program or for a person."""
    if as_json:
        emit(asdict(move))
    else:
        typer.echo(message)


# ── what is shown ──────────────────────────────────────────────────────────────────────────────


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
    from clickline.artifacts.diff import measures, state_of

    body = version.body
    features = body.get("features") or {}
    model = body.get("model") or {}
    sample = body.get("sample") or {}
    state = ", ".join(state_of(version.number, current))
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
        **{name.replace("_", " "): value for name, value in measures(version).items()},
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
