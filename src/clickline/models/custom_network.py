"""A user's custom network: a Python file with `forward(spec)` and optional functions for other parts of training.

    forward(spec) -> nn.Module        required; spec is a NetworkSpec, the module maps (inputs_BI, wide_B) to
                                      logit_B and must be exportable to ONNX, because serving runs no user code
    loss(labels, logits) -> Tensor    of shape (rows,), to which row weights are applied; or a scalar, to which
                                      they are not
    optimizer(params) -> Optimizer    for the network's weights; the tables have their own
    metrics() -> dict                 name to function(labels, probabilities, weights) -> float, NumPy arrays,
                                      called once over the whole evaluation set
    feed(batch) -> batch              changes a batch of LabelledRows before it is trained on; in training only, so
                                      that evaluation matches serving. It must keep the number of rows (weight 0
                                      excludes a row), the slots and the dense fields, and depend only on the
                                      batch: a resumed run passes batches again.

All functions are called with a dummy batch when the file is loaded, so mistakes are reported before any data is read.
Names that begin with `_`, classes and imported names are ignored.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clickline.errors import ConfigError, Mistake
from clickline.models.layers import seeded
from clickline.models.network_spec import NetworkSpec
from clickline.models.onnx_export import dummy_batch
from clickline.plugins import accepts_arguments, error_line, execute, parse, public_functions, type_name
from clickline.records import EncodedRows, LabelledRows, SlotIds

Floats = NDArray[np.float32]
Metric = Callable[[Floats, Floats, Floats], float]  # labels, probabilities, weights

_SIGNATURES = {
    "forward": ("spec",),
    "loss": ("labels", "logits"),
    "optimizer": ("params",),
    "metrics": (),
    "feed": ("batch",),
}
_LOSS_REMEDY = "Return one number per row or one scalar, computed from the logits."
_ROWS = 8


class LossFunction(Protocol):
    """The loss of a batch as one number; without weights all rows count equally."""

    def __call__(self, labels_B: Tensor, logits_B: Tensor, weights_B: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class CustomModel:
    """What a user's file defines; None for functions that it leaves out."""

    network: nn.Module
    uses_wide: bool  # whether the logit depends on the wide weights
    loss: LossFunction | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    feed: Callable[[LabelledRows], LabelledRows] | None = None


def load_custom_model(path: Path, spec: NetworkSpec, seed: int, *, multi: Sequence[bool] = ()) -> CustomModel:
    """Load and try out the model of a file. Raises a ConfigError with the lines that are wrong.

    `multi` marks the slots with several ids per row, so that `feed` is tried with such slots.
    """
    with redirect_stdout(sys.stderr):  # stdout belongs to the command: with --json it is one document
        return _load(_ModelFile(path), spec, seed, multi)


def _load(file: _ModelFile, spec: NetworkSpec, seed: int, multi: Sequence[bool]) -> CustomModel:
    with seeded(seed):
        network = file.call("forward", spec)
    with seeded(seed):
        trial = file.call("forward", spec)  # a second one, so that the trial does not change the first
    with seeded(seed):
        logits_B, uses_wide = _try_network(file, trial, spec)
        mistakes: list[Mistake] = []
        metrics: dict[str, Metric] = {}
        trials: tuple[Callable[[], None], ...] = (
            lambda: _try_loss(file, logits_B),
            lambda: _try_optimizer(file, trial, logits_B),
            lambda: metrics.update(_try_metrics(file)),
            lambda: _try_feed(file, spec, multi),
        )
        for attempt in trials:
            try:
                attempt()
            except ConfigError as error:
                mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return CustomModel(
        network,
        uses_wide,
        loss=partial(_loss, file) if "loss" in file.functions else None,
        optimizer=file.function("optimizer"),
        metrics=metrics,
        feed=partial(_feed, file) if "feed" in file.functions else None,
    )


