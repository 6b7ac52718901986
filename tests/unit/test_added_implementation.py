"""An implementation that is added from outside is seen everywhere: nothing but its traits has to be told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt.bench.selection import rows_of
from econmt.budget.prices import settings
from econmt.config.recipe import Recipe, implementation_names, load_recipe
from econmt.errors import InputError
from econmt.estimate.techniques import techniques
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations, build_model
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt.training.choice import choose_implementations
from econmt_ops.core.arguments import CrossEntropyArguments
from econmt_ops.dispatch import session, traits
from econmt_ops.dispatch.rule import rule
from econmt_ops.dispatch.traits import Cost, Traits
from tests.conftest import ROOT
from tests.unit.bench.test_benches import chosen_for

OP = "linear_cross_entropy"
WORKSPACE = 30 << 20


@torch.library.custom_op("econmt_tests::logits", mutates_args=())
def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """A product that cannot be followed without values."""
    return torch.from_numpy(hidden.detach().numpy() @ weight.detach().numpy().T)


@logits.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(len(hidden), len(weight))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight = ctx.saved_tensors
    return gradient @ weight, gradient.T @ hidden


logits.register_autograd(_backward, setup_context=_keep)


def losses(call: CrossEntropyArguments) -> Tensor:
    """As `econmt_ops.linear_cross_entropy`."""
    found = logits(call.hidden, call.weight)
    options: Any = {"ignore_index": call.ignore_index, "reduction": call.reduction}
    found = found if call.bias is None else found + call.bias
    return functional.cross_entropy(found, call.targets, label_smoothing=call.smoothing, **options)


def cost(hidden: Tensor, weight: Tensor) -> Cost:
    """Of the operator `logits`."""
    return Cost(WORKSPACE, 2 * hidden.numel() * len(weight))


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """The implementation "toy" of the output layer, which goes before all others."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path))
    session.forget()
    own = Traits(recomputes=True, has_kernels=True, costs={"econmt_tests::logits": cost})
    traits.register(OP, "toy", losses, own)
    yield
    del traits._OPS[OP]["toy"]
    session.forget()


def small(*changes: str) -> Recipe:
    sizes = ["model.embedding=8", "model.encoder.size=8", "model.decoder.size=8", "model.attention.size=8"]
    return load_recipe("quickstart", [*sizes, *changes])


def test_recipes_plans_profiles_and_the_model_use_it() -> None:
    assert small("ops.output=toy").ops.output == "toy"
    assert implementation_names("output")[-1] == "toy"
    with pytest.raises(InputError, match="must be one of auto, reference, recompute, compiled, triton, toy"):
        small("ops.output=toys")
    with pytest.raises(InputError, match=r"ops.encoder: must be one of .*triton, found the text 'toy'"):
        small("ops.encoder=toy")
    assert rule(OP, "cpu") == "toy"
    assert choose_implementations(Implementations(), []).output == "toy"
    assert settings(Implementations(), "cpu")[-1].output == "toy"
    rows = {row.name: row.implementations for row in techniques("auto", "cpu", False)}
    assert rows["all"].output == rows["+ output"].output == "toy"
    assert rows["all, recompute"] == rows["all"]._replace(output="recompute")
    torch.manual_seed(1)
    model, words = build_model(small(), 11, 11), torch.tensor([[4, 5, 3], [6, 3, 0]])
    found = [
        model.loss(words, torch.tensor([3, 2]), words, words, implementations=how).item()
        for how in (Implementations(output="reference"), Implementations())
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_estimates_take_what_it_declares(device: str) -> None:
    shape = Shape(3, 5, 4)
    plain = estimate_step(TranslationTask(small("ops.output=reference"), 90, 70), shape, device)
    found = estimate_step(TranslationTask(small("ops.output=toy"), 90, 70), shape, device)
    assert found.entries["workspace", "output"] >= WORKSPACE > plain.entries["workspace", "output"]
    declared = 2 * (3 * 4) * 8 * 70
    backward = 2 * declared
    assert found.flops == plain.flops - 3 * declared + declared + backward
    assert WORKSPACE in {each.bytes for each in found.largest}


def test_benches_and_runs_measure_it_and_no_name_is_compared() -> None:
    measured, _ = chosen_for(small())
    rows = [row for row in rows_of(measured.measurements.values()) if str(row["problem"]).startswith(OP)]
    assert {row["candidate"] for row in rows} == {"reference", "recompute", "toy"}
    assert [row["candidate"] for row in rows if "(rule)" in str(row["chosen"])] == ["toy"]
    compared = re.compile(r"""[=!]= "(reference|recompute|compiled|triton)\"""")
    scripts = [file for file in (ROOT / "scripts").rglob("*.py") if file.parent.name != "tests"]
    files = [*(ROOT / "econmt").rglob("*.py"), *scripts]
    assert not {file.name for file in files if compared.search(file.read_text(encoding="utf-8"))}
