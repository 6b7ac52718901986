"""The check that implementations give the values of a definition, and the gradients of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import econmt_ops
from econmt_ops import UniqueRows, dropout_mask
from econmt_ops.products.dropout import derive_seed
from tests.ops import helpers
from tests.ops.cases import CASES, NONE, Case, Sizes


class Variation(NamedTuple):
    """Way to call an op.

    Attributes:
        sizes: Sizes of the tensors.
        ragged: True if rows have lengths, one of them 0; then padding holds poison.
        state: False if no state is given, and states begin at 0.
        options: Further options, of those that an op takes.
        scattered: True if no tensor is contiguous.
        repeated: True if inputs are given as distinct rows.
    """

    sizes: Sizes = Sizes()
    ragged: bool = True
    state: bool = True
    options: dict[str, Any] = NONE
    scattered: bool = False
    repeated: bool = False

    def serves(self, case: Case) -> bool:
        """True if the variation differs for a case from `full` and `ragged`."""
        special = {name for name in self.options if name not in ("dropout_seed", "residual")}
        if self.repeated:
            return case.op.__name__ in ("lstm", "bidirectional_lstm", "attentional_lstm", "gru", "sru")
        return not special or any(case.takes(name) for name in special)


DROPOUT = {"dropout": 0.4, "dropout_seed": 11, "residual": True}
VARIATIONS = {
    "ones": Variation(Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1, 1), ragged=False),
    "full": Variation(Sizes(2, 5, 4, 3, 7, 6, 3, 1), ragged=False, state=False),
    "ragged": Variation(),
    "reverse": Variation(options={"reverse": True}, scattered=True),
    "dropout": Variation(Sizes(3, 2, 2, 5, 5, 9, 8, 3), options=DROPOUT),
    "variational": Variation(
        Sizes(3, 3, 3, 4, 6, 4, 5, 2, 9), options={**DROPOUT, "variational": True, "reverse": True}
    ),
    "repeated": Variation(options=DROPOUT, repeated=True),
}


def variants() -> list[Any]:
    """Cases and their variations: all of those that differ, but of each decoder another one; the rest is thorough."""
    found, decoders = [], 0
    for name, case in CASES.items():
        names = [each for each in VARIATIONS if VARIATIONS[each].serves(case)]
        is_decoder = name.startswith("attentional")
        decoders += is_decoder
        for number, each in enumerate(names):
            more = is_decoder and number != decoders % len(names)
            found.append(pytest.param(name, each, marks=[pytest.mark.thorough] if more else []))
    return found


def zero_state(tensors: dict[str, Any]) -> dict[str, Any]:
    """The state among tensors as zeros of float64, which a definition needs if none is given."""
    return {
        name: tree_map(
            lambda part: None if part is None else torch.zeros_like(part, dtype=torch.float64), tensors[name]
        )
        for name in ("state", "initial")
        if name in tensors
    }


def padding_of(case: Case) -> tuple[str, tuple[str, ...]]:
    """The letter of the size that lengths are of, and the tensors that have padding."""
    if case.takes("keys"):
        return "S", ("keys", "values")
    return "T", ("decay", "inputs") if case.takes("decay") else ("inputs",)


def masks_of(options: dict[str, Any], sizes: Sizes, device: str) -> list[Tensor | None]:
    """Masks of the layers' inputs, one for all steps if they are variational."""
    if not options.get("dropout"):
        return []
    shape = (sizes.B, 1 if options.get("variational") else sizes.T, sizes.H)
    seeds = [derive_seed(options["dropout_seed"], k) for k in range(1, sizes.L)]
    place = torch.device(device)
    return [None, *(dropout_mask(shape, options["dropout"], seed, place, torch.float64) for seed in seeds)]


def distinct_rows(tensors: dict[str, Any], lengths: Tensor | None) -> dict[str, Any]:
    """The tensors with inputs that repeat rows; only positions past the lengths read the last one."""
    inputs = tensors["inputs"]
    batch, steps, _ = inputs.shape
    rows = inputs.flatten(0, 1)[:5]
    places = torch.arange(batch * steps).view(batch, steps).square() % max(1, len(rows) - 2)
    if lengths is not None:
        places = places.masked_fill(torch.arange(steps) >= lengths.cpu().unsqueeze(1), len(rows) - 1)
    return {**tensors, "inputs": UniqueRows(rows.clone(), places.to(inputs.device))}


