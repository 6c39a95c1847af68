"""ElasticDL: the flags of `elasticdl train`."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from clickline.importers.config_draft import Draft
from clickline.importers.source_files import Origin, all_files, slug, wrong

_COMMAND = "the command"

# Flag to our key, where the value stays as it is.
_SAME = {
    "minibatch_size": "train.batch_size",
    "namespace": "deploy.namespace",
    "image_pull_policy": "deploy.pull",
}
_STRATEGIES = {
    "ParameterServerStrategy": "cluster",
    "AllreduceStrategy": "cluster",
    "Local": "local",
}
_OWN_CODE = (
    "is Python of yours. The built-in networks need none; a network of your own is one file: model.file."
)
_BY_ITSELF = (
    "there is nothing to set: lost workers and shards come back by themselves, and no row counts twice."
)
_IMAGE = "holds ElasticDL and your code. deploy.image names an image of Clickline; docs/image.md builds it."
_MEASURED = "AUC, log loss and calibration are measured on data.eval at the end of each epoch."
_OUTPUT = "checkpoints and versions lie in home; publish.registry can be elsewhere."
_NONE = {
    "model_zoo": _OWN_CODE,
    "feed": "reads rows by Python of yours. data.fields says what a row holds.",
    "loss": "it is log loss.",
    "optimizer": "stands in Python of yours. train.learning_rate, train.embedding and train.wide have what it says.",
    "callbacks": "there are none. train.early_stop, train.schedule and gate do what they are used for.",
    "eval_metrics_fn": _MEASURED,
    "custom_data_reader": "a reader of your own is one file: data.reader.",
    "prediction_outputs_processor": "a client of the endpoint gets the scores: docs/serving.md.",
    "model_params": _OWN_CODE,
    "data_reader_params": "options of a reader stand in data; MaxCompute is not read: export the table as Parquet.",
    "num_minibatches_per_task": "there is nothing to set: a worker leases a unit of rows at a time, docs/cluster.md.",
    "grads_to_wait": "with train.sync all workers share each batch and step together.",
    "sync_version_tolerance": "with train.sync nothing is stale; without, train.staleness bounds it.",
    "get_model_steps": "dense weights are as fresh as train.sync and train.staleness say.",
    "evaluation_steps": _MEASURED,
    "log_loss_steps": "progress is shown once a second, and curves are kept with each run.",
    "max_step": "there is none: train.epochs says when it ends, train.early_stop sooner.",
    "checkpoint_dir": _OUTPUT,
    "checkpoint_dir_for_init": "checkpoints of ElasticDL cannot be read. train.warm_start takes one of ours.",
    "output": _OUTPUT,
    "task_fault_tolerance": _BY_ITSELF,
    "relaunch_timeout_worker": _BY_ITSELF,
    "relaunch_on_worker_failure": "see cluster.crashes, which counts failures at one place without progress.",
    "need_task_manager": _BY_ITSELF,
    "need_pod_manager": _BY_ITSELF,
    "need_tf_config": "there is no TensorFlow.",
    "job_command": "the commands of the pods are those of Clickline.",
    "image_name": _IMAGE,
    "worker_image": _IMAGE,
    "ps_resource_request": "shards live in the pods of the workers: deploy.resources.ray_worker.",
    "ps_resource_limit": "shards live in the pods of the workers: deploy.resources.ray_worker.",
    "master_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all pods of training.",
    "worker_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all pods of training.",
    "ps_pod_priority": "deploy.nodes.priority_class names one PriorityClass for all pods of training.",
    "restart_policy": "each kind of pod has the one that it needs.",
    "envs": "may hold secrets, so their values were not looked at. deploy.secrets.environment names Secrets whose keys "
    "become variables of the pods.",
    "populate_env_names": "the pods see nothing of your environment; deploy.secrets.environment names Secrets.",
    "cluster_spec": "there is none: `clickline deploy render` writes plain manifests to change as you like.",
    "aux_params": _BY_ITSELF,
    "log_level": "there are no levels to choose.",
    "log_file_path": "logs lie in home; in pods on stderr.",
    "yaml": "`clickline deploy render -o DIR` writes the manifests.",
}
_RESOURCES = {
    "master_resource_request": ("pipeline", ""),
    "master_resource_limit": ("pipeline", "_limit"),
    "worker_resource_request": ("ray_worker", ""),
    "worker_resource_limit": ("ray_worker", "_limit"),
}
_TOGETHER = (
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


def elasticdl(command: str) -> Draft:
    """The draft from `[elasticdl] train --flag value …`."""
    draft = Draft("the flags of `elasticdl train`")
    flags = _flags(command, draft)
    if "job_name" in flags:
        draft.put("name", slug(flags["job_name"].value), flags["job_name"].origin)
    else:
        draft.put("name", "ads", why="the model's name in requests")
    _rows(draft, flags)
    _network(draft, flags)
    _training(draft, flags)
    for name, (value, origin) in flags.items():
        if name in _SAME:
            draft.put(_SAME[name], value, origin)
        elif name in _NONE:
            draft.leave(origin, _NONE[name])
        elif name not in _TOGETHER:
            draft.leave(origin, "is not a flag that this import knows. Its value was not looked at.")
    _pods(draft, flags)
    draft.hint(
        "Sizes of layers and vectors stand in your model_def: set model.embedding_dim and model.hidden. ElasticDL has "
        "no gate; `gate: {auc: 0.6}` keeps what is worse from being published."
    )
    return draft


def _flags(command: str, draft: Draft) -> dict[str, _Flag]:
    place = Origin(_COMMAND, 0, "")
    words: list[tuple[str, int]] = []
    # A backslash before a line's end continues it; the line still counts, and its last word belongs to it.
    lines = command.replace("\r\n", "\n").replace("\\\n", "\n").replace("\n", " \n")
    lexer = shlex.shlex(lines, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        while (word := lexer.get_token()) is not None:
            words.append((word, lexer.lineno))
    except ValueError:
        found = "has a quote that is not closed."
        raise wrong(place, found, "Close it, and put the whole command in quotes.") from None
    several = "\n" in command.strip()
    if words and words[0][0] == "elasticdl":
        words = words[1:]
    verb = words[0][0] if words else ""
    if verb != "train":
        what = f"begins with {verb[:20]!r}" if verb and not verb.startswith("-") else "names no verb"
        raise wrong(place, f"{what}. Allowed: train.", 'Write "train --training_data=… --model_def=…".')
    found_flags: dict[str, _Flag] = {}
    rest = words[1:]
    while rest:
        (word, line), rest = rest[0], rest[1:]
        match = re.fullmatch(r"--?([A-Za-z]\w*)(?:=(.*))?", word, re.ASCII | re.DOTALL)
        here = place._replace(line=line if several else 0)
        if match is None:
            found = "has a word between its flags that belongs to none."
            raise wrong(here, found, "Write --flag=value, and quote values that hold spaces.")
        name, value = match.groups()
        if value is None and rest and not re.match(r"--?[A-Za-z]", rest[0][0]):
            (value, _), rest = rest[0], rest[1:]
        if name in found_flags:
            draft.leave(found_flags[name].origin, "is given again later, which counts.")
        found_flags[name] = _Flag(value or "", here._replace(key=f"--{name}"))
    return found_flags


def _rows(draft: Draft, flags: dict[str, _Flag]) -> None:
    if not flags.get("training_data", _Flag("", Origin("", 0, ""))).value:
        raise wrong(Origin(_COMMAND, 0, "--training_data"), "is missing or empty.", "Name the rows to learn.")
    train, origin = flags["training_data"]
    if train.endswith((".txt", ".tsv", ".csv")):
        draft.put(
            "data.format", "criteo", origin, why="text of 40 columns; for others format: csv and fields"
        )
    else:
        draft.put("data.format", "recordio", origin, why="records of tf.Example")
    for flag, key in (("training_data", "data.train"), ("validation_data", "data.eval")):
        if flags.get(flag, _Flag("", origin)).value:
            value, at = flags[flag]
            draft.put(key, value if re.search(r"\.\w+$", value) else all_files(value), at)
    if not train.endswith((".txt", ".tsv", ".csv")):
        why = "what ElasticDL's converter of the Criteo rows writes, numbers as log1p; correct it for records of yours"
        draft.put("data.fields", _DAC_FIELDS, why=why)


def _network(draft: Draft, flags: dict[str, _Flag]) -> None:
    if "model_def" not in flags:
        return
    value, origin = flags["model_def"]
    said = value.lower()
    for pattern, ours in (
        ("xdeepfm", "xdeepfm"),
        ("deepfm", "deepfm"),
        ("dcn|deep_?cross", "dcn_v2"),
        ("wdl|wide_?(and_?)?deep|wide_?n_?deep", "wide_deep"),
    ):
        if re.search(pattern, said):
            draft.put("model.name", ours, origin, why="by its name; your own Python would be model.file")
            return
    why = "it names no network that is built in; your own is one file of PyTorch: model.file"
    draft.put("model.name", "wide_deep", origin, why=why)


def _training(draft: Draft, flags: dict[str, _Flag]) -> None:
    if "distribution_strategy" in flags:
        value, origin = flags["distribution_strategy"]
        if value not in _STRATEGIES:
            found = f"is {value[:40]!r}. Allowed: {', '.join(_STRATEGIES)}."
            raise wrong(origin, found, "Correct it.")
        draft.put("train.mode", _STRATEGIES[value], origin)
    if "num_workers" in flags:
        number = _count(flags["num_workers"])
        why = "training begins as soon as one fits; train.workers.min can ask for more"
        draft.put("train.workers.max", number, flags["num_workers"].origin, why=why)
    if "num_ps_pods" in flags:
        number, origin = _count(flags["num_ps_pods"]), flags["num_ps_pods"].origin
        if number:
            draft.put("train.shards", number, origin)
        else:
            draft.leave(origin, "0 servers of parameters: on a cluster the rows live in train.shards.")
    if "use_async" in flags:
        draft.put("train.sync", not flags["use_async"].on, flags["use_async"].origin)
    if "lr_staleness_modulation" in flags:
        flag = flags["lr_staleness_modulation"]
        draft.put("train.staleness_rate", flag.on, flag.origin)
    for name, key, zero in (
        ("num_epochs", "train.epochs", "endless: `clickline up --follow` learns hours as they arrive."),
        (
            "checkpoint_steps",
            "train.checkpoint_steps",
            "none by steps: train.checkpoint_every has them by time.",
        ),
        (
            "keep_checkpoint_max",
            "train.keep_checkpoints",
            "all are kept: up to 1000 by train.keep_checkpoints.",
        ),
    ):
        if name in flags:
            number, origin = _count(flags[name], negative=name == "num_epochs"), flags[name].origin
            if number > 0:
                draft.put(key, number, origin)
            else:
                draft.leave(origin, zero)


def _count(flag: _Flag, *, negative: bool = False) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}" if negative else r"[0-9]{1,18}", flag.value, re.ASCII) is None:
        found = f"is {flag.value[:20]!r}. Allowed: a whole number{'' if negative else ' of at least 0'}."
        raise wrong(flag.origin, found, "Correct it.")
    return int(flag.value)


def _pods(draft: Draft, flags: dict[str, _Flag]) -> None:
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
                draft.leave(
                    origin._replace(key=f"{origin.key} {what}"), "is not asked for: docs/kubernetes.md."
                )
    for role in ("pipeline", "ray_worker"):
        asked = draft.entries.get(f"deploy.resources.{role}.memory")
        limit = f"deploy.resources.{role}.memory_limit"
        if asked is not None and limit not in draft.entries:
            draft.put(limit, asked.value, *asked.origins, why="as much as is asked for")
    if "volume" in flags:
        _volume(draft, flags)


def _pairs(flag: _Flag, text: str | None = None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in (flag.value if text is None else text).split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise wrong(flag.origin, "is not a list of name=value with commas between.", "Correct it.")
        pairs[name.strip()] = value.strip()
    return pairs


def _volume(draft: Draft, flags: dict[str, _Flag]) -> None:
    """The volume that holds the rows; others have no use here."""
    flag, train = flags["volume"], flags["training_data"].value
    taken = False
    for text in filter(None, (part.strip() for part in flag.value.split(";"))):
        volume = _pairs(flag, text)
        mount = volume.get("mount_path", "")
        if taken or not mount.startswith("/") or not train.startswith(mount.rstrip("/") + "/"):
            said = mount if mount.startswith("/") else "a path that is not absolute"
            why = f"the volume at {said} holds no training_data; models have one of their own: deploy.storage.models."
            draft.leave(flag.origin, why)
            continue
        taken = True
        if "claim_name" in volume:
            draft.put("deploy.storage.data.kind", "existing", flag.origin)
            draft.put("deploy.storage.data.claim", volume["claim_name"], flag.origin)
        elif "host_path" in volume:
            draft.put("deploy.storage.data.kind", "host", flag.origin)
            draft.put("deploy.storage.data.path", volume["host_path"], flag.origin)
        else:
            raise wrong(flag.origin, "names neither host_path nor claim_name.", "Give one of them.")
        draft.put("deploy.storage.data.mount", mount, flag.origin)
