"""Where nodes come from. Each provider starts nodes, says what it would start, and releases them."""
