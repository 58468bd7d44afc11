"""What runs in a rank: one call at a time, on the main thread, with nothing of the last one left."""