def check(
    case: Case,
    variation: Variation,
    dtype: torch.dtype,
    device: str,
    implementations: Sequence[str],
    tolerance: float | None = None,
    **more: Any,
) -> None:
    """Compares values, and the gradients of every tensor, with the definition's in float64 on the same, rounded tensors.

    Padding is poisoned, its gradients must be 0; without gradients float64 results are the same.

    Args:
        case: Op and definition.
        variation: How it is called.
        dtype: Type of the tensors.
        device: Device of the tensors.
        implementations: Names of the implementations to compare.
        tolerance: Largest relative error, that of the type if None.
        more: Options of the implementations alone.
    """
    make, sizes = helpers.Make(device, seed=3), variation.sizes
    letter, names = padding_of(case)
    lengths = None
    if variation.ragged:
        most = getattr(sizes, letter)
        lengths = torch.tensor([most, 1, 0, most - 1, *range(sizes.B)][: sizes.B], device=device).clamp(
            max=most
        )
    rounded = helpers.to(dtype, case.tensors(make, sizes))
    start = {} if variation.state else zero_state(rounded)
    rounded = {name: value for name, value in rounded.items() if name not in start}
    steps = lengths if letter == "T" else None
    if variation.repeated:
        rounded, names = distinct_rows(rounded, steps), tuple(name for name in names if name != "inputs")
    wanted = {name: value for name, value in variation.options.items() if case.takes(name)}
    plain = {name: wanted[name] for name in ("reverse", "residual") if name in wanted}
    masks = {"masks": masks_of(wanted, sizes, device)} if case.takes("dropout") else {}

    def definition(**tensors: Any) -> Any:
        inputs = tensors.get("inputs")
        if isinstance(inputs, UniqueRows):
            tensors["inputs"] = inputs.rows[inputs.places]
        return case.definition(**tensors, **start, **case.options, **plain, **masks, lengths=lengths)

    expected, expected_gradients = helpers.values_and_gradients(
        definition, helpers.to(torch.float64, rounded)
    )
    given = helpers.scatter_strides(rounded) if variation.scattered else rounded
    if lengths is not None:
        value = float("nan") if dtype in (torch.float64, torch.bfloat16) else float("inf")
        given = {**given, **{name: helpers.poisoned(given[name], lengths, value) for name in names}}
        if variation.repeated and steps is not None:
            given["inputs"].rows[-1] = value
    types: list[torch.dtype] = []
    for name in implementations:

        def function(name: str = name, **tensors: Any) -> Any:
            made = case.op(**tensors, **case.options, **wanted, **more, lengths=lengths, implementation=name)
            if case.takes("decay"):
                first = {"initial": tensors.get("initial"), "reverse": wanted.get("reverse", False)}
                return made, econmt_ops.final_state(made, lengths=lengths, **first)
            return made

        actual, gradients = helpers.values_and_gradients(function, given, expected)
        assert actual[0].dtype == dtype, name
        types = types or [part.dtype for part in actual]
        assert [part.dtype for part in actual] == types, name
        most_error = helpers.TOLERANCE[dtype] if tolerance is None else tolerance
        helpers.assert_close(actual, expected, most_error)
        helpers.assert_close(gradients, expected_gradients, most_error)
        if lengths is not None:
            assert_padding_has_no_gradient(given, gradients, names, lengths)
        if dtype == torch.float64:
            with torch.no_grad():
                alone = [part for part in tree_leaves(function(**given)) if isinstance(part, Tensor)]
            helpers.assert_close(alone, expected, most_error)


def assert_padding_has_no_gradient(
    given: dict[str, Any], gradients: list[Tensor], names: Sequence[str], lengths: Tensor
) -> None:
    """Checks that the gradients of the named tensors are exactly 0 past the lengths."""
    leaves = [part for part in tree_leaves(given) if isinstance(part, Tensor) and part.is_floating_point()]
    of_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    for name in names:
        gradient = of_leaf[id(given[name])]
        padding = torch.arange(gradient.shape[1]) >= lengths.cpu().unsqueeze(1)
        assert not gradient[padding.to(gradient.device)].any(), name
