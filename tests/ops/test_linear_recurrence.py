from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import final_state, linear_recurrence
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    each_implementation,
    each_size,
    padded_part,
    poisoned,
    scatter_strides,
    values_and_gradients,
)

pytestmark = each_implementation("linear_recurrence")
SIZES = each_size({"B": 1, "T": 1, "H": 1}, {"B": 2, "T": 5, "H": 7}, {"B": 3, "T": 33, "H": 2})
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
LENGTHS = (5, 0, 1, 4)
STASH = pytest.mark.parametrize("stash", ["outputs", "carries"])
INITIAL = pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])


def arguments(size: SimpleNamespace, make: Make, initial: bool) -> dict[str, Any]:
    return {
        "decay": make(size.B, size.T, size.H).sigmoid(),
        "inputs": make(size.B, size.T, size.H),
        "initial": make(size.B, size.H) if initial else None,
    }


def naive(decay: Tensor, inputs: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """The sum over all earlier inputs, each times the decays since: no recurrence."""
    steps = inputs.shape[1]
    order = list(range(steps))[:: -1 if reverse else 1]
    outputs: list[Tensor] = [inputs[:, 0]] * steps
    for now in range(steps):
        total = torch.zeros_like(inputs[:, 0])
        for then in range(now + 1):
            since = decay[:, order[then + 1 : now + 1]].prod(1)
            total = total + since * inputs[:, order[then]]
        if initial is not None:
            total = total + decay[:, order[: now + 1]].prod(1) * initial
        outputs[order[now]] = total
    return torch.stack(outputs, 1)


@SIZES
@REVERSE
@INITIAL
def test_equals_definition(
    size: SimpleNamespace, reverse: bool, initial: bool, implementation: str, device: str
) -> None:
    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    def definition(**tensors: Any) -> Tensor:
        return naive(**tensors, reverse=reverse)

    assert_same_function(function, definition, arguments(size, Make(device), initial))


@REVERSE
@INITIAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(
    reverse: bool, initial: bool, dtype: torch.dtype, implementation: str, device: str
) -> None:
    def function(**tensors: Any) -> Tensor:
        outputs = linear_recurrence(**tensors, reverse=reverse, implementation=implementation)
        assert outputs.dtype == dtype
        return outputs

    def definition(**tensors: Any) -> Tensor:
        return naive(**tensors, reverse=reverse)

    size = SimpleNamespace(B=2, T=9, H=5)
    assert_same_function(function, definition, arguments(size, Make(device), initial), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulates_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # In bfloat16 a running sum of 1/512 stops at 1/2, in float16 one of 2^-12 at 1/2.
    step = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    count = int(1 / step)
    inputs = torch.full((1, count, 1), step, dtype=dtype, device=device)
    outputs = linear_recurrence(torch.ones_like(inputs), inputs, implementation=implementation)
    assert float(outputs[0, -1, 0]) == 1.0


@REVERSE
@INITIAL
def test_gradcheck(reverse: bool, initial: bool, implementation: str, device: str) -> None:
    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    assert_gradcheck(function, arguments(SimpleNamespace(B=2, T=4, H=2), Make(device), initial))


def test_zero_decay_forgets_everything(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=5, H=3), Make(device), True)
    tensors["decay"] = torch.zeros_like(tensors["decay"])
    assert linear_recurrence(**tensors, implementation=implementation).equal(tensors["inputs"])


@REVERSE
def test_memory_layout_does_not_matter(reverse: bool, implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=3, T=4, H=5), Make(device), True)

    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scatter_strides(tensors))
    assert_close(outputs, expected, 1e-14)
    assert_close(gradients, expected_gradients, 1e-14)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decay", (2, 5), r"decay must be \(B, T, H\) with B=2, T=5, H=7, got \(2, 5\)"),
        ("decay", (2, 4, 7), r"decay must be \(B, T, H\) with B=2, T=5, H=7, got \(2, 4, 7\)"),
        ("initial", (7, 2), r"initial must be \(B, H\) with B=2, H=7, got \(7, 2\)"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str, implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=5, H=7), Make("cpu"), True)
    tensors[name] = torch.ones(shape)
    with pytest.raises(ValueError, match="linear_recurrence: " + message):
        linear_recurrence(**tensors, implementation=implementation)


def test_empty(implementation: str) -> None:
    with pytest.raises(ValueError, match=r"inputs must have at least one position, got \(2, 0, 7\)"):
        linear_recurrence(torch.ones(2, 0, 7), torch.ones(2, 0, 7), implementation=implementation)


