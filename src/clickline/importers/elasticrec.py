"""Imports ElasticCTR 2.0 (ElasticREC): `data.config`, a few shell exports, and `slot.conf`, the slots to use."""

from __future__ import annotations

import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from clickline.data.readers.slot_lines import read_slot_conf
from clickline.importers.config_draft import ConfigDraft
from clickline.importers.source_files import Origin, all_files, read_source, relative, source_error

KEYS = ("HDFS_ADDRESS", "HDFS_UGI", "START_DATE_HR", "END_DATE_HR", "DATASET_PATH", "SPARSE_DIM")

_EXPORT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.ASCII)
_EXPORT_FORM = 'Write one `export NAME="value"` per line.'
_COMPUTED = ("$", "`")


class _Export(NamedTuple):
    value: str
    origin: Origin


class ControlOptions(NamedTuple):
    """The numbers that `elastic-control.sh` takes; None: not given."""

    cpu: int | None = None  # -u
    mem: int | None = None  # -m, in GB
    trainer: int | None = None  # -t
    pserver: int | None = None  # -p
    cube: int | None = None  # -b


_NO_OPTIONS = ControlOptions()


def elasticrec(
    data_config: Path, slot_conf: Path, folder: Path, options: ControlOptions = _NO_OPTIONS
) -> ConfigDraft:
    """A draft config, to be saved in `folder`, from the two files and the options of `elastic-control.sh`."""
    draft = ConfigDraft(f"ElasticCTR's {data_config} and {slot_conf}")
    exports = _exports(data_config, draft)
    slots = read_slot_conf(str(slot_conf), read_source(slot_conf).encode())
    draft.put("name", "ads", why="the model name in requests")
    draft.put("data.format", "slots", why="ElasticCTR's format: show click feasign:slot …")
    _train(draft, exports, data_config, folder)
    draft.put(
        "data.slot_conf",
        relative(str(slot_conf), Path(), folder),
        Origin(str(slot_conf), 0, ""),
        why=f"{len(slots)} slots",
    )
    if "SPARSE_DIM" in exports:
        dim, origin = exports["SPARSE_DIM"]
        draft.put(
            "data.modulo",
            dim,
            origin,
            why="keeps the ids that your clients may send; if all clients send full feasigns, remove it: tables grow "
            "as needed, and ids no longer collide",
        )
    network = "as in ElasticCTR's code"
    draft.put("model.name", "wide_deep", why="its network is only the deep part; this adds a wide part")
    draft.put("model.embedding_dim", 9, why=network)
    draft.put("model.hidden", [400, 400, 400], why=network)
    draft.put("train.order", "time", why="hour after hour, as ElasticCTR trains")
    if "HDFS_UGI" in exports:
        draft.skip(
            exports["HDFS_UGI"].origin,
            "contains a user and a password, and secrets are never written to this file. Put them in a separate file, "
            "such as `webhdfs: {user: …, password: …}`, and name it: `storage: {credentials_file: FILE}`.",
        )
    for name, (_, origin) in exports.items():
        if name not in KEYS:
            draft.skip(
                origin, "is an ElasticCTR key that the importer does not know. Its value was not read."
            )
    draft.hint(
        "Hard-coded in ElasticCTR and not imported: batches of 32 rows, and SGD with learning rate 0.0001 on summed "
        "losses. The defaults of `train` give better models; docs/training.md."
    )
    draft.hint("ElasticCTR has no gate; `gate: {auc: 0.6}` keeps a worse model from being published.")
    _cluster(draft, options)
    return draft


def _cluster(draft: ConfigDraft, options: ControlOptions) -> None:
    """The cluster that the options describe; without options, training runs on one machine."""
    if options == _NO_OPTIONS:
        draft.hint(
            "With the options of elastic-control.sh (-u, -m, -t, -p, -b), `clickline import elasticrec` also writes "
            "the keys of its cluster: train.workers, train.embedding_servers, publish.shards, deploy."
        )
        return

    def origin(flag: str) -> Origin:
        return Origin("elastic-control.sh", 0, flag)

    if options.trainer is not None or options.pserver is not None:
        why = "for one machine: --set train.mode=local"
        draft.put("train.mode", "cluster", origin("-t" if options.trainer is not None else "-p"), why=why)
        draft.put("deploy.training.kind", "volcano", why="ElasticCTR installs Volcano")
    if options.trainer is not None:
        draft.put("train.workers.min", options.trainer, origin("-t"))
    if options.pserver is not None:
        draft.put("train.embedding_servers", options.pserver, origin("-p"))
    if options.cube is not None:
        draft.put("publish.shards", options.cube, origin("-b"))
        draft.put(
            "deploy.serving.lookup.replicas", 1, origin("-b"), why="one lookup server per shard, like cube"
        )
    if options.cpu is not None:
        draft.put("deploy.resources.ray_worker.cpu", str(options.cpu), origin("-u"))
    if options.mem is not None:
        for key in ("memory", "memory_limit"):
            draft.put(f"deploy.resources.ray_worker.{key}", f"{options.mem}Gi", origin("-m"))


