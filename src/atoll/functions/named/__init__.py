"""Pools with a name, which outlive the process that made them, and calls that outlive their caller."""