def by_rows(
    decay: Tensor, inputs: Tensor, initial: Tensor | None, lengths: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Outputs and last states by `naive`, row by row, over exactly the positions that a row has."""
    outputs, states = torch.zeros_like(inputs), []
    for row, length in enumerate(lengths.tolist()):
        start = None if initial is None else initial[row : row + 1]
        one = slice(row, row + 1)
        state = inputs.new_zeros(1, inputs.shape[2]) if start is None else start
        if length:
            found = naive(decay[one, :length], inputs[one, :length], start, reverse)
            outputs[row, :length] = found[0]
            state = found[:, 0 if reverse else -1]
        states.append(state)
    return outputs, torch.cat(states)


@REVERSE
@INITIAL
@STASH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_lengths(
    reverse: bool, initial: bool, stash: str, dtype: torch.dtype, implementation: str, device: str
) -> None:
    lengths = torch.tensor(LENGTHS)

    def function(decay: Tensor, inputs: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        # Neither what stands in the padding nor its gradient may matter.
        poison = poisoned(decay, lengths), poisoned(inputs, lengths)
        options = {"initial": initial, "lengths": lengths.to(device), "reverse": reverse}
        outputs = linear_recurrence(*poison, **options, stash=stash, implementation=implementation)
        assert not padded_part(outputs, lengths).any()
        outputs.register_hook(lambda gradient: poisoned(gradient, lengths))
        return outputs, final_state(outputs, lengths=lengths, reverse=reverse, initial=initial)

    def definition(decay: Tensor, inputs: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return by_rows(decay, inputs, initial, lengths, reverse)

    tensors = arguments(SimpleNamespace(B=4, T=5, H=3), Make(device), initial)
    assert_same_function(function, definition, tensors, dtype)


@REVERSE
@STASH
@pytest.mark.parametrize("steps", [63, 64, 65, 130])
def test_blocks_of_steps(steps: int, reverse: bool, stash: str, implementation: str, device: str) -> None:
    """As many steps as a block has, and neither more nor fewer; rows that end in the middle of one."""
    lengths = torch.tensor([steps, steps // 2])

    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(
            **tensors, lengths=lengths, reverse=reverse, stash=stash, implementation=implementation
        )

    def definition(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, lengths=lengths, reverse=reverse, implementation="reference")

    tensors = arguments(SimpleNamespace(B=2, T=steps, H=3), Make(device), True)
    for dtype in torch.float64, torch.float32:
        assert_same_function(function, definition, tensors, dtype)


@REVERSE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_stash_changes_nothing(
    reverse: bool, dtype: torch.dtype, implementation: str, device: str
) -> None:
    found = []
    for stash in "outputs", "carries":
        options = {"reverse": reverse, "stash": stash, "implementation": implementation}
        make = Make(device, dtype)
        tensors = arguments(SimpleNamespace(B=2, T=150, H=5), make, True) | {"initial": make(2, 5)}
        outputs, gradients = values_and_gradients(
            lambda options=options, **given: linear_recurrence(**given, **options), tensors
        )
        found.append([*outputs, *gradients])
    assert all(left.equal(right) for left, right in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 1)], ids=str)
def test_decay_that_is_the_same(shape: tuple[int, ...], implementation: str, device: str) -> None:
    make = Make(device)
    tensors = {"decay": make(*shape), "inputs": make(3, 4, 5)}

    def function(decay: Tensor, inputs: Tensor) -> Tensor:
        return linear_recurrence(decay, inputs, implementation=implementation)

    def definition(decay: Tensor, inputs: Tensor) -> Tensor:
        return naive(decay.expand(3, 4, 5), inputs, None, False)

    assert_same_function(function, definition, tensors)


@pytest.mark.parametrize("shape", [(4,), (1,), (2, 4, 5), (3, 1), (1, 3, 4, 5)], ids=str)
def test_decay_that_does_not_fit(shape: tuple[int, ...], implementation: str) -> None:
    with pytest.raises(ValueError, match=r"decay must be \(B, T, H\) with B=3, T=4, H=5, got \("):
        linear_recurrence(torch.ones(shape), torch.ones(3, 4, 5), implementation=implementation)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 1.0001, 4.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_decays(decay: float, dtype: torch.dtype, implementation: str, device: str) -> None:
    """Nothing is divided, so no decay is special; products that overflow do no harm to a state that is zero."""
    inputs = Make(device, dtype)(1, 600, 2)
    if decay == 4.0:
        inputs[:, :560] = 0
    given = torch.full_like(inputs, decay).requires_grad_()
    expected = linear_recurrence(given.detach().double(), inputs.double(), implementation="reference")
    found = linear_recurrence(given, inputs, implementation=implementation)
    assert found.isfinite().all()
    assert_close([found], [expected], 1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("message", ["unknown stash 'gates'; available: outputs, carries"])
def test_unknown_stash(message: str, implementation: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_recurrence(
            torch.ones(1, 1, 1), torch.ones(1, 1, 1), stash="gates", implementation=implementation
        )


def test_wrong_lengths_and_kinds(implementation: str) -> None:
    tensors = torch.ones(2, 3, 1), torch.ones(2, 3, 1)
    with pytest.raises(ValueError, match="decay must be a tensor, got a value of type float"):
        linear_recurrence(0.5, tensors[1], implementation=implementation)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lengths must be an int64 tensor, got torch\.int32"):
        linear_recurrence(*tensors, lengths=torch.ones(2, dtype=torch.int32), implementation=implementation)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"lengths must be from 0 to 3, got {length}"):
            linear_recurrence(*tensors, lengths=torch.tensor([3, length]), implementation=implementation)
