"""Registration of operators with torch.library from one NamedTuple of arguments, without importing torch's compiler.

`OperatorSchema` derives from the NamedTuple the schema, the tensors to save for backward, and the order of the
gradients. `Operator` registers a forward and a backward operator from it.

`torch.library.custom_op` hides kernels from torch.compile with a decorator that imports the compiler at the first call:
70 MB and two seconds, whether anything is compiled or not. `custom_op` here hides them in the same way, but only once
the compiler has been imported by someone else.

Kernels receive every tensor with a contiguous last axis (`rows_of`): other views, such as the expanded gradients of
`sum`, are copied; all other tensors are passed on as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

from econmt_ops.core import scopes
from econmt_ops.core.chunks import rows_of
from econmt_ops.core.precision import MatmulTF32, explicit_casts, recurrent_tf32
from econmt_ops.dispatch.device_limits import on_gpu_of
from econmt_ops.dispatch.rule import is_forward_mode, is_transformed

_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    list[bool]: "bool[]",
    torch.dtype: "ScalarType",
}
"""Types of torch.library by the annotation of an argument."""

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Results = TypeVar("Results", bound=tuple[Any, ...])

Gradients = Mapping[str, Any]
"""Gradients of arguments by name: a tensor, or a sequence of them for a list of tensors."""

Incoming = Mapping[str, Tensor | None]
"""Gradients of results by name; None where the loss does not depend on a result."""


def custom_op(name: str, *, schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers the decorated kernel for all devices, as `torch.library.custom_op`; it mutates none of its arguments.

    The name has a namespace, "econmt_ops::lstm_layer"; a schema of None is derived from the kernel's annotations.
    """

    def register(kernel: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, kernel, mutates_args=(), schema=schema)
        # PyTorch's private table of kernels; the key None holds the decorated kernel for all devices.
        assert set(operator._backend_fns) == {None}
        operator._backend_fns[None] = _hidden_from_the_compiler(
            _with_contiguous_rows(kernel, operator._opoverload._schema)
        )
        return operator

    return register


