"""A network as ONNX, which serving runs without any of the user's code.

The exporter built on `torch.export` is used: it takes a second or two, and it refuses what it cannot follow
(a branch on the batch's values, say) where the older tracer would silently keep one of the two ways.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from clickline.errors import ConfigError, Mistake
from clickline.models.network_spec import NetworkSpec

OPSET = 20
TOLERANCE = 1e-5
CHECKED_ROWS = (1, 7)


def export_onnx(network: nn.Module, spec: NetworkSpec, *, folded: bool = False) -> bytes:
    """ONNX with inputs `inputs` [rows, width] and `wide` [rows] and the output `logit` [rows].

    Batch norm and dropout are as in serving, whatever mode the network is in. Weights keep their names, so that
    `with_weights` can replace them; ONNX Runtime simplifies the graph when it loads it. `folded` does so here, for
    who works on the graph.
    """
    rows = torch.export.Dim("rows")
    with _serving(network), _quiet():
        try:
            program = torch.export.export(
                network, dummy_batch(spec, 3), dynamic_shapes=({0: rows}, {0: rows})
            )
            onnx = torch.onnx.export(
                program,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                input_names=["inputs", "wide"],
                output_names=["logit"],
                optimize=folded,
            )
        except Exception as error:
            raise _cannot_export(network, error) from error
    assert onnx is not None
    model = onnx.model_proto
    del model.graph.value_info[:]  # shapes in the exporter's own symbols; the runtime infers them again
    _forget_origin(model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "rows"
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def with_weights(content: bytes, network: nn.Module) -> bytes | None:
    """An earlier ONNX of the same network with its weights as they are now, in a tenth of the time of an export.
    None where it is not of this network, or was folded."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(content)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    # Batch norm counts its batches while it learns; no graph needs that.
    kept = [name for name in weights if not name.endswith("num_batches_tracked")]
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    if any(name not in found or tuple(found[name].dims) != weights[name].shape for name in kept):
        return None
    for name in kept:
        found[name].CopyFrom(numpy_helper.from_array(weights[name], name))
    changed: bytes = model.SerializeToString(deterministic=True)
    return changed


def check_export(network: nn.Module, spec: NetworkSpec) -> None:
    """Refuses a network that cannot be exported, or whose ONNX gives other logits than PyTorch."""
    import onnxruntime  # type: ignore[import-untyped]

    content = export_onnx(network, spec)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        for rows in CHECKED_ROWS:
            inputs_BI, wide_B = dummy_batch(spec, rows)
            feeds = {"inputs": inputs_BI.numpy(), "wide": wide_B.numpy()}
            found_B = torch.from_numpy(session.run(["logit"], feeds)[0])
            with _serving(network):
                wanted_B = network(inputs_BI, wide_B)
            if found_B.shape != wanted_B.shape or not torch.allclose(
                found_B, wanted_B, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
            ):
                problem = f"gives other logits in ONNX than in PyTorch for a batch of {rows} rows."
                raise _mistake(network, 0, problem, "Leave out what is random or depends on other rows.")
    except ConfigError:
        raise
    except Exception as error:
        problem = f"is refused by ONNX Runtime: {_first_line(error)}"
        raise _mistake(network, 0, problem, "Use another operator.") from error


def dummy_batch(spec: NetworkSpec, rows: int) -> tuple[Tensor, Tensor]:
    """Random inputs and wide sums, always the same."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, spec.width, generator=generator), torch.randn(rows, generator=generator)


@contextmanager
def _serving(network: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks on all channels about things no user can change."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))  # each of torch's loggers has a handler of its own
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _forget_origin(message: Any) -> None:
    """Takes out stack traces and other notes, which name files of the machine that exported."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                _forget_origin(part)


def _cannot_export(network: nn.Module, error: Exception) -> ConfigError:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    line, operator = _at_fault(_origin(network)[0], error)
    if operator:
        problem = f"cannot be exported to ONNX, which has no operator for {operator}."
        remedy = "Write it with other operators."
    elif isinstance(error, GuardOnDataDependentSymNode):
        problem = "cannot be exported to ONNX: it branches on the values of a batch."
        remedy = "Replace if, while, int() or .item() on tensors, for example by torch.where."
    elif str(error).startswith("Constraints violated"):
        problem = "cannot be exported to ONNX: it works for one number of rows only."
        remedy = "Take the number of rows from the inputs' shape, or write -1."
    else:
        problem = f"cannot be exported to ONNX: {type(error).__name__}: {_first_line(error)}"
        remedy = "Use operators of PyTorch on the inputs, and nothing else."
    return _mistake(network, line, problem, remedy)


def _at_fault(file: str, error: BaseException) -> tuple[int, str]:
    """The line of `file` where the error arose, and the operator that was being translated, if any."""
    line, operator = 0, ""
    cause: BaseException | None = error
    while cause is not None:
        for frame, number in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_filename == file:
                line = number
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node) and node.op == "call_function":
                operator = str(node.target)
                lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', node.stack_trace or "")
                line = int(lines[-1]) if lines else line
        cause = cause.__cause__
    return line, operator


def _origin(network: nn.Module) -> tuple[str, int]:
    """The file and line of the network's own forward."""
    forward = inspect.unwrap(type(network).forward)
    code = getattr(forward, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("clickline.yaml", 0)


def _mistake(network: nn.Module, line: int, problem: str, remedy: str) -> ConfigError:
    file, first = _origin(network)
    return ConfigError([Mistake(file, line or first, type(network).__name__, problem, remedy)])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
