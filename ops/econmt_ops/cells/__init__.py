"""Equations of one step of each recurrent cell, forward and backward."""
