"""Parts that operations share and that choose kernels: products, look-up, dropout, reversal, stacks of layers."""
