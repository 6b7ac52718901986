"""Fake tensors: their results are remembered by shapes, have the real sizes, and kernels are told by their names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import econmt_ops
from econmt.config.recipe import load_recipe
from econmt.engine.precision import NAMED
from econmt.estimate import profiling, training_step
from econmt.estimate.kernels import CLASSES, KernelRow, KernelTimes, kernel_class, optimizer_bytes, summarise
from econmt.estimate.report.kernel_tables import classes_table, kernels_data, launches_table
from econmt.estimate.report.page import kernel_section
from econmt.estimate.techniques import Technique, estimate, techniques
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.estimate import shape_cache
from econmt_memory.estimate.fake import ON_GPU, REPLACEMENTS, fake_tensors
from econmt_memory.estimate.shape_cache import ShapeCache
from econmt_memory.measure.ledger import Ledger
from econmt_memory.measure.tracker import Tracker
from econmt_ops.core import chunks
from tests.unit.engine.fake_cuda import use_fake_cuda
from tests.unit.engine.toy import tiny_recipe
from tests.unit.training.tiny import watch_losses

aten = torch.ops.aten
SMALL = ("model.embedding=24", "model.encoder.size=32", "model.decoder.size=32", "model.attention.size=48")
TASK = TranslationTask(load_recipe("iwslt", SMALL), 97, 89)
ROWS = [(device, row) for device in ("cpu", "cuda") for row in techniques("auto", device, False)]


def account(ledger: Ledger) -> tuple[Any, ...]:
    return ledger.peak, ledger.entries, ledger.stash, ledger.flops, ledger.reserved, Counter(ledger.largest)


each_row = pytest.mark.parametrize(("device", "row"), ROWS, ids=lambda value: getattr(value, "name", value))


@pytest.mark.sampled(2)
@each_row
def test_remembered_results_and_loops_of_which_few_steps_are_followed_give_the_same_ledger(
    device: str, row: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of two steps, and chunks of a few rows.
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 2 * 5 * 4 * 32 * 4)
    monkeypatch.setattr(import_module("econmt_ops.linear_cross_entropy.recompute"), "CHUNK_BYTES", 89 * 4 * 7)
    shape = Shape(5, 15, 13)
    few = estimate(TASK, row, shape, device)
    with monkeypatch.context() as patch:
        patch.setattr(training_step, "ShapeCache", lambda _: lambda func, args, kwargs: func(*args, **kwargs))
        assert account(few) == account(estimate(TASK, row, shape, device))
    monkeypatch.setattr(training_step, "shortened", lambda _: nullcontext())
    every = estimate(TASK, row, shape, device)
    assert account(few) == account(every)
    phases = [Counter(moment.phase for moment in ledger.timeline) for ledger in (few, every)]
    assert phases[0] == phases[1]


def test_few_steps_of_a_long_loop_are_followed() -> None:
    (row,) = (each for device, each in ROWS if device == "cpu" and each.name == "all")
    calls: Counter[int] = Counter()
    known = ShapeCache.__call__

    def counted(self: ShapeCache, func: Any, args: Any, kwargs: Any) -> Any:
        calls[steps] += 1
        return known(self, func, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapeCache, "__call__", counted)
        for steps in (10, 30):
            estimate(TASK, row, Shape(5, steps, steps), "cpu")
    assert calls[30] == pytest.approx(calls[10], rel=0.1)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs an operator; the results of the first run are known to the second."""
    mode = FakeTensorMode()
    results = ShapeCache(mode)

    def twice(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [results(func, args, kwargs) for _ in range(2)]

    twice.mode = mode  # type: ignore[attr-defined]
    return twice


def fake(run: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with run.mode:
        return torch.empty(*shape, dtype=dtype)


def test_views_share_memory_wherever_they_begin(run: Any) -> None:
    whole = fake(run, 6, 4)
    for row in range(3):
        for found in run(aten.select.int, whole, 0, row):
            assert found.untyped_storage()._cdata == whole.untyped_storage()._cdata
            assert found.storage_offset() == 4 * row
    (first, second), _ = run(aten.split.Tensor, whole, 3)
    assert (first.storage_offset(), second.storage_offset()) == (0, 12)


def test_other_arguments_are_another_result(run: Any) -> None:
    tensor = fake(run, 4)
    assert run(aten.div.Tensor, tensor, fake(run, 4, dtype=torch.float64))[1].dtype == torch.float64
    assert run(aten.div.Tensor, tensor, tensor)[1].dtype == torch.float32
    assert [len(run(aten.new_empty.default, tensor, [size])[1]) for size in (2, 3, 2)] == [2, 3, 2]
    # 1.0 equals 1, and sums of both differ in type.
    whole = fake(run, 4, dtype=torch.int64)
    assert run(aten.add.Scalar, whole, 1)[1].dtype == torch.int64
    assert run(aten.add.Scalar, whole, 1.0)[1].dtype == torch.float32
    assert run(aten.sum.default, tensor)[1].dtype == torch.float32
    assert run(aten.sum.default, tensor, dtype=torch.float64)[1].dtype == torch.float64
    assert run(aten.sum.default, tensor, dtype=torch.int64)[1].dtype == torch.int64
    square = fake(run, 3, 3)
    assert [run(aten.relu.default, each)[1].stride() for each in (square, square.t())] == [(3, 1), (1, 3)]


def test_it_does_remember(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = fake(run, 3, 4)
    run(aten.mul.Tensor, left, left)
    monkeypatch.setattr(shape_cache, "_form", None)
    run(aten.mul.Tensor, left, fake(run, 3, 4))


def test_it_remembers_what_cannot_be_created_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[Any] = []
    made = shape_cache._form

    def noted(*arguments: Any) -> Any:
        forms.append(made(*arguments))
        return forms[-1]

    monkeypatch.setattr(shape_cache, "_KNOWN", {})
    monkeypatch.setattr(shape_cache, "_form", noted)
    assert run(aten.is_same_size.default, fake(run, 3, 4), fake(run, 3, 4)) == [True, True]
    assert forms == [shape_cache._UnknownError]


def test_values_are_taken_at_their_worst() -> None:
    with FakeTensorMode(), Tracker(torch.device("cpu"), replacements=REPLACEMENTS):
        seed = int(torch.randint(2**62, ()))
        assert (torch.zeros(3, 4) != 0).nonzero().shape == (12, 2)
        mask = torch.ones(5, dtype=torch.bool)
        assert torch.zeros(5, 2)[mask.nonzero().squeeze(1)].shape == (5, 2)
    assert isinstance(seed, int)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cudnn_lstm_has_the_results_and_gradients_of_an_lstm(bidirectional: bool, batch_first: bool) -> None:
    lstm = torch.nn.LSTM(6, 5, batch_first=batch_first, bidirectional=bidirectional)
    inputs = torch.zeros(7, 3, 6, requires_grad=True)
    state = torch.zeros(2 if bidirectional else 1, 3 if not batch_first else 7, 5)
    real, (real_h, real_c) = lstm(inputs, (state, state))
    weights = [parameter.shape for parameter in lstm.parameters()]
    tracker = Tracker(torch.device("cpu"), replacements=ON_GPU)
    with fake_tensors("cuda"):
        inputs, state = torch.zeros(7, 3, 6, requires_grad=True), torch.zeros(state.shape)
        parameters = [torch.zeros(shape, requires_grad=True) for shape in weights]
        with tracker.recording():
            settings = (True, 1, 0.0, True, bidirectional, batch_first)
            outputs, h, c = torch.lstm(inputs, (state, state), parameters, *settings)
            torch.autograd.backward(outputs.sum())
        assert (outputs.shape, outputs.stride()) == (real.shape, real.stride())
        assert (h.shape, c.shape) == (real_h.shape, real_c.shape)
        assert inputs.grad.shape == inputs.shape
        assert [None if p.grad is None else p.grad.shape for p in parameters] == weights
    kept = {s.shape for s in tracker.alive(len(tracker.changes)) if s.kept_by is not None}
    directions = 2 if bidirectional else 1
    reserve = -(-21 * directions * 5 * 5 * 4 // 64) * 64 + 256
    assert (reserve,) not in kept  # the reserve is gone after the backward pass
    assert {c.storage.operator for c in tracker.changes} >= {"aten._cudnn_rnn", "aten._cudnn_rnn_backward"}
    assert not [c for c in tracker.changes if c.storage.operator.endswith("aten.new_empty")]
    assert reserve in [change.size for change in tracker.changes]
    steps, batch = (3, 7) if batch_first else (7, 3)
    assert tracker.flops.total() == 3 * 2 * directions * steps * batch * (6 + 5) * 20


def test_tensors_are_compared_without_making_them() -> None:
    """By itself PyTorch would make both, filled with zeros: as much memory as the step that is only predicted."""
    with fake_tensors("cpu"), Tracker(torch.device("cpu"), replacements=REPLACEMENTS):
        large = torch.empty(1 << 50)
        assert large.is_set_to(large.detach())
        assert not large.is_set_to(torch.empty(1 << 50))
        assert not large.is_set_to(large[1:])
        assert not large.is_set_to(large.view(2, -1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scan_costs_what_it_declares(device: str) -> None:
    """Whatever its length, none of its steps is followed: two operations a value forward, four backward."""
    tracker = Tracker(torch.device("cpu"), replacements=REPLACEMENTS)
    with fake_tensors(device), tracker:
        given = [torch.zeros(2, 1000, 8, requires_grad=True) for _ in range(2)]
        lengths = torch.zeros(2, dtype=torch.int64)
        outputs = econmt_ops.linear_recurrence(*given, lengths=lengths)
        torch.autograd.grad(outputs.sum(), given)
    assert dict(tracker.flops) == {torch.float32: 6 * outputs.numel()}


NAMES = {
    "products": [
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "ampere_sgemm_32x128_tn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx)",
        "void splitKreduce_kernel<32, 16, int, float, float, __nv_bfloat16, false>(cublasSplitKParams<float>)",
    ],
    "recurrences": [
        *("lstm_forward", "lstm_backward", "lstm_cells", "cell_forward", "cell_backward"),
        "void RNN_blockPersist_fp_LSTM_NN<__half, __half, float, 2, 512>(...)",
        "void elemWiseRNNcell<__half, __half, float, (cudnnRNNMode_t)2, (cudnnRNNBiasMode_t)2>(...)",
    ],
    "attention": [
        *("attention_forward", "attention_backward", "attention_sum"),
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*, ...)",
    ],
    "loss": [
        "loss_rows",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
        "::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(...)",
        "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float, 512>(...)",
    ],
    "embedding and dropout": [
        *("embedding_sum", "dropout_values", "reversal_rows"),
        "void at::native::radixSortKVInPlace<2, -1, 128, 32, long, long, unsigned int>(...)",
        "void cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<...>(...)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, int>(...)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
    ],
    "copies and pointwise": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>(...)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(...)",
    ],
    "other": ["void something_new(int)"],
}


def event(category: str, name: str, begin: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cuda_runtime", "cudaGraphLaunch", 0.0, 40.0),
    event("cuda_driver", "cuLaunchKernelEx", 50.0, 10.0),
    event("cuda_runtime", "cudaDeviceSynchronize", 60.0, 5000.0),
    event("kernel", "nvjet_sm90", 100.0, 1000.0),
    event("kernel", "lstm_forward", 600.0, 1000.0),
    event("kernel", "lstm_backward", 2000.0, 500.0),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2500.0, 100.0),
    event("kernel", "void multi_tensor_apply_kernel<FusedAdam>()", 2600.0, 400.0),
]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in NAMES for name in NAMES[kind]])
def test_class_of_a_kernel(kind: str, name: str) -> None:
    assert kernel_class(name) == kind
    assert kind in CLASSES


def own_kernels() -> set[str]:
    """Names of the kernels of econmt_ops: functions for Triton that no other one calls, and kernels in CUDA C++."""
    folder = Path(econmt_ops.__file__).parent / "backends"
    functions: set[str] = set()
    called: set[str] = set()
    for path in (folder / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = map(ast.unparse, node.decorator_list) if isinstance(node, ast.FunctionDef) else ()
            if any("jit" in each for each in decorators):
                functions.add(node.name)
                called |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    kernels = {name for name in functions - called if not name.startswith("_")}
    sources = [path.read_text(encoding="utf-8") for path in (folder / "cuda").glob("*.cu")]
    return kernels | {name for text in sources for name in re.findall(r"__global__ .*?(\w+)\(const", text)}


def test_every_kernel_of_a_step_has_a_class() -> None:
    kernels = own_kernels()
    assert {"adam", "decoder_forward", "scan_backward", "lstm_forward", "attention_forward"} <= kernels
    # Search is no part of a step; the stand-ins for operations of Gluon are no kernels.
    elsewhere = {"beam_advance", "beam_candidates", "arange", "convert_layout", "full"}
    assert elsewhere <= kernels
    assert {name for name in kernels if kernel_class(name) == "other"} == elsewhere


def test_a_step_is_summed_up_by_class() -> None:
    times = summarise("in a graph", 4.0, TRACE, 4e12, {"optimizer": 800_000_000})
    assert times.rows == [
        KernelRow("products", 1, 1.0),
        KernelRow("recurrences", 2, 1.5),
        KernelRow("optimizer", 1, 0.4, 800_000_000),
        KernelRow("copies and pointwise", 1, 0.1),
    ]
    # What runs at the same time counts once.
    assert times.busy == pytest.approx(2.5)
    assert times.gaps == pytest.approx(1.5)
    assert (times.kernels, times.launches) == (5, 2)
    assert times.launching == pytest.approx(0.05)
    nothing = summarise("nothing", 1.0, TRACE[:1], 1e12, {})
    assert (nothing.rows, nothing.busy, nothing.kernels) == ([], 0.0, 0)
    assert optimizer_bytes(10, 2 * 10) == 10 * 4 * (1 + 1 + 2 + 4), "of Adam"


def test_tables_data_and_page_have_the_same_figures() -> None:
    before = summarise("reference, launched one by one", 8.0, TRACE, 4e12, {})
    after = summarise("in a graph", 4.0, TRACE, 4e12, {"optimizer": 800_000_000})
    launches, classes = launches_table([before, after]), classes_table([after])
    assert classes.title == "kernels by class, in a graph"
    assert launches.rows[1] == ["in a graph", "4.00", "5", "2", "0.05", "2.50", "1.50"]
    # 800 MB in 0.4 ms are 2 TB/s, half of what copying reaches.
    assert classes.rows == [
        ["products", "1", "1.00", "25 %", ""],
        ["recurrences", "2", "1.50", "38 %", ""],
        ["optimizer", "1", "0.40", "10 %", "50 %"],
        ["copies and pointwise", "1", "0.10", "2 %", ""],
        ["gaps", "", "1.50", "38 %", ""],
    ]
    both = classes_table([before, after])
    assert both.columns[3:5] == ["reference, launched one by one: share", "in a graph: launches"]
    assert both.rows[2] == ["optimizer", "1", "0.40", "5 %", "1", "0.40", "10 %", "50 %"]
    data = kernels_data([before, after])
    expected = {"class": "optimizer", "launches": 1, "milliseconds": 0.4, "bytes": 800_000_000}
    assert data[1]["classes"][2] == {**expected, "share_of_copy_rate": pytest.approx(0.5)}
    page = kernel_section([before, after])
    assert "Launches against compute" in page
    assert "recurrences" in page
    assert kernel_section([]) == ""


def test_the_reference_is_launched_and_the_recipe_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is nothing to see, but both steps are run."""
    use_fake_cuda(monkeypatch)
    used: list[Implementations] = []

    def measured(name: str, run: Callable[[], object], _: object, known: dict[str, int]) -> KernelTimes:
        run()
        return summarise(name, 4.0, TRACE, 4e12, known)

    watch_losses(monkeypatch, lambda _, how: used.append(how))
    monkeypatch.setattr(profiling, "measure_kernels", measured)
    task = TranslationTask(tiny_recipe("training.gradient_clipping={type: none}"), 20, 20)
    own = Technique("own", Implementations.everywhere("recompute"), NAMED["float32"])
    before, after = profiling.kernels(task, own, Shape(2, 3, 4), torch.device("cpu"), str)
    assert (before.name, used[0]) == ("reference, one by one", Implementations.everywhere("reference"))
    assert after.name in ("in a CUDA graph", "one by one")
    assert used[-1] == own.implementations
    values = sum(part.numel() for part in task.build_model().parameters())
    assert before.rows[2].bytes == after.rows[2].bytes == optimizer_bytes(values, 2 * values)


@pytest.mark.cuda
def test_kernels_of_a_replayed_graph_are_seen() -> None:
    task = TranslationTask(tiny_recipe(), 90, 90)
    own = Technique("own", Implementations.everywhere("triton"), NAMED["bfloat16"])
    before, after = profiling.kernels(task, own, Shape(8, 7, 6), torch.device("cuda"), str)
    assert (before.name, after.name) == ("reference, one by one", "in a CUDA graph")
    assert before.launches > 20 * after.launches
    assert {"products", "recurrences", "loss", "optimizer"} <= {row.kind for row in after.rows}
    assert 0.0 < after.busy < 10 * after.step
    assert after.copy_rate > 1e10
