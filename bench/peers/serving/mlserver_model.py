"""MLServer: a custom runtime behind its gRPC server (Open Inference Protocol, raw contents)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from network import Network


class Ranker(MLModel):
    async def load(self) -> bool:
        self._network = Network()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs_BI, wide_B = (NumpyCodec.decode_input(tensor) for tensor in payload.inputs)
        logit_B = self._network.logits(inputs_BI, wide_B)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("logit", logit_B)])
