"""Predicts the memory of a training step on tensors that have shapes and no memory."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from econmt_memory.account.account import Account
from econmt_memory.account.module_scopes import ModuleScopes
from econmt_memory.account.predicting_tracker import PredictingTracker
from econmt_memory.account.reachable import reachable, restored
from econmt_memory.account.stand_ins import OnCPU
from econmt_memory.account.tracking import nested_hooks, several
from econmt_memory.estimate.allocator import CachingAllocator
from econmt_memory.estimate.cpu_workspaces import cpu_workspace
from econmt_memory.estimate.fake import ON_GPU, REPLACEMENTS, elements_not_zero, fake_tensors
from econmt_memory.estimate.gpu_workspaces import Workspaces
from econmt_memory.estimate.gradients import Accumulation, accumulate_once
from econmt_memory.estimate.sequences import following_values
from econmt_memory.estimate.shape_cache import ShapeCache
from econmt_memory.measure.patches import patched
from econmt_memory.measure.storages import MemoryRecord, plain_tensors

aten = torch.ops.aten


def predict(
    step: Callable[[], object],
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str = "cuda",
    nonzero: float = 1.0,
    isolated: bool = False,
) -> Account:
    """Predicts the account of a training step without running it; a GPU's needs no GPU.

    The step runs twice on tensors without memory: once so that the optimizer has its state, and once to be counted.
    Afterwards all objects that the step can reach and random generators are as before; files that it writes are not.

    Args:
        step: Runs a training step of ``model`` and ``optimizer``. Without a model, it makes all it needs itself; if it
            returns a function, that one runs the step.
        model: Model or models; on any device, also ``meta``, as all tensors that the step reads.
        optimizer: Optimizer or optimizers.
        device: Device of the prediction, "cpu" or "cuda".
        nonzero: Share of elements that are not zero, where the program looks for them (``torch.nonzero``, boolean
            masks): k/n for a mixture of n experts of which k compute each token.
        isolated: True to predict in a process of its own, for a step that reads from iterators.

    Returns:
        The account, without times. Compiled functions count as if they were not compiled.

    Raises:
        ValueError: The device is neither "cpu" nor "cuda", the share is not between 0 and 1, a module is one of
            TorchScript, tensors are nested, parameters lazy or sparse, an iterator would be used up, or a process of
            its own failed.
        TypeError: ``step``, ``model`` or ``optimizer`` is something else.
    """
    device = str(device).partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise ValueError(f"memory.predict: device '{device}' is unknown; use cpu or cuda")
    if not callable(step):
        raise TypeError(f"memory.predict: step is no function that runs a step, but {type(step).__name__}")
    if not isinstance(nonzero, int | float) or not 0.0 <= nonzero <= 1.0:
        raise ValueError(f"memory.predict: nonzero {nonzero!r} is no share; give a number from 0 to 1")
    models: list[nn.Module] = several(model, nn.Module)
    optimizers: list[Optimizer] = several(optimizer, Optimizer)
    if any(isinstance(each, torch.jit.ScriptModule) for one in models for each in one.modules()):
        raise ValueError(
            "memory.predict: modules of torch.jit.script cannot be predicted; give the Python module"
        )
    if any(hasattr(each, "unshard") for one in models for each in one.modules()):
        raise ValueError(
            "memory.predict: step must make a model of fully_shard, and return the function that trains"
        )
    generators = random.random, np.random.mtrand._rand, torch.default_generator, torch.cuda.default_generators
    objects = list(reachable(step=step, model=models, optimizer=optimizers, generators=generators))
    others = [each for _, each, _ in objects if issubclass(type(each), Optimizer)]
    run = partial(_predicted, step, models, optimizers, others, device, nonzero)
    with restored(objects, isolated=isolated):
        return _in_child(run) if isolated else run()


def _predicted(
    step: Callable[[], object],
    models: list[nn.Module],
    optimizers: list[Optimizer],
    others: list[Any],
    device: str,
    nonzero: float,
) -> Account:
    """Predicts the account, and leaves fake tensors wherever the step puts some."""
    on_gpu = device == "cuda"
    parameters = [parameter for one in models for parameter in one.parameters()]
    is_hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    stand_ins = OnCPU(like_gpu=on_gpu)
    try:
        with fake_tensors(device) as mode, stand_ins.active(), uncompiled:
            _fake(models, [*optimizers, *others], stand_ins.replaced)
            mode.allow_non_fake_inputs = True
            replacements = dict(ON_GPU if on_gpu else REPLACEMENTS)
            replacements[aten.nonzero.default] = partial(elements_not_zero, nonzero)
            replacements[aten.add.Tensor] = Accumulation()
            allocator = CachingAllocator() if on_gpu else None
            tracker = PredictingTracker(
                allocator, replacements=replacements, run=following_values(ShapeCache(mode))
            )
            tracker.workspace = Workspaces(tracker.label) if on_gpu else cpu_workspace
            for parameter in [each for one in models for each in (*one.parameters(), *one.buffers())]:
                if parameter.layout is not torch.strided:
                    raise ValueError(
                        "memory.predict: sparse parameters cannot be predicted; use memory.track"
                    )
                for part in plain_tensors(parameter):
                    tracker.find(part)
            # DistributedDataParallel copies gradients to buckets, which exist from its beginning to its end.
            modules = [each for one in models for each in one.modules()]
            parallel = [each for each in modules if getattr(each, "gradient_as_bucket_view", None) is False]
            weights = [each for one in parallel for each in one.parameters() if each.requires_grad]
            buckets = list(map(torch.empty_like, weights))
            for bucket in buckets:
                tracker.find(bucket)
            with tracker.resizing(), tracker:  # without a record
                accumulate_once()
                made = step()
                run = made if callable(made) else step
                del made  # a result, which would stay in memory
                if run is not step:
                    run()
            # Other tensors are alive only so that they can be put back.
            stand_ins.keep_only(reachable(step=run, model=models, optimizer=optimizers))
            scopes = ModuleScopes(tracker, models, optimizers)
            account = Account(tracker)
            with tracker.recording():
                tracker.start_over()
                tracker.begin("forward")
                counted = patched(torch, get_rng_state=tracker.random_state)
                with scopes.active(), nested_hooks(tracker), counted, tracker.resizing():
                    run()
            account.close(scopes)
    except DynamicOutputShapeException as error:
        raise ValueError(
            f"memory.predict: the shape of the result of {error.func} depends on values, which a prediction does not "
            "have; give sizes as numbers where PyTorch takes them (repeat_interleave: output_size)"
        ) from error
    account.ledger.device, account.ledger.seconds = device, 0.0
    if allocator is not None:
        account.ledger.allocated, account.ledger.reserved = allocator.peak_allocated, allocator.peak_reserved
    notes = {
        f"Predicted for {device}; no step was run.": True,
        "Gradients are sparse; what operators on sparse tensors allocate is not counted.": scopes.has_sparse,
        "Hooks of parameters did not run, so an optimizer that they run in the backward pass is missing.": is_hooked,
    }
    account.notes += [note for note, is_true in notes.items() if is_true]
    return account


def _fake(models: Iterable[nn.Module], optimizers: Iterable[Optimizer], fake: Callable[[Any], Any]) -> None:
    """Replaces parameters, buffers and optimizer state by fake tensors, until they are put back."""
    for module in [each for model in models for each in model.modules()]:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(module, name, fake(parameter))  # as an RNN notices
        module._buffers.update({name: fake(buffer) for name, buffer in module._buffers.items()})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [fake(parameter) for parameter in group["params"]]
        state = {fake(parameter): tree_map(fake, state) for parameter, state in optimizer.state.items()}
        optimizer.state = defaultdict(dict, state)


_child: list[Callable[[], Account]] = []
"""The function that a forked process calls."""


def _in_child(run: Callable[[], Account]) -> Account:
    """Returns the account that a function makes in a fork of this process.

    A process that starts anew would need a pickle of what the step uses, which functions in functions do not have.
    """
    if sys.platform != "linux" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError("memory.predict: isolated=True needs Linux and a process that has used no GPU")
    with ProcessPoolExecutor(1, get_context("fork"), _child.append, (run,)) as pool:
        return pool.submit(_account_of_child).result()


def _account_of_child() -> Account:
    """Returns the account without what only the tracking needed; errors have one line."""
    torch.set_num_threads(1)  # the threads of the other process do not exist in this one
    try:
        account = _child[0]()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the other process gets whatever it is as one line
        text = " ".join(str(error).split())
        kind = "" if text.startswith("memory.predict: ") else f"memory.predict: {type(error).__name__}: "
        raise ValueError(kind + text) from None
    record = MemoryRecord(account._tracker.device)
    vars(record).update({name: vars(account._tracker)[name] for name in vars(record)})
    vars(account).update(_tracker=record)
    return account
