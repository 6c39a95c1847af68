"""brpc beside our own gRPC: the same rows to the same server, in turns.

python bench/brpc.py          measured in turns, into docs/benchmarks.md
python bench/brpc.py --try    very short turns and printed only, as a smoke test
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import socket
import statistics
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

from clickline.features.encoder_kernels import xxh64
from clickline.wire.messages import (
    GeneralModelRequest,
    OldGeneralModelRequest,
    PredictRequest,
    PredictResponse,
    RpcMeta,
)
from measure import Row, free_ports, publish
from published import DENSE, SLOTS, Live, predict_body
from serve import CONNECTIONS, PREDICT, REQUESTS, TRY, Size, Traffic, send, serving, traffic_to

ROWS = (1, 100)
GOAL = 0.8
REAL = Size(turns=9, seconds=2.0, first=0.0, write=True)
LAYOUTS = {"v0.9": "tensors with names", "v0.2.1": "one instance per row"}
_SERVICE = "baidu.paddle_serving.predictor.general_model.GeneralModelService"


def _feasign(text: bytes) -> int:
    return int(np.uint64(xxh64(np.frombuffer(text, dtype=np.uint8), 0, len(text))).astype(np.int64))


def _frame(predict: bytes, layout: str) -> bytes:
    """The rows of a PredictRequest as a call of the general model."""
    inputs = PredictRequest.FromString(predict).inputs
    slots = {f"C{n}": list(map(_feasign, inputs[f"C{n}"].string_val)) for n in range(1, SLOTS + 1)}
    dense_BD = np.array([inputs[f"I{n}"].float_val for n in range(1, DENSE + 1)]).T
    if layout == "v0.9":
        request = GeneralModelRequest(fetch_var_names=["logistic"])
        for name, values in slots.items():
            request.tensor.add(name=name, shape=[len(values), 1], int64_data=values)
        request.tensor.add(
            name="dense_input", elem_type=1, shape=dense_BD.shape, float_data=dense_BD.reshape(-1)
        )
    else:
        request = OldGeneralModelRequest(fetch_var_names=["logistic"])
        for row, numbers in enumerate(dense_BD):
            inst = request.insts.add()
            for values in slots.values():
                inst.tensor_array.add(elem_type=0, shape=[-1], int64_data=[values[row]])
            inst.tensor_array.add(elem_type=1, shape=[DENSE], float_data=numbers)
    meta = RpcMeta(correlation_id=1)
    meta.request.service_name, meta.request.method_name = _SERVICE, "inference"
    head, body = meta.SerializeToString(), request.SerializeToString()
    return struct.pack(">4sLL", b"PRPC", len(head) + len(body), len(head)) + head + body


def _answer(port: int, frame: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(frame)
        stream = connection.makefile("rb")
        head = stream.read(12)
        return head + stream.read(struct.unpack(">4sLL", head)[1])


def _brpc_traffic(port: int, predicts: list[bytes], scores: bytes, layout: str) -> Traffic:
    """The calls, after a check that they get the scores that gRPC gave."""
    frames = [_frame(predict, layout) for predict in predicts]
    answer = _answer(port, frames[0])
    if scores not in answer:
        sys.exit(f"{layout}: brpc and gRPC give the same rows different scores")
    return Traffic("raw", {"length": len(answer), "begins": answer[:12].hex()}, frames)


def measure(size: Size) -> None:
    table = []
    with tempfile.TemporaryDirectory() as name:
        live = Live(Path(name), 100_000)
        live.publish()
        (port,) = free_ports(1)
        server = serving(live, "fp32", f"brpc_port={port}")
        try:
            by_brpc = copy.copy(server)
            by_brpc.port = port
            for rows in ROWS:
                bodies = [predict_body(rows, live.values, seed) for seed in range(REQUESTS)]
                answer = PredictResponse.FromString(PREDICT.ask(server.port, bodies[0]))
                scores = np.array(answer.outputs["logistic"].float_val, dtype="<f4").tobytes()
                contestants = {"gRPC": (server, traffic_to(PREDICT, server.port, bodies))} | {
                    f"brpc, {layout} ({what})": (by_brpc, _brpc_traffic(port, bodies, scores, layout))
                    for layout, what in LAYOUTS.items()
                }
                rates: dict[str, list[float]] = {one: [] for one in contestants}
                for turn in range(-1, size.turns):  # the first one is a warm-up
                    for one, (at, traffic) in contestants.items():
                        rate = send(at, traffic, size.seconds, CONNECTIONS).rate
                        print(
                            f"  {turn + 1}/{size.turns} {one}, {rows} rows: {rate:,.0f} requests/s",
                            flush=True,
                        )
                        if turn >= 0:
                            rates[one].append(rate)
                for one, measured in rates.items():
                    ratios = [mine / other for mine, other in zip(measured, rates["gRPC"], strict=True)]
                    is_brpc = one != "gRPC"
                    table.append(
                        Row(
                            f"{one}, {rows} row{'s' if rows > 1 else ''} a request",
                            f"{statistics.median(measured):,.0f} requests/s",
                            f"{statistics.median(ratios):.2f}x" if is_brpc else "",
                            f"≥ {GOAL}x" if is_brpc else "",
                        )
                    )
        finally:
            server.stop()
    publish(
        "brpc",
        "brpc beside our gRPC",
        f"`python bench/brpc.py` (the same rows: raw fields by TensorFlow Serving's Predict, feasigns and numbers by Paddle "
        f"Serving's general model; Wide & Deep of `bench/serve.py`; two processes, {CONNECTIONS} connections with one "
        f"request in flight; medians of {size.turns} turns of {size.seconds:g} s, in turn; load average before it: "
        f"{load:.1f}).",
        table,
        "The ratios are medians of the ratios of neighbouring turns.",
        write=size.write,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", action="store_true", dest="only_try")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the server is stopped too
    measure(TRY if arguments.only_try else REAL)
