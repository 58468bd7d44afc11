"""Hosts for the tests of the ssh provider."""

from testbed.fixtures import bed, make_bed

__all__ = ["bed", "make_bed"]
