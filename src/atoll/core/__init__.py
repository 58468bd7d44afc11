"""Errors, events, paths and the context of a call: nothing heavy, imported by everything."""
