"""The oneDNN layers give the same numbers as the plain ones, and are used only where allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clickline.models import fused_linear
from clickline.models.layers import Network
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import NETWORKS, build_network

ROWS = 1100
SPEC = NetworkSpec(dims=(9,) * 5, dense=3, hidden=(24, 16), dropout=0.0)
HAVE_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
pytestmark = pytest.mark.skipif(not HAVE_ONEDNN, reason="this PyTorch has no oneDNN")


def batch(spec: NetworkSpec, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs_BI = 0.5 * torch.randn(rows, spec.width, generator=generator)
    return inputs_BI.requires_grad_(), torch.randn(rows, generator=generator).requires_grad_()


def gradients(network: Network, spec: NetworkSpec) -> dict[str, Tensor]:
    """The logits and all gradients."""
    inputs_BI, wide_B = batch(spec)
    network.zero_grad()
    with torch.random.fork_rng(devices=[]):  # for dropout
        torch.manual_seed(3)
        logit_B = network(inputs_BI, wide_B)
    loss = nn.functional.binary_cross_entropy_with_logits(logit_B, (wide_B > 0).float())
    loss.backward()  # type: ignore[no-untyped-call]
    gradients_by_name = {name: weight.grad for name, weight in network.named_parameters()}
    gradients_by_name |= {"inputs": inputs_BI.grad, "wide": wide_B.grad, "logit": logit_B.detach()}
    return {name: value.clone() for name, value in gradients_by_name.items() if value is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that oneDNN was called with."""
    recorded: list[Tensor] = []
    real = fused_linear._onednn

    def spy(x_BI: Tensor, *others: object, **options: object) -> Tensor:
        recorded.append(x_BI)
        return real(x_BI, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_linear, "_onednn", spy)
    return recorded


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_logits_and_gradients_equal_those_of_the_plain_layers(
    name: str, dropout: float, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, dropout=dropout)
    network = build_network(name, spec, 1)
    gradients_by_name = gradients(network, spec)
    assert bool(calls) == (name not in ("lr", "fm"))
    calls.clear()
    monkeypatch.setattr(fused_linear, "_MIN_ROWS", 1 << 40)
    wanted = gradients(network, spec)
    assert not calls
    assert gradients_by_name.keys() == wanted.keys()
    for part in wanted:
        furthest = float((gradients_by_name[part] - wanted[part]).abs().max())
        assert furthest <= 1e-5 * min(float(wanted[part].abs().max()), 1.0), part


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x[:, 3:40],
        lambda x: x.t().contiguous().t(),
        lambda x: x[::2],
        lambda x: x[:1].expand(1500, -1),
    ],
    ids=["columns", "transposed", "every second row", "one row repeated"],
)
@pytest.mark.parametrize("relu", [True, False])
def test_strided_inputs_and_gradients(
    strided: Callable[[Tensor], Tensor], relu: bool, calls: list[Tensor]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2200, 40, generator=generator)
    width = strided(x).shape[1]
    weight, bias = torch.randn(7, width, generator=generator), torch.randn(7, generator=generator)
    pull = torch.randn(7, strided(x).shape[0], generator=generator).t()
    gradients_by_name: list[Tensor] = []
    wanted: list[Tensor] = []
    for into, run in ((gradients_by_name, True), (wanted, False)):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias)]
        shaped = strided(leaves[0])
        if run:
            y = fused_linear.affine(shaped, leaves[1], leaves[2], relu=relu)
        else:
            y = nn.functional.linear(shaped, leaves[1], leaves[2])
            y = torch.relu(y) if relu else y
        into += [y.detach(), *torch.autograd.grad(y, leaves, pull)]
    assert len(calls) == 2 and all(x.is_contiguous() for x in calls)
    for ours, theirs in zip(gradients_by_name, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_no_backward_for_inputs_without_gradient(calls: list[Tensor]) -> None:
    x, weight, bias = torch.randn(ROWS, 6), torch.randn(4, 6), torch.randn(4)
    fused_linear.affine(x, weight.requires_grad_(), bias, relu=True).sum().backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 1  # forward only: the first layer of a network without slots
    assert weight.grad is not None and x.grad is None and bias.grad is None


def test_plain_layers_are_used_where_fusion_is_not_allowed(calls: list[Tensor]) -> None:
    network = build_network("wide_deep", SPEC, 1)
    inputs_BI, wide_B = batch(SPEC)
    with torch.no_grad():
        network(inputs_BI, wide_B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(inputs_BI, wide_B)
    network(inputs_BI[:1000], wide_B[:1000])
    build_network("wide_deep", SPEC, 1).double()(inputs_BI.double(), wide_B)
    norm = NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, batch_norm=True)
    build_network("wide_deep", norm, 1)(inputs_BI, wide_B)
    assert not calls
    network(inputs_BI, wide_B)
    assert calls


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "wide_deep" else pytest.mark.slow) for name in NETWORKS]
)
def test_compiler_and_exporter_use_plain_operators(name: str) -> None:
    network = build_network(name, SPEC, 1)
    inputs_BI, wide_B = (tensor.detach() for tensor in batch(SPEC))
    rows = torch.export.Dim("rows")
    program = torch.export.export(network, (inputs_BI, wide_B), dynamic_shapes=({0: rows}, {0: rows}))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert operators and not [name for name in operators if "mkldnn" in name]
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(inputs_BI, wide_B), network(inputs_BI, wide_B))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_bf16_is_the_plain_path_and_near_fp32(name: str) -> None:
    network = build_network(name, SPEC, 1)
    gradients_by_name: list[Tensor] = []
    for enabled in (False, True):
        inputs_BI, wide_B = batch(SPEC)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logit_B = network(inputs_BI, wide_B).float()
        logit_B.square().mean().backward()
        assert inputs_BI.grad is not None and inputs_BI.grad.dtype == torch.float32
        gradients_by_name.append(torch.cat((logit_B.detach()[:, None], inputs_BI.grad * ROWS), dim=1))
    spread = float(gradients_by_name[0][:, 0].std())
    assert float((gradients_by_name[0] - gradients_by_name[1])[:, 0].abs().mean()) < 0.02 * spread
    assert float((gradients_by_name[0] - gradients_by_name[1]).abs().mean()) < 0.1 * float(
        gradients_by_name[0].abs().mean()
    )
