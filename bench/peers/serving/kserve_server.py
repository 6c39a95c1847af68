"""KServe's Python server: gRPC of the Open Inference Protocol, raw contents.

    python kserve_server.py --grpc_port N --http_port N

Its gRPC side runs in one process, so a pool of two threads takes the network off the event loop. It can only listen
on all addresses; what follows keeps it on loopback.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

sys.path.insert(0, str(Path(__file__).parent))

import grpc.aio
import uvicorn
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from network import Network

WORKERS = 2


class Ranker(Model):
    def __init__(self) -> None:
        super().__init__("network")
        self._mine = local()
        self._pool = ThreadPoolExecutor(WORKERS, initializer=self._open)
        self.ready = True

    def _open(self) -> None:
        self._mine.network = Network()

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._predict, payload)

    def _predict(self, payload: InferRequest) -> InferResponse:
        inputs_BI, wide_B = (tensor.as_numpy() for tensor in payload.inputs)
        logit_B = self._mine.network.logits(inputs_BI, wide_B)
        output = InferOutput("logit", list(logit_B.shape), "FP32")
        output.set_data_from_numpy(logit_B)
        return InferResponse(payload.id, self.name, [output])


def stay_on_loopback() -> None:
    add_port, configure = grpc.aio.Server.add_insecure_port, uvicorn.Config.__init__
    grpc.aio.Server.add_insecure_port = lambda self, address: add_port(self, address.replace("[::]", "127.0.0.1"))

    def on_loopback(self, *arguments, **named):
        configure(self, *arguments, **{**named, "host": "127.0.0.1"})

    uvicorn.Config.__init__ = on_loopback


if __name__ == "__main__":
    stay_on_loopback()
    ModelServer(workers=1, enable_latency_logging=False).start([Ranker()])
