"""What a run shows: the console, metrics.jsonl, pictures, trackers and traces."""
