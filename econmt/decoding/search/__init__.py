"""Beam search and sampling, batched, in fixed slots and in C, and the scores they rank by."""
