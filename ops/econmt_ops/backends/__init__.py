"""What a step computes between its products, by PyTorch, by torch.compile, in C and in Triton."""

from __future__ import annotations
