"""Translation of text with trained models: beam search, sampling, ensembles, constraints, streams of lines."""
