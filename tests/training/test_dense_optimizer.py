"""The network learns the same whether one machine computes a batch or several workers parts of it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from training_doubles import model_plan

from clickline.embedding import Cosine
from clickline.errors import ArtifactError
from clickline.models.custom_network import CustomModel
from clickline.models.model_plan import ModelPlan
from clickline.models.network_spec import NetworkSpec
from clickline.models.networks import build_network
from clickline.records import EncodedRows, LabelledRows
from clickline.training.dense_optimizer import BUFFER_ROWS, LOSS, TOTAL_WEIGHT, DenseOptimizer, Diverged

SPEC = NetworkSpec((4, 4), 3, (16, 8), 0.0, False)


def plan(**changes: object) -> ModelPlan:
    return model_plan(**({"network": "deepfm", "hidden": SPEC.hidden, "weight_decay": 0.01} | changes))


def dense(**changes: object) -> DenseOptimizer:
    one = plan(**changes)
    spec = NetworkSpec(SPEC.dims, SPEC.dense, SPEC.hidden, one.dropout, one.batch_norm)
    return DenseOptimizer(build_network(one.network or "", spec, one.seed), one)


Batch = tuple[LabelledRows, np.ndarray, np.ndarray]


def batch(seed: int, rows: int) -> Batch:
    rng = np.random.default_rng(seed)
    label = (rng.random(rows) < 0.4).astype(np.float32)
    ones = np.ones(rows, np.uint32)
    weight = rng.choice([0.5, 1.0, 3.0], rows).astype(np.float32)
    encoded = EncodedRows(rows, rng.normal(size=(SPEC.dense, rows)).astype(np.float32), ())
    hour = np.zeros(rows, np.int32)
    inputs = rng.normal(size=(rows, SPEC.width)).astype(np.float32)
    wide = rng.normal(size=rows).astype(np.float32)
    return LabelledRows(label, weight, ones, label.astype(np.uint32), hour, encoded), inputs, wide


def part(whole: Batch, start: int, stop: int) -> Batch:
    rows, inputs_BI, wide_B = whole
    return rows.slice(start, stop), inputs_BI[start:stop], wide_B[start:stop]


def learn(one: DenseOptimizer, whole: Batch) -> float:
    computed = one.compute(*whole)
    one.update(None, computed.total_weight)
    return computed.mean_loss


def summed(workers: list[DenseOptimizer], whole: Batch, cuts: list[int]) -> np.ndarray:
    """The workers' gradients of their parts, added up as a group does it."""
    bounds = [0, *cuts, whole[0].rows]
    total = None
    for worker, start, stop in zip(workers, bounds[:-1], bounds[1:], strict=True):
        worker.compute(*part(whole, start, stop))
        total = worker.gradient().copy() if total is None else total + worker.gradient()
    assert total is not None
    total.flags.writeable = False  # as what comes from Ray is
    return total


def weights_of(one: DenseOptimizer) -> dict[str, np.ndarray]:
    return {name: value for name, value in one.state().items() if name != "random"}


@pytest.mark.parametrize("cuts", [[], [7], [20, 20], [1, 2, 39]], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"network": "wide_deep"}, {"click_weight": 4.0}, {"network": "dcn_v2"}, {"schedule": Cosine(5)}],
    ids=str,
)
def test_summed_gradients_of_parts_equal_the_whole_batch(changes, cuts):
    alone, workers = dense(**changes), [dense(**changes) for _ in range(len(cuts) + 1)]
    for seed in range(4):
        whole = batch(seed, 40)
        mean = learn(alone, whole)
        vector = summed(workers, whole, cuts)
        total = float(vector[TOTAL_WEIGHT])
        assert vector[LOSS] / total == pytest.approx(mean, rel=1e-5)
        for worker in workers:
            worker.update(vector, total)
    for worker in workers:
        assert np.array_equal(worker.weights(), workers[0].weights())
        assert worker.step == alone.step == 4
    state = weights_of(workers[0])
    for name, value in weights_of(alone).items():
        assert np.allclose(state[name], value, rtol=1e-3, atol=2e-5), name


