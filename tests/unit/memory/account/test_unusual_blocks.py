"""Blocks of memory.track around programs that make, change, wrap and drop their modules in unusual ways."""

from __future__ import annotations

import gc
import io
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import econmt_memory as memory


class Exponential(nn.Module):
    """A module that keeps its result."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.exp()


class Sine(nn.Module):
    """A module that keeps its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sin()


class Nest(nn.Module):
    """A module in a module in a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs)
        return result


def test_modules_that_are_nested_as_deep_as_they_run() -> None:
    """Hooks take a frame for each module."""
    model: nn.Module = nn.Linear(3, 2)
    for _ in range(200):
        model = Nest(model)
    limit = sys.getrecursionlimit()
    with memory.track(model) as account:
        model(torch.ones(4, 3)).sum().backward()
    assert account.by_category()["weights"] == 4 * (3 * 2 + 2)
    assert sys.getrecursionlimit() == limit

    class Again(nn.Module):
        def forward(self, inputs: Tensor, times: int) -> Tensor:
            return (self(inputs, times - 1) if times else inputs).exp()

    again = Again()
    with memory.track(again) as account:
        again(torch.ones(64, requires_grad=True), 3).sum().backward()
    assert account.by_module()["Again"]["feature maps"] == 4 * 64 * 4


def _unusual_tensors() -> dict[str, Tensor]:
    """Tensors of layouts other than strided, and nested ones; each larger than what has a line of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        eye = torch.eye(512)
        return {
            "coo": eye.to_sparse(),
            "hybrid": torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 512), (5, 512)),
            "csr": eye.to_sparse_csr(),
            "bsr": eye.to_sparse_bsr((2, 2)),
            "mkldnn": eye.to_mkldnn(),
            "nested": torch.nested.nested_tensor([torch.ones(2, 512), torch.ones(600, 512)]),
        }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["coo", "hybrid", "csr", "bsr", "mkldnn", "nested"])
def test_modules_take_and_return_tensors_of_every_layout(kind: str) -> None:
    given, dense = _unusual_tensors()[kind], torch.ones(64, 512)
    linear = nn.Linear(512, 2)
    with memory.track(linear) as account:
        assert nn.Identity()(given) is given
        if kind in ("coo", "nested"):
            assert nn.ReLU()(given).layout is given.layout
        linear(dense).sum().backward()
    assert account.by_category()["weights"] == 4 * (512 * 2 + 2)


def test_a_module_that_is_gone_leaves_its_name_to_no_other() -> None:
    inputs = torch.randn(64, 64, requires_grad=True)
    with memory.track() as account:
        results = [kind()(inputs) for _ in range(3) for kind in (Exponential, Sine)]
    assert account.names == ["Exponential", "Sine"]
    assert account.by_module() == {
        "Exponential": {"feature maps": 3 * inputs.nbytes},
        "Sine": {"workspace": 3 * inputs.nbytes},
        "outside of modules": {"other": inputs.nbytes},
    }
    assert len(results) == 6


def test_an_account_keeps_neither_the_model_nor_the_optimizer_alive() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with memory.track(model, optimizer) as account:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        inner = nn.Linear(64, 64)
        inner(torch.ones(2, 64))
        kept = [weakref.ref(inner.weight.untyped_storage())]
        del inner
        gc.collect()
        assert kept[0]() is None
    kept += [weakref.ref(model), weakref.ref(model.weight.untyped_storage()), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert not any(reference() for reference in kept)
    assert account.by_category()["optimizer state"] > 0


def test_weights_that_change_their_type_in_the_block_stay_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.is_floating_point())
    with memory.track(model) as account:
        model.double()
        model(torch.ones(1024, 64, dtype=torch.float64)).sum().backward()
    assert account.by_category()["weights"] == 2 * size + 8


def test_a_lazy_module_gets_its_weights_in_the_block() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d())
    with memory.track(model) as account:
        model(torch.ones(512, 64)).sum().backward()
    assert account.by_module()["0"]["weights"] == (64 + 1) * 32 * 4
    assert model[1].weight.grad._post_accumulate_grad_hooks is None
    assert any(category == "gradients" for category, _ in account.over_time()[-1][2])


@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_is_no_part_of_the_update(is_named: bool) -> None:
    model, inputs = nn.Linear(64, 64), torch.ones(8, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs).exp().sum()
        loss.backward()
        return loss

    with memory.track(model, optimizer) as account:
        loss = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
    assert loss is not None
    assert account.ledger.stashed == inputs.nbytes  # the result of exp
    assert [begin.phase for begin in account._settled().begins][-3:] == ["forward", "backward", "optimizer"]


