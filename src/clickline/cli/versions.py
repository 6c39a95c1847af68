"""clickline versions: list the published versions and move the pointer to the current one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickline.cli.console import emit, facts, note, table
from clickline.cli.options import CommandGroup, ConfigOptions, Json, JsonOptions
from clickline.progress import human_size

if TYPE_CHECKING:
    from clickline.artifacts.promotion import MoveResult
    from clickline.artifacts.registry import Move, Registry
    from clickline.artifacts.version import Version
    from clickline.config import Config

versions = CommandGroup(
    help="List published versions, change the current one, remove old ones.", no_args_is_help=False
)

Number = Annotated[int, typer.Argument(metavar="N", help="Version number.", min=1)]
CurrentNumber = Annotated[
    int | None,
    typer.Argument(metavar="N", help="Version number.", min=1, show_default="the current version"),
]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Recorded in the history.", show_default=False)
]

_MAX_MOVES = 10


@versions.command("list")
def list_versions(options: JsonOptions) -> None:
    """List all versions."""
    from clickline.artifacts.diff import state_of, summary
    from clickline.errors import ArtifactError
    from clickline.storage.redaction import redacted

    _, registry = _open(options)
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
    if options.as_json:
        emit(listed)
    elif not listed:
        note(f"{redacted(registry.uri)} has no versions yet: `clickline publish` creates one.")
    else:
        header = ("VERSION", "TABLE", "CREATED", "ROWS", "SIZE", "AUC", "STATE")
        table(header, [_line(entry) for entry in listed])
    if current is not None and current.version not in [entry["version"] for entry in listed]:
        note(f"the current version {current.version} no longer exists. Run `clickline versions rollback`.")


@versions.command()
def show(
    options: JsonOptions,
    number: CurrentNumber = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print only the config that it was built with.")
    ] = False,
) -> None:
    """Show everything about one version."""
    from clickline.artifacts.diff import state_of
    from clickline.validation import document_of

    _, registry = _open(options)
    current = registry.current()
    version = _version(registry, number)
    if resolved:
        typer.echo(version.manifest.config.rstrip("\n"))
        return
    moves = [move for move in registry.moves() if move.version == version.number][-_MAX_MOVES:]
    chain = [one.number for one in registry.chain(version)]
    if options.as_json:
        state = state_of(version.number, current)
        document = document_of(version.manifest)
        emit({**document, "chain": chain, "state": state, "moves": [asdict(move) for move in moves]})
        return
    facts(_facts(version, chain, current))
    typer.echo()
    files = [(name, human_size(file.size), file.sha256) for name, file in version.files.items()]
    table(("FILE", "SIZE", "SHA-256"), files)
    if moves:
        typer.echo()
        _show_moves(moves)


@versions.command()
def diff(
    options: JsonOptions,
    first: Annotated[int, typer.Argument(metavar="A", help="Version number.", min=1)],
    second: Annotated[
        int | None,
        typer.Argument(
            metavar="B", help="Another version number.", min=1, show_default="the current version"
        ),
    ] = None,
) -> None:
    """Compare two versions: contents, metrics, features, config."""
    from clickline.artifacts.diff import differences

    _, registry = _open(options)
    old = registry.version(first)
    new = _version(registry, second)
    changes = differences(old, new)
    if options.as_json:
        emit({"versions": [old.number, new.number], **changes})
        return
    for title, pairs in changes.items():
        if not pairs:
            typer.echo(f"{title}: the same")
            continue
        typer.echo(f"{title}:")
        rows = [(f"  {key}", _cell(a), f"{_cell(b)}{_change(a, b)}") for key, (a, b) in pairs.items()]
        table(("  ", f"VERSION {old.number}", f"VERSION {new.number}"), rows)


@versions.command()
def rollback(
    options: JsonOptions,
    to: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="An earlier version.", min=1, show_default="the previously current one"
        ),
    ] = None,
    reason: Reason = None,
) -> None:
    """Make an earlier version current; servers switch within seconds. `versions promote` goes forward."""
    from clickline.artifacts.promotion import roll_back

    _, registry = _open(options, any_version=False)
    _report_move(roll_back(registry, to, reason), options.as_json)


@versions.command()
def promote(options: JsonOptions, number: Number, reason: Reason = None) -> None:
    """Make a newer version current; servers switch within seconds. `versions rollback` goes back."""
    from clickline.artifacts.promotion import promote as move_forward

    _, registry = _open(options, any_version=False)
    _report_move(move_forward(registry, number, reason), options.as_json)


@versions.command()
def pin(options: JsonOptions, number: Number, reason: Reason = None) -> None:
    """Make a version current and keep it current: publishing does not change it until `unpin`."""
    from clickline.artifacts.promotion import pin as pin_version

    _, registry = _open(options, any_version=False)
    moved = pin_version(registry, number, reason)
    if not moved.changed:
        _report(moved.now, options.as_json, f"version {number} is already current and pinned")
        return
    before = moved.before
    was = "" if before is None or before.version == number else f" (was {before.version})"
    message = f"version {number} is current{was} and stays current until `clickline versions unpin`."
    _report(moved.now, options.as_json, message)


@versions.command()
def unpin(options: JsonOptions, reason: Reason = None) -> None:
    """Let publishing change the current version again. The current version stays."""
    from clickline.artifacts.promotion import unpin as unpin_version

    _, registry = _open(options)
    moved = unpin_version(registry, reason)
    move = moved.now
    if not moved.changed:
        _report(move, options.as_json, f"no version is pinned; version {move.version} is current")
        return
    newest = max(registry.numbers())
    newer = (
        f" Version {newest} is newer: `clickline versions promote {newest}` makes it current now."
        if newest > move.version
        else ""
    )
    _report(move, options.as_json, f"version {move.version} stays current until the next publish.{newer}")


@versions.command()
def gc(
    options: JsonOptions,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Number of newest versions to keep.",
            min=1,
            show_default="publish.keep_versions",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove old versions, except the current and previous ones and those that kept deltas build on."""
    config, registry = _open(options)
    keep = config.publish.keep_versions if keep is None else keep
    garbage = registry.garbage(keep)
    removed = list(garbage.versions) if dry_run else registry.gc(keep)
    if options.as_json:
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
    options: JsonOptions,
    number: CurrentNumber = None,
) -> None:
    """Check every file of a version, and of the versions it builds on, against its manifest.

    With serve.trusted_keys_file, signatures are checked too.
    """
    config, registry = _open(options, any_version=False)
    version = _version(registry, number)
    chain = registry.chain(version)
    for one in chain:
        registry.verify(one, registry.fetch(one, Path(config.cache.dir, "versions")))
    signed = config.serve.trusted_keys_file is not None
    files = sum(len(one.files) for one in chain)
    if options.as_json:
        numbers = [one.number for one in chain]
        emit({"version": version.number, "chain": numbers, "files": files, "signed": signed or None})
        return
    typer.echo(
        f"version {version.number} is complete: checked {_count(files, 'file')} of {_count(len(chain), 'version')}. "
        + (
            "Signed by a trusted key."
            if signed
            else "Signatures were not checked: serve.trusted_keys_file is not set."
        )
    )


