"""On fake tensors, functions take the path of a GPU and allocate what its kernels do; bytes are worked out by hand."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt import memory
from econmt_memory.estimate.allocator import BLOCK, CachingAllocator, cublas_workspace
from econmt_memory.estimate.fake import ON_GPU, fake_tensors
from econmt_memory.estimate.gpu_dispatch import attention_backend
from econmt_memory.estimate.gpu_workspaces import (
    _FEW,
    Workspaces,
    convolution,
    convolution_backward,
    reduction_buffers,
)
from econmt_memory.measure.tracker import Tracker


def followed(run: Any) -> tuple[list[str], Tracker]:
    """Runs a function on fake tensors of a GPU; returns the operators that allocated memory, and their tracker."""
    tracker = Tracker(torch.device("cpu"), replacements=ON_GPU)
    with fake_tensors("cuda"), tracker.recording():
        run()
    operators = [change.storage.operator for change in tracker.changes if change.size > 0]
    return list(dict.fromkeys(operators)), tracker


def sizes_of(tracker: Tracker, operator: str) -> list[int]:
    """Bytes that operators of a name took and gave back."""
    return [change.size for change in tracker.changes if change.storage.operator.startswith(operator)]


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "size", "steps", "settings", "backend"),
    [
        (torch.float32, 64, 32, {}, "efficient"),
        (torch.float32, 64, 32, {"mask": True}, "efficient"),
        (torch.float32, 30, 32, {}, "math"),  # no multiple of four
        (torch.float64, 64, 32, {}, "math"),
        (HALF, 64, 32, {}, "cudnn"),
        (HALF, 64, 32, {"mask": True}, "cudnn"),
        (HALF, 64, 32, {"p": 0.125}, "cudnn"),
        (HALF, 64, 32, {"p": 0.1}, "flash"),  # cuDNN's probabilities are multiples of 1/16
        (HALF, 192, 32, {}, "flash"),
        (HALF, 30, 32, {}, "flash"),
        (HALF, 30, 32, {"mask": True}, "math"),
        (HALF, 64, 1, {}, "flash"),  # cuDNN needs two keys
        (HALF, 64, 32, {"p": 0.1, "mask": True}, "efficient"),
        (HALF, 128, 32, {}, "cudnn"),  # the largest that cuDNN takes
        (HALF, 136, 32, {}, "flash"),
        (HALF, 256, 32, {}, "flash"),  # the largest that flash attention takes
        (HALF, 264, 32, {}, "efficient"),
        (HALF, 64, 2, {}, "cudnn"),
        (HALF, 64, 32, {"deterministic": True}, "flash"),
        (HALF, 64, 32, {"deterministic": True, "mask": True}, "efficient"),
        (HALF, 64, 32, {"learnt": True}, "efficient"),  # cuDNN has no gradient of a mask
        (HALF, 64, 32, {"off": "cudnn"}, "flash"),
        (HALF, 64, 32, {"off": "cudnn flash"}, "efficient"),
        (HALF, 64, 32, {"off": "cudnn flash mem_efficient"}, "math"),
        (torch.float32, 64, 32, {"off": "mem_efficient"}, "math"),
        (torch.float16, 20, 32, {"mask": True}, "math"),  # no multiple of eight
        (torch.float32, 20, 32, {}, "efficient"),
        (torch.float32, 64, 32, {"mask": True, "transposed": True}, "math"),  # as the position biases of T5
    ],
)
def test_attention_takes_the_kernel_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, steps: int, settings: Any, backend: str
) -> None:
    query = torch.zeros(2, 4, steps, size, dtype=dtype)
    mask = torch.zeros(steps, steps) if settings.keys() & {"mask", "learnt"} else None
    if mask is not None:
        mask = mask.mT if "transposed" in settings else mask
        mask.requires_grad_("learnt" in settings)
    for name in settings.get("off", "").split():
        monkeypatch.setattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "deterministic" in settings)
    assert attention_backend(query, query, query, mask, settings.get("p", 0.0), False, False) == backend


def test_attention_keeps_a_sum_for_each_row_and_dropout_a_byte_for_each_element() -> None:
    def run() -> None:
        query = torch.zeros(2, 4, 40, 64, requires_grad=True)
        functional.scaled_dot_product_attention(query, query, query, scale=0.1).sum().backward()

    operators, tracker = followed(run)
    assert "aten._scaled_dot_product_efficient_attention" in [name.split()[0] for name in operators]
    kept = {storage.shape for storage, _ in tracker._known.values()} | {
        change.storage.shape for change in tracker.changes if change.storage.kept_by
    }
    assert (2, 4, 64) in kept  # 40 rows in whole blocks of 32

    def run() -> None:
        functional.dropout(torch.zeros(1000, requires_grad=True), 0.1).sum().backward()

    _, tracker = followed(run)
    kept = [change.storage for change in tracker.changes if change.storage.kept_by and change.size > 0]
    assert [(storage.size, storage.dtype) for storage in kept] == [(1000, torch.bool)]


def test_batch_normalization_runs_in_cudnn_in_float32() -> None:
    def run(dtype: torch.dtype) -> None:
        weights = [torch.ones(8, requires_grad=True) for _ in range(2)]
        inputs = torch.zeros(4, 8, 5, 5, dtype=dtype, requires_grad=True)
        functional.batch_norm(inputs, None, None, *weights, True).sum().backward()

    for dtype, operator in ((torch.float32, "aten.cudnn_batch_norm"), (HALF, "aten.native_batch_norm")):
        operators, _ = followed(partial(run, dtype))
        assert operator in [name.split()[0] for name in operators]


def test_functions_of_real_tensors_stay_as_they_are() -> None:
    real = torch.ones(6, requires_grad=True)
    with fake_tensors("cuda") as mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            dropped = functional.dropout(real, 0.5)
        finally:
            mode.__enter__()  # type: ignore[no-untyped-call]
    assert dropped.grad_fn.name() == functional.dropout(real, 0.5).grad_fn.name()  # type: ignore[union-attr]


def test_an_optimizer_updates_all_parameters_at_once() -> None:
    """AdamW's roots of the second moments take as much memory as the parameters, all at the same time."""
    model = nn.ParameterList(torch.zeros(1024) for _ in range(3))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    account = memory.predict(step, model, optimizer)
    at_once = [tensor for tensor in account.ledger.largest if tensor.operator == "aten._foreach_sqrt"]
    assert sum(tensor.bytes for tensor in at_once) == 3 * 4096


