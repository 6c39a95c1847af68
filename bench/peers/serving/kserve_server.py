"""KServe's Python server: gRPC of the Open Inference Protocol, raw contents.

    SERVED_THREADS=N python kserve_server.py --grpc_port N --http_port N

Its gRPC side runs in one process: a pool of threads takes the network off the event loop, which helps large requests
and slows small ones down; with 0 threads there is none. Left alone it would write a line for each request, and listen
on all addresses.
"""

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

sys.path.insert(0, str(Path(__file__).parent))

import grpc.aio
import uvicorn
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.logging import configure_logging
from network import Network

THREADS = int(os.environ["SERVED_THREADS"])


class Ranker(Model):
    def __init__(self) -> None:
        super().__init__("network")
        self._mine = local()
        self._pool = ThreadPoolExecutor(THREADS, initializer=self._open) if THREADS else None
        self._open()
        self.ready = True

    def _open(self) -> None:
        self._mine.network = Network()

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        if self._pool is None:
            return self._predict(payload)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._predict, payload)

    def _predict(self, payload: InferRequest) -> InferResponse:
        inputs_BI, wide_B = (tensor.as_numpy() for tensor in payload.inputs)
        logit_B = self._mine.network.logits(inputs_BI, wide_B)
        output = InferOutput("logit", list(logit_B.shape), "FP32")
        output.set_data_from_numpy(logit_B)
        return InferResponse(payload.id, self.name, [output])


def stay_on_loopback() -> None:
    make_server, configure = grpc.aio.server, uvicorn.Config.__init__

    def grpc_on_loopback(*arguments, **named):
        server = make_server(*arguments, **named)
        add_port = server.add_insecure_port
        server.add_insecure_port = lambda address: add_port(address.replace("[::]", "127.0.0.1"))
        return server

    def http_on_loopback(self, *arguments, **named):
        configure(self, *arguments, **{**named, "host": "127.0.0.1"})

    grpc.aio.server, uvicorn.Config.__init__ = grpc_on_loopback, http_on_loopback


if __name__ == "__main__":
    stay_on_loopback()
    configure_logging()
    logging.getLogger("kserve").setLevel(logging.WARNING)
    ModelServer(workers=1, enable_latency_logging=False).start([Ranker()])
