"""The training step and the machinery it runs on: devices, precision, optimizers, threads and communication."""