def test_blocks_that_are_not_split_count_whole() -> None:
    """A request of 3 MiB takes a free block of 3.5 MiB whole, since less than 1 MiB would be left."""
    half_mib = 1 << 19

    def making() -> Any:
        def step() -> None:
            first, second = (torch.empty(size * half_mib, dtype=torch.uint8) for size in (7, 6))
            del first
            third, fourth = (torch.empty(size * half_mib, dtype=torch.uint8) for size in (6, 10))
            del second, third, fourth

        return step

    assert memory.predict(making).peak_bytes == (6 + 7 + 10) * half_mib


def test_reductions_exchange_partial_sums() -> None:
    for dims in ([0], [1]):
        assert reduction_buffers(torch.empty(64, 64, device="meta"), dims) == []
    # Blocks of 32 x 4 threads with four columns each are 8; each thread would add 1,024 values, so each column is
    # divided among 64 blocks, of 16 values per thread.
    for dim in (0, -2):
        found = reduction_buffers(torch.empty(4096, 1024, device="meta"), [dim])
        assert found == [4 * 1024 * 64 * 32 * 4, 4 * 8]


def test_gradients_of_many_words_are_sorted() -> None:
    """10,000 words of 20,000: three orders and two of the sort, then partial sums of at most 10 rows in float32."""

    def run() -> None:
        words = torch.zeros(20000, 64, requires_grad=True)
        ids = torch.zeros(10000, dtype=torch.int64)
        functional.embedding(ids, words).sum().backward()

    _, tracker = followed(run)
    sizes = sizes_of(tracker, "aten.embedding_dense")
    partial = 10000 // 10 + 10000
    assert partial * 64 * 4 in sizes
    assert sizes.count(8 * partial) == 1


