"""Prediction of a step's memory on fake tensors."""

from __future__ import annotations
