"""Workspace that cuBLAS takes from PyTorch's allocator."""

from __future__ import annotations

import os
import re

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable with the workspace's size, as cuBLAS reads it."""

DEFAULT_WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace by default on a GPU of compute capability 9.0; PyTorch gives it 8.1 MiB on others.

Each thread has its own workspace (ATen/cuda/CublasHandlePool.cpp), and backward passes on a GPU have their own thread.
Both workspaces persist from the first step on; in a CUDA graph the first is freed before the second is allocated.
"""


def cublas_workspace(unset: str = "") -> int:
    """Returns the bytes of the workspace for a thread; ``unset``: configuration if the variable is not set."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get(VARIABLE, unset))
    return sum(int(kibibytes) * int(count) for kibibytes, count in sizes) << 10 or DEFAULT_WORKSPACE
