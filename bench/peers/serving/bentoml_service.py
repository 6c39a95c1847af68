"""BentoML: a service with two workers that takes bytes and gives bytes, the leanest of what its HTTP API has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bentoml
from network import Network, split


@bentoml.service(workers=2, traffic={"timeout": 30}, logging={"access": {"enabled": False}})
class Ranker:
    def __init__(self) -> None:
        self._network = Network()

    @bentoml.api
    async def rank(self, body: bytes, /) -> bytes:
        return self._network.logits(*split(body)).tobytes()
