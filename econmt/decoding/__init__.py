"""From a trained model to translations: beam search, sampling, ensembles, streams of lines."""