def as_impressions(grouped: Batch) -> Batch:
    """The same impressions, each as a row of its own: a row's clicks first, then the others."""
    rows, inputs_BI, wide_B = grouped
    of_N = np.repeat(np.arange(rows.rows), rows.impression_B)
    place_N = np.arange(of_N.size) - np.repeat(
        np.cumsum(rows.impression_B) - rows.impression_B, rows.impression_B
    )
    click_N = (place_N < rows.click_B[of_N]).astype(np.uint32)
    single = rows.take(of_N)
    labelled = LabelledRows(
        click_N.astype(np.float32),
        single.weight_B / single.impression_B,
        np.ones_like(single.impression_B),
        click_N,
        single.event_hour_B,
        single.encoded,
    )
    return labelled, inputs_BI[of_N], wide_B[of_N]


def grouped_batch(seed: int, rows: int) -> Batch:
    """Rows of 1 to 12 impressions, with their own weights."""
    rng = np.random.default_rng(seed)
    single, inputs, wide = batch(seed, rows)
    show = rng.integers(1, 13, rows).astype(np.uint32)
    click = rng.binomial(show, 0.3).astype(np.uint32)
    label = (click / show).astype(np.float32)
    weight = (single.weight_B * show).astype(np.float32)
    return LabelledRows(label, weight, show, click, single.event_hour_B, single.encoded), inputs, wide


@pytest.mark.parametrize(
    "changes",
    [{}, {"click_weight": 5.0}, {"no_click_weight": 0.2}, {"click_weight": 3.0, "no_click_weight": 0.5}],
    ids=str,
)
def test_row_of_several_impressions_weighs_as_much_as_single_rows(changes):
    grouped, single = grouped_batch(1, 30), as_impressions(grouped_batch(1, 30))
    one, other = dense(**changes), dense(**changes)
    of_rows, of_impressions = one.compute(*grouped), other.compute(*single)
    assert of_rows.total_weight == pytest.approx(of_impressions.total_weight, rel=1e-5)
    assert of_rows.mean_loss == pytest.approx(of_impressions.mean_loss, rel=1e-5)
    np.testing.assert_allclose(
        one.gradient()[:BUFFER_ROWS], other.gradient()[:BUFFER_ROWS], rtol=1e-3, atol=2e-4
    )
    starts = (np.cumsum(grouped[0].impression_B) - grouped[0].impression_B).astype(np.int64)
    summed_BI = np.add.reduceat(of_impressions.grad_inputs_BI, starts)
    np.testing.assert_allclose(of_rows.grad_inputs_BI, summed_BI, rtol=1e-3, atol=1e-4)


