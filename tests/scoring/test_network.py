"""The dense network: a split for ranking does not change scores, and 8-bit weights change them little."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from clickline.errors import ArtifactError
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import build_network
from clickline.models.onnx_export import export_onnx, with_weights
from clickline.models.quantization import quantize
from clickline.scoring.onnx_network import OnnxNetwork

SPEC = NetworkSpec((9,) * 6, 4, (64, 32, 16), dropout=0.1)


def trained(name: str, spec: NetworkSpec = SPEC) -> torch.nn.Module:
    """Weights as after training: no bias is zero, since the exporter would drop it."""
    network = build_network(name, spec, 1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return network


@cache
def exported(name: str, spec: NetworkSpec = SPEC) -> bytes:
    return export_onnx(trained(name, spec), spec)


def batch(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, SPEC.width), dtype=np.float32), random.standard_normal(
        rows, dtype=np.float32
    )


@pytest.mark.parametrize("batch_norm", [False, True])
def test_split_network_scores_like_the_full_one(batch_norm):
    spec = replace(SPEC, batch_norm=batch_norm)
    network = OnnxNetwork(exported("wide_deep", spec), 1)
    inputs_BI, wide_B = batch(50)
    own, shared = [*range(0, 9), 20, 57], [i for i in range(SPEC.width) if i not in {*range(0, 9), 20, 57}]
    inputs_BI[:, shared] = inputs_BI[0, shared]
    split = network.split(own, shared)
    assert split is not None
    found_B = split.logits(np.ascontiguousarray(inputs_BI[:, own]), inputs_BI[0, shared], wide_B)
    np.testing.assert_allclose(found_B, network.logits(inputs_BI, wide_B), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["deepfm", "dcn_v2", "dlrm", "lr"])
def test_network_with_nonlinear_use_of_its_input_is_not_split(name):
    network = OnnxNetwork(exported(name), 1)
    assert network.split([0, 1], list(range(2, SPEC.width))) is None


def test_invalid_onnx_file_is_refused():
    with pytest.raises(ArtifactError, match=r"ONNX Runtime cannot load dense\.onnx"):
        OnnxNetwork(b"not a network", 1)


def test_quantized_scores_are_close_and_rows_are_independent():
    inputs_BI, wide_B = batch(2000)
    inputs_BI[:, -4:] *= 20  # dense floats are larger than embeddings: each column has its own range
    content = exported("wide_deep")
    full, small = OnnxNetwork(content, 1), OnnxNetwork(quantize(content, inputs_BI, wide_B), 1)
    expected_B, found_B = full.logits(inputs_BI, wide_B), small.logits(inputs_BI, wide_B)
    deep_B = expected_B - wide_B
    assert np.abs(found_B - expected_B).max() < 0.1 * np.abs(deep_B).max()
    assert np.corrcoef(found_B - wide_B, deep_B)[0, 1] > 0.995
    for row in (0, 7, 1999):  # the same score alone as in a batch
        alone = small.logits(inputs_BI[row : row + 1], wide_B[row : row + 1])
        np.testing.assert_allclose(alone[0], found_B[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "batch_norm"), [("wide_deep", True), ("dcn_v2", False), ("dlrm", False)])
def test_replaced_weights_equal_a_new_export(name, batch_norm):
    spec = replace(SPEC, batch_norm=batch_norm)
    earlier = export_onnx(build_network(name, spec, 1), spec)
    changed = with_weights(earlier, trained(name, spec))
    assert changed is not None
    inputs_BI, wide_B = batch(20)
    expected_B = OnnxNetwork(exported(name, spec), 1).logits(inputs_BI, wide_B)
    np.testing.assert_array_equal(OnnxNetwork(changed, 1).logits(inputs_BI, wide_B), expected_B)


def test_weights_of_another_network_or_a_folded_graph_are_not_replaced():
    network = trained("wide_deep")
    # Its biases are zero, so the exporter drops them.
    folded = export_onnx(build_network("wide_deep", SPEC, 1), SPEC, folded=True)
    assert with_weights(folded, network) is None
    assert with_weights(exported("deepfm"), trained("dcn_v2")) is None
