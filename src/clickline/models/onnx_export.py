"""Exports a network to ONNX, which serving runs without any of the user's code.

It uses the exporter based on `torch.export`: it takes a second or two, and rejects what it cannot trace (such as a
branch on the batch's values), where the older tracer would silently keep one of the two branches.
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

    Batch norm and dropout are in evaluation mode, whatever mode the network is in. Weights keep their names, so that
    `with_weights` can replace them; ONNX Runtime optimizes the graph when it loads it. `folded` does so here, for
    callers that edit the graph.
    """
    rows = torch.export.Dim("rows")
    with _eval_mode(network), _quiet():
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
    _strip_metadata(model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "rows"
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def with_weights(content: bytes, network: nn.Module) -> bytes | None:
    """An earlier ONNX of the same network with its current weights, in a tenth of the time of an export. None if it is
    of another network, or was folded."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(content)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    # Batch norm counts its batches in training; no graph needs that.
    names = [name for name in weights if not name.endswith("num_batches_tracked")]
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    if any(
        name not in initializers or tuple(initializers[name].dims) != weights[name].shape for name in names
    ):
        return None
    for name in names:
        initializers[name].CopyFrom(numpy_helper.from_array(weights[name], name))
    changed: bytes = model.SerializeToString(deterministic=True)
    return changed


def check_export(network: nn.Module, spec: NetworkSpec) -> None:
    """Raise a ConfigError for a network that cannot be exported, or whose ONNX logits differ from PyTorch's."""
    import onnxruntime  # type: ignore[import-untyped]

    content = export_onnx(network, spec)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        for rows in CHECKED_ROWS:
            inputs_BI, wide_B = dummy_batch(spec, rows)
            feeds = {"inputs": inputs_BI.numpy(), "wide": wide_B.numpy()}
            onnx_B = torch.from_numpy(session.run(["logit"], feeds)[0])
            with _eval_mode(network):
                torch_B = network(inputs_BI, wide_B)
            if onnx_B.shape != torch_B.shape or not torch.allclose(
                onnx_B, torch_B, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
            ):
                problem = f"gives different logits in ONNX and in PyTorch for a batch of {rows} rows."
                raise _mistake(network, 0, problem, "Remove what is random or depends on other rows.")
    except ConfigError:
        raise
    except Exception as error:
        problem = f"is rejected by ONNX Runtime: {_first_line(error)}"
        raise _mistake(network, 0, problem, "Use another operator.") from error


def dummy_batch(spec: NetworkSpec, rows: int) -> tuple[Tensor, Tensor]:
    """Random inputs and wide sums, the same in every call."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, spec.width, generator=generator), torch.randn(rows, generator=generator)


@contextmanager
def _eval_mode(network: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores each module's mode afterwards."""
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
    """Silence the exporter, which reports things that no user can change."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))  # each of torch's loggers has a handler of its own
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _strip_metadata(message: Any) -> None:
    """Remove stack traces and other notes, which contain paths of the exporting machine."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                _strip_metadata(part)


def _cannot_export(network: nn.Module, error: Exception) -> ConfigError:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    line, operator = _error_location(_forward_location(network)[0], error)
    if operator:
        problem = f"cannot be exported to ONNX, which has no operator for {operator}."
        remedy = "Use other operators."
    elif isinstance(error, GuardOnDataDependentSymNode):
        problem = "cannot be exported to ONNX: it branches on the values of a batch."
        remedy = "Replace if, while, int() or .item() on tensors, for example with torch.where."
    elif str(error).startswith("Constraints violated"):
        problem = "cannot be exported to ONNX: it only works for a fixed number of rows."
        remedy = "Take the number of rows from the inputs' shape, or use -1."
    else:
        problem = f"cannot be exported to ONNX: {type(error).__name__}: {_first_line(error)}"
        remedy = "Use only PyTorch operators on the inputs."
    return _mistake(network, line, problem, remedy)


def _error_location(file: str, error: BaseException) -> tuple[int, str]:
    """The line of `file` that caused the error, and the operator being translated, if any."""
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


def _forward_location(network: nn.Module) -> tuple[str, int]:
    """The file and line of the network's forward method."""
    forward = inspect.unwrap(type(network).forward)
    code = getattr(forward, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("clickline.yaml", 0)


def _mistake(network: nn.Module, line: int, problem: str, remedy: str) -> ConfigError:
    file, first = _forward_location(network)
    return ConfigError([Mistake(file, line or first, type(network).__name__, problem, remedy)])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