def test_custom_loss_gets_the_class_weights_of_each_impression():
    """Its weights add up to those of the impressions, and its labels are the clicks' share of them."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(label: torch.Tensor, logit: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given.append((label, weight))
        return (
            weight * nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="none")
        ).mean()

    network = build_network("deepfm", SPEC, 0)
    one = DenseOptimizer(network, plan(click_weight=5.0), CustomModel(network, True, loss=loss))
    rows = grouped_batch(2, 8)[0]
    one.compute(*grouped_batch(2, 8))
    label, weight = (value.numpy() for value in given[0])
    own = rows.weight_B / rows.impression_B
    np.testing.assert_allclose(weight * label, own * 5 * rows.click_B, rtol=1e-5)
    np.testing.assert_allclose(
        weight * (1 - label), own * (rows.impression_B - rows.click_B), rtol=1e-5, atol=1e-6
    )


def test_input_gradients_are_of_the_summed_loss_for_any_part():
    one, whole = dense(), batch(0, 40)
    all_of_it = one.compute(*whole)
    parts = [one.compute(*part(whole, start, start + 10)) for start in range(0, 40, 10)]
    for name in ("grad_inputs_BI", "grad_wide_B", "logit_B"):
        together = np.concatenate([getattr(piece, name) for piece in parts])
        assert np.allclose(together, getattr(all_of_it, name), atol=1e-5), name
    summed = sum(piece.mean_loss * piece.total_weight for piece in parts)
    assert summed == pytest.approx(all_of_it.mean_loss * all_of_it.total_weight, rel=1e-5)
    assert sum(piece.total_weight for piece in parts) == pytest.approx(all_of_it.total_weight)


@pytest.mark.parametrize("network", ["deepfm", "xdeepfm", "dlrm", "lr"])
def test_empty_part_contributes_nothing(network):
    one = dense(network=network)
    one.compute(*batch(0, 8))
    computed = one.compute(*part(batch(1, 8), 8, 8))
    assert (computed.mean_loss, computed.total_weight, computed.finite) == (0.0, 0.0, True)
    assert computed.grad_inputs_BI.shape == (0, SPEC.width)
    assert computed.grad_wide_B.shape == computed.logit_B.shape == (0,)
    assert not one.gradient().any()


def test_batch_with_zero_weight_changes_nothing():
    one, other = dense(weight_decay=0.0), dense(weight_decay=0.0)
    before = one.weights()
    rows, inputs_BI, wide_B = batch(0, 8)
    rows.weight_B[:] = 0
    computed = one.compute(rows, inputs_BI, wide_B)
    assert (computed.total_weight, computed.mean_loss) == (0.0, 0.0)
    other.update(one.gradient(), 0.0)
    one.update(None, 0.0)
    assert np.array_equal(one.weights(), before)
    assert np.array_equal(other.weights(), before)


def test_network_is_unchanged_until_the_update():
    one, once = dense(batch_norm=True), dense(batch_norm=True)
    before = one.weights()
    for seed in range(3):
        one.compute(*batch(seed, 32))
        assert np.array_equal(one.weights(), before)
    whole = batch(5, 32)
    first = one.compute(*whole), one.gradient().copy()
    again = one.compute(*whole), one.gradient().copy()  # after a sum that failed
    assert first[0].mean_loss == again[0].mean_loss
    assert np.array_equal(first[1], again[1])
    one.update(None, again[0].total_weight)
    learn(once, whole)
    assert np.array_equal(one.weights(), once.weights())
    assert not np.array_equal(one.weights(), before)


def test_batch_norm_uses_the_mean_of_all_workers():
    alone, workers = dense(batch_norm=True), [dense(batch_norm=True) for _ in range(4)]
    whole = batch(0, 61)
    learn(alone, whole)
    vector = summed(workers, whole, [10, 60, 60])  # 10 rows, 50, none, and one, of which it learns nothing
    assert vector[BUFFER_ROWS] == 60
    for worker in workers:
        worker.update(vector, float(vector[TOTAL_WEIGHT]))
    before, after = dict(alone.network.named_buffers()), dict(workers[0].network.named_buffers())
    linear = next(layer for layer in dense(batch_norm=True).network.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():
        expected = 0.1 * linear(torch.from_numpy(whole[1][:60])).mean(0)
    name = next(name for name in after if name.endswith("running_mean"))
    assert torch.allclose(after[name], expected, atol=1e-6)
    counts = [name for name in after if name.endswith("num_batches_tracked")]
    assert [int(after[name]) for name in counts] == [int(before[name]) for name in counts] == [1, 1]
    for worker in workers:
        assert np.array_equal(worker.weights(), workers[0].weights())


def test_non_finite_loss_reaches_all_workers_and_leaves_no_gradient():
    one, other, whole = dense(batch_norm=True), dense(batch_norm=True), batch(0, 20)
    whole[1][3, 0] = np.inf
    before = one.weights()
    computed = one.compute(*part(whole, 0, 10))
    assert not computed.finite
    assert not computed.grad_inputs_BI.any()
    assert not np.isfinite(one.gradient()[LOSS])
    assert np.array_equal(one.weights(), before)
    assert other.compute(*part(whole, 10, 20)).finite
    assert not np.isfinite((one.gradient() + other.gradient())[LOSS])
    assert learn(one, batch(1, 20)) == learn(dense(batch_norm=True), batch(1, 20))


def test_diverged_error_survives_pickling():
    error = pickle.loads(pickle.dumps(Diverged(float("nan"), batch(0, 3)[0])))  # noqa: S301
    assert "the loss became nan: training has diverged." in str(error)
    assert error.rows.rows == 3


def test_randomness_depends_on_seed_step_and_rank():
    whole = batch(0, 64)

    def logits(seed: int, step: int, rank: int | None, noise: int) -> bytes:
        one = dense(dropout=0.5, seed=seed)
        one.load_weights(dense(dropout=0.5).weights())
        one.step = step
        torch.manual_seed(noise)
        return one.compute(*whole, rank=rank).logit_B.tobytes()

    assert logits(0, 0, 0, 1) == logits(0, 0, 0, 2)
    assert len({logits(*place, 1) for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}) == 4
    assert logits(0, 0, None, 1) != logits(0, 0, None, 2)


def test_weights_round_trip_as_one_vector():
    one, other = dense(batch_norm=True), dense(batch_norm=True, seed=9)
    for seed in range(3):
        learn(one, batch(seed, 32))
    vector = one.weights()
    kept = vector.copy()
    vector.flags.writeable = False
    other.load_weights(vector)
    for name, value in one.network.state_dict().items():
        assert torch.equal(value, other.network.state_dict()[name]), name
    assert other.compute(*batch(7, 32)).logit_B.tobytes() == one.compute(*batch(7, 32)).logit_B.tobytes()
    learn(one, batch(3, 32))
    assert np.array_equal(vector, kept)


def test_state_is_complete_and_its_names_are_stable():
    one, other = dense(dropout=0.3), dense(dropout=0.3, seed=4)
    for seed in range(3):
        learn(one, batch(seed, 32))
    state = one.state()
    names = set(one.network.state_dict())
    assert {name for name in state if name.startswith("network/")} == {f"network/{name}" for name in names}
    assert {name for name in state if name.startswith("optimizer/0/")} == {
        "optimizer/0/step",
        "optimizer/0/exp_avg",
        "optimizer/0/exp_avg_sq",
    }
    assert "random" in state
    after = [learn(one, batch(seed, 32)) for seed in range(3, 6)]
    other.load_state(state, step=3)
    assert [learn(other, batch(seed, 32)) for seed in range(3, 6)] == after
    with pytest.raises(ArtifactError, match="the stored weights do not match the network"):
        dense(network="dlrm").load_state(state, step=3)


class Half(nn.Module):
    """Uses one of its two weights, and keeps a third as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.used = nn.Parameter(torch.zeros(SPEC.width))

    def forward(self, inputs_BI, wide_B):
        return inputs_BI @ self.used


@pytest.mark.parametrize("extra", [1.0, 0.25])
@pytest.mark.parametrize("by_vector", [False, True])
def test_custom_network_and_optimizer(extra, by_vector):
    network = Half()
    custom = CustomModel(network, False, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5))
    one = DenseOptimizer(network, plan(schedule=Cosine(4)), custom)
    one.step = 2  # half of the rate
    rows, inputs_BI, wide_B = batch(0, 16)
    computed = one.compute(rows, inputs_BI, wide_B)
    assert not computed.grad_wide_B.any()
    one.update(one.gradient() if by_vector else None, computed.total_weight, extra)
    slope_B = rows.weight_B * (0.5 - rows.label_B)
    expected = -0.5 * 0.5 * extra * (slope_B @ inputs_BI) / rows.weight_B.sum()
    assert np.allclose(network.used.detach().numpy(), expected, atol=1e-6)
    assert network.idle.tolist() == network.fixed.tolist() == [1.0, 1.0]
