"""Hosts that the user reaches with ``ssh``: which ones, how, what Atoll puts there, and nodes on them.

Standard library only: the supervisor of a cluster uses it on a head node that has nothing but a Python.
"""
