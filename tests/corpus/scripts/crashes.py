# Killed by its own hand, in C.
#> [run]
#> flags = ["--nproc", "2"]
#> code = 100
#> long = true
#> lines = ["begun"]
#> said = ["rank 0 on head was killed by SIGSEGV"]
import ctypes
import os
import time

if os.environ["RANK"] == "0":
    print("begun", flush=True)
    ctypes.string_at(0)
time.sleep(60)
