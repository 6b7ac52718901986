"""Names of the modules that run, from hooks on all modules, and labels of what belongs to them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from itertools import chain, count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from econmt_memory.account.predicting_tracker import PredictingTracker
from econmt_memory.account.step_recorder import StepRecorder
from econmt_memory.measure import scopes

StepFollower = StepRecorder | PredictingTracker
"""Record of a program's step, of real or of fake tensors."""


class ModuleScopes:
    """Scopes of modules: the code of a module belongs to the layer of its name.

    Names are those of ``named_modules``; the model itself has the name of its class. A module that belongs to no known
    model is registered as one when it runs on its own.

    Attributes:
        names: Names of modules that exist.
        compiled: Names of modules that ``torch.compile`` has compiled.
        kinds: Classes of all modules by name, in the order in which they were known.
        inputs: Bytes of the tensors that a module was called with last, by name.
        has_sparse: True if gradients are sparse.
        in_threads: True if the program called modules in other threads, which the profiler does not follow.
    """

    def __init__(
        self, tracker: StepFollower, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        # Weak, so that the account keeps nothing alive that the program lets go.
        self.names: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
        self.compiled: list[str] = []
        self.kinds: dict[str, str] = {}
        self.inputs: dict[str, int] = {}
        self.in_threads = self.has_sparse = False
        self._thread = threading.get_ident()
        self._tracker = tracker
        self._owners: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._running: list[nn.Module] = []
        self._optimizers = weakref.WeakSet(optimizers)
        self._updating: int | None = None  # the number of the optimizer that steps
        self._is_elementwise = False
        self._hooks = ExitStack()
        for model in models:
            self._register(model)
        for optimizer in list(self._optimizers):
            self._label_state(optimizer)
            for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
                self._label_gradient(parameter)  # of one that belongs to no module, too

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enters the scopes of modules that run within the context, and labels gradients and optimizer state."""
        limit = sys.getrecursionlimit()
        # A module with hooks takes four Python frames in place of three.
        sys.setrecursionlimit(limit + limit // 2)
        with self._hooks as hooks:
            hooks.callback(sys.setrecursionlimit, limit)
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._begin_update),
                register_optimizer_step_post_hook(self._end_update),
            ):
                hooks.callback(handle.remove)
            try:
                yield
            finally:
                self._unwind(0)
                for module, name in [*self.names.items()]:  # some are new, as from model.to or a lazy module
                    self._label_weights(module, name)
                for optimizer in list(self._optimizers):
                    self._label_optimizer(optimizer)

    def _register(self, model: nn.Module) -> None:
        """Names a model's modules, labels its parameters and buffers, and follows its gradients."""
        kind = type(_inside(model)).__name__
        taken = set(self.names.values())
        names = chain([kind], (f"{kind} {number}" for number in count(2)))
        root = next(name for name in names if name not in taken)
        prefix = f"{root}." if self.kinds else ""
        is_parallel = _is_parallel(getattr(model, "_orig_mod", model))
        for path, module in model.named_modules():
            parts = [part for part in path.split(".") if part != "_orig_mod"]
            path = ".".join(parts[1:] if is_parallel else parts)  # without the parts that wrappers add
            name = self._name(module, prefix + path if path else root)
            if hasattr(module, "_orig_mod"):
                self.compiled.append(name)
            elif module._compiled_call_impl is not None:
                self.compiled.append(name)
                self._enter_compiled(module, name)
            self._label_weights(module, name)

    def _name(self, module: nn.Module, name: str) -> str:
        """Names a module, if it has no name yet, and returns its name."""
        if module not in self.names:
            self.names[module] = name
            self.kinds.setdefault(name, type(module).__name__)
        return self.names[module]

    def _label_weights(self, module: nn.Module, name: str) -> None:
        """Labels a module's own parameters and buffers that have memory."""
        for parameter in module.parameters(recurse=False):
            if parameter in self._owners:
                self._tracker.label(parameter, "weights", self._owners[parameter])
                self._label_gradient(parameter)
            elif not is_lazy(parameter):
                self._own(parameter, name)
        for buffer in module.buffers(recurse=False):
            if not is_lazy(buffer):
                self._tracker.label(buffer, "weights", name)

    def _enter_compiled(self, module: nn.Module, name: str) -> None:
        """Enters the scope of a module whose call is compiled, and which therefore calls no hooks."""
        compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            scopes.enter(name)
            try:
                return compiled(*args, **kwargs)
            finally:
                scopes.leave()

        module._compiled_call_impl = call
        self._hooks.callback(setattr, module, "_compiled_call_impl", compiled)

    def _own(self, parameter: Tensor, name: str) -> None:
        self._owners[parameter] = name
        self._tracker.nodes.add_parameters({parameter: name})
        self._tracker.label(parameter, "weights", name)
        self._label_gradient(parameter)
        if parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]
            self._hooks.callback(hook.remove)

    def _label_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self.has_sparse |= gradient.is_sparse
            parts = (gradient._values(), gradient._indices()) if gradient.is_sparse else (gradient,)
            for part in parts:
                self._tracker.label(part, "gradients", self._owners.get(parameter, "other"))

    def _label_optimizer(self, optimizer: Optimizer) -> None:
        """Labels state, and parameters that no module has, such as an image that is optimized."""
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            if parameter not in self._owners:
                self._own(parameter, "other")
        self._label_state(optimizer)

    def _label_state(self, optimizer: Optimizer) -> None:
        settings = ({**group, "params": None} for group in optimizer.param_groups)  # the rate may be a tensor
        for parameter, state in (*optimizer.state.items(), *zip(repeat(None), settings)):
            owner = self._owners.get(parameter, "other") if isinstance(parameter, Tensor) else "other"
            for part in tree_leaves(state):
                if isinstance(part, Tensor):
                    self._tracker.label(part, "optimizer state", owner)

    def _begin_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._optimizers.add(optimizer)
        self._leave_update(id(optimizer))  # if its last step has failed
        if self._updating is None:  # else another optimizer runs this one
            # Optimizers that PyTorch runs for lists of tensors work element by element, without a closure.
            self._is_elementwise = "foreach" in optimizer.defaults and len(args) == 1 and not kwargs
            self._tracker.update(elementwise=self._is_elementwise)
            self._updating = id(optimizer)

    def _leave_update(self, number: int | None) -> None:
        """Ends the running step of an optimizer."""
        if number is not None and self._updating == number:
            self._updating = None
            self._tracker.update()

    def _end_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._leave_update(id(optimizer))
        self._label_optimizer(optimizer)

    def _is_elsewhere(self) -> bool:
        """Returns True in code that is compiled, or in a thread of the program other than that of the block."""
        if torch.compiler.is_compiling():
            return True
        is_foreign = threading.get_ident() != self._thread and torch._C._current_graph_task_id() < 0
        self.in_threads |= is_foreign
        return is_foreign

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_elsewhere():
            return
        if self._is_elementwise:  # such a step calls no module, so it has failed
            self._leave_update(self._updating)
        name = self.names.get(module)
        if name is None:
            if self._running:  # made after its model was registered
                self._name(module, f"{scopes.current_layer()}.{type(module).__name__}")
            else:
                self._register(module)
            name = self.names[module]
        strided = [each for each in args if isinstance(each, Tensor) and each.layout is torch.strided]
        for each in strided:
            self._tracker.use(each)
        self.inputs[name] = sum(each.nbytes for each in strided)
        self._running.append(module)
        scopes.enter(name)

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        if self._is_elsewhere():
            return
        if type(module).__module__.startswith("torch."):  # else a line within the module made it
            self._tracker.made(result)
        depths = [depth for depth, running in enumerate(self._running) if running is module]
        self._unwind(depths[-1] if depths else len(self._running))

    def _unwind(self, depth: int) -> None:
        """Leaves all but the outermost ``depth`` scopes."""
        while len(self._running) > depth:
            self._running.pop()
            scopes.leave()


def _inside(model: nn.Module) -> nn.Module:
    """Returns the model below ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if _is_parallel(model) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _is_parallel(model: nn.Module) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")
