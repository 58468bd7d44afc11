"""The node agent: starts ranks, relays their frames, captures their output, and kills whole trees.

Standard library only, and of Atoll only ``core`` and ``wire.frames``, so that it can be shipped to a bare host.
"""
