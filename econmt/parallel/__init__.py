"""Training of one model by several processes: data parallelism, pipelines over layers, and models of their cost."""
