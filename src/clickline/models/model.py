"""A model: tables, network and calibration, which turn rows into click probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clickline.artifacts.arrays import with_prefix
from clickline.artifacts.checkpoint import Checkpoint
from clickline.embedding import BatchLookup, Tables, load_snapshot
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.models.calibration import Calibration, calibration_from_json
from clickline.models.custom_network import CustomModel, load_custom_model
from clickline.models.model_plan import ModelPlan
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import build_network
from clickline.models.torch_runtime import retain_freed_memory
from clickline.records import LabelledRows

_SCORE_BATCH_ROWS = 8192  # per batch: the activations of more would not stay in the caches
_PREFIX = "network/"  # of the weights in a checkpoint

GatherInputs = Callable[[LabelledRows, NDArray[np.float32], NDArray[np.float32]], None]
"""Fills the slots' columns of the network's inputs, and the wide sums, for some rows."""


@dataclass
class DenseModel:
    """The network built from a plan, without tables: on a cluster these are in other processes. Until training, all
    weights depend only on the plan's seed."""

    features: FeatureSpec
    plan: ModelPlan
    spec: NetworkSpec
    network: nn.Module
    custom: CustomModel | None  # the user's file, if the network is custom
    uses_wide: bool
    calibration: Calibration | None = None

    @classmethod
    def build(
        cls, features: FeatureSpec, plan: ModelPlan, threads: int, file: Path | None = None
    ) -> DenseModel:
        """An untrained network. `file` is the user's network if the plan has no built-in one."""
        torch.set_num_threads(threads)
        retain_freed_memory()
        spec = NetworkSpec(
            tuple(slot.dim for slot in plan.slots),
            len(features.dense),
            plan.hidden,
            plan.dropout,
            plan.batch_norm,
        )
        if plan.network is not None:
            network = build_network(plan.network, spec, plan.seed)
            return DenseModel(features, plan, spec, network, None, network.uses_wide)
        if file is None:
            raise ArtifactError(
                "the model has a custom network, and model.file is not set. Set it to the network's file."
            )
        custom = load_custom_model(file, spec, plan.seed, multi=[slot.multi for slot in features.slots])
        return DenseModel(features, plan, spec, custom.network, custom, custom.uses_wide)

    def probabilities(self, logit_B: torch.Tensor) -> NDArray[np.float32]:
        """Probabilities for all rows: undoes sampling and class weights of training, then applies the calibration."""
        probability_B: NDArray[np.float32] = torch.sigmoid(logit_B.float() + self.plan.logit_shift).numpy()
        return probability_B if self.calibration is None else self.calibration.apply(probability_B)

    def score_with(self, gather: GatherInputs, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities, with the network's inputs from `gather`; changes nothing."""
        self.network.eval()
        probability_B = np.empty(rows.rows, dtype=np.float32)
        for start in range(0, rows.rows, _SCORE_BATCH_ROWS):
            stop = min(start + _SCORE_BATCH_ROWS, rows.rows)
            part = rows.slice(start, stop)
            inputs_BI, wide_B = self.buffers(part)
            gather(part, inputs_BI, wide_B)
            with torch.no_grad():
                logit_B = self.network(torch.from_numpy(inputs_BI), torch.from_numpy(wide_B))
            probability_B[start:stop] = self.probabilities(logit_B)
        return probability_B

    def buffers(self, rows: LabelledRows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Buffers for the network's inputs, with the dense fields filled in."""
        inputs_BI = np.empty((rows.rows, self.spec.width), dtype=np.float32)
        inputs_BI[:, self.spec.width - self.spec.dense :] = rows.encoded.dense_DB.T
        return inputs_BI, np.empty(rows.rows, dtype=np.float32)


@dataclass
class Model(DenseModel):
    """Network and tables built from a plan."""

    tables: Tables = field(kw_only=True)

    @classmethod
    def build(cls, features: FeatureSpec, plan: ModelPlan, threads: int, file: Path | None = None) -> Model:
        """An untrained model. `file` is the user's network if the plan has no built-in one."""
        dense = DenseModel.build(features, plan, threads, file)
        return cls(**vars(dense), tables=Tables(**plan.tables(dense.uses_wide), threads=threads))

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities; changes nothing."""

        def gather(part: LabelledRows, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
            self.tables.gather(part.encoded.slots, inputs_BI, wide_B, train=False)

        return self.score_with(gather, rows)

    def pool(
        self, lookup: BatchLookup, rows: LabelledRows
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The network's inputs for rows that were looked up."""
        inputs_BI, wide_B = self.buffers(rows)
        self.tables.pool(lookup, inputs_BI, wide_B)
        return inputs_BI, wide_B

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def restore(self, checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
        """Restore a checkpoint; returns its arrays, of which the caller may need more than the weights."""
        load_snapshot(self.tables, checkpoint.tables)
        arrays = checkpoint.dense()
        load_network(self.network, arrays)
        calibration = checkpoint.manifest.calibration
        self.calibration = None if calibration is None else calibration_from_json(calibration)
        return arrays


def network_arrays(network: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of the weights and buffers as plain arrays, under the names used in checkpoints."""
    return {f"{_PREFIX}{name}": value.numpy().copy() for name, value in network.state_dict().items()}


def load_network(network: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load the arrays of `network_arrays`; other arrays are ignored."""
    weights = {name: torch.from_numpy(array.copy()) for name, array in with_prefix(_PREFIX, arrays).items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # most likely the user's file has changed
        raise ArtifactError(f"the stored weights do not match the network: {error}") from error


def open_checkpoint(checkpoint: Checkpoint, threads: int, model_file: Path | None = None) -> Model:
    """The model of a checkpoint, ready to score. `model_file` is required for a custom network: artifacts contain no
    code."""
    plan = ModelPlan.from_json(checkpoint.manifest.plan)
    if plan.network is None:
        if model_file is None:
            raise ArtifactError(
                f"{checkpoint.folder} has a custom network, and model.file is not set. Set it to the network's file."
            )
        if sha256(model_file.read_bytes()).hexdigest() != plan.network_sha256:
            raise ArtifactError(
                f"{model_file} is not the file that {checkpoint.folder} was trained with: its checksum differs. "
                "Set model.file to the original file, or train again."
            )
    model = Model.build(checkpoint.features, plan, threads, model_file)
    model.restore(checkpoint)
    return model
