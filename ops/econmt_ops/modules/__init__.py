"""`torch.nn.Module` versions of the ops, with the parameter names of `torch.nn` where a counterpart exists."""
