"""Beam search and sampling: in batches, in slots of fixed shape, and in the C library; scores and penalties."""
