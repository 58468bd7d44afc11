"""A gang of ranks on nodes: their calls, their failures, their output."""
