"""Several processes that train one model: by data, by layers, and what the network costs."""
