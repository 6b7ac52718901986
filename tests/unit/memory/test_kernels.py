"""Kernels are told apart by their names; the figures of a step are those of its trace."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import econmt_ops
from econmt.engine.precision import NAMED
from econmt.estimate import profiling
from econmt.estimate.kernels import CLASSES, KernelRow, KernelTimes, kernel_class, optimizer_bytes, summarise
from econmt.estimate.report.kernel_tables import classes_table, kernels_data, launches_table
from econmt.estimate.report.page import kernel_section
from econmt.estimate.techniques import Technique
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from tests.unit.engine.fake_cuda import use_fake_cuda
from tests.unit.engine.toy import tiny_recipe
from tests.unit.training.tiny import watch_losses

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
