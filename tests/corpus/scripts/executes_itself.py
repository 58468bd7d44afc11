# Sets a variable that only a new process sees, as launchers of allocators do.
#> [run]
#> flags = ["--nproc", "2"]
#> script = ["executes_itself.py", "x"]
#> lines = ["0 again ['x']", "1 again ['x']"]
#> long = true
import os
import sys

if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
print(os.environ["RANK"], "again", sys.argv[1:])
