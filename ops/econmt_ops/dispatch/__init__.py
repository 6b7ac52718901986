"""Choice of the implementation of an op: traits, measurements, the rule for "auto", registration with torch.library."""