def _exports(path: Path, draft: ConfigDraft) -> dict[str, _Export]:
    exports: dict[str, _Export] = {}
    for number, line in enumerate(read_source(path).splitlines(), 1):
        place = Origin(str(path), number, "")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _EXPORT.fullmatch(line)
        if match is None:
            raise source_error(
                place, f"begins with {_line_start(line)!r}, which is not an export.", _EXPORT_FORM
            )
        name, written = match.groups()
        place = place._replace(key=name)
        if any(char in written for char in _COMPUTED) and not re.fullmatch(r"'[^']*'\s*", written):
            raise source_error(
                place, "is computed by the shell, and the importer runs no code.", "Write the value itself."
            )
        try:
            words = shlex.split(written, comments=True)
        except ValueError:
            raise source_error(place, "has an unclosed quote.", _EXPORT_FORM) from None
        if len(words) > 1:
            raise source_error(place, f"has {len(words)} words. Allowed: one.", "Put the value in quotes.")
        if name in exports:
            draft.skip(exports[name].origin, f"is overridden in line {number}, as in a shell.")
        exports[name] = _Export(words[0] if words else "", place)
    return exports


def _line_start(line: str) -> str:
    """The beginning of a line, without anything that may be a value."""
    match = re.match(r"\s*(export\s+)?[\w.-]*", line, re.ASCII)
    return (match[0].strip() if match else "") or line.strip()[:1]


def _train(draft: ConfigDraft, exports: dict[str, _Export], data_config: Path, folder: Path) -> None:
    for name in ("DATASET_PATH", "START_DATE_HR"):
        if not exports.get(name, _Export("", Origin("", 0, ""))).value:
            place = exports[name].origin if name in exports else Origin(str(data_config), 0, name)
            raise source_error(place, "is missing or empty.", f"Write export {name}=…")
    dataset, dataset_origin = exports["DATASET_PATH"]
    origins = [dataset_origin]
    address = ""
    why = "an hour is complete when its donefile exists"
    if "HDFS_ADDRESS" in exports and exports["HDFS_ADDRESS"].value:
        address, origin = exports["HDFS_ADDRESS"]
        origins.append(origin)
        if re.fullmatch(r"(web)?hdfs://[^/\s]+/?", address) is None:
            raise source_error(origin, "is not an HDFS address. Allowed: hdfs://host:port.", "Correct it.")
        why += (
            "; hdfs:// needs the Hadoop client on each machine, webhdfs://host:9870 (the web port) does not"
        )
    root = (
        f"{address.rstrip('/')}/{dataset.strip('/')}"
        if address
        else relative(dataset, data_config.parent, folder)
    )
    pattern = all_files(f"{root.rstrip('/')}/{{date}}/{{hour}}")
    draft.put("data.train", pattern, *origins, why=why)
    start, start_origin = exports["START_DATE_HR"]
    draft.put("data.dates.from", _hour(start, start_origin), start_origin)
    if not exports.get("END_DATE_HR", _Export("", start_origin)).value:
        draft.hint("END_DATE_HR is not set: `clickline up --follow` trains on each hour as it arrives.")
        return
    end, end_origin = exports["END_DATE_HR"]
    last = _hour(end, end_origin)
    before = _hour_before(last)
    if before < _hour(start, start_origin):
        draft.put("data.dates.to", last, end_origin, why="a single hour: none is left for evaluation")
        return
    draft.put(
        "data.dates.to", before, end_origin, why="one hour earlier, since the last hour is for evaluation"
    )
    draft.put("data.eval", pattern, *origins)
    draft.put("data.eval_dates.from", last, end_origin)
    draft.put("data.eval_dates.to", last, end_origin, why="ElasticCTR evaluates on its training rows")


def _hour(text: str, origin: Origin) -> str:
    for form in ("%Y%m%d/%H", "%Y%m%d"):
        try:
            if datetime.strptime(text, form).strftime(form) == text:
                return text
        except ValueError:
            continue
    raise source_error(origin, f"is {text[:20]!r}. Allowed: a valid YYYYMMDD/HH or YYYYMMDD.", "Correct it.")


def _hour_before(text: str) -> str:
    """The previous hour of an hour, the previous day of a day."""
    form, step = ("%Y%m%d/%H", timedelta(hours=1)) if "/" in text else ("%Y%m%d", timedelta(days=1))
    return (datetime.strptime(text, form) - step).strftime(form)