@versions.command("client-config")
def client_config(
    options: ConfigOptions,
    number: Number,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write to.", show_default="stdout"),
    ] = None,
    per_field: Annotated[
        bool, typer.Option("--per-field", help="One variable per number instead of the vector dense_input.")
    ] = False,
) -> None:
    """Write the config of Paddle Serving's clients for a version (serving_client_conf.prototxt)."""
    from clickline.serving.protocols.paddle_general_model import FETCHED
    from clickline.serving.protocols.request import OUTPUTS
    from clickline.storage.atomic import put_atomically
    from clickline.wire.client_config import client_config as config_text

    config, registry = _open(options)
    features = registry.version(number).manifest.feature_spec
    outputs = {name: (OUTPUTS[name].width, OUTPUTS[name].is_integer) for name in FETCHED}
    text = config_text(features, outputs, config.serve.brpc_names, per_field=per_field)
    if output is None:
        typer.echo(text, nl=False)
    else:
        put_atomically(output, text.encode())
        note(f"wrote {output}")


@versions.command()
def keygen(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the two files to.")],
    as_json: Json = False,
) -> None:
    """Create a key pair: the private key signs versions, the public key lets servers verify them."""
    from clickline.artifacts.signing import make_keys

    private, public = make_keys(out)
    if as_json:
        emit({"private": str(private), "public": str(public)})
        return
    facts(
        {
            "private key": f"{private}: set it as publish.signing_key_file; keep it where versions are published",
            "public key": f"{public}: set it as serve.trusted_keys_file; copy it to every server",
        }
    )


# ── the registry ───────────────────────────────────────────────────────────────────────────────


def _open(options: ConfigOptions, *, any_version: bool = True) -> tuple[Config, Registry]:
    """The config and its registry; `any_version` also opens versions whose signature servers would refuse."""
    from clickline.artifacts.from_config import registry_of

    config = options.config()
    return config, registry_of(config, any_version=any_version)


def _version(registry: Registry, number: int | None) -> Version:
    """The version of this number, or else the current one."""
    from clickline.artifacts.promotion import current_of

    return registry.version(current_of(registry).version if number is None else number)


def _report_move(moved: MoveResult, as_json: bool) -> None:
    """Print the result of a rollback or a promotion."""
    now = moved.now
    if moved.before is None or not moved.changed:
        _report(now, as_json, f"version {now.version} is already current")
        return
    if now.pinned:
        next_publish = "It stays pinned: publishing does not change it until `clickline versions unpin`."
    else:
        next_publish = (
            f"The next publish replaces it; to prevent that: `clickline versions pin {now.version}`."
        )
    _report(now, as_json, f"version {now.version} is current (was {moved.before.version}). {next_publish}")


def _report(move: Move, as_json: bool, message: str) -> None:
    """Print the move that is in effect as JSON, or else `message`."""
    if as_json:
        emit(asdict(move))
    else:
        typer.echo(message)


# ── formatting ─────────────────────────────────────────────────────────────────────────────────


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
    from clickline.artifacts.diff import metrics_of, state_of

    manifest = version.manifest
    state = ", ".join(state_of(version.number, current))
    named: dict[str, object] = {
        "version": f"{version.number}{f' ({state})' if state else ''}",
        "created": f"{version.created} ({_age(version.created)})",
        "table": _table(manifest.table, version.parent),
        "chain": " < ".join(map(str, chain)) if len(chain) > 1 else None,
        "rows": manifest.rows,
        "tombstones": manifest.tombstones,
        "size": human_size(version.size),
        "table precision": manifest.table_precision,
        "dense precision": manifest.dense_precision,
        "shards": manifest.shards,
        "fields": f"{len(manifest.features.get('dense', ()))} dense, {len(manifest.slots)} slots",
        **{f"model {name}": value for name, value in manifest.model.to_json().items()},
        **{name.replace("_", " "): value for name, value in metrics_of(version).items()},
        **{f"cost {name}": value for name, value in vars(manifest.cost).items()},
        **{f"sample {name.replace('_', ' ')}": value for name, value in vars(manifest.sample).items()},
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
    """How much a metric or a count has changed."""
    numbers = [
        value for value in (old, new) if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if len(numbers) < 2:
        return ""
    change = numbers[1] - numbers[0]
    return f" ({change:+,})" if isinstance(change, int) else f" ({change:+.6g})"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
