"""Device on which tests run the kernels; beside conftest.py, which a test that imported it would run a second time."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
