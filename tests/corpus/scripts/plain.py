# A script of the standard library alone: variables, arguments, a file beside it, no `if __name__`.
#> [files]
#> "notes.txt" = "beside\n"
#> [run]
#> flags = ["--nodes", "2", "--nproc", "2"]
#> script = ["plain.py", "--lr", "0.1", "a b", "--", "-x"]
#> lines = ["0 of 4, local 0 of 2 on 0", "1 of 4, local 1 of 2 on 0", "2 of 4, local 0 of 2 on 1", "3 of 4, local 1 of 2 on 1", "['--lr', '0.1', 'a b', '--', '-x'] beside __main__"]
import os
import sys
from pathlib import Path

rank, local, world, nproc, node = (
    int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
)
print(f"{rank} of {world}, local {local} of {nproc} on {node}")
if rank == 0:
    print(sys.argv[1:], Path(__file__).with_name("notes.txt").read_text().strip(), __name__)
