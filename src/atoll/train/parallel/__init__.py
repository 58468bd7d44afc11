"""How one model is spread over ranks: the mesh, the sharding of each axis, and what is right on every mesh."""