def test_convolutions_copy_tensors_with_the_channels_last() -> None:
    """Inputs and outputs of 32 x 256 x 16 x 16 and weights of 256 x 256 x 3 x 3, all in float32."""
    inputs, weight = torch.empty(32, 256, 16, 16, device="meta"), torch.empty(256, 256, 3, 3, device="meta")
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image, kernel = 4 * 32 * 256 * 16 * 16, 4 * 256 * 256 * 9
    assert convolution(inputs, weight, None, *settings) == 2 * image + kernel
    backward = convolution_backward(inputs, inputs, weight, None, *settings, [True, True, False])
    assert backward == 2 * image + kernel + 3 * kernel  # three partial sums
    few, thin = torch.empty(32, _FEW, 16, 16, device="meta"), torch.empty(_FEW, 256, 3, 3, device="meta")
    backward = convolution_backward(few, inputs, thin, None, *settings, [True, True, False])
    assert backward == round(2.28 * image)
    last = [each.to(memory_format=torch.channels_last) for each in (inputs, weight)]
    assert convolution(*last, None, *settings) == 0


@pytest.mark.parametrize(
    ("network", "reserve", "workspace"),
    [
        (nn.LSTM(128, 128, 2, bidirectional=True), 7209216, 46924288),
        (nn.LSTM(512, 512), 10486016 * 10 // 16, None),
        (nn.GRU(128, 128, 2, bidirectional=True), 8519936, 45154816),
    ],
)
def test_recurrent_layers_take_what_was_measured(
    network: nn.RNNBase, reserve: int, workspace: int | None
) -> None:
    """Bytes that cuDNN 9.19 reported on an H100 for 20 steps of 32 rows; the second has 20 x 32 of 16 x 64."""

    def run() -> None:
        with torch.device("cpu"):
            sizes = (network.input_size, network.hidden_size, network.num_layers)
            fake = type(network)(*sizes, bidirectional=network.bidirectional)
        fake(torch.zeros(20, 32, network.input_size, requires_grad=True))

    _, tracker = followed(run)
    sizes = sizes_of(tracker, "aten._cudnn_rnn")
    assert any(abs(size - reserve) <= 128 for size in sizes)
    if workspace is not None:
        assert any(size == pytest.approx(workspace, rel=0.01) for size in sizes)


def predicted(layer: nn.Module, inputs: Tensor) -> memory.Account:
    def step() -> None:
        layer(inputs).sum().backward()
        layer.zero_grad()

    return memory.predict(step, layer)


def test_products_have_workspaces_of_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has 32 MiB for each thread, cuBLASLt 1 MiB where a bias is added, in the forward pass."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    largest = predicted(nn.Linear(16, 16), torch.zeros(4, 16)).ledger.largest
    large = [(tensor.bytes >> 20, tensor.operator) for tensor in largest if tensor.bytes >= 1 << 20]
    assert large == [(32, "cuBLAS"), (32, "cuBLAS"), (1, "cuBLAS")]


def test_packed_sequences_are_predicted() -> None:
    network, inputs = nn.LSTM(8, 16, batch_first=True), torch.zeros(4, 10, 8)
    lengths = torch.tensor([10, 8, 6, 4])

    def step() -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(network(packed)[0], batch_first=True)
        outputs.sum().backward()
        network.zero_grad()
        return outputs

    account = memory.predict(step, network)
    assert account._tracker.flops.total() == 3 * 2 * 28 * 64 * (8 + 16)


def test_copies_of_expanded_tensors_and_sorted_indices_take_memory() -> None:
    expanded, whole, indices = torch.ones(()).expand(4, 128), torch.ones(4, 128), [torch.zeros(100).long()]
    workspaces, aten = Workspaces(lambda *_: None), torch.ops.aten
    assert workspaces(aten._softmax_backward_data.default)(expanded, whole, -1) == 2048
    assert workspaces(aten.mm.default)(whole.t(), expanded) == 2048
    assert workspaces(aten.index_put.default)(whole, indices, whole, True) == 6 * 1024
    assert workspaces(aten.index_put.default)(whole, indices, whole) == 0


MIB = 1 << 20


def test_one_request() -> None:
    for size, allocated, reserved in (
        *((1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB)),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # A segment of its own; the rest of up to 1 MiB stays part of the block.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 512, 12 * MIB, 12 * MIB),
        (12 * MIB + 512, 12 * MIB + 512, 14 * MIB),
    ):
        allocator = CachingAllocator()
        allocator.allocate(size)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), size


