# An exception, with a cause, in one rank.
#> [run]
#> flags = ["--nodes", "2"]
#> code = 100
#> traceback = true
#> long = true
#> said = ["rank 1 on worker1 exited with code 1", "    RuntimeError: no data for rank 1"]
#> lines = []
import os
import time

try:
    {}[os.environ["RANK"]]
except KeyError as error:
    if os.environ["RANK"] == "1":
        raise RuntimeError("no data for rank 1") from error
time.sleep(60)
