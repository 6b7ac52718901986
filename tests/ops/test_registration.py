"""OperatorSchema and Operator: what follows from a NamedTuple of arguments; and what READMEs say of operations."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from econmt_ops.dispatch import registration, select
from econmt_ops.dispatch.registration import Incoming, Operator, OperatorSchema, custom_op
from econmt_ops.layers.op import OPS as LAYER_OPS


class Arguments(NamedTuple):
    first: Tensor
    others: list[Tensor]
    bias: Tensor | None
    places: Tensor | None
    scale: float
    number: int
    flip: list[bool]
    text: str
    doubled: bool


class Results(NamedTuple):
    total: Tensor
    squares: Tensor


def _forward(call: Arguments, keep: bool) -> Results:
    total = call.first * call.scale
    for other, flip in zip(call.others, call.flip, strict=True):
        total = total - other if flip else total + other
    if call.bias is not None:
        total = total + call.bias
    if call.places is not None:
        total = total[call.places]
    total = total * 2 if call.doubled else total.clone()
    return Results(total, call.first.square() if keep else call.first.new_empty(0))


def _fake(call: Arguments, keep: bool) -> Results:
    rows = len(call.first) if call.places is None else len(call.places)
    squares = call.first.new_empty(call.first.shape if keep else (0,))
    return Results(call.first.new_empty(rows, *call.first.shape[1:]), squares)


def _backward(call: Arguments, results: Results, incoming: Incoming) -> dict[str, Any]:
    assert results.squares.shape == call.first.shape
    dtotal, given, dsquares = torch.zeros_like(call.first), incoming["total"], incoming["squares"]
    if given is not None:
        places = torch.arange(len(given)) if call.places is None else call.places
        dtotal.index_add_(0, places, given, alpha=2 if call.doubled else 1)
    more = 0 if dsquares is None else 2 * call.first * dsquares
    return {
        "first": dtotal * call.scale + more,
        "others": [-dtotal if flip else dtotal for flip in call.flip],  # one tensor twice: it must be copied
        "bias": dtotal.sum(0),
    }


def _saves(call: Arguments) -> Collection[str]:
    return ("first", "others", "bias", "squares") if call.places is None else (*Arguments._fields, "squares")


_sum = Operator(
    "econmt_ops_test::sum", Arguments, Results, forward=_forward, fake=_fake, backward=_backward, saves=_saves
)


def _arguments(places: bool = False, bias: bool = True, dtype: torch.dtype = torch.float64) -> Arguments:
    torch.manual_seed(0)

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, requires_grad=True)

    first, others = leaf(3, 2), [leaf(3, 2) for _ in range(3)]
    optional = leaf(2) if bias else None, torch.tensor([2, 0, 2, 1]) if places else None
    return Arguments(first, others, *optional, 0.5, 7, [False, True, False], "text", True)


def test_schema_names_kinds_and_order() -> None:
    schema = OperatorSchema(Arguments)
    assert schema.text == (
        "Tensor first, Tensor[] others, Tensor? bias, Tensor? places, float scale, int number, bool[] flip, "
        "str text, bool doubled"
    )
    call = _arguments(places=True, bias=False)
    flat = schema.tensors(call)
    assert [name for name, _ in schema.named_tensors(call)] == ["first", *["others"] * 3, "bias", "places"]
    assert flat[4] is None
    assert [id(part) for part in schema.differentiable(call)] == [id(part) for part in flat[:4]]
    rebuilt = schema.make(schema.with_tensors(call, flat))
    assert rebuilt.others == call.others
    assert rebuilt[4:] == call[4:]
    assert schema.with_tensors(call, range(6), rest=False) == [0, [1, 2, 3], 4, 5, *[None] * 5]


def test_schema_refuses_what_no_operator_takes() -> None:
    class Wrong(NamedTuple):
        sizes: tuple[int, ...]

    with pytest.raises(TypeError, match="Wrong: no operator can take sizes"):
        OperatorSchema(Wrong)


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_operator_is_differentiable_in_every_tensor(places: bool, bias: bool) -> None:
    call = _arguments(places, bias)
    leaves = _sum.schema.differentiable(call)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        left, given = iter(tensors), _sum.schema.tensors(call)
        flat = [next(left) if part is not None and part.requires_grad else part for part in given]
        return tuple(_sum(_sum.schema.make(_sum.schema.with_tensors(call, flat))))

    torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("places", [False, True])
def test_operators_pass_opcheck(places: bool) -> None:
    call = _arguments(places)
    torch.library.opcheck(_sum.forward, (*call, True))
    with torch.no_grad():
        results = _sum(call)
        incoming = (torch.ones_like(results.total), None)
        torch.library.opcheck(_sum.backward, (*incoming, None, call.first.square(), *call))


def test_nothing_is_kept_without_gradients_which_have_the_types_of_their_arguments() -> None:
    call = _arguments()
    with torch.no_grad():
        assert _sum(call).squares.numel() == 0
    assert _sum(call).squares.shape == (3, 2)
    call = call._replace(bias=torch.zeros(2, dtype=torch.float32, requires_grad=True))
    _sum(call).total.sum().backward()
    assert call.bias.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert call.first.grad.dtype == torch.float64  # type: ignore[union-attr]


def test_a_gradient_that_is_missing_is_noticed() -> None:
    schema = OperatorSchema(Arguments)
    call = _arguments()
    with pytest.raises(AssertionError, match="no gradient of bias"):
        schema.in_order(call, {"first": call.first, "others": call.others})
    with pytest.raises(ValueError, match="zip"):
        schema.in_order(call, {"first": call.first, "others": call.others[:2], "bias": call.bias})


_seen: list[Tensor | None] = []


@custom_op(
    "econmt_ops_test::look", schema="(Tensor a, Tensor[] b, Tensor? c, int d, Tensor? e=None) -> Tensor"
)
def _look(a: Tensor, b: list[Tensor], c: Tensor | None, d: int, e: Tensor | None = None) -> Tensor:
    _seen[:] = [a, *b, c, e]
    return a.new_zeros(d)


def test_kernels_get_rows_and_what_consists_of_rows_as_it_is() -> None:
    square = torch.arange(4.0).view(2, 2)
    _look(square.t(), [square, torch.ones(1).expand(3)], None, 3)
    turned, rows = ([[0, 2], [1, 3]], (2, 1)), ([[0, 1], [2, 3]], (2, 1))
    seen = [None if x is None else (x.tolist(), x.stride()) for x in _seen]
    assert seen == [turned, rows, ([1, 1, 1], (1,)), None, None]
    wide, scalar = torch.arange(12.0).view(2, 2, 3), torch.tensor(1.0)
    rows = wide.transpose(0, 1)[..., :2]
    _look(rows, [scalar], square.expand(5, 2, 2), 1, square.t())
    places = [(x.data_ptr(), x.stride()) for x in _seen[:3] if x is not None]
    strides = {rows: (3, 6, 1), scalar: (), square: (0, 2, 1)}
    assert places == [(each.data_ptr(), stride) for each, stride in strides.items()]
    assert _seen[3].is_contiguous()


OPS = Path(__file__).parents[2] / "ops"
READMES = [OPS / "README.md", *sorted((OPS / "econmt_ops").rglob("README.md"))]


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Triton does not ask for: with the first GPU as the current one, a call on the second ran on the first."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    schema: Any = SimpleNamespace(arguments=[SimpleNamespace(type="float"), SimpleNamespace(type="Device")])
    kernel = registration._with_contiguous_rows(lambda *_: len(entered), schema)
    assert [kernel(1.0, device) for device in (first, second, torch.device("cuda"), second)] == [0, 1, 1, 2]
    problem: Any = SimpleNamespace(op="linear", device=second, arguments=(), is_light=False)
    assert select.run(problem, lambda _: len(entered), "reference") == 3
    assert entered == [second] * 3


def test_every_op_has_one() -> None:
    folders = {path.parent.name for path in (OPS / "econmt_ops").glob("*/reference.py")}
    assert {path.parent.name for path in READMES} == {"ops", "cells", "modules", "linear", *folders}


def test_every_cell_has_its_equations() -> None:
    assert all("_{t-1}" in (op.__doc__ or "") or "`lstm`" in (op.__doc__ or "") for op in LAYER_OPS.values())


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_run(readme: Path) -> None:
    torch.manual_seed(0)
    examples = re.findall(
        r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert examples
    for example in examples:
        exec(compile(example, str(readme), "exec"), {})
