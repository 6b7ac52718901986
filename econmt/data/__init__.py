"""Data pipeline: corpora, filters, vocabularies, token store, buckets, batches, and the catalog of data sets."""
