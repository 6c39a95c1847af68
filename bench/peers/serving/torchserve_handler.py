"""TorchServe: a handler that takes bytes and gives bytes, in two workers behind its Java front end."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from network import Network, split

network = None


def handle(requests, context):
    global network
    if network is None:
        network = Network()
    if requests is None:
        return None
    return [network.logits(*split(request["body"])).tobytes() for request in requests]
