"""PyTriton: Triton's own gRPC server before two Python callables, with Triton's batching of what waits.

python pytriton_server.py GRPC_PORT HTTP_PORT METRICS_PORT
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from network import WIDTH, Network
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

WORKERS = 2
LARGEST_BATCH = 1024  # rows


def ranker():
    network = Network()

    @batch
    def rank(inputs, wide):
        return {"logit": network.logits(inputs, wide[:, 0])[:, None]}

    return rank


grpc_port, http_port, metrics_port = map(int, sys.argv[1:])
config = TritonConfig(
    grpc_address="127.0.0.1",
    grpc_port=grpc_port,
    http_address="127.0.0.1",
    http_port=http_port,
    metrics_address="127.0.0.1",
    metrics_port=metrics_port,
)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves the block below, so Triton tidies up
with Triton(config=config) as triton:
    triton.bind(
        model_name="network",
        infer_func=[ranker() for _ in range(WORKERS)],
        inputs=[
            Tensor(name="inputs", dtype=np.float32, shape=(WIDTH,)),
            Tensor(name="wide", dtype=np.float32, shape=(1,)),
        ],
        outputs=[Tensor(name="logit", dtype=np.float32, shape=(1,))],
        config=ModelConfig(
            max_batch_size=LARGEST_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=0)
        ),
    )
    triton.serve()