def _with_contiguous_rows(kernel: Callable[..., Any], schema: torch.FunctionSchema) -> Callable[..., Any]:
    """Wraps a kernel so that all tensors of its schema, alone or in lists, have a contiguous last axis."""
    kinds = [str(argument.type) for argument in schema.arguments]
    tensors = [number for number, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    lists = [number for number, kind in enumerate(kinds) if kind == "List[Tensor]"]

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        # These loops run in every call and take a microsecond, as most tensors are contiguous and need one test.
        values = list(arguments)
        for number in tensors:
            # Trailing arguments with default values are missing.
            tensor = values[number] if number < len(values) else None
            if tensor is not None and not tensor.is_contiguous():
                values[number] = rows_of(tensor)
        for number in lists:
            parts = values[number]
            for index, part in enumerate(parts):
                if not part.is_contiguous():
                    parts[index] = rows_of(part)
        with on_gpu_of(values):
            return scopes.run_whole(kernel, values)

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
    """Schema of an operator, and conversions of its arguments, derived from a NamedTuple.

    Attributes:
        names: Names of the arguments, in order.
        text: Schema of the arguments, "Tensor inputs, Tensor[] weights, int seed".
        make: Returns the NamedTuple of an operator's arguments, given in order.
    """

    def __init__(self, arguments: type[Arguments]) -> None:
        """Derives the schema from ``arguments``, a NamedTuple.

        Raises:
            TypeError: If an operator cannot take a field's annotation.
        """
        self.make: Callable[[Sequence[Any]], Arguments] = arguments._make  # type: ignore[attr-defined]
        hints = get_type_hints(arguments)
        unknown = [f"{name}: {hint}" for name, hint in hints.items() if hint not in _KINDS]
        if unknown:
            raise TypeError(f"{arguments.__name__}: no operator can take {', '.join(unknown)}")
        self.names = tuple(hints)
        self._kinds = [_KINDS[hint] for hint in hints.values()]
        self.text = ", ".join(f"{kind} {name}" for kind, name in zip(self._kinds, self.names, strict=True))

    def tensors(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns all tensors in order, lists flattened; None where an optional one is missing."""
        return [tensor for _, tensor in self.named_tensors(arguments)]

    def named_tensors(self, arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the tensors as :meth:`tensors`, each with the name of its argument."""
        for name, kind, value in zip(self.names, self._kinds, arguments, strict=True):
            if kind.startswith("Tensor"):
                yield from ((name, part) for part in (value if kind == "Tensor[]" else (value,)))

    def with_tensors(self, arguments: Sequence[Any], tensors: Iterable[Any], rest: bool = True) -> list[Any]:
        """Replaces each tensor of the arguments by another value, in the order of :meth:`tensors`.

        Without ``rest``, arguments that are not tensors become None.
        """
        remaining = iter(tensors)
        made: list[Any] = []
        for kind, value in zip(self._kinds, arguments, strict=True):
            if kind == "Tensor[]":
                made.append([next(remaining) for _ in value])
            elif kind.startswith("Tensor"):
                made.append(next(remaining))
            else:
                made.append(value if rest else None)
        return made

    def differentiable(self, arguments: Sequence[Any], constants: Collection[str] = ()) -> list[Tensor]:
        """Returns the floating point tensors in order, without those of the ``constants``."""
        return [
            tensor
            for name, tensor in self.named_tensors(arguments)
            if _has_gradient(tensor) and name not in constants
        ]

    def requires_grad(self, arguments: Sequence[Any]) -> bool:
        """Returns True if a call with these arguments will have a backward pass."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self.differentiable(arguments))

    def in_order(
        self, arguments: Sequence[Any], gradients: Gradients, constants: Collection[str] = ()
    ) -> list[Tensor]:
        """Returns the gradients of :meth:`differentiable`, in its order; those of tensors without one are ignored.

        The arguments may be a result of :meth:`with_tensors` with True in place of each tensor with a gradient.
        """
        ordered: list[Tensor] = []
        for name, kind, value in zip(self.names, self._kinds, arguments, strict=True):
            if not kind.startswith("Tensor") or name in constants:
                continue
            made = gradients.get(name)
            pairs = zip(value, made or (), strict=True) if kind == "Tensor[]" else ((value, made),)
            for part, gradient in pairs:
                if part is True or _has_gradient(part):
                    assert gradient is not None, f"no gradient of {name}"
                    ordered.append(gradient)
        return ordered


def _has_gradient(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


class Operator(Generic[Arguments, Results]):
    """Pair of registered operators, forward and backward, with autograd; called with the NamedTuple of arguments.

    Args:
        name: Name with namespace; the backward operator's name has the suffix "_backward".
        arguments: NamedTuple whose fields are tensors (also optional ones and lists), numbers, str, lists of bool or
            types of tensors. Floating point tensors have gradients.
        results: NamedTuple of tensors.
        forward: Computes the results from the arguments, and from a flag that is True if a backward pass will follow.
        fake: Returns empty tensors of the shapes and types of the results.
        backward: Computes gradients by name from the arguments, the results and the gradients of the results by name,
            which are None where the loss does not depend on a result. Results that were not saved are None.
        saves: Returns the names of the arguments and results to save for the backward pass.
        stand_ins: For arguments that may not be saved, the result of equal shape and type that replaces them in the
            backward pass.
        in_place: Computes gradients without an operator, or returns None to use ``backward``. It gets the arguments of
            ``backward``, with None for arguments that are not saved, and may overwrite saved tensors.
        constants: Returns the names of arguments without gradient in a call; by default none. It may only test which
            optional arguments are present.
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
        saves: Callable[[Arguments], Collection[str]],
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
        self.forward.register_fake(lambda *values: _returned(fake(self.schema.make(values[:-1]), values[-1])))
        self.backward = custom_op(f"{name}_backward", schema=f"({kept}{self.schema.text}) -> Tensor[]")(
            self._backward
        )
        self.backward.register_fake(self._fake_backward)
        self.backward.register_autograd(self.refuse_second_derivative)
        self.forward.register_autograd(self._differentiate, setup_context=self._remember)

    def __call__(self, arguments: Arguments) -> Results:
        """Runs the forward operator.

        Raises:
            RuntimeError: If an argument has a tangent of forward-mode differentiation, which torch.library would drop,
                or a gradient of torch.func.
        """
        if is_transformed():
            self._refuse_transforms(arguments)
        made = self.forward(*arguments, self.schema.requires_grad(arguments))
        results: Results = self._results(*_as_tuple(made))
        return results

    def _forward(self, *values: Any) -> Tensor | tuple[Tensor, ...]:
        arguments = self.schema.make(values[:-1])
        with self._products(arguments):
            return _returned(self._run(arguments, values[-1]))

    def _products(self, arguments: Arguments) -> AbstractContextManager[None]:  # noqa: ARG002 - a subclass reads them
        """Returns the context that sets the precision of matrix products."""
        return nullcontext()

    def _parts(self, values: Sequence[Any]) -> Iterator[Any]:
        """Yields arguments, results and gradients of the results from the backward operator's flat arguments."""
        count = len(self._names)
        yield self.schema.make(values[2 * count :])
        yield self._results(*values[count : 2 * count])
        yield dict(zip(self._names, values, strict=False))

    def _backward(self, *values: Any) -> list[Tensor]:
        arguments, results, incoming = self._parts(values)
        constants = self._constants(arguments)
        wanted = self.schema.differentiable(arguments, constants)
        with explicit_casts(wanted[0]), self._products(arguments):
            made = self.schema.in_order(arguments, self._run_back(arguments, results, incoming), constants)
        # torch.library forbids results that share memory with each other or with the arguments.
        flat = [*incoming.values(), *results, *self.schema.tensors(arguments)]
        taken = {tensor.untyped_storage()._cdata for tensor in flat if tensor is not None}
        return [_own(gradient.to(part.dtype), taken) for gradient, part in zip(made, wanted, strict=True)]

    def _fake_backward(self, *values: Any) -> list[Tensor]:
        arguments, _, _ = self._parts(values)
        return [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for part in self.schema.differentiable(arguments, self._constants(arguments))
        ]

    def refuse_second_derivative(self, *_: Any) -> NoReturn:
        """Raises RuntimeError; arguments, which torch.library passes, are ignored."""
        raise RuntimeError(
            f"{self.forward._qualname} has no second derivative; name implementation='reference', which has"
        )

    def _refuse_transforms(self, arguments: Arguments) -> None:
        unpack: Any = forward_ad.unpack_dual
        parts, lacking = self.schema.differentiable(arguments), None
        # torch.compile does not tell which arguments have tangents.
        compiles = is_forward_mode() and torch.compiler.is_compiling()
        if compiles or any(unpack(part).tangent is not None for part in parts):
            lacking = "forward-mode derivative"
        elif any(map(torch._C._functorch.is_gradtrackingtensor, parts)):
            lacking = "gradient of torch.func"
        if lacking is not None:
            told = "name implementation='reference', which has"
            raise RuntimeError(f"{self.forward._qualname} has no {lacking}; {told}")

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        arguments = self.schema.make(inputs[:-1])
        saved = self._saves(arguments)
        results = dict(zip(self._names, _as_tuple(output), strict=True))
        named = [*results.items(), *self.schema.named_tensors(arguments)]
        instead = {name: results[other] for name, other in self._stand_ins.items() if name not in saved}
        ctx.set_materialize_grads(False)
        # Each tensor is replaced by a flag that is True if it has a gradient.
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
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint refuses a second read
        results, tensors = saved[:count], saved[count:]
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


class RecurrentOperator(Operator[Arguments, Results]):
    """`Operator` whose float32 products on a GPU use TF32 where those of `torch.nn.LSTM` may; see `recurrent_tf32`."""

    def _products(self, arguments: Arguments) -> AbstractContextManager[None]:
        first = self.schema.differentiable(arguments)[0]
        if first.is_cuda and first.dtype == torch.float32:
            return MatmulTF32(recurrent_tf32())
        return nullcontext()


def _returned(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Returns results as torch.library takes them: a tuple, or a single one by itself."""
    return tuple(results) if len(results) > 1 else results[0]


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undoes `_returned`."""
    return (results,) if isinstance(results, Tensor) else results


def _own(gradient: Tensor, taken: set[int]) -> Tensor:
    """Returns the gradient contiguous and in memory of its own, which it adds to ``taken``."""
    storage = gradient.untyped_storage()._cdata
    if storage in taken or not gradient.is_contiguous():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        storage = gradient.untyped_storage()._cdata
    taken.add(storage)
    return gradient
