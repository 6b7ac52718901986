"""The kernel of Adam with 8-bit moments computes what the definition in PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.loss_scale import LossScale
from tests.ops.triton.kernel_device import DEVICE


def steps(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], name: str, decay: float, *, kernel: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Three clipped steps, of which the second one has a gradient with zeros and small numbers."""
    with monkeypatch.context() as patch:
        if not kernel:
            patch.setattr(EightBitOptimizer, "_kernel_of", lambda *_: None)
        draw = torch.Generator().manual_seed(sum(shape))
        parameter = nn.Parameter(torch.randn(shape, generator=draw).to(DEVICE))
        ours = EightBitOptimizer(
            [parameter], name=name, learning_rate=0.01, weight_decay=decay, betas=(0.8, 0.95)
        )
        for step in range(3):
            gradient = torch.randn(shape, generator=draw)
            if step == 1:
                gradient[::2] *= 1e-12
                gradient[1::4] = 0.0
            parameter.grad = gradient.to(DEVICE)
            ours.clip("norm", 3.0)
            ours.step()
        return parameter.detach(), ours.state[parameter]


@pytest.mark.parametrize("shape", [(14, 300), (17, 256), (5, 1000), (3, 50, 40), (130, 33)], ids=str)
@pytest.mark.parametrize(("name", "decay"), [("adam8bit", 0.0), ("adam8bit", 0.1), ("adamw8bit", 0.1)])
@pytest.mark.sampled(5)
def test_steps_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], name: str, decay: float
) -> None:
    (found, state), (wanted, expected) = (
        steps(monkeypatch, shape, name, decay, kernel=kernel) for kernel in (True, False)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for moment in ("exp_avg", "exp_avg_sq"):
        # Another rounding before the dither may change a code, and with it the scale of the next step.
        scales = state[f"{moment}_scale"], expected[f"{moment}_scale"]
        assert torch.isclose(*scales, rtol=1e-5, atol=0.0).float().mean() > 0.998
        codes = state[moment].int() - expected[moment].int()
        assert codes.abs().max() <= 1
        assert (codes != 0).float().mean() < 2e-3
        assert state[moment].unique().numel() > 10
    assert int(state["step"]) == 3


def test_an_overflow_changes_nothing() -> None:
    draw = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(14, 300, generator=draw).to(DEVICE))
    ours = EightBitOptimizer([parameter], name="adam8bit", learning_rate=0.01)
    ours.loss_scale = LossScale(parameter.device)
    for infinite in (False, True):
        before = [part.clone() for part in (parameter.detach(), *ours.state.get(parameter, {}).values())]
        gradient = torch.randn(14, 300, generator=draw).to(DEVICE) * ours.loss_scale.scale
        gradient[3, 3] = torch.inf if infinite else 1.0
        parameter.grad = gradient
        ours.clip("none", 0.0)
        ours.step()
        after = [parameter.detach(), *ours.state[parameter].values()]
        if infinite:
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        else:
            assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("kind", ["none", pytest.param("value", marks=pytest.mark.thorough)])
def test_a_matrix_in_bfloat16_is_rounded_as_defined(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = []
    for kernel in (True, False):
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(EightBitOptimizer, "_kernel_of", lambda *_: None)
            draw = torch.Generator().manual_seed(5)
            parameter = nn.Parameter(torch.randn(14, 300, generator=draw).to(DEVICE, torch.bfloat16))
            ours = EightBitOptimizer([parameter], name="adam8bit", learning_rate=0.01, rounding_seed=9)
            norms = []
            for _ in range(3):
                parameter.grad = torch.randn(14, 300, generator=draw).to(DEVICE, torch.bfloat16)
                norms.append(float(ours.clip_and_step(kind, 0.5)))
            found.append((parameter.detach().float(), norms))
    (one, norms), (other, expected) = found
    assert norms == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
    assert (one == other).float().mean() > 0.99


def test_one_pass_clips_and_sums_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `clip_and_step` does at once is `clip`, then `step`; NaN reaches the parameter and the norm."""
    draw = torch.Generator().manual_seed(6)
    start, gradient = torch.randn(17, 300, generator=draw), torch.randn(17, 300, generator=draw)
    runs = [nn.Parameter(start.to(DEVICE)) for _ in range(2)]
    optimizers = [EightBitOptimizer([run], name="adam8bit", learning_rate=0.01) for run in runs]
    launched: list[bool] = []
    matrix = EightBitOptimizer._launch

    def spy(*given: object, **options: object) -> object:
        launched.append(True)
        return matrix(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EightBitOptimizer, "_launch", spy)
    for run in runs:
        run.grad = gradient.to(DEVICE)
    norm = optimizers[0].clip_and_step("value", 0.3)
    assert runs[0].grad.equal(gradient.to(DEVICE))  # the kernel clips what it has read
    expected = optimizers[1].clip("value", 0.3)
    optimizers[1].step()
    assert len(launched) == 2
    torch.testing.assert_close(norm, expected)
    assert runs[0].equal(runs[1])
    runs[0].grad[3, 5] = torch.nan
    assert optimizers[0].clip_and_step("value", 0.3).isnan()
    assert runs[0][3, 5].isnan()
