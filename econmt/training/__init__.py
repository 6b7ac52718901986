"""Training: the objective, optimizers and schedules, checkpoints, validation, the trainer."""
