"""The Python surface: ``@compute``, operators, gather, shard, sampler, integrations, reports."""
