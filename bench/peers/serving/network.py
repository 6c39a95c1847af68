"""The network that every peer serves: the same ONNX file, ONNX Runtime on one thread. NumPy is all else it needs."""

from __future__ import annotations

import os

import numpy as np
import onnxruntime

WIDTH = 247  # 26 slots of dim 9 and 13 dense floats


class Network:
    """One session; each worker of a peer has its own."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = os.environ["SERVED_NETWORK"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def logits(self, inputs_BI: np.ndarray, wide_B: np.ndarray) -> np.ndarray:
        logit_B: np.ndarray = self._session.run(["logit"], {"inputs": inputs_BI, "wide": wide_B})[0]
        return logit_B


def split(body: bytes | bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and wide sums out of plain bytes, for servers that leave the format to their users: first all inputs."""
    floats_N = np.frombuffer(body, np.float32)
    rows = len(floats_N) // (WIDTH + 1)
    return floats_N[: rows * WIDTH].reshape(rows, WIDTH), floats_N[rows * WIDTH :]
