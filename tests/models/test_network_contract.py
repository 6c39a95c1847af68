"""The contract of all networks, and what each network computes."""

from __future__ import annotations

import re

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clickline.config.sections import ModelSection
from clickline.errors import ConfigError
from clickline.models.layers import DEFAULT_DIM, Network
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import NETWORKS, build_network
from clickline.models.onnx_export import check_export, export_onnx

SPEC = NetworkSpec(dims=(4, 4, 4, 4, 4), dense=3, hidden=(16, 8))
MULTIPLY_SLOTS = {"fm", "deepfm", "xdeepfm", "autoint", "dlrm"}
EVERY = pytest.mark.parametrize("name", list(NETWORKS))
QUICK = {"wide_deep", "dcn_v2", "dlrm"}  # for tests that take a second per network
EVERY_SLOWLY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NETWORKS]
)


def batch(spec: NetworkSpec, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.width, generator=generator), torch.randn(rows, generator=generator)


def logits(network: nn.Module, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = network.eval()(inputs_BI, wide_B)
    return result


def onnx_logits(content: bytes, inputs_BI: Tensor, wide_B: Tensor) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(
        ["logit"], {"inputs": inputs_BI.numpy(), "wide": wide_B.numpy()}
    )[0]
    return result


def trained_a_little(network: Network, spec: NetworkSpec) -> Network:
    """Move weights, biases and running statistics away from their initial values."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    inputs_BI, wide_B = batch(spec, 64, seed=9)
    for _ in range(3):
        optimizer.zero_grad()
        (network.train()(inputs_BI, wide_B) - inputs_BI[:, 0]).square().mean().backward()
        optimizer.step()
    return network


@EVERY
def test_gradients_flow_to_every_input_and_to_the_wide_sum(name: str) -> None:
    network = build_network(name, SPEC, 1)
    inputs_BI, wide_B = (tensor.requires_grad_() for tensor in batch(SPEC, 64))
    network(inputs_BI, wide_B).square().sum().backward()
    assert inputs_BI.grad is not None
    reached_I = inputs_BI.grad.abs().sum(0) > 0
    vectors = sum(SPEC.dims)
    assert reached_I[vectors:].all()
    assert reached_I[:vectors].all() == network.uses_vectors
    assert (wide_B.grad is not None) == network.uses_wide
    if network.uses_wide:
        assert wide_B.grad.abs().min() > 0  # type: ignore[union-attr]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


@EVERY
def test_state_round_trips(name: str) -> None:
    spec = NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, dropout=0.2, batch_norm=True)
    network = trained_a_little(build_network(name, spec, 1), spec)
    other = build_network(name, spec, 2)
    other.load_state_dict(network.state_dict())
    assert torch.equal(logits(network, *batch(spec, 20)), logits(other, *batch(spec, 20)))


@EVERY
def test_same_seed_gives_same_weights_and_keeps_torch_random_state(name: str) -> None:
    torch.manual_seed(5)
    first, again, other = (build_network(name, SPEC, seed).state_dict() for seed in (1, 1, 2))
    drawn = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@EVERY_SLOWLY
@pytest.mark.parametrize(
    ("dims", "dense"),
    [
        pytest.param(SPEC.dims, 3, id="slots and dense"),
        pytest.param(SPEC.dims, 0, id="slots alone", marks=pytest.mark.slow),
        pytest.param((4, 1, 16, 0), 2, id="different dims", marks=pytest.mark.slow),
        pytest.param((), 6, id="dense alone", marks=pytest.mark.slow),
    ],
)
def test_onnx_equals_pytorch(name: str, dims: tuple[int, ...], dense: int) -> None:
    if name in MULTIPLY_SLOTS and dims != SPEC.dims:
        pytest.skip("needs slots of one dim")
    spec = NetworkSpec(dims, dense, SPEC.hidden, dropout=0.3, batch_norm=True)
    network = trained_a_little(build_network(name, spec, 1), spec)
    content = export_onnx(network, spec)
    assert network.training
    for rows in (1, 7, 300):
        inputs_BI, wide_B = batch(spec, rows, seed=rows)
        wanted_B = logits(network, inputs_BI, wide_B).numpy()
        np.testing.assert_allclose(onnx_logits(content, inputs_BI, wide_B), wanted_B, rtol=1e-5, atol=1e-5)


@EVERY
def test_logits_do_not_depend_on_other_rows_or_their_order(name: str) -> None:
    network = trained_a_little(build_network(name, SPEC, 1), SPEC)
    inputs_BI, wide_B = batch(SPEC, 40)
    order_B = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    together_B = logits(network, inputs_BI, wide_B)
    torch.testing.assert_close(logits(network, inputs_BI[order_B], wide_B[order_B]), together_B[order_B])
    alone_B = torch.cat([logits(network, inputs_BI[at : at + 1], wide_B[at : at + 1]) for at in range(40)])
    torch.testing.assert_close(alone_B, together_B)


@EVERY
def test_dropout_and_batch_norm_act_only_in_training(name: str) -> None:
    inputs_BI, wide_B = batch(SPEC, 32)
    dropping = build_network(name, NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, dropout=0.5), 1)
    assert torch.equal(logits(dropping, inputs_BI, wide_B), logits(dropping, inputs_BI, wide_B))
    dropping.train()
    same = torch.equal(dropping(inputs_BI, wide_B), dropping(inputs_BI, wide_B))
    assert same == (name in ("lr", "fm"))  # they have no hidden layers

    norming = build_network(name, NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, batch_norm=True), 1)
    before_B = logits(norming, inputs_BI, wide_B)
    norming.train()(3 * inputs_BI, wide_B)
    assert torch.equal(before_B, logits(norming, inputs_BI, wide_B)) == (name in ("lr", "fm"))


@EVERY
def test_different_dims_work_or_are_rejected_by_name(name: str) -> None:
    spec = NetworkSpec((4, 1, 16, 0), 2, (8,))
    if name in MULTIPLY_SLOTS:
        spec = NetworkSpec((4, 16, 4), 2, (8,))
        with pytest.raises(
            ConfigError, match=rf"^clickline.yaml model.embedding_dim {name} .* found 4, 16\. Give all"
        ):
            build_network(name, spec, 1)
        return
    network = build_network(name, spec, 1)
    inputs_BI, wide_B = batch(spec, 32)
    inputs_BI.requires_grad_()
    network(inputs_BI, wide_B).square().sum().backward()
    assert inputs_BI.grad is not None
    if network.uses_vectors:
        assert (inputs_BI.grad.abs().sum(0) > 0).all()


@EVERY
def test_dense_floats_only_work_or_are_rejected_by_name(name: str) -> None:
    spec = NetworkSpec((), 6, (8,))
    if name in MULTIPLY_SLOTS:
        with pytest.raises(
            ConfigError, match=rf"model.name {name} .* there is no slot\. Choose lr, wide_deep"
        ):
            build_network(name, spec, 1)
        return
    assert logits(build_network(name, spec, 1), *batch(spec, 5)).shape == (5,)


@EVERY
def test_slots_only_and_one_slot_only(name: str) -> None:
    spec = NetworkSpec((4,), 0, (8,))
    if name == "dlrm":
        with pytest.raises(ConfigError, match="dlrm needs at least two fields to multiply, found one slot"):
            build_network(name, spec, 1)
        spec = NetworkSpec((4, 4), 0, (8,))
    assert logits(build_network(name, spec, 1), *batch(spec, 5)).shape == (5,)


@EVERY
def test_no_hidden_layers(name: str) -> None:
    spec = NetworkSpec(SPEC.dims, SPEC.dense, ())
    network = build_network(name, spec, 1)
    inputs_BI, wide_B = batch(spec, 32)
    inputs_BI.requires_grad_()
    network(inputs_BI, wide_B).square().sum().backward()
    assert inputs_BI.grad is not None
    assert (inputs_BI.grad.abs().sum(0) > 0).all() == network.uses_vectors


@EVERY
def test_initial_logits_are_moderate(name: str) -> None:
    """An initial loss far from that of random guessing would cost steps, or overflow in bf16."""
    spec = NetworkSpec((9,) * 26, 13, (512, 256, 128, 32))
    inputs_BI, _ = batch(spec, 256)
    inputs_BI[:, : sum(spec.dims)] *= 0.05  # vectors start small
    assert logits(build_network(name, spec, 1), inputs_BI, torch.zeros(256)).abs().mean() < 2


@EVERY_SLOWLY
def test_compiles_to_one_graph(name: str) -> None:
    network = build_network(name, SPEC, 1)
    inputs_BI, wide_B = batch(SPEC, 6)
    wanted_B = network(inputs_BI, wide_B)
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(inputs_BI, wide_B), wanted_B)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler uses what torch itself deprecates
def test_compiled_gradients_are_the_same() -> None:
    network = build_network("wide_deep", SPEC, 1)
    compiled = torch.compile(network)
    result: list[Tensor] = []
    for run in (network, compiled):
        inputs_BI, wide_B = batch(SPEC, 6)
        inputs_BI.requires_grad_()
        run(inputs_BI, wide_B).sum().backward()
        assert inputs_BI.grad is not None
        result.append(inputs_BI.grad)
    torch.testing.assert_close(*result)


def auc(labels_B: Tensor, scores_B: Tensor) -> float:
    positive, negative = scores_B[labels_B > 0.5], scores_B[labels_B < 0.5]
    wins = (positive[:, None] > negative).float() + 0.5 * (positive[:, None] == negative).float()
    return float(wins.mean())


@EVERY
def test_learns_what_a_linear_model_cannot(name: str) -> None:
    """A click depends on whether two slots' values match; a single value has no information."""
    generator = torch.Generator().manual_seed(3)
    values, rows = 4, 1500
    ids_BS = torch.randint(values, (rows, 3), generator=generator)
    dense_BD = torch.randn(rows, 1, generator=generator)
    labels_B = ((ids_BS[:, 0] % 2) == (ids_BS[:, 1] % 2)).float()
    spec = NetworkSpec((4, 4, 4), 1, (16,))
    network = build_network(name, spec, 1)
    rows_of_S = torch.arange(3) * values
    vectors = nn.Parameter(0.3 * torch.randn(3 * values, 4, generator=generator))
    wide = nn.Parameter(torch.zeros(3 * values))
    optimizer = torch.optim.Adam([*network.parameters(), vectors, wide], lr=0.01)

    def score() -> Tensor:
        at_BS = ids_BS + rows_of_S
        inputs_BI = torch.cat((vectors[at_BS].flatten(1), dense_BD), dim=1)
        result: Tensor = network(inputs_BI, wide[at_BS].sum(1))
        return result

    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(score(), labels_B).backward()
        optimizer.step()
    reached = auc(labels_B, score().detach())
    assert reached < 0.6 if name == "lr" else reached > 0.97


def test_fm_is_the_sum_over_pairs_scaled_to_the_default_dim() -> None:
    network = build_network("fm", SPEC, 1)
    inputs_BI, wide_B = batch(SPEC, 10)
    factors_DK = network.get_parameter("pairs.factors_DK")
    weight_D1 = network.get_parameter("linear.weight_D1")
    dense_BD = inputs_BI[:, 20:]
    fields = [inputs_BI[:, 4 * at : 4 * at + 4] for at in range(5)]
    fields += [dense_BD[:, at : at + 1] * factors_DK[at] for at in range(3)]
    pairs_B = 9 / 4 * sum((fields[i] * fields[j]).sum(1) for i in range(8) for j in range(i))
    torch.testing.assert_close(network(inputs_BI, wide_B), wide_B + (dense_BD @ weight_D1)[:, 0] + pairs_B)
    assert ModelSection().embedding_dim == DEFAULT_DIM == 9


def test_xdeepfm_maps_match_the_paper() -> None:
    spec = NetworkSpec((4, 4, 4), 0, ())
    network = build_network("xdeepfm", spec, 1)
    inputs_BI, _ = batch(spec, 10)
    fields_BFK = inputs_BI.reshape(10, 3, 4)
    first_HFI, second_HFI = (network.get_parameter(f"mixes.{at}.weight").reshape(16, 3, -1) for at in (0, 1))
    first_BHK = torch.einsum("hji,bik,bjk->bhk", first_HFI, fields_BFK, fields_BFK)
    second_BHK = torch.einsum("hji,bik,bjk->bhk", second_HFI, first_BHK, fields_BFK)
    maps_BH = torch.cat((first_BHK, second_BHK), dim=1).sum(2)
    wanted_B = network.get_submodule("products")(maps_BH) + network.get_submodule("deep")(inputs_BI)
    torch.testing.assert_close(network(inputs_BI, torch.zeros(10)), wanted_B)


def test_dlrm_top_gets_each_pair_once() -> None:
    spec = NetworkSpec((4, 4, 4), 2, ())
    network = build_network("dlrm", spec, 1)
    inputs_BI, wide_B = batch(spec, 10)
    bottom_BK = network.get_submodule("bottom")(inputs_BI[:, 12:])
    fields = [inputs_BI[:, 0:4], inputs_BI[:, 4:8], inputs_BI[:, 8:12], bottom_BK]
    products = [(fields[i] * fields[j]).sum(1, keepdim=True) for i in range(4) for j in range(i)]
    wanted_B = network.get_submodule("top")(torch.cat((bottom_BK, *products), dim=1))
    torch.testing.assert_close(network(inputs_BI, wide_B), wanted_B)


def test_autoint_attention_matches_the_paper() -> None:
    layer = build_network("autoint", NetworkSpec((4, 4, 4), 0, ()), 1).get_submodule("attentions.0")
    fields_BFK = batch(NetworkSpec((4, 4, 4), 0, ()), 10)[0].reshape(10, 3, 4)
    query, key, value, residual = layer.get_parameter("project.weight").chunk(4)
    heads = []
    for of_head in (slice(0, 16), slice(16, 32)):
        scores_BFF = (fields_BFK @ query[of_head].T) @ (fields_BFK @ key[of_head].T).transpose(1, 2)
        heads.append(torch.softmax(scores_BFF, dim=2) @ (fields_BFK @ value[of_head].T))
    wanted = torch.relu(torch.cat(heads, dim=2) + fields_BFK @ residual.T)
    torch.testing.assert_close(layer(fields_BFK), wanted)


def test_dcn_v2_crosses_with_the_inputs() -> None:
    spec = NetworkSpec((2, 3), 1, ())
    network = build_network("dcn_v2", spec, 1)
    inputs_BI, wide_B = batch(spec, 10)
    x_BI = inputs_BI
    for at in range(3):
        x_BI = (
            inputs_BI * (x_BI @ network.get_parameter(f"crosses.{at}.weight").T) + x_BI
        )  # biases start at 0
    torch.testing.assert_close(network(inputs_BI, wide_B), network.get_submodule("last")(x_BI))


def test_masknet_normalizes_each_slot_but_not_single_numbers() -> None:
    spec = NetworkSpec((4, 1, 6), 2, ())
    norm = build_network("masknet", spec, 1).get_submodule("norm")
    inputs_BI, _ = batch(spec, 10)
    four, one, six, dense = inputs_BI.split([4, 1, 6, 2], dim=1)
    wanted = [nn.functional.layer_norm(four, (4,)), one, nn.functional.layer_norm(six, (6,)), dense]
    torch.testing.assert_close(norm(inputs_BI), torch.cat(wanted, dim=1))


def test_lr_needs_no_vectors() -> None:
    spec = NetworkSpec((), 0, ())
    network = build_network("lr", spec, 1)
    check_export(network, spec)
    assert torch.equal(
        logits(network, torch.empty(3, 0), torch.tensor([1.0, 2.0, 3.0])), torch.tensor([1.0, 2.0, 3.0])
    )


def test_a_network_without_inputs_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("model.name wide_deep has no input: no slot has a vector")
    ):
        build_network("wide_deep", NetworkSpec((0, 0), 0, (8,)), 1)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"model.name is 'deep_fm'\. Choose one of lr, fm, wide_deep, deepfm"
    ):
        build_network("deep_fm", SPEC, 1)
