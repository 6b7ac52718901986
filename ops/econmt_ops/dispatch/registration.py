"""Registering operators of torch.library: from one NamedTuple of their arguments, and without torch's compiler.

`OperatorSchema` derives from the NamedTuple all that would otherwise be counted by hand: the schema, what a backward
pass saves and gets back, and the order of the gradients. `Operator` registers a pair of operators from it.

`torch.library.custom_op` hides every kernel from torch.compile by a decorator that imports the compiler at the first
call: 70 MB and two seconds, whether something is compiled or not. Kernels registered by `custom_op` here are hidden in
the same way as soon as the compiler is there; before, nobody could look.

Kernels get every tensor with a contiguous last axis (`rows_of`): other views, such as the expanded gradients that `sum`
passes back, are copied on entry; all other tensors are passed on as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from econmt_ops.core.chunks import rows_of
from econmt_ops.core.precision import explicit_casts

_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    list[bool]: "bool[]",
}
"""Annotations of arguments, and what torch.library calls them."""

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Results = TypeVar("Results", bound=tuple[Any, ...])

Gradients = Mapping[str, Any]
"""Of arguments, by their names: a tensor, or for a list of tensors a sequence of them."""

Incoming = Mapping[str, Tensor | None]
"""The gradients of results by their names; None where nothing depends on one."""


def custom_op(name: str, *, schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers a kernel for all devices, as `torch.library.custom_op` does; it changes none of its arguments.

    Args:
        name: with its namespace, "econmt_ops::lstm_layer".
        schema: of the arguments and results; None: that of the kernel's annotations.
    """

    def register(kernel: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, kernel, mutates_args=(), schema=schema)
        # Where PyTorch keeps what it calls for all devices: the kernel, decorated.
        assert set(operator._backend_fns) == {None}
        operator._backend_fns[None] = _hidden_from_the_compiler(
            _given_rows(kernel, operator._opoverload._schema)
        )
        return operator

    return register


def _given_rows(kernel: Callable[..., Any], schema: torch.FunctionSchema) -> Callable[..., Any]:
    """Wraps a kernel of a schema so that all of its tensors, alone or in lists, have a contiguous last axis."""
    kinds = [str(argument.type) for argument in schema.arguments]
    tensors = [number for number, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    lists = [number for number, kind in enumerate(kinds) if kind == "List[Tensor]"]

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        # Every call runs these loops: they take a microsecond. Tensors are mostly contiguous, and then asked no more.
        given = list(arguments)
        for number in tensors:
            # Arguments that have their defaults are missing at the end.
            tensor = given[number] if number < len(given) else None
            if tensor is not None and not tensor.is_contiguous():
                given[number] = rows_of(tensor)
        for number in lists:
            parts = given[number]
            for place, part in enumerate(parts):
                if not part.is_contiguous():
                    parts[place] = rows_of(part)
        return kernel(*given)

    return call


def _hidden_from_the_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] | None = None

    @functools.wraps(kernel)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal hidden
        if hidden is None:
            compiler = sys.modules.get("torch._dynamo")
            disable = getattr(compiler, "disable", None)  # missing while it is being imported
            if disable is None:
                return kernel(*arguments, **options)
            hidden = disable(kernel)
        return hidden(*arguments, **options)

    return call


