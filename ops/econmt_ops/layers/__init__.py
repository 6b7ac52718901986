"""Layers of all cells other than the LSTM: the op, the stack, and the loops over steps or blocks."""
