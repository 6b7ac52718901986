"""How good translations are: metrics with signatures, significance, log-probabilities of given translations."""
