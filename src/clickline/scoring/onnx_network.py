"""The dense network of a version, run by ONNX Runtime.

A ranking request repeats one user's fields for every candidate. If the network's input goes only into linear layers,
their product with the shared columns is the same in every row, so it is computed once: the layer keeps the columns that
differ and gets the rest as its bias (`Network.split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from clickline.errors import ArtifactError

Floats = NDArray[np.float32]


class OnnxNetwork:
    """Computes logits from the rows' inputs and wide sums."""

    def __init__(self, content: bytes, threads: int) -> None:
        self._content = content
        self._threads = threads
        self._session = _open(content, threads)
        (inputs,) = (value for value in self._session.get_inputs() if value.name == "inputs")
        self.width = int(inputs.shape[1])
        self._takes_wide = any(value.name == "wide" for value in self._session.get_inputs())

    def logits(self, inputs_BI: Floats, wide_B: Floats) -> Floats:
        feeds = {"inputs": inputs_BI, "wide": wide_B} if self._takes_wide else {"inputs": inputs_BI}
        logit_B: Floats = self._session.run(["logit"], feeds)[0]
        return logit_B

    def split(self, own: Sequence[int], shared: Sequence[int]) -> SplitNetwork | None:
        """The same network for rows that differ in the columns `own` and share the columns `shared`; None if the input
        is not only used by linear layers."""
        import onnx
        from onnx import numpy_helper

        model = onnx.load_from_string(self._content)
        graph = model.graph
        constants = {tensor.name: tensor for tensor in graph.initializer}
        users = [node for node in graph.node if "inputs" in node.input and not _reads_row_count(node)]
        if not users or not all(_is_linear(node, constants) for node in users):
            return None
        layers = []
        for number, node in enumerate(users):
            weight_OI = numpy_helper.to_array(constants[node.input[1]])
            if not _attribute(node, "transB"):
                weight_OI = weight_OI.T
            bias_O = numpy_helper.to_array(constants[node.input[2]]) if len(node.input) > 2 else None
            layers.append((np.ascontiguousarray(weight_OI[:, shared].T), 0.0 if bias_O is None else bias_O))
            own_weight = numpy_helper.from_array(np.ascontiguousarray(weight_OI[:, own].T), f"own.{number}")
            graph.initializer.append(own_weight)
            bias = onnx.helper.make_tensor_value_info(
                f"shared.{number}", onnx.TensorProto.FLOAT, [1, weight_OI.shape[0]]
            )
            graph.input.append(bias)
            layer = onnx.helper.make_node(
                "Gemm", ["inputs", f"own.{number}", f"shared.{number}"], list(node.output)
            )
            node.CopyFrom(layer)
        used = {name for node in graph.node for name in node.input}
        used_constants = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(used_constants)
        (inputs,) = (value for value in graph.input if value.name == "inputs")
        inputs.type.tensor_type.shape.dim[1].dim_value = len(own)
        session = _open(model.SerializeToString(), self._threads)
        return SplitNetwork(session, layers, self._takes_wide)


class SplitNetwork:
    """A network whose first layers get part of their input from one row shared by all."""

    def __init__(self, session: Any, layers: Sequence[tuple[Floats, Any]], takes_wide: bool) -> None:
        self._session = session
        self._layers = layers
        self._takes_wide = takes_wide

    def logits(self, inputs_BI: Floats, shared_I: Floats, wide_B: Floats) -> Floats:
        feeds = {"inputs": inputs_BI, "wide": wide_B} if self._takes_wide else {"inputs": inputs_BI}
        for number, (weight_IO, bias_O) in enumerate(self._layers):
            feeds[f"shared.{number}"] = (shared_I @ weight_IO + bias_O).reshape(1, -1)
        logit_B: Floats = self._session.run(["logit"], feeds)[0]
        return logit_B


def _open(content: bytes, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # A process serves on its own core: spinning threads would take it from the next request.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise ArtifactError(f"ONNX Runtime cannot load dense.onnx: {line}. Publish again.") from error


def _is_linear(node: Any, constants: Any) -> bool:
    """Whether a node computes inputs · constant + constant, as exported linear layers do."""
    return (
        node.op_type == "Gemm"
        and node.input[0] == "inputs"
        and all(name in constants for name in node.input[1:])
        and not _attribute(node, "transA")
        and _attribute(node, "alpha", 1.0) == 1.0
        and _attribute(node, "beta", 1.0) == 1.0
    )


def _reads_row_count(node: Any) -> bool:
    """Whether a node only reads the number of rows."""
    return node.op_type == "Shape" and _attribute(node, "start") == 0 and _attribute(node, "end") == 1


def _attribute(node: Any, name: str, default: float = 0) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return float(attribute.f if attribute.type == 1 else attribute.i)
    return default
