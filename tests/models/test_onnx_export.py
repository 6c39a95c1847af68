"""ONNX export: the bytes, and the errors if a network cannot be exported."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from clickline.errors import ConfigError
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import build_network
from clickline.models.onnx_export import check_export, export_onnx

SPEC = NetworkSpec((4, 4), 2, (8,))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SPEC.width, 1)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.linear(inputs_BI).squeeze(1)
        return logit_B


class UnknownOperator(Linear):
    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        curved_BI = torch.special.bessel_j0(inputs_BI)  # fault
        return super().forward(curved_BI, wide_B) + wide_B


class Branches(Linear):
    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        if inputs_BI.sum() > 0:  # fault
            return wide_B
        return super().forward(inputs_BI, wide_B)


class CountsRows(Linear):
    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:  # fault
        return super().forward(inputs_BI, wide_B).reshape(3)


class LeavesTorch(Linear):
    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        plain = inputs_BI.numpy()  # fault
        return super().forward(torch.from_numpy(plain), wide_B)


class Random(Linear):
    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:  # fault
        return super().forward(inputs_BI + torch.rand_like(inputs_BI), wide_B)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (UnknownOperator, "cannot be exported to ONNX, which has no operator for prims.bessel_j0.default."),
        (Branches, "cannot be exported to ONNX: it branches on the values of a batch."),
        (CountsRows, "cannot be exported to ONNX: it only works for a fixed number of rows."),
        (LeavesTorch, "cannot be exported to ONNX: RuntimeError: .numpy() is not supported"),
        (Random, "gives different logits in ONNX and in PyTorch for a batch of 1 rows."),
    ],
)
def test_a_network_that_cannot_be_exported_is_rejected_with_its_line(
    kind: type[Linear], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_export(kind(), SPEC)
    lines, first = inspect.getsourcelines(kind)
    fault = next(at for at, line in enumerate(lines) if "# fault" in line)
    (mistake,) = caught.value.mistakes
    assert (mistake.file, mistake.line) == (__file__, first + fault)
    assert mistake.problem.startswith(message)
    assert mistake.remedy
    assert capfd.readouterr() == ("", "")


def test_the_bytes_are_reproducible_and_contain_no_local_paths() -> None:
    network = build_network("wide_deep", SPEC, 1)
    content = export_onnx(network, SPEC)
    assert content == export_onnx(network, SPEC)
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content and b".py" not in content


def test_inputs_and_outputs_are_named_and_any_number_of_rows_is_allowed() -> None:
    model = onnx.load_from_string(export_onnx(Linear(), SPEC))  # ignores `wide`
    onnx.checker.check_model(model)
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {"inputs": ["rows", SPEC.width], "wide": ["rows"], "logit": ["rows"]}


def test_export_keeps_the_mode_and_the_random_state() -> None:
    network = build_network("wide_deep", NetworkSpec((4, 4), 2, (8,), dropout=0.5, batch_norm=True), 1)
    network.train()
    batch_norm = next(module for module in network.modules() if isinstance(module, nn.BatchNorm1d))
    batch_norm.eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    state = torch.get_rng_state()
    check_export(network, SPEC)
    assert torch.equal(state, torch.get_rng_state())
    assert not batch_norm.training
    assert all(module.training for module in network.modules() if module is not batch_norm)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in network.parameters())


@pytest.mark.slow
def test_export_prints_nothing() -> None:
    program = """
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import build_network
from clickline.models.onnx_export import check_export
spec = NetworkSpec((4, 4), 2, (8,))
check_export(build_network("deepfm", spec, 1), spec)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
