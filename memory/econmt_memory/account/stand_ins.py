"""Puts a program's tensors of any device on the CPU, where fake tensors stand for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import transform_subclass
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from econmt_memory.account.reachable import Reached
from econmt_memory.estimate.fake import scalar_of
from econmt_memory.estimate.sequences import know_values
from econmt_memory.measure.patches import patched
from econmt_memory.measure.storages import plain_tensors

_IN_FLOAT32 = {
    *("layer_norm", "group_norm", "norm", "kl_div", "dist", "cdist", "cosine_similarity"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy_with_logits", "softplus", "logsumexp"),
    *("exp", "log", "log1p", "log2", "pow", "__pow__", "rsqrt", "reciprocal"),
}
"""Functions that autocast computes in float32 on a GPU."""

_TO_FLOAT32 = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"}
"""Functions whose results autocast makes float32 on a GPU."""

_HALF = (torch.float16, torch.bfloat16)


class OnCPU(TorchFunctionMode):
    """Replaces real tensors of a program by fake ones, and devices of a GPU by the CPU.

    Args:
        like_gpu: True if autocast follows the list of functions of a GPU.
    """

    def __init__(self, *, like_gpu: bool) -> None:
        super().__init__()
        self._like_gpu = like_gpu
        self._fakes: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._alike = weakref.WeakKeyDictionary[Any, Any]()  # the fakes of each storage by their forms

    def keep_only(self, objects: Iterable[Reached]) -> None:
        """Forgets what stands for tensors that are not among objects with names."""
        kept = {id(each) for _, each, _ in takewhile(itemgetter(0), objects)}
        self._fakes = {key: pair for key, pair in self._fakes.items() if key in kept}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(map(self.replaced, args))
        kwargs = {key: self.replaced(value) for key, value in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.numpy:
            return np.ones(tuple(args[0].shape), str(args[0].dtype).removeprefix("torch."))
        if func is Tensor.tolist:
            return np.broadcast_to(scalar_of(args[0]), tuple(args[0].shape)).tolist()
        if self._like_gpu and torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                with torch.autocast("cpu", enabled=False):
                    args, kwargs = tree_map(_widened, (args, kwargs))
                    return func(*args, **kwargs)
            if name in _TO_FLOAT32 and args and isinstance(args[0], Tensor) and args[0].dtype in _HALF:
                kwargs.setdefault("dtype", torch.float32)
        return func(*args, **kwargs)

    def replaced(self, value: Any) -> Any:
        """Returns the one fake tensor that stands for a real one, the CPU for a GPU, and other things as they are."""
        if isinstance(value, list | tuple | dict):
            return tree_map(self.replaced, value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if isinstance(value, str):
            return "cpu" if value.partition(":")[0] == "cuda" else value
        if not isinstance(value, Tensor) or isinstance(next(plain_tensors(value)), FakeTensor):
            return value
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return value
        if value.is_nested:
            raise ValueError("memory.predict: nested tensors cannot be predicted; use memory.track")
        if is_lazy(value):
            raise ValueError("memory.predict: a lazy parameter has no shape yet; run the model once before")
        if value.layout is not torch.strided:
            return value
        if id(value) not in self._fakes:
            form = value.storage_offset(), value.dtype, value.shape, value.stride()
            alike = self._alike.setdefault(value.untyped_storage(), weakref.WeakValueDictionary())
            # The program may use the tensor elsewhere.
            with torch.inference_mode(mode=False), temporarily_clear_interpreter_stack():
                same = alike.get(form)  # such as a parameter whose ``detach`` has returned the tensor
                fake = self._empty_like(value) if same is None else same.detach()
                if isinstance(value, nn.Parameter):
                    fake = nn.Parameter(fake, value.requires_grad)
                fake.requires_grad_(value.requires_grad)
            know_values(fake, value)
            alike[form] = fake
            key = id(value)
            self._fakes[key] = weakref.ref(value, lambda _: self._fakes.pop(key, None)), fake
            if value.is_leaf and value.grad is not None:
                fake.grad = self.replaced(value.grad)
        return self._fakes[id(value)][1]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Acts on code within the context, on backward passes too, and on autocast and gradient scalers for a GPU.

        PyTorch takes modes off while it calls functions such as ``Tensor.backward``, and for reentrant checkpoints;
        transforms of torch.func wrap tensors before modes see them.
        """
        run, begin = torch.autograd._engine_run_backward, torch.autocast.__init__  # type: ignore[attr-defined]

        def of_fakes(owner: Any, name: str) -> Any:
            function = getattr(owner, name)
            return patched(owner, **{name: lambda *args: function(*map(self.replaced, args))})

        def followed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        def begin_on_cpu(context: Any, device_type: str, dtype: Any = None, *rest: Any, **more: Any) -> None:
            if device_type.partition(":")[0] == "cuda":
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
            begin(context, device_type, dtype, *rest, **more)

        def step(_: GradScaler, optimizer: Optimizer, _state: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        with (
            patched(torch.autograd, _engine_run_backward=followed),
            of_fakes(CheckpointFunction, "apply"),
            of_fakes(vmap, "_add_batch_dim"),
            of_fakes(eager_transforms, "_wrap_for_grad"),
            patched(torch.autocast, __init__=begin_on_cpu),
            patched(GradScaler, _maybe_opt_step=step),
            self,
        ):
            yield

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor like a tensor; for a wrapper, such as a DTensor, another wrapper."""
        if hasattr(tensor, "__tensor_flatten__"):
            wrapper: Tensor = transform_subclass(tensor, lambda _, part: self.replaced(part))  # type: ignore[no-untyped-call]
            return wrapper
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _widened(value: Any) -> Any:
    """Returns an argument in float32 if it is a tensor of 16 bits."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
