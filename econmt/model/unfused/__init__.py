"""Layers for options that no fused operation supports, computed one time step at a time in PyTorch."""
