"""Checkpoints that are one atomic thing, wherever they are kept."""
