"""Imports the `config.yaml` of a PaddleRec model, with `runner` and `hyper_parameters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from clickline.config.yaml_tree import Node, parse
from clickline.errors import ConfigError, Mistake
from clickline.importers.config_draft import ConfigDraft
from clickline.importers.source_files import Origin, all_files, read_source, relative, source_error

_NETWORKS = {
    "logistic_regression": "lr",
    **{n: n for n in ("fm", "wide_deep", "deepfm", "dcn_v2", "xdeepfm", "autoint", "dlrm", "finalmlp")},
    "dcn": "dcn_v2",
}

_MULTI_TASK = ("esmm", "escm2")  # the models whose rows are slots; those of the others are csv
_SPLIT_INTERVAL = 5  # minutes, PaddleRec's default

# PaddleRec keys whose value is used unchanged, and our key for each.
_DIRECT = {
    "runner.train_batch_size": "train.batch_size",
    "runner.epochs": "train.epochs",
    "runner.seed": "train.seed",
    "runner.data_donefile": "data.donefile",
    "runner.data_sleep_second": "follow.poll_interval",
    "hyper_parameters.sparse_feature_dim": "model.embedding_dim",
    "hyper_parameters.fc_sizes": "model.hidden",
    "hyper_parameters.reg": "train.embedding.l2",
}
# The same by the last part of a key below table_parameters.
_DIRECT_IN_ACCESSOR = {
    "embedx_threshold": "train.admission.min_impressions",
    "show_click_decay_rate": "train.eviction.decay",
    "delete_threshold": "train.eviction.threshold",
    "click_coeff": "train.eviction.click_weight",
    "nonclk_coeff": "train.eviction.nonclick_weight",
}
_EVALUATE = "`clickline evaluate` evaluates any checkpoint or version; its batch size is automatic."
_EXPORTED = "every version contains what a server needs, verified before it is published: docs/versions.md."
_HARDWARE = "training runs on CPUs, on several machines with train.mode: cluster."
_STREAM = "`clickline up --follow` evaluates each hour before it trains on it: docs/continuous.md."
_NO_COUNTERPART = {
    "runner.train_reader_path": "data.format chooses the built-in reader; for other formats write a reader and name "
    "it in data.reader: docs/data.md.",
    "runner.infer_reader_path": "training and evaluation use the same fields; docs/data.md.",
    "runner.reader_type": "each format has one reader, which streams on all cores.",
    "runner.num_workers": "prepare uses all cores automatically.",
    "runner.thread_num": "all cores are used.",
    "runner.model_save_path": "datasets, checkpoints and versions are in home.",
    "runner.model_init_path": "Paddle weights cannot be read. train.warm_start takes a Clickline checkpoint.",
    "runner.infer_batch_size": _EVALUATE,
    "runner.infer_load_path": _EVALUATE,
    "runner.infer_start_epoch": _EVALUATE,
    "runner.infer_end_epoch": _EVALUATE,
    "runner.use_gpu": _HARDWARE,
    "runner.use_xpu": _HARDWARE,
    "runner.use_npu": _HARDWARE,
    "runner.print_interval": "progress is shown once a second; `clickline logs` shows it later.",
    "runner.use_auc": "AUC, log loss and calibration are always measured.",
    "runner.use_visual": "`clickline studio` and each run's report show the curves, `tracking` sends them to MLflow.",
    "runner.use_inference": _EXPORTED,
    "runner.save_inference_feed_varnames": _EXPORTED,
    "runner.save_inference_fetch_varnames": _EXPORTED,
    "runner.split_per_pass": _STREAM,
    "runner.checkpoint_per_pass": _STREAM,
    "runner.save_delta_frequency": "each hour is published as a delta; publish.max_deltas says when a base is due.",
    "hyper_parameters.sparse_inputs_slots": "slots are discovered in the data; data.slot_conf selects among them.",
    "hyper_parameters.sparse_feature_number": "tables grow as needed. Ids hashed by your own reader stay the same; "
    "raw text becomes 64-bit ids, which do not collide.",
    "hyper_parameters.dense_input_dim": "dense fields are discovered in the data.",
    "hyper_parameters.distributed_embedding": "train.mode: cluster puts the table into train.embedding_servers.",
}
_ACCESSOR = (
    "none: train.admission and train.eviction decide when ids are added and removed; docs/training.md."
)


class _Value(NamedTuple):
    value: Any
    origin: Origin


def paddlerec(config: Path, folder: Path) -> ConfigDraft:
    """A draft config, to be saved in `folder`, from a model's config."""
    draft = ConfigDraft(f"PaddleRec's {config}")
    given = _flat(config)
    _network(draft, config)
    _layout(draft, config)
    _data(draft, given, config, folder)
    for name, (value, origin) in given.items():
        if name in _DIRECT:
            draft.put(_DIRECT[name], value, origin)
        elif name in _NO_COUNTERPART:
            draft.skip(origin, _NO_COUNTERPART[name])
        elif name.startswith("table_parameters."):
            _accessor(draft, name, value, origin)
        elif name not in _HANDLED:
            draft.skip(origin, "is a key that the importer does not know. Its value was not read.")
    _optimizer(draft, given)
    draft.hint(
        "PaddleRec's learning rates are constant; for the same, set `train: {schedule: {kind: constant}, embedding: "
        "{schedule: {kind: constant}}}`. It has no gate; `gate: {auc: 0.6}` keeps a worse model from being published."
    )
    return draft