def test_segments_are_shared_and_kept() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB // 2) for _ in range(5)]
    assert allocator.reserved == 4 * MIB
    for block in blocks:
        allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, 4 * MIB)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (5 * MIB // 2, 4 * MIB)
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB  # the freed halves are one block again
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 24 * MIB  # large requests have segments of their own kind


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    first, wall, second, _ = (allocator.allocate(size * BLOCK) for size in (10, 1, 4, 1))
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(3 * BLOCK) == second
    assert allocator.allocate(5 * BLOCK) == first
    assert allocator.allocate(5 * BLOCK) == first + 5 * BLOCK
    allocator.free(wall)
    assert allocator.allocate(BLOCK) == wall  # the first of the smallest that are left
    assert allocator.allocate(BLOCK) == second + 3 * BLOCK


def test_fragments_do_not_help_a_large_request() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
    assert allocator.reserved == 20 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_other_pools_take_nothing_of_the_first_ones_and_give_back_what_is_theirs() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(2 * MIB), allocator.allocate(2 * MIB)
    allocator.free(first)
    allocator.begin_pools()
    other = allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(second)
    assert allocator.allocate(2 * MIB) == other + 2 * MIB
    allocator.free(other)
    assert allocator.allocate(2 * MIB) == other
    assert (allocator.allocated, allocator.reserved) == (4 * MIB, 40 * MIB)


def test_blocks_never_overlap_and_everything_comes_back() -> None:
    generator = random.Random(1)
    allocator = CachingAllocator()
    used: dict[int, int] = {}
    for _ in range(2000):
        if used and generator.random() < 0.5:
            address = generator.choice(list(used))
            allocator.free(address)
            del used[address]
        else:
            size = generator.choice((1, 600, 5000, MIB - 7, MIB + 1, 7 * MIB, 30 * MIB))
            address = allocator.allocate(size)
            assert all(address + size <= begin or end <= address for begin, end in used.items())
            used[address] = address + size
        assert sum(end - begin for begin, end in used.items()) <= allocator.allocated <= allocator.reserved
    for address in used:
        allocator.free(address)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    allocator.allocate(30 * MIB)
    assert allocator.reserved == reserved


@pytest.mark.parametrize(("rest", "is_split"), [(BLOCK, True), (MIB, False), (MIB + BLOCK, True)])
def test_what_is_left_of_a_block_is_split_off_if_it_is_large_enough(rest: int, is_split: bool) -> None:
    """Of a small one any rest, of a large one more than 1 MiB."""
    size, allocator = BLOCK if rest == BLOCK else 2 * MIB, CachingAllocator()
    block = allocator.allocate(size + rest)
    wall = allocator.allocate(size)
    allocator.free(block)
    assert allocator.allocate(size) == block
    allocator.free(wall)
    assert allocator.allocated == size + (0 if is_split else rest)


@pytest.mark.parametrize(
    ("given", "kibibytes"), [(":4096:8", 32768), (":4096:2:16:8", 8320), (":16:8", 128), ("", 32768)]
)
def test_the_workspace_of_cublas_is_what_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, given: str, kibibytes: int
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    assert cublas_workspace(":1:1") == kibibytes << 10
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert cublas_workspace(":16:3") == 48 << 10
