"""Optimizers, their parameter groups, and learning rates as functions of a counter."""
