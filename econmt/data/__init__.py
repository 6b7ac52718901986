"""Text -> ids -> buckets -> batches: corpora, vocabularies, the token store, the batch iterator, the catalog."""