class _ModelFile:
    """The executed file with its functions; builds errors with line numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tree = parse(path, "Check model.file.")
        self._lines = _definition_lines(tree)
        try:
            module = execute(path, tree, "clickline_model_")
        except (Exception, SystemExit) as error:
            raise self.raised("", error) from error
        self.functions = self._find(module)

    def _find(self, module: ModuleType) -> dict[str, Callable[..., Any]]:
        mistakes: list[Mistake] = []
        for name in public_functions(module):
            if name not in _SIGNATURES:
                problem = f"is not one of {', '.join(_SIGNATURES)}."
                mistakes.append(
                    self._mistake(name, problem, f"Begin the names of helpers with _: _{name}().")
                )
        for name, arguments in _SIGNATURES.items():
            value = vars(module).get(name)
            signature = f"Write `def {name}({', '.join(arguments)}):`."
            if value is None:
                if name == "forward":
                    mistakes.append(self._mistake(name, "is missing.", signature))
            elif not callable(value):
                mistakes.append(self._mistake(name, "is not a function.", signature))
            elif not accepts_arguments(value, len(arguments)):
                problem = f"has the arguments {inspect.signature(value)}."
                mistakes.append(self._mistake(name, problem, signature))
        if mistakes:
            raise ConfigError(mistakes)
        return {name: vars(module)[name] for name in _SIGNATURES if vars(module).get(name) is not None}

    def call(self, name: str, *arguments: object) -> Any:
        try:
            return self.functions[name](*arguments)
        except (Exception, SystemExit) as error:
            raise self.raised(name, error) from error

    def function(self, name: str) -> Callable[..., Any] | None:
        """The file's function; an exception inside becomes a ConfigError with its line."""
        return (lambda *arguments: self.call(name, *arguments)) if name in self.functions else None

    def line(self, name: str) -> int:
        return self._lines.get(name, 0)

    def raised(self, name: str, error: BaseException, what: str = "") -> ConfigError:
        problem = f"{what}raised {type(error).__name__}: {str(error).strip() or 'no message'}"
        return self.error(name, problem, "", error_line(self.path, error))

    def error(self, name: str, problem: str, remedy: str, line: int = 0) -> ConfigError:
        return ConfigError([self._mistake(name, problem, remedy, line)])

    def _mistake(self, name: str, problem: str, remedy: str, line: int = 0) -> Mistake:
        """`line`: by default that of the definition."""
        return Mistake(str(self.path), line or self.line(name), f"{name}()" if name else "", problem, remedy)