class OperatorSchema(Generic[Arguments]):
    """What follows from the arguments of an operator.

    Attributes:
        names: of the arguments, in their order.
        text: the schema, "Tensor inputs, Tensor[] weights, int seed".
    """

    def __init__(self, arguments: type[Arguments]) -> None:
        """``arguments``: a NamedTuple.

        Raises:
            TypeError: a field has an annotation that no operator can take.
        """
        self._make = arguments
        hints = get_type_hints(arguments)
        unknown = [f"{name}: {hint}" for name, hint in hints.items() if hint not in _KINDS]
        if unknown:
            raise TypeError(f"{arguments.__name__}: no operator can take {', '.join(unknown)}")
        self.names = tuple(hints)
        self._kinds = [_KINDS[hint] for hint in hints.values()]
        self.text = ", ".join(f"{kind} {name}" for kind, name in zip(self._kinds, self.names, strict=True))

    def make(self, values: Sequence[Any]) -> Arguments:
        """The NamedTuple of an operator's arguments in their order."""
        return self._make(*values)

    def tensors(self, arguments: Sequence[Any]) -> list[Any]:
        """All tensors in their order, lists laid open; None where an optional one is missing."""
        return [tensor for _, tensor in self.named_tensors(arguments)]

    def named_tensors(self, arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """As :meth:`tensors`, each with the name of its argument."""
        for name, kind, value in zip(self.names, self._kinds, arguments, strict=True):
            if kind.startswith("Tensor"):
                yield from ((name, part) for part in (value if kind == "Tensor[]" else (value,)))

    def with_tensors(self, arguments: Sequence[Any], tensors: Iterable[Any], rest: bool = True) -> list[Any]:
        """The inverse of :meth:`tensors`: the arguments with something else in the place of each tensor.

        Args:
            arguments: of which the lists count with their lengths.
            tensors: as many as :meth:`tensors` gives.
            rest: whether the arguments that are no tensors are there too; else they are None.
        """
        left = iter(tensors)
        made: list[Any] = []
        for kind, value in zip(self._kinds, arguments, strict=True):
            if kind == "Tensor[]":
                made.append([next(left) for _ in value])
            elif kind.startswith("Tensor"):
                made.append(next(left))
            else:
                made.append(value if rest else None)
        return made

    def differentiable(self, arguments: Sequence[Any], constants: Collection[str] = ()) -> list[Tensor]:
        """The tensors that have gradients, in their order: those of floating point numbers but the ``constants``."""
        return [
            tensor
            for name, tensor in self.named_tensors(arguments)
            if _has_gradient(tensor) and name not in constants
        ]

    def requires_grad(self, arguments: Sequence[Any]) -> bool:
        """Whether a backward pass will follow a call with these arguments."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self.differentiable(arguments))

    def in_order(
        self, arguments: Sequence[Any], gradients: Gradients, constants: Collection[str] = ()
    ) -> list[Tensor]:
        """The gradients of :meth:`differentiable`, in its order.

        Args:
            arguments: or what :meth:`with_tensors` made of them, with True in the place of what has a gradient.
            gradients: by name. Of what has no gradient it does not matter what they are.
            constants: names of arguments that have none.
        """
        found: list[Tensor] = []
        for name, kind, value in zip(self.names, self._kinds, arguments, strict=True):
            if not kind.startswith("Tensor") or name in constants:
                continue
            given = gradients.get(name)
            pairs = zip(value, given or (), strict=True) if kind == "Tensor[]" else ((value, given),)
            for part, gradient in pairs:
                if part is True or _has_gradient(part):
                    assert gradient is not None, f"no gradient of {name}"
                    found.append(gradient)
        return found


def _has_gradient(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


class Operator(Generic[Arguments, Results]):
    """A pair of operators, forward and backward, that autograd knows; called with the NamedTuple of arguments.

    Args:
        name: with its namespace; the backward operator has "_backward" behind it.
        arguments: a NamedTuple whose fields are tensors (also optional ones and lists), numbers, str or lists of bool.
            Tensors of floating point numbers have gradients.
        results: a NamedTuple of tensors.
        forward: computes the results from the arguments and from whether a backward pass will follow.
        fake: gives empty tensors of the shapes and types of the results.
        backward: computes gradients by name from the arguments, the results, and the gradients of the results by name,
            which are None where nothing depends on one. Results that are not saved are None for it.
        saves: the names of the arguments and results that the backward pass reads; by default all.
        stand_ins: of arguments that may not be saved the result of the same shape and type that then takes their place
            in the backward pass.
        in_place: gradients by name that need no operator, or None: then ``backward`` makes them. It is called with the
            same as ``backward``, but with None for arguments that are not saved, and may change what was saved.
        constants: the names of arguments that have no gradient in a call; by default none. It may ask which optional
            arguments there are, and nothing else of them.
    """

    def __init__(
        self,
        name: str,
        arguments: type[Arguments],
        results: type[Results],
        *,
        forward: Callable[[Arguments, bool], Results],
        fake: Callable[[Arguments, bool], Results],
        backward: Callable[[Arguments, Results, Incoming], Gradients],
        saves: Callable[[Arguments], Collection[str]] | None = None,
        stand_ins: Mapping[str, str] | None = None,
        in_place: Callable[[Arguments, Results, Incoming], Gradients | None] | None = None,
        constants: Callable[[Arguments], Collection[str]] = lambda _: (),
    ) -> None:
        self.schema = OperatorSchema(arguments)
        self._results: Any = results
        self._names = tuple(get_type_hints(results))
        self._run, self._run_back, self._saves, self._in_place = forward, backward, saves, in_place
        self._stand_ins = stand_ins or {}
        self._constants = constants
        outputs = ", ".join("Tensor" for _ in self._names)
        kept = "".join(f"Tensor? {part}_{name}, " for part in ("d", "kept") for name in self._names)
        self.forward = custom_op(name, schema=f"({self.schema.text}, bool keep) -> ({outputs})")(
            self._forward
        )
        self.forward.register_fake(lambda *given: tuple(fake(self.schema.make(given[:-1]), given[-1])))
        self.backward = custom_op(f"{name}_backward", schema=f"({kept}{self.schema.text}) -> Tensor[]")(
            self._backward
        )
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._remember)

    def __call__(self, arguments: Arguments) -> Results:
        """Runs the forward operator."""
        results: Results = self._results(*self.forward(*arguments, self.schema.requires_grad(arguments)))
        return results

    def _forward(self, *given: Any) -> tuple[Tensor, ...]:
        return tuple(self._run(self.schema.make(given[:-1]), given[-1]))

    def _parts(self, given: Sequence[Any]) -> Iterator[Any]:
        """What the backward operator is called with: arguments, results, and gradients of results."""
        count = len(self._names)
        yield self.schema.make(given[2 * count :])
        yield self._results(*given[count : 2 * count])
        yield dict(zip(self._names, given, strict=False))

    def _backward(self, *given: Any) -> list[Tensor]:
        arguments, results, incoming = self._parts(given)
        constants = self._constants(arguments)
        wanted = self.schema.differentiable(arguments, constants)
        with explicit_casts(wanted[0]):
            made = self.schema.in_order(arguments, self._run_back(arguments, results, incoming), constants)
        # An operator's results may share memory neither with each other nor with its arguments.
        flat = [*incoming.values(), *results, *self.schema.tensors(arguments)]
        taken = {tensor.untyped_storage()._cdata for tensor in flat if tensor is not None}
        return [_own(gradient.to(part.dtype), taken) for gradient, part in zip(made, wanted, strict=True)]

    def _fake_backward(self, *given: Any) -> list[Tensor]:
        arguments, _, _ = self._parts(given)
        return [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for part in self.schema.differentiable(arguments, self._constants(arguments))
        ]

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        arguments = self.schema.make(inputs[:-1])
        saved = (*self.schema.names, *self._names) if self._saves is None else self._saves(arguments)
        results = dict(zip(self._names, output, strict=True))
        named = [*results.items(), *self.schema.named_tensors(arguments)]
        instead = {name: results[other] for name, other in self._stand_ins.items() if name not in saved}
        ctx.set_materialize_grads(False)
        # In the place of each tensor, whether it has a gradient.
        constants = self._constants(arguments)
        ctx.arguments = self.schema.with_tensors(
            arguments,
            (
                _has_gradient(part) and name not in constants
                for name, part in self.schema.named_tensors(arguments)
            ),
        )
        ctx.types = [part.dtype for part in self.schema.differentiable(arguments, constants)]
        ctx.save_for_backward(*(tensor if name in saved else instead.get(name) for name, tensor in named))

    def _differentiate(self, ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if all(gradient is None for gradient in incoming):
            nothing = [None for _ in self.schema.tensors(ctx.arguments)]
            return *self.schema.with_tensors(ctx.arguments, nothing, rest=False), None
        count = len(self._names)
        results, tensors = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        arguments = self.schema.make(self.schema.with_tensors(ctx.arguments, tensors))
        made = None
        if self._in_place is not None:
            named = dict(zip(self._names, incoming, strict=True))
            made = self._in_place(arguments, self._results(*results), named)
        if made is None:
            gradients = iter(self.backward(*incoming, *results, *arguments))
        else:
            ordered = zip(self.schema.in_order(ctx.arguments, made), ctx.types, strict=True)
            gradients = iter([gradient.to(dtype) for gradient, dtype in ordered])
        flat = [
            next(gradients) if has_gradient else None for has_gradient in self.schema.tensors(ctx.arguments)
        ]
        return *self.schema.with_tensors(ctx.arguments, flat, rest=False), None


def _own(gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient, contiguous and in memory that nobody has taken, which it takes."""
    place = gradient.untyped_storage()._cdata
    if place in taken or not gradient.is_contiguous():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        place = gradient.untyped_storage()._cdata
    taken.add(place)
    return gradient
