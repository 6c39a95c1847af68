"""The built-in networks by name, one file each. They map looked-up vectors and dense floats to a logit.

    network(inputs_BI, wide_B) -> logit_B

`inputs_BI` holds the slots' vectors side by side, then the dense floats; `wide_B` the sums of the rows' wide weights.
Tables, loss and optimizer belong to the trainer.
"""

from __future__ import annotations

from clickline.models.autoint import AutoInt
from clickline.models.dcn_v2 import DCNv2
from clickline.models.deepfm import DeepFM
from clickline.models.dlrm import DLRM
from clickline.models.finalmlp import FinalMLP
from clickline.models.fm import FactorizationMachine
from clickline.models.layers import Network, seeded
from clickline.models.lr import LogisticRegression
from clickline.models.masknet import MaskNet
from clickline.models.network_spec import NetworkSpec, model_error
from clickline.models.wide_deep import WideDeep
from clickline.models.xdeepfm import XDeepFM

NETWORKS: dict[str, type[Network]] = {
    "lr": LogisticRegression,
    "fm": FactorizationMachine,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn_v2": DCNv2,
    "xdeepfm": XDeepFM,
    "autoint": AutoInt,
    "dlrm": DLRM,
    "finalmlp": FinalMLP,
    "masknet": MaskNet,
}


def build_network(name: str, spec: NetworkSpec, seed: int) -> Network:
    """Build the network of that name; its initial weights depend only on `seed`."""
    if name not in NETWORKS:
        raise model_error("name", f"is {name!r}.", f"Choose one of {', '.join(NETWORKS)}.")
    kind = NETWORKS[name]
    if spec.width == 0 and kind.uses_vectors:
        raise model_error(
            "name", f"{name} has no input: no slot has a vector and there is no dense field.", "Choose lr."
        )
    with seeded(seed):
        return kind(spec)
