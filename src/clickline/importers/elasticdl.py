"""Imports the flags of ElasticDL's `elasticdl train`."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from clickline.importers.config_draft import ConfigDraft
from clickline.importers.source_files import Origin, all_files, slug, source_error

_COMMAND = "the command"

# Flags whose value is used unchanged, and our key for each.
_DIRECT = {
    "minibatch_size": "train.batch_size",
    "namespace": "deploy.namespace",
    "image_pull_policy": "deploy.pull",
}
_STRATEGIES = {
    "ParameterServerStrategy": "cluster",
    "AllreduceStrategy": "cluster",
    "Local": "local",
}
_CUSTOM_CODE = (
    "is your own Python. The built-in networks need none; a custom network is one file: model.file."
)
_AUTOMATIC = (
    "nothing to set: lost workers and embedding servers are replaced automatically; no row counts twice."
)
_IMAGE = "contains ElasticDL and your code. deploy.image names a Clickline image; docs/image.md builds it."
_MEASURED = "AUC, log loss and calibration are measured on data.eval at the end of each epoch."
_OUTPUT = "checkpoints and versions are in home; publish.registry can be elsewhere."
_NO_COUNTERPART = {
    "model_zoo": _CUSTOM_CODE,
    "feed": "parses rows in your own Python. data.fields describes the columns.",
    "loss": "the loss is always log loss.",
    "optimizer": "is set in your own Python. Use train.learning_rate, train.embedding and train.wide.",
    "callbacks": "there are none. train.early_stopping, train.schedule and gate cover their usual purposes.",
    "eval_metrics_fn": _MEASURED,
    "custom_data_reader": "a custom reader is one file: data.reader.",
    "prediction_outputs_processor": "clients get the scores from the endpoint: docs/serving.md.",
    "model_params": _CUSTOM_CODE,
    "data_reader_params": "reader options are in data; MaxCompute is not supported: export the table as Parquet.",
    "num_minibatches_per_task": "nothing to set: a worker leases one work unit at a time, docs/cluster.md.",
    "grads_to_wait": "with train.sync all workers split each batch and step together.",
    "sync_version_tolerance": "with train.sync nothing is stale; without, train.max_staleness bounds it.",
    "get_model_steps": "dense weights are as fresh as train.sync and train.max_staleness say.",
    "evaluation_steps": _MEASURED,
    "log_loss_steps": "progress is shown once a second, and curves are saved with each run.",
    "max_step": "there is none: train.epochs limits training, and train.early_stopping sooner.",
    "checkpoint_dir": _OUTPUT,
    "checkpoint_dir_for_init": "ElasticDL checkpoints cannot be read. train.warm_start takes a Clickline checkpoint.",
    "output": _OUTPUT,
    "task_fault_tolerance": _AUTOMATIC,
    "relaunch_timeout_worker": _AUTOMATIC,
    "relaunch_on_worker_failure": "see cluster.max_failures, which counts failures at one place without progress.",
    "need_task_manager": _AUTOMATIC,
    "need_pod_manager": _AUTOMATIC,
    "need_tf_config": "TensorFlow is not used.",
    "job_command": "the pods run Clickline's own commands.",
    "image_name": _IMAGE,
    "worker_image": _IMAGE,
    "ps_resource_request": "shards live in the pods of the workers: deploy.resources.ray_worker.",
    "ps_resource_limit": "shards live in the pods of the workers: deploy.resources.ray_worker.",
    "master_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all training pods.",
    "worker_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all training pods.",
    "ps_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all training pods.",
    "restart_policy": "each kind of pod has the policy that it needs.",
    "envs": "may contain secrets, so their values were not read. deploy.secrets.environment names Secrets whose keys "
    "become environment variables of the pods.",
    "populate_env_names": "pods do not inherit your environment; deploy.secrets.environment names Secrets.",
    "cluster_spec": "there is none: `clickline deploy render` writes plain manifests that you can edit.",
    "aux_params": _AUTOMATIC,
    "log_level": "there are no log levels.",
    "log_file_path": "logs are in home; pods log to stderr.",
    "yaml": "`clickline deploy render -o DIR` writes the manifests.",
}
_RESOURCES = {
    "master_resource_request": ("pipeline", ""),
    "master_resource_limit": ("pipeline", "_limit"),
    "worker_resource_request": ("ray_worker", ""),
    "worker_resource_limit": ("ray_worker", "_limit"),
}
_HANDLED = (
    *(
        "training_data",
        "validation_data",
        "model_def",
        "job_name",
        "num_epochs",
        "checkpoint_steps",
        "volume",
    ),
    *("keep_checkpoint_max", "distribution_strategy", "use_async", "lr_staleness_modulation"),
    *("num_workers", "num_ps_pods", *_RESOURCES),
)
_DAC_FIELDS = {
    "label": "label",
    **{f"I{n}": "log1p" for n in range(1, 14)},
    **{f"C{n}": "slot" for n in range(1, 27)},
}


class _Flag(NamedTuple):
    value: str
    origin: Origin

    @property
    def on(self) -> bool:
        return self.value.lower() in ("", "true", "1", "yes")


def elasticdl(command: str) -> ConfigDraft:
    """A draft config from the command `[elasticdl] train --flag value …`."""
    draft = ConfigDraft("the flags of `elasticdl train`")
    flags = _flags(command, draft)
    if "job_name" in flags:
        draft.put("name", slug(flags["job_name"].value), flags["job_name"].origin)
    else:
        draft.put("name", "ads", why="the model name in requests")
    _data(draft, flags)
    _network(draft, flags)
    _training(draft, flags)
    for name, (value, origin) in flags.items():
        if name in _DIRECT:
            draft.put(_DIRECT[name], value, origin)
        elif name in _NO_COUNTERPART:
            draft.skip(origin, _NO_COUNTERPART[name])
        elif name not in _HANDLED:
            draft.skip(origin, "is a flag that the importer does not know. Its value was not read.")
    _pods(draft, flags)
    draft.hint(
        "Layer and embedding sizes are in your model_def: set model.embedding_dim and model.hidden. ElasticDL has no "
        "gate; `gate: {auc: 0.6}` keeps a worse model from being published."
    )
    return draft


def _flags(command: str, draft: ConfigDraft) -> dict[str, _Flag]:
    place = Origin(_COMMAND, 0, "")
    tokens: list[tuple[str, int]] = []
    # A backslash before a line's end continues it; it still counts as a line, and its last word belongs to it.
    lines = command.replace("\r\n", "\n").replace("\\\n", "\n").replace("\n", " \n")
    lexer = shlex.shlex(lines, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        while (token := lexer.get_token()) is not None:
            tokens.append((token, lexer.lineno))
    except ValueError:
        problem = "has an unclosed quote."
        raise source_error(place, problem, "Close it, and put the whole command in quotes.") from None
    several = "\n" in command.strip()
    if tokens and tokens[0][0] == "elasticdl":
        tokens = tokens[1:]
    subcommand = tokens[0][0] if tokens else ""
    if subcommand != "train":
        named = subcommand and not subcommand.startswith("-")
        problem = f"begins with {subcommand[:20]!r}" if named else "has no subcommand"
        raise source_error(
            place, f"{problem}. Allowed: train.", 'Write "train --training_data=… --model_def=…".'
        )
    flags: dict[str, _Flag] = {}
    rest = tokens[1:]
    while rest:
        (token, line), rest = rest[0], rest[1:]
        match = re.fullmatch(r"--?([A-Za-z]\w*)(?:=(.*))?", token, re.ASCII | re.DOTALL)
        here = place._replace(line=line if several else 0)
        if match is None:
            problem = "has a word between its flags that belongs to no flag."
            raise source_error(here, problem, "Write --flag=value, and quote values that contain spaces.")
        name, value = match.groups()
        if value is None and rest and not re.match(r"--?[A-Za-z]", rest[0][0]):
            (value, _), rest = rest[0], rest[1:]
        if name in flags:
            draft.skip(flags[name].origin, "is overridden by a later one.")
        flags[name] = _Flag(value or "", here._replace(key=f"--{name}"))
    return flags


def _data(draft: ConfigDraft, flags: dict[str, _Flag]) -> None:
    if not flags.get("training_data", _Flag("", Origin("", 0, ""))).value:
        raise source_error(
            Origin(_COMMAND, 0, "--training_data"), "is missing or empty.", "Name the training rows."
        )
    train, origin = flags["training_data"]
    if train.endswith((".txt", ".tsv", ".csv")):
        draft.put(
            "data.format",
            "criteo",
            origin,
            why="text with 40 columns; for other columns use format: csv and fields",
        )
    else:
        draft.put("data.format", "recordio", origin, why="records of tf.Example")
    for flag, key in (("training_data", "data.train"), ("validation_data", "data.eval")):
        if flags.get(flag, _Flag("", origin)).value:
            value, at = flags[flag]
            draft.put(key, value if re.search(r"\.\w+$", value) else all_files(value), at)
    if not train.endswith((".txt", ".tsv", ".csv")):
        why = "the columns that ElasticDL's Criteo converter writes, numbers as log1p; change them for other records"
        draft.put("data.fields", _DAC_FIELDS, why=why)


def _network(draft: ConfigDraft, flags: dict[str, _Flag]) -> None:
    if "model_def" not in flags:
        return
    value, origin = flags["model_def"]
    definition = value.lower()
    for pattern, ours in (
        ("xdeepfm", "xdeepfm"),
        ("deepfm", "deepfm"),
        ("dcn|deep_?cross", "dcn_v2"),
        ("wdl|wide_?(and_?)?deep|wide_?n_?deep", "wide_deep"),
    ):
        if re.search(pattern, definition):
            draft.put(
                "model.name", ours, origin, why="recognized by its name; your own Python would be model.file"
            )
            return
    why = "it names no built-in network; a custom one is one PyTorch file: model.file"
    draft.put("model.name", "wide_deep", origin, why=why)


def _training(draft: ConfigDraft, flags: dict[str, _Flag]) -> None:
    if "distribution_strategy" in flags:
        value, origin = flags["distribution_strategy"]
        if value not in _STRATEGIES:
            problem = f"is {value[:40]!r}. Allowed: {', '.join(_STRATEGIES)}."
            raise source_error(origin, problem, "Correct it.")
        draft.put("train.mode", _STRATEGIES[value], origin)
    if "num_workers" in flags:
        number = _count(flags["num_workers"])
        why = "training starts as soon as one worker is placed; train.workers.min can require more"
        draft.put("train.workers.max", number, flags["num_workers"].origin, why=why)
    if "num_ps_pods" in flags:
        number, origin = _count(flags["num_ps_pods"]), flags["num_ps_pods"].origin
        if number:
            draft.put("train.embedding_servers", number, origin)
        else:
            draft.skip(
                origin, "0 servers of parameters: on a cluster the rows live in train.embedding_servers."
            )
    if "use_async" in flags:
        draft.put("train.sync", not flags["use_async"].on, flags["use_async"].origin)
    if "lr_staleness_modulation" in flags:
        flag = flags["lr_staleness_modulation"]
        draft.put("train.scale_lr_by_staleness", flag.on, flag.origin)
    for name, key, zero in (
        ("num_epochs", "train.epochs", "endless: `clickline up --follow` trains on each hour as it arrives."),
        (
            "checkpoint_steps",
            "train.checkpoint_steps",
            "none by steps: train.checkpoint_every writes them by time.",
        ),
        (
            "keep_checkpoint_max",
            "train.keep_checkpoints",
            "keep all: train.keep_checkpoints keeps up to 1000.",
        ),
    ):
        if name in flags:
            number, origin = _count(flags[name], negative=name == "num_epochs"), flags[name].origin
            if number > 0:
                draft.put(key, number, origin)
            else:
                draft.skip(origin, zero)


def _count(flag: _Flag, *, negative: bool = False) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}" if negative else r"[0-9]{1,18}", flag.value, re.ASCII) is None:
        problem = f"is {flag.value[:20]!r}. Allowed: a whole number{'' if negative else ' of at least 0'}."
        raise source_error(flag.origin, problem, "Correct it.")
    return int(flag.value)


def _pods(draft: ConfigDraft, flags: dict[str, _Flag]) -> None:
    for name, (role, suffix) in _RESOURCES.items():
        if name not in flags:
            continue
        origin = flags[name].origin
        for what, amount in _pairs(flags[name]).items():
            if what in ("cpu", "memory"):
                draft.put(f"deploy.resources.{role}.{what}{suffix}", amount, origin)
            elif what == "gpu" and not suffix:
                draft.put(f"deploy.resources.{role}.gpu", amount, origin)
            else:
                draft.skip(
                    origin._replace(key=f"{origin.key} {what}"), "is not requested: docs/kubernetes.md."
                )
    for role in ("pipeline", "ray_worker"):
        requested = draft.entries.get(f"deploy.resources.{role}.memory")
        limit = f"deploy.resources.{role}.memory_limit"
        if requested is not None and limit not in draft.entries:
            draft.put(limit, requested.value, *requested.origins, why="the same as the request")
    if "volume" in flags:
        _volume(draft, flags)


def _pairs(flag: _Flag, text: str | None = None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in (flag.value if text is None else text).split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise source_error(flag.origin, "is not a comma-separated list of name=value.", "Correct it.")
        pairs[name.strip()] = value.strip()
    return pairs


def _volume(draft: ConfigDraft, flags: dict[str, _Flag]) -> None:
    """Import the volume that contains the rows; other volumes are not used."""
    flag, train = flags["volume"], flags["training_data"].value
    taken = False
    for text in filter(None, (part.strip() for part in flag.value.split(";"))):
        volume = _pairs(flag, text)
        mount = volume.get("mount_path", "")
        if taken or not mount.startswith("/") or not train.startswith(mount.rstrip("/") + "/"):
            where = mount if mount.startswith("/") else "a path that is not absolute"
            why = f"the volume at {where} does not contain training_data; models have their own: deploy.storage.models."
            draft.skip(flag.origin, why)
            continue
        taken = True
        if "claim_name" in volume:
            draft.put("deploy.storage.data.kind", "existing", flag.origin)
            draft.put("deploy.storage.data.claim", volume["claim_name"], flag.origin)
        elif "host_path" in volume:
            draft.put("deploy.storage.data.kind", "host", flag.origin)
            draft.put("deploy.storage.data.path", volume["host_path"], flag.origin)
        else:
            raise source_error(flag.origin, "has neither host_path nor claim_name.", "Set one of them.")
        draft.put("deploy.storage.data.mount", mount, flag.origin)
