# A progress bar, standard error, bytes that are no UTF-8, a last line without an end.
#> [run]
#> flags = ["--nproc", "2"]
#> lines = ["only 0 to stderr", "only 1 to stderr", "caf\ufffd 0", "caf\ufffd 1", "100%", "100%", "no end 0", "no end 1"]
import os
import sys

rank = os.environ["RANK"]
for percent in range(0, 101, 10):
    sys.stdout.write(f"\r{percent:3}%")
    sys.stdout.flush()
print()
print(f"only {rank} to stderr", file=sys.stderr)
sys.stdout.flush()
sys.stdout.buffer.write(b"caf\xe9 " + rank.encode() + b"\n")
print(f"no end {rank}", end="")
