"""Memory plans: the settings and micro-batches with which a step fits a number of bytes."""
