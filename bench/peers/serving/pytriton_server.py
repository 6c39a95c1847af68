"""PyTriton: Triton's own gRPC server before two Python callables.

    python pytriton_server.py GRPC_PORT HTTP_PORT METRICS_PORT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from network import WIDTH, Network
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

WORKERS = 2


def ranker():
    network = Network()

    def rank(requests):
        answers = []
        for request in requests:
            answers.append({"logit": network.logits(request.data["inputs"], request.data["wide"])})
        return answers

    return rank


grpc_port, http_port, metrics_port = map(int, sys.argv[1:])
config = TritonConfig(
    grpc_address="127.0.0.1",
    grpc_port=grpc_port,
    http_address="127.0.0.1",
    http_port=http_port,
    metrics_port=metrics_port,
    metrics_address="127.0.0.1",
)
with Triton(config=config) as triton:
    triton.bind(
        model_name="network",
        infer_func=[ranker() for _ in range(WORKERS)],
        inputs=[Tensor(name="inputs", dtype=np.float32, shape=(-1, WIDTH)), Tensor(name="wide", dtype=np.float32, shape=(-1,))],
        outputs=[Tensor(name="logit", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(batching=False),
    )
    triton.serve()