class Averaging(torch.optim.Optimizer):
    """An optimizer that runs another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.5)


def test_an_optimizer_within_another_one_belongs_to_its_step() -> None:
    model = nn.Linear(64, 64)
    inner = torch.optim.Adam(model.parameters())
    outer = Averaging(inner)
    model(torch.ones(8, 64)).sum().backward()
    with memory.track(model, [outer, inner]) as account:
        outer.step()
    assert [begin.phase for begin in account._settled().begins] == ["forward", "optimizer"]


def test_an_account_says_that_modules_ran_in_another_thread() -> None:
    model, inputs = nn.Linear(64, 64), torch.ones(8, 64)

    def notes(run: Callable[[], object]) -> str:
        with memory.track(model) as account:
            run()
        return " ".join(account.notes)

    def in_thread() -> None:
        thread = threading.Thread(target=model, args=(inputs,))
        thread.start()
        thread.join()

    assert notes(lambda: model(inputs).sum().backward()) == ""
    assert notes(in_thread) == "Modules ran in another thread as well; what it allocated is not counted."


ODD = ("<script>alert(1)</script>", "[/red]", "[bold]x", ":x:", "two\nlines", "\x1b[31m", "日本")
"""Names that HTML, tables or terminals could take for something else."""


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ODD})
    with memory.track(model) as account:
        results = [layer(torch.ones(64, 8)) for layer in model.values()]
    assert len(results) == len(ODD)
    for width in (40, 80, 200):
        for show in (account.show, memory.compare(account, _nothing()).show):
            console = Console(file=io.StringIO(), width=width)
            show(console=console)
            text = console.file.getvalue()  # type: ignore[attr-defined]
            assert all(name in text for name in ("<script>", "[/red]", "[bold]x", ":x:", "日本", "\\x1b[31m"))
            assert "\x1b" not in text
    account.save(tmp_path / "page.html", depth=None)
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    account.to_json(tmp_path / "account.json")
    assert memory.compare(tmp_path / "account.json", account).changes() == {}


def _nothing() -> memory.Account:
    with memory.track() as account:
        pass
    return account


def test_wrong_arguments_are_named() -> None:
    linear = nn.Linear(1, 1)
    for kind, found, arguments in (
        ("Module", "Adam", (torch.optim.Adam([torch.ones(1)]),)),
        ("Optimizer", "Linear", (linear, linear)),
        ("Module", "Parameter", ([*linear.parameters()],)),
        ("Module", "str", ({"model": linear},)),
    ):
        message = f"expected a torch {kind} or a list of them, but got {found}"
        with pytest.raises(TypeError, match=message), memory.track(*arguments):  # type: ignore[arg-type]
            pass
        with pytest.raises(TypeError, match=message):
            memory.predict(lambda: None, *arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_cannot_be_tracked(device: str) -> None:
    message = f"there is no GPU for device '{device}"
    with pytest.raises(ValueError, match=message), memory.track(device=device):
        pass


def test_devices_of_a_prediction_are_given_as_elsewhere_in_pytorch() -> None:
    model, inputs = nn.Linear(64, 64), torch.ones(8, 64)
    peaks = {
        memory.predict(lambda: model(inputs), model, device=device).peak_bytes
        for device in ("cuda", "cuda:0", torch.device("cuda", 0))
    }
    assert len(peaks) == 1
    assert memory.predict(lambda: model(inputs), model, device=torch.device("cpu")).peak_bytes not in peaks


def test_scripted_modules_are_tracked_and_not_predicted() -> None:
    model, inputs = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), torch.ones(8, 64)
    with memory.track(model) as account:
        model(inputs).sum().backward()
    assert account.by_category()["weights"] == (64 + 1) * 64 * 4
    with pytest.raises(ValueError, match=r"modules of torch\.jit\.script cannot be predicted"):
        memory.predict(lambda: model(inputs), model)


class Counting(torch.optim.SGD):
    """An optimizer whose state has an entry of no parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["all"]["sums"] = torch.zeros(64)
        super().step(closure)


@pytest.mark.parametrize("predicts", [False, True])
def test_optimizers_may_have_state_of_no_parameter(predicts: bool) -> None:
    model = nn.Linear(8, 8)
    optimizer = Counting(model.parameters(), 0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    if predicts:
        account = memory.predict(step, model, optimizer, device="cpu")
    else:
        with memory.track(model, optimizer) as account:
            step()
    assert account.by_category()["optimizer state"] == 64 * 4


class Silent(Exception):
    """An error without a text."""

    __str__ = None  # type: ignore[assignment]


def test_an_error_that_cannot_be_printed_ends_the_block_as_itself() -> None:
    with pytest.raises(Silent), memory.track() as account:
        raise Silent
    assert account.notes == ["The step ended with Silent; the account counts until then."]


def test_names_of_any_characters_are_written_and_levels_are_numbers(tmp_path: Path) -> None:
    model = nn.Module()
    model.add_module("\ud800", nn.Linear(2, 2))
    with memory.track(model) as account:
        model.get_submodule("\ud800")(torch.ones(1, 2))
    account.to_csv(tmp_path / "account.csv")
    assert "\\ud800," in (tmp_path / "account.csv").read_text()
    for depth in (0, -1, "1"):
        with pytest.raises(ValueError, match=f"depth {depth!r}: give a number of levels"):
            account.by_module(depth)  # type: ignore[arg-type]