def _definition_lines(tree: ast.Module) -> dict[str, int]:
    """The line where each top-level name is defined."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines[node.name] = node.lineno
        elif isinstance(node, ast.Assign):
            lines |= {target.id: node.lineno for target in node.targets if isinstance(target, ast.Name)}
    return lines


def _try_network(file: _ModelFile, network: object, spec: NetworkSpec) -> tuple[Tensor, bool]:
    """The logits of a dummy batch, and whether they depend on the wide weights."""
    if not isinstance(network, nn.Module):
        problem = f"returned {type_name(network)}."
        raise file.error("forward", problem, "Return a torch.nn.Module.")
    if not any(weight.requires_grad for weight in network.parameters()):
        problem = f"returned a {type(network).__name__} without trainable weights."
        raise file.error("forward", problem, "Add some, if only a bias.")
    forward = type(network).forward
    line = file.line("forward")
    if inspect.isfunction(forward) and forward.__code__.co_filename == str(file.path):
        line = forward.__code__.co_firstlineno
    name = f"{type(network).__name__}.forward"
    inputs_BI, wide_B = (tensor.requires_grad_() for tensor in dummy_batch(spec, _ROWS))
    try:
        logits_B = network(inputs_BI, wide_B)
    except (Exception, SystemExit) as error:
        raised = file.raised(name, error).mistakes[0]
        remedy = f"It is called with inputs of shape ({_ROWS}, {spec.width}) and wide of shape ({_ROWS},)."
        raise file.error(name, raised.problem + ".", remedy, raised.line or line) from error
    remedy = "Return one logit per row, a float tensor of shape (rows,)."
    if not isinstance(logits_B, Tensor):
        raise file.error(name, f"returned {type_name(logits_B)}.", remedy, line)
    if tuple(logits_B.shape) != (_ROWS,) or not logits_B.is_floating_point():
        dtype = str(logits_B.dtype).removeprefix("torch.")
        problem = f"returned {dtype} of shape {tuple(logits_B.shape)} for {_ROWS} rows."
        raise file.error(name, problem, remedy, line)
    if not logits_B.requires_grad:
        problem = "returned logits that depend on no weight and no input."
        raise file.error(name, problem, "Remove detach() and no_grad().", line)
    _, wide_grad = torch.autograd.grad(
        logits_B.sum(), (inputs_BI, wide_B), retain_graph=True, allow_unused=True
    )
    return logits_B, wide_grad is not None


def _try_loss(file: _ModelFile, logits_B: Tensor) -> None:
    if "loss" not in file.functions:
        return
    loss = _loss(file, (torch.arange(_ROWS) % 2).float(), logits_B)
    if not loss.requires_grad:
        raise file.error("loss", "returned a number without a gradient.", _LOSS_REMEDY)
    if not torch.isfinite(loss):
        problem = f"returned {loss.item()} for a batch of random logits."
        raise file.error("loss", problem, _LOSS_REMEDY)


def _loss(file: _ModelFile, labels_B: Tensor, logits_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """The user's scalar loss, or the weighted mean of the user's losses per row."""
    loss = file.call("loss", labels_B, logits_B)
    if not isinstance(loss, Tensor):
        raise file.error("loss", f"returned {type_name(loss)}.", _LOSS_REMEDY)
    if loss.shape == ():
        return loss
    if loss.shape != logits_B.shape:
        problem = f"returned a tensor of shape {tuple(loss.shape)} for {len(logits_B)} rows."
        raise file.error("loss", problem, _LOSS_REMEDY)
    if weights_B is None:
        return loss.mean()
    total = weights_B.sum()
    return (loss * weights_B).sum() / torch.where(total > 0, total, 1.0)


def _try_optimizer(file: _ModelFile, network: nn.Module, logits_B: Tensor) -> None:
    if "optimizer" not in file.functions:
        return
    optimizer = file.call("optimizer", list(network.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"returned {type_name(optimizer)}."
        raise file.error("optimizer", problem, "Return a torch.optim.Optimizer.")
    torch.autograd.backward(logits_B.sum(), retain_graph=True)
    try:
        optimizer.step()
    except (Exception, SystemExit) as error:
        raise file.raised("optimizer", error) from error


def _try_metrics(file: _ModelFile) -> dict[str, Metric]:
    if "metrics" not in file.functions:
        return {}
    remedy = "Return {name: function(labels, probabilities, weights) -> float}."
    functions = file.call("metrics")
    if not isinstance(functions, dict):
        raise file.error("metrics", f"returned {type_name(functions)}.", remedy)
    for name, function in functions.items():
        if not isinstance(name, str) or not callable(function):
            raise file.error("metrics", f"has {name!r}: {type_name(function)}.", remedy)
    metrics = {name: _metric(file, name, function) for name, function in functions.items()}
    generator = np.random.default_rng(0)
    labels_N = (np.arange(64) % 2).astype(np.float32)
    for metric in metrics.values():
        metric(labels_N, generator.random(64, dtype=np.float32), np.ones(64, dtype=np.float32))
    return metrics


def _metric(file: _ModelFile, name: str, function: Callable[..., Any]) -> Metric:
    def metric(labels_N: Floats, probabilities_N: Floats, weights_N: Floats) -> float:
        try:
            return float(function(labels_N, probabilities_N, weights_N))
        except (Exception, SystemExit) as error:
            raise file.raised("metrics", error, f"{name!r} ") from error

    return metric


def _try_feed(file: _ModelFile, spec: NetworkSpec, multi: Sequence[bool]) -> None:
    if "feed" in file.functions:
        _feed(file, _dummy_rows(spec, multi))


def _feed(file: _ModelFile, batch: LabelledRows) -> LabelledRows:
    """Call the user's feed on a batch, and reject a result that does not match it."""
    fed = file.call("feed", batch)
    problem = _mismatch(batch, fed)
    if problem:
        remedy = "Return LabelledRows with the same rows, slots and dense fields."
        raise file.error("feed", problem, remedy)
    assert isinstance(fed, LabelledRows)
    return fed


