"""Prepared data on disk, buckets of similar lengths, and training and validation batches."""