# Keys that are handled together, below.
_HANDLED = (
    "runner.train_data_dir",
    "runner.test_data_dir",
    "runner.start_day",
    "runner.end_day",
    "runner.split_interval",
    "runner.use_fleet",
    "runner.sync_mode",
    "hyper_parameters.optimizer.class",
    "hyper_parameters.optimizer.learning_rate",
    "hyper_parameters.optimizer.strategy",
)


def _flat(path: Path) -> dict[str, _Value]:
    """All values by their dotted keys. A ${ in the file is not expanded."""
    mistakes: list[Mistake] = []
    root = parse(read_source(path).replace("${", "$${"), str(path), mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    place = Origin(str(path), root.line, "")
    if not isinstance(root.value, dict) or "runner" not in root.value:
        problem = "has no section `runner:`. Allowed: the config of a PaddleRec model."
        raise source_error(place, problem, "Name models/…/config.yaml.")
    values: dict[str, _Value] = {}

    def walk(node: Node, name: str) -> None:
        if isinstance(node.value, dict):
            for key, below in node.value.items():
                walk(below, f"{name}.{key}" if name else key)
        else:
            values[name] = _Value(node.to_python(typed=True), Origin(str(path), node.line, name))

    for group in ("runner", "hyper_parameters"):
        node = root.value.get(group)
        if node is not None and not isinstance(node.value, dict):
            raise source_error(
                Origin(str(path), node.line, group), "is not a mapping.", "Indent its keys below it."
            )
    walk(root, "")
    return values


def _network(draft: ConfigDraft, config: Path) -> None:
    draft.put("name", "ads", why="the model name in requests")
    folder = config.absolute().parent.name
    known = _NETWORKS.get(folder)
    if known:
        draft.put("model.name", known, Origin(str(config), 0, "(its folder)"))
    else:
        networks = "lr, fm, deepfm, dcn_v2, xdeepfm, autoint, dlrm, finalmlp, masknet"
        draft.put("model.name", "wide_deep", why=f"the file does not name its network; others: {networks}")


def _data(draft: ConfigDraft, given: dict[str, _Value], config: Path, folder: Path) -> None:
    for name, key in (("runner.train_data_dir", "data.train"), ("runner.test_data_dir", "data.eval")):
        if name not in given:
            if key == "data.train":
                raise source_error(
                    Origin(str(config), 0, name), "is missing.", "Give the folder of the rows."
                )
            continue
        value, origin = given[name]
        if not isinstance(value, str) or not value:
            raise source_error(origin, "is not a folder.", "Give the folder of the rows.")
        place = relative(value, config.parent, folder)
        if key == "data.train" and "runner.start_day" in given:
            _passes(draft, given, place, origin)
        else:
            draft.put(key, all_files(place), origin)
    for name, key in (("runner.start_day", "data.dates.from"), ("runner.end_day", "data.dates.to")):
        if name in given:
            value, origin = given[name]
            draft.put(key, str(value), origin)


def _passes(draft: ConfigDraft, given: dict[str, _Value], place: str, origin: Origin) -> None:
    """The folders YYYYMMDD/HHMM of the online trainer, one per `split_interval` minutes."""
    interval = given.get("runner.split_interval") or _Value(_SPLIT_INTERVAL, origin)
    minutes, split = interval.value, interval.origin
    if not isinstance(minutes, int) or not 1 <= minutes <= 60 or 60 % minutes:
        problem = f"is {minutes}. Allowed: a number of minutes that divides an hour, since models learn hour by hour."
        raise source_error(split, problem, "Merge the folders into hours, and set it to 60.")
    folders = [f"{place}/{{date}}/{{hour}}{minute:02}" for minute in range(0, 60, minutes)]
    draft.put(
        "data.train",
        [all_files(one) for one in folders],
        origin,
        split,
        why="an hour is complete when all are",
    )


def _layout(draft: ConfigDraft, config: Path) -> None:
    """The layout of the rows, which the folder of the model decides."""
    model = config.absolute().parent.name
    place = Origin(str(config), 0, "(its folder)")
    if model == "slot_dnn":
        draft.put("data.format", "slots", place, why="label:1 feasign:slot …")
        return
    if model in _MULTI_TASK:
        draft.put("data.format", "paddlerec", place, why="sample,click,conversion,slot:feature,…")
        draft.put("data.columns", ["sample", "click", "conversion"], place)
        slots = ("109_14", "110_14", "127_14", "150_14")
        why = "slots without a plain number must be named; click is the label, others are found in the data"
        draft.put("data.fields", dict.fromkeys(slots, "slot"), place, why=why)
        draft.hint(
            "One model learns one task. For conversions after a click, train a second model with `data: {fields: "
            "{conversion: label, click: weight}}` besides these slots: rows without a click then have weight 0."
        )
        return
    draft.put("data.format", "paddlerec", why="click:0 dense_feature:v … slot:id …")
    why = "PaddleRec's numbers are scaled but not clipped, and reach hundreds; `none` uses them unchanged"
    draft.put("data.fields", {"dense_*": "log1p"}, why=why)


def _optimizer(draft: ConfigDraft, given: dict[str, _Value]) -> None:
    fleet = given.get("runner.use_fleet")
    strategy = given.get("runner.sync_mode") or given.get("hyper_parameters.optimizer.strategy")
    if fleet is not None:
        draft.put("train.mode", "cluster" if fleet.value is True else "local", fleet.origin)
    if strategy is not None and fleet is not None and fleet.value is True:
        why = "" if strategy.value in ("sync", "async") else f"{strategy.value} is closest to async"
        draft.put("train.sync", strategy.value == "sync", strategy.origin, why=why)
    elif strategy is not None:
        draft.skip(strategy.origin, "has no effect on one machine; on a cluster it is train.sync.")
    rate = given.get("hyper_parameters.optimizer.learning_rate")
    if rate is not None:
        draft.put("train.learning_rate", rate.value, rate.origin)
        draft.put("train.embedding.learning_rate", rate.value, rate.origin)
    kind = given.get("hyper_parameters.optimizer.class")
    if kind is not None:
        why = "the dense part " + ("uses" if kind.value == "Adam" else "always uses") + " Adam"
        draft.put("train.embedding.optimizer", str(kind.value).lower(), kind.origin, why=why)


def _accessor(draft: ConfigDraft, name: str, value: Any, origin: Origin) -> None:
    last = name.rpartition(".")[2]
    if last in _DIRECT_IN_ACCESSOR:
        draft.put(_DIRECT_IN_ACCESSOR[last], value, origin)
    elif last == "delete_after_unseen_days" and isinstance(value, int):
        draft.put("train.eviction.max_idle_hours", value * 24, origin, why=f"{value} days")
    else:
        draft.skip(origin, _ACCESSOR)
