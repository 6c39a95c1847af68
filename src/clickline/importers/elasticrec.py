"""ElasticCTR 2.0 (ElasticREC): `data.config`, a few shell exports, and `slot.conf`, the slots to use."""

from __future__ import annotations

import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from clickline.data.readers.slot_lines import read_slot_conf
from clickline.importers.config_draft import Draft
from clickline.importers.source_files import Origin, all_files, read, relative, wrong

KEYS = ("HDFS_ADDRESS", "HDFS_UGI", "START_DATE_HR", "END_DATE_HR", "DATASET_PATH", "SPARSE_DIM")

_EXPORT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.ASCII)
_FORM = 'Write one `export NAME="value"` a line.'
_COMPUTED = ("$", "`")


class _Export(NamedTuple):
    value: str
    origin: Origin


def elasticrec(data_config: Path, slot_conf: Path, folder: Path) -> Draft:
    """The draft for `folder` from the two files."""
    draft = Draft(f"ElasticCTR's {data_config} and {slot_conf}")
    exports = _exports(data_config, draft)
    slots = read_slot_conf(str(slot_conf), read(slot_conf).encode())
    draft.put("name", "ads", why="the model's name in requests")
    draft.put("data.format", "slots", why="ElasticCTR's lines, show click feasign:slot …")
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
            why="ids stay those that your clients may send; if all of them send whole feasigns, remove it: tables grow "
            "here, and ids no longer collide",
        )
    network = "as ElasticCTR's code has it"
    draft.put("model.name", "wide_deep", why="its network is the deep part alone; a wide part comes with it")
    draft.put("model.embedding_dim", 9, why=network)
    draft.put("model.hidden", [400, 400, 400], why=network)
    draft.put("train.order", "time", why="hour after hour, as ElasticCTR learns")
    if "HDFS_UGI" in exports:
        draft.leave(
            exports["HDFS_UGI"].origin,
            "holds a user and a password, and secrets never stand in this file. Put them into a file of your own, such "
            "as `webhdfs: {user: …, password: …}`, and name it: `storage: {credentials: FILE}`.",
        )
    for name, (_, origin) in exports.items():
        if name not in KEYS:
            draft.leave(
                origin, "is not a key of ElasticCTR that this import knows. Its value was not looked at."
            )
    draft.hint(
        "Fixed in ElasticCTR's code and not taken over: batches of 32 rows and SGD with 0.0001 on summed losses. The "
        "defaults of train: learn better; docs/training.md."
    )
    draft.hint(
        "The options of elastic-control.sh: -t is train.workers, -p train.shards, -b publish.shards, -u and -m "
        "deploy.resources. ElasticCTR has no gate; `gate: {auc: 0.6}` keeps what is worse from being published."
    )
    return draft


def _exports(path: Path, draft: Draft) -> dict[str, _Export]:
    found: dict[str, _Export] = {}
    for number, line in enumerate(read(path).splitlines(), 1):
        place = Origin(str(path), number, "")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _EXPORT.fullmatch(line)
        if match is None:
            raise wrong(place, f"begins with {_beginning(line)!r}, which is no export.", _FORM)
        name, written = match.groups()
        place = place._replace(key=name)
        if any(sign in written for sign in _COMPUTED) and not re.fullmatch(r"'[^']*'\s*", written):
            raise wrong(
                place, "is computed by the shell, and an import runs nothing.", "Write the value itself."
            )
        try:
            words = shlex.split(written, comments=True)
        except ValueError:
            raise wrong(place, "has a quote that is not closed.", _FORM) from None
        if len(words) > 1:
            raise wrong(place, f"holds {len(words)} words. Allowed: one.", "Put the value in quotes.")
        if name in found:
            draft.leave(found[name].origin, f"is given again in line {number}, which counts, as in a shell.")
        found[name] = _Export(words[0] if words else "", place)
    return found


def _beginning(line: str) -> str:
    """The first words of a line, before anything that may be a value."""
    match = re.match(r"\s*(export\s+)?[\w.-]*", line, re.ASCII)
    return (match[0].strip() if match else "") or line.strip()[:1]


def _train(draft: Draft, exports: dict[str, _Export], data_config: Path, folder: Path) -> None:
    for name in ("DATASET_PATH", "START_DATE_HR"):
        if not exports.get(name, _Export("", Origin("", 0, ""))).value:
            place = exports[name].origin if name in exports else Origin(str(data_config), 0, name)
            raise wrong(place, "is missing or empty.", f"Write export {name}=…")
    dataset, dataset_origin = exports["DATASET_PATH"]
    origins = [dataset_origin]
    address = ""
    why = "an hour is complete when its donefile is there"
    if "HDFS_ADDRESS" in exports and exports["HDFS_ADDRESS"].value:
        address, origin = exports["HDFS_ADDRESS"]
        origins.append(origin)
        if re.fullmatch(r"(web)?hdfs://[^/\s]+/?", address) is None:
            raise wrong(origin, "is not the address of an HDFS. Allowed: hdfs://host:port.", "Correct it.")
        why += "; hdfs:// needs Hadoop's client on each machine, webhdfs://host:9870 (its web port) nothing"
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
        draft.hint("END_DATE_HR is not given: `clickline up --follow` learns hours as they arrive.")
        return
    end, end_origin = exports["END_DATE_HR"]
    last = _hour(end, end_origin)
    before = _before(last)
    if before < _hour(start, start_origin):
        draft.put("data.dates.to", last, end_origin, why="a single hour: nothing is left to measure on")
        return
    draft.put("data.dates.to", before, end_origin, why="the hour before, since the last is measured on")
    draft.put("data.eval", pattern, *origins)
    draft.put("data.eval_dates.from", last, end_origin)
    draft.put("data.eval_dates.to", last, end_origin, why="ElasticCTR measures on rows that it has learned")


def _hour(text: str, origin: Origin) -> str:
    for form in ("%Y%m%d/%H", "%Y%m%d"):
        try:
            if datetime.strptime(text, form).strftime(form) == text:
                return text
        except ValueError:
            continue
    raise wrong(origin, f"is {text[:20]!r}. Allowed: YYYYMMDD/HH or YYYYMMDD of the calendar.", "Correct it.")


def _before(text: str) -> str:
    """The hour before an hour, the day before a day."""
    form, step = ("%Y%m%d/%H", timedelta(hours=1)) if "/" in text else ("%Y%m%d", timedelta(days=1))
    return (datetime.strptime(text, form) - step).strftime(form)
