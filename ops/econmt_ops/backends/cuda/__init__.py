"""CUDA C++ kernels for Hopper GPUs, for what Triton cannot express: clusters of blocks that load data once for all.

NVRTC, which PyTorch's CUDA builds bring, compiles them when they are first used.
"""
