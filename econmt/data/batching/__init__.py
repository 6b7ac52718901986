"""Prepared data, buckets of like lengths, and the batches made from them."""
