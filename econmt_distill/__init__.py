"""Distillation of a teacher into a small student: translations, selection, training, export and measurement."""
