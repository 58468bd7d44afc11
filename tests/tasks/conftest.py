"""Hosts for the tests of tasks that run on them."""

from testbed.fixtures import bed, make_bed

__all__ = ["bed", "make_bed"]
