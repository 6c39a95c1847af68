"""Custom networks: the documented example runs, and every mistake is reported with its line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch import nn

from clickline.errors import ConfigError, Mistake
from clickline.models.custom_network import load_custom_model
from clickline.models.network_spec import NetworkSpec
from clickline.models.onnx_export import check_export
from clickline.records import EncodedRows, LabelledRows, SlotIds

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_model.py"
SPEC = NetworkSpec((4, 4, 2), 2, (8,))

GOOD = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.linear = nn.Linear(spec.width, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs, wide):
        return self.drop(self.linear(inputs)).squeeze(1)

def forward(spec):
    return Net(spec)
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "my_model.py"
    path.write_text(text)
    return path


def mistakes(path: Path, *, multi: tuple[bool, ...] = ()) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        load_custom_model(path, SPEC, 1, multi=multi)
    assert all(mistake.file == str(path) for mistake in caught.value.mistakes)
    return caught.value.mistakes


def some_rows(weights: list[float]) -> LabelledRows:
    count = len(weights)
    ids = SlotIds(np.arange(count, dtype=np.uint64))
    return LabelledRows(
        np.zeros(count, dtype=np.float32),
        np.array(weights, dtype=np.float32),
        np.ones(count, dtype=np.uint32),
        np.zeros(count, dtype=np.uint32),
        np.full(count, -1, dtype=np.int32),
        EncodedRows(count, np.zeros((2, count), dtype=np.float32), (ids, ids, ids)),
    )


def test_the_example_trains_evaluates_feeds_and_exports() -> None:
    spec = NetworkSpec((4,) * 6, 3, (16, 8), dropout=0.1)
    model = load_custom_model(EXAMPLE, spec, 1)
    assert model.uses_wide and model.loss and model.optimizer and model.feed
    generator = torch.Generator().manual_seed(1)
    inputs_BI, wide_B = torch.randn(256, spec.width, generator=generator), torch.zeros(256)
    labels_B = (inputs_BI[:, 0] > inputs_BI[:, 4]).float()
    optimizer = model.optimizer(list(model.network.parameters()))
    losses: list[float] = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(labels_B, model.network(inputs_BI, wide_B))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    logits_B = torch.tensor([0.0, 3.0])  # of rows without a click: one at 0.5, the other wrong
    only_first = model.loss(torch.zeros(2), logits_B, torch.tensor([1.0, 0.0]))
    assert only_first == pytest.approx(0.5 * np.log(2))  # focal: entropy times the chance of being wrong
    ones = np.ones(20, dtype=np.float32)
    labels_N = np.zeros(20, dtype=np.float32)
    labels_N[:4] = 1
    scores_N = np.linspace(1, 0, 20, dtype=np.float32)
    assert model.metrics["clicks_in_top_tenth"](labels_N, scores_N, ones) == 0.5
    spec_rows = some_rows([1, 7])
    assert model.feed(spec_rows).weight_B.tolist() == [1, 5]
    check_export(model.network, spec)


def test_the_minimal_file(tmp_path: Path) -> None:
    before = (list(sys.path), torch.get_rng_state())
    model = load_custom_model(write(tmp_path, GOOD), SPEC, 1)
    assert (model.loss, model.optimizer, model.metrics, model.feed) == (None, None, {}, None)
    assert not model.uses_wide
    assert sys.path == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]  # no bytecode


def test_the_trial_has_no_side_effects_and_the_seed_decides(tmp_path: Path) -> None:
    text = GOOD.replace("nn.Dropout(0.5)", "nn.BatchNorm1d(1)")
    text += "def optimizer(params):\n    return torch.optim.SGD(params, lr=1.0)\n"
    path = write(tmp_path, text)
    first, again, other = (load_custom_model(path, SPEC, seed).network for seed in (1, 1, 2))
    assert torch.equal(first.get_parameter("linear.weight"), again.get_parameter("linear.weight"))
    assert not torch.equal(first.get_parameter("linear.weight"), other.get_parameter("linear.weight"))
    assert first.get_buffer("drop.num_batches_tracked") == 0
    assert first.get_parameter("linear.weight").grad is None


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("def forward(spec:\n", 1, "", "is not Python: '(' was never closed."),
        ("import torch\nimport torhc\n", 2, "", "raised ModuleNotFoundError: No module named 'torhc'"),
        ("raise SystemExit(1)\n", 1, "", "raised SystemExit: 1"),
        ("x = 1\n", 0, "forward()", "is missing. Write `def forward(spec):`."),
        ("\nforward = 3\n", 2, "forward()", "is not a function."),
        ("def forward():\n    pass\n", 1, "forward()", "has the arguments ()."),
        ("async def forward(spec):\n    pass\n", 1, "forward()", "has the arguments (spec)."),
        (
            "def forward(spec):\n    return spec.dim\n",
            2,
            "forward()",
            "raised AttributeError: 'NetworkSpec' object",
        ),
        (
            "from torch import nn\ndef forward(spec):\n    return nn.ReLU()\n",
            2,
            "forward()",
            "returned a ReLU without trainable weights. Add some, if only a bias.",
        ),
        ("\ndef forward(spec):\n    return 5\n", 2, "forward()", "returned int. Return a torch.nn.Module."),
        (
            GOOD.replace("inputs, wide)", "inputs)"),
            10,
            "Net.forward()",
            "raised TypeError: Net.forward() takes 2",
        ),
        (
            GOOD.replace("self.linear(inputs)", "self.linear(wide)"),
            11,
            "Net.forward()",
            "raised RuntimeError: mat1",
        ),
        (
            GOOD.replace(".squeeze(1)", ""),
            10,
            "Net.forward()",
            "returned float32 of shape (8, 1) for 8 rows.",
        ),
        (
            GOOD.replace(".squeeze(1)", ".squeeze(1).long()"),
            10,
            "Net.forward()",
            "returned int64 of shape (8,)",
        ),
        (
            GOOD.replace(".squeeze(1)", ".squeeze(1).detach()"),
            10,
            "Net.forward()",
            "returned logits that depend on no",
        ),
        (
            GOOD.replace("return self.drop", "return None and self.drop"),
            10,
            "Net.forward()",
            "returned NoneType.",
        ),
        (
            GOOD + "def loss(labels, logits):\n    return labels - logits[:, None]\n",
            15,
            "loss()",
            "returned a tensor of shape (8, 8) for 8 rows. Return one number per row or one scalar",
        ),
        (
            GOOD + "def loss(labels, logits):\n    return 0.5\n",
            15,
            "loss()",
            "returned float. Return one number",
        ),
        (
            GOOD + "def loss(labels, logits):\n    return labels.mean()\n",
            15,
            "loss()",
            "returned a number without a grad",
        ),
        (
            GOOD + "def loss(labels, logits):\n    return (logits / 0).sum()\n",
            15,
            "loss()",
            "returned nan for a batch",
        ),
        (
            GOOD + "def loss(labels):\n    return labels\n",
            15,
            "loss()",
            "has the arguments (labels). Write `def loss(labels,",
        ),
        (
            GOOD + "def loss(labels, logits):\n    x = 1\n    return y\n",
            17,
            "loss()",
            "raised NameError: name 'y'",
        ),
        (
            GOOD + "def optimizer(params):\n    return torch.optim.Adam\n",
            15,
            "optimizer()",
            "returned type. Return a torch",
        ),
        (
            GOOD + "def optimizer(params):\n    return torch.optim.LBFGS(params)\n",
            15,
            "optimizer()",
            "raised TypeError",
        ),
        (
            GOOD + "def optimiser(params):\n    pass\n",
            15,
            "optimiser()",
            "is not one of forward, loss, optimizer, metrics, feed.",
        ),
        (
            GOOD + "def metrics():\n    return [1]\n",
            15,
            "metrics()",
            "returned list. Return {name: function(labels,",
        ),
        (GOOD + "def metrics():\n    return {'a': 1}\n", 15, "metrics()", "has 'a': int. Return {name:"),
        (
            GOOD + "def metrics():\n    return {'a': lambda *x: x}\n",
            15,
            "metrics()",
            "'a' raised TypeError: float() argument",
        ),
        (
            GOOD + "def metrics():\n    return {'a': lambda y, p, w: y.x}\n",
            16,
            "metrics()",
            "'a' raised AttributeError",
        ),
        (
            GOOD + "def feed(batch):\n    batch\n",
            15,
            "feed()",
            "returned NoneType. Return LabelledRows with the same rows",
        ),
        (
            GOOD + "def feed(batch):\n    return batch.select(batch.label_B > 0)\n",
            15,
            "feed()",
            "returned label_B as float32[4]",
        ),
        (
            GOOD
            + "from dataclasses import replace\ndef feed(batch):\n    return replace(batch, label_B=[1] * batch.rows)\n",
            16,
            "feed()",
            "returned list as label_B.",
        ),
        (GOOD + "def feed(batch):\n    return batch.lable_B\n", 16, "feed()", "raised AttributeError"),
    ],
)
def test_a_mistake_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int, key: str, message: str
) -> None:
    (mistake,) = mistakes(write(tmp_path, text))
    assert (mistake.line, mistake.key) == (line, key)
    assert f"{mistake.problem} {mistake.remedy}".startswith(message)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    (mistake,) = mistakes(tmp_path / "absent.py")
    assert mistake.problem == "cannot be read: No such file or directory."


def test_several_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD + dedent("""\
        def loss(labels, logits):
            return logits[:1]

        def optimizer(params):
            return None

        def metrics():
            return 1 / 0

        def feed(batch):
            return batch.rows
    """)
    assert [mistake.key for mistake in mistakes(write(tmp_path, text))] == [
        "loss()",
        "optimizer()",
        "metrics()",
        "feed()",
    ]


def test_callables_other_than_functions_work(tmp_path: Path) -> None:
    text = GOOD + dedent("""\
        from functools import partial
        from torch.nn.functional import binary_cross_entropy_with_logits as _entropy
        loss = lambda labels, logits: _entropy(logits, labels)
        optimizer = partial(torch.optim.Adagrad, lr=0.1)
    """)
    model = load_custom_model(write(tmp_path, text), SPEC, 1)
    assert model.optimizer is not None
    assert isinstance(model.optimizer(list(model.network.parameters())), torch.optim.Adagrad)


@pytest.mark.parametrize(("reduced", "weighted"), [("", True), (".mean()", False)])
def test_row_weights_apply_to_losses_per_row_but_not_to_a_scalar(
    tmp_path: Path, reduced: str, weighted: bool
) -> None:
    text = GOOD + f"def loss(labels, logits):\n    return (labels - logits).abs(){reduced}\n"
    loss = load_custom_model(write(tmp_path, text), SPEC, 1).loss
    assert loss is not None
    labels_B, logits_B = torch.zeros(3), torch.tensor([1.0, 2.0, 6.0])
    assert loss(labels_B, logits_B) == 3
    assert loss(labels_B, logits_B, torch.tensor([3.0, 1.0, 0.0])) == (1.25 if weighted else 3)
    assert loss(labels_B, logits_B, torch.zeros(3)) == (0 if weighted else 3)


def test_output_of_the_trial_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("        return self.drop", "        print('inside')\n        return self.drop")
    load_custom_model(write(tmp_path, text + "print('loaded')\n"), SPEC, 1)
    assert capsys.readouterr() == ("", "loaded\ninside\n")


def test_feed_is_tried_with_multi_value_slots(tmp_path: Path) -> None:
    text = GOOD + dedent("""\
        def feed(batch):
            assert batch.encoded.slots[0].offsets_B1 is None
            assert len(batch.encoded.slots[1].offsets_B1) == batch.rows + 1
            return batch
    """)
    path = write(tmp_path, text)
    assert load_custom_model(path, SPEC, 1, multi=(False, True, False)).feed is not None
    assert mistakes(path)[0].line == 17


@pytest.mark.parametrize(
    "change",
    [
        "replace(slot, ids_N=slot.ids_N[1:])",
        "replace(slot, ids_N=slot.ids_N.astype('i8'))",
        "replace(slot, ids_N=list(slot.ids_N))",
        "replace(slot, offsets_B1=batch.click_B)",
        "replace(slot, offsets_B1=np.array([0, 9] + [8] * 7))",
        "slot.ids_N",
    ],
)
def test_a_feed_result_that_does_not_match_is_rejected(tmp_path: Path, change: str) -> None:
    text = GOOD + dedent(f"""\
        import numpy as np
        from dataclasses import replace
        def feed(batch):
            slot, *others = batch.encoded.slots
            slots = ({change}, *others)
            return replace(batch, encoded=replace(batch.encoded, slots=slots))
    """)
    (mistake,) = mistakes(write(tmp_path, text))
    assert mistake.problem.startswith("returned slot 0 without a uint64 id per row, or int64 offsets")


def test_an_error_during_training_is_reported_with_its_line(tmp_path: Path) -> None:
    text = (
        GOOD
        + "def feed(batch):\n    if batch.rows == 3:\n        raise ValueError('three')\n    return batch\n"
    )
    path = write(tmp_path, text)
    feed = load_custom_model(path, SPEC, 1).feed
    assert feed is not None
    assert feed(some_rows([1, 1])).rows == 2
    with pytest.raises(ConfigError, match=r"my_model.py:17 feed\(\) raised ValueError: three"):
        feed(some_rows([1, 1, 1]))


def test_export_errors_have_the_line_of_the_user_file(tmp_path: Path) -> None:
    text = GOOD.replace("self.drop(self.linear(inputs))", "torch.special.i0(self.linear(inputs))")
    path = write(tmp_path, text)
    network = load_custom_model(path, SPEC, 1).network
    with pytest.raises(
        ConfigError, match=r"my_model.py:11 Net cannot be exported .* operator for prims.bessel_i0"
    ):
        check_export(network, SPEC)


def test_helpers_classes_and_imported_names_are_ignored(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass, replace\n@dataclass\nclass Options:\n    rate: float = 0.1\n"
    text += "def _helper():\n    return Options()\n" + GOOD
    model = load_custom_model(write(tmp_path, text), replace(SPEC, dropout=0.1), 1)
    assert isinstance(model.network, nn.Module)