def _mismatch(batch: LabelledRows, fed: object) -> str:
    """Why `fed` cannot replace `batch`; empty if it can."""
    if not isinstance(fed, LabelledRows):
        return f"returned {type_name(fed)}."
    if type(fed.encoded) is not EncodedRows:
        return f"returned {type_name(fed.encoded)} as encoded."
    for name in ("label_B", "weight_B", "impression_B", "click_B", "event_hour_B"):
        problem = _array_mismatch(name, getattr(batch, name), getattr(fed, name))
        if problem:
            return problem
    if fed.rows != batch.rows:
        return f"returned {fed.rows} rows for {batch.rows}."
    if len(fed.encoded.slots) != len(batch.encoded.slots):
        return f"returned {len(fed.encoded.slots)} slots for {len(batch.encoded.slots)}."
    for at, slot in enumerate(fed.encoded.slots):
        if not _is_valid_slot(slot, batch.rows):
            return f"returned slot {at} without a uint64 id per row, or int64 offsets that match its ids."
    return _array_mismatch("dense_DB", batch.encoded.dense_DB, fed.encoded.dense_DB)


def _array_mismatch(name: str, before: NDArray[Any], after: object) -> str:
    if not isinstance(after, np.ndarray):
        return f"returned {type_name(after)} as {name}."
    if before.shape == after.shape and before.dtype == after.dtype:
        return ""
    return f"returned {name} as {after.dtype}{list(after.shape)}, it was {before.dtype}{list(before.shape)}."


def _is_valid_slot(slot: object, rows: int) -> bool:
    if (
        not isinstance(slot, SlotIds)
        or not isinstance(slot.ids_N, np.ndarray)
        or slot.ids_N.dtype != np.uint64
    ):
        return False
    offsets_B1 = slot.offsets_B1
    if offsets_B1 is None:
        return slot.ids_N.shape == (rows,)
    return bool(
        isinstance(offsets_B1, np.ndarray)
        and offsets_B1.dtype == np.int64
        and offsets_B1.shape == (rows + 1,)
        and offsets_B1[0] == 0
        and offsets_B1[-1] == len(slot.ids_N)
        and (np.diff(offsets_B1) >= 0).all()
    )


def _dummy_rows(spec: NetworkSpec, multi: Sequence[bool]) -> LabelledRows:
    """A batch like those of a dataset; slots marked in `multi` have 0, 1, 2, 0, 1, 2, … ids per row."""
    generator = np.random.default_rng(0)
    offsets_B1 = np.concatenate([[0], np.cumsum(np.arange(_ROWS) % 3)]).astype(np.int64)
    slots: list[SlotIds] = []
    for at in range(len(spec.dims)):
        is_multi = at < len(multi) and multi[at]
        count = int(offsets_B1[-1]) if is_multi else _ROWS
        ids_N = generator.integers(0, 2**64, count, dtype=np.uint64)
        slots.append(SlotIds(ids_N, offsets_B1 if is_multi else None))
    clicks_B = (np.arange(_ROWS) % 2).astype(np.uint32)
    return LabelledRows(
        clicks_B.astype(np.float32),
        np.ones(_ROWS, dtype=np.float32),
        np.ones(_ROWS, dtype=np.uint32),
        clicks_B,
        np.arange(_ROWS, dtype=np.int32) + 480_000,
        EncodedRows(_ROWS, generator.random((spec.dense, _ROWS), dtype=np.float32), tuple(slots)),
    )
