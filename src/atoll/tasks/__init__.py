"""Tasks: what every node of a cluster runs, the jobs made of them, and the supervisor that outlives the terminal."""
