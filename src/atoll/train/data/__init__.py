"""From text on disk to batches of tokens whose order is a function of seed, epoch and index."""
