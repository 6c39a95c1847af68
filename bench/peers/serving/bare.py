"""The network alone, without a server: what two processes could answer if requests cost nothing.

    SERVED_NETWORK=FILE python bare.py ROWS SECONDS

Prints batches a second.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from network import WIDTH, Network

rows, seconds = int(sys.argv[1]), float(sys.argv[2])
network = Network()
inputs_BI = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
wide_B = np.zeros(rows, np.float32)
network.logits(inputs_BI, wide_B)
began, batches = time.perf_counter(), 0
while (passed := time.perf_counter() - began) < seconds:
    network.logits(inputs_BI, wide_B)
    batches += 1
print(batches / passed)
