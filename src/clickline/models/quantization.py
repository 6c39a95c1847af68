"""Quantization of a network's ONNX to 8-bit weights and activations: about three times faster, slightly less exact.

Ranges are calibrated on a sample of rows (static quantization), so that a row's score never depends on the rows it is
scored with. All inputs share one range, but vectors are small and dense floats may be large. So each column is first
scaled to -1 … 1 and the first layers' weights undo that; otherwise the vectors would keep few of their bits.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CALIBRATION_ROWS = 512  # per batch


def quantize(content: bytes, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> bytes:
    """Quantize the ONNX of `export_onnx`, with ranges calibrated on these rows."""
    import onnx
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class CalibrationRows(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._parts = iter(range(0, len(wide_B), _CALIBRATION_ROWS))

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            start = next(self._parts, None)
            if start is None:
                return None
            part = slice(start, start + _CALIBRATION_ROWS)
            return {"inputs": inputs_BI[part], "wide": wide_B[part]}

    model = onnx.load_from_string(content)
    _normalize_columns(model.graph, np.abs(inputs_BI).max(axis=0))
    # The last layers have few outputs: nothing to gain, and their error goes straight into the logit.
    narrow = [node.name for node in _name_nodes(model.graph) if _output_width(model.graph, node) < 8]
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # it recommends preprocessing that the exporter has already done
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "source.onnx"), Path(folder, "target.onnx")
            onnx.save(model, source)
            quantize_static(
                source,
                target,
                CalibrationRows(),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["Gemm", "MatMul"],
                nodes_to_exclude=narrow,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
            return target.read_bytes()
    finally:
        root.setLevel(before)


def _normalize_columns(graph: Any, largest_I: NDArray[np.float32]) -> None:
    """Divide each input column by its largest value, if only linear layers read the inputs."""
    import onnx
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers = [node for node in graph.node if "inputs" in node.input]
    if not all(
        node.op_type == "Gemm" and node.input[0] == "inputs" and node.input[1] in constants
        for node in readers
    ):
        return
    scale_I = np.where(largest_I > 0, largest_I, 1).astype(np.float32)
    for node in readers:
        tensor = constants[node.input[1]]
        weight = numpy_helper.to_array(tensor)
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        scaled = weight * (scale_I if transposed else scale_I[:, None])
        tensor.CopyFrom(numpy_helper.from_array(scaled.astype(np.float32), tensor.name))
        node.input[0] = "leveled_inputs"
    graph.initializer.append(numpy_helper.from_array(1 / scale_I, "input_scale"))
    graph.node.insert(0, onnx.helper.make_node("Mul", ["inputs", "input_scale"], ["leveled_inputs"]))


def _name_nodes(graph: Any) -> Sequence[Any]:
    for number, node in enumerate(graph.node):
        node.name = node.name or f"node_{number}"
    return list(graph.node)


def _output_width(graph: Any, node: Any) -> int:
    """The number of outputs of a linear layer; a large number if unknown."""
    if node.op_type not in ("Gemm", "MatMul"):
        return 1 << 30
    for tensor in graph.initializer:
        if tensor.name == node.input[1]:
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            return int(tensor.dims[0] if transposed else tensor.dims[-1])
    return 1 << 30
