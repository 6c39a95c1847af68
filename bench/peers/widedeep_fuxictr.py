"""FuxiCTR's Wide & Deep, built from its layers as in its model zoo, which is not in the wheel."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FeatureEmbedding, LogisticRegression, MLP_Block
from fuxictr.pytorch.models import BaseModel


class WideDeep(BaseModel):
    def __init__(
        self,
        features: FeatureMap,
        *,
        dim: int,
        hidden: tuple[int, ...],
        learning_rate: float = 1e-3,
        dropout: float = 0.0,
        embedding_l2: float | None = None,
    ) -> None:
        super().__init__(
            features,
            model_id="WideDeep",
            embedding_regularizer=embedding_l2,
            verbose=0,
            model_root=".",
            metrics=["AUC", "logloss"],
        )
        self.embedding_layer = FeatureEmbedding(features, dim)
        self.lr_layer = LogisticRegression(features, use_bias=False)
        self.dnn = MLP_Block(
            input_dim=dim * features.get_num_fields(),
            output_dim=1,
            hidden_units=list(hidden),
            hidden_activations="relu",
            dropout_rates=dropout,
        )
        self.compile("adam", "binary_crossentropy", learning_rate)
        self.reset_parameters()
        self.model_to_device()
        self._max_gradient_norm = 10.0  # what its `fit` sets before it takes steps

    def forward(self, inputs: Any) -> dict[str, Any]:
        fields = self.get_inputs(inputs)
        logit_B1 = self.lr_layer(fields)
        logit_B1 += self.dnn(self.embedding_layer(fields).flatten(start_dim=1))
        return {"y_pred": self.output_activation(logit_B1)}


def feature_map(numbers: list[str], vocabularies: dict[str, int]) -> FeatureMap:
    """What its preprocessing would have written: number fields, and category fields with their sizes."""
    features = FeatureMap("criteo", ".")
    features.labels = ["label"]
    features.features = OrderedDict(
        [(name, {"source": "", "type": "numeric"}) for name in numbers]
        + [(name, {"source": "", "type": "categorical", "vocab_size": n}) for name, n in vocabularies.items()]
    )
    features.num_fields = features.get_num_fields()
    features.set_column_index()
    return features
