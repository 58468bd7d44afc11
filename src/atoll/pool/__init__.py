"""Gang lifecycle: agents, ranks, failure detection, logs."""
