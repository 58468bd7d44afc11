# One rank leaves with a code of its own while the others are busy.
#> [run]
#> flags = ["--nodes", "2"]
#> code = 100
#> lines = ["saved by 0", "    bye"]
import os
import signal
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
ready = Path("ready")


def save(*_):
    print("saved by", rank, flush=True)
    sys.exit(0)


if rank == 0:
    signal.signal(signal.SIGTERM, save)
    ready.touch()
    while True:
        time.sleep(60)
while not ready.exists():
    time.sleep(0.01)
print("bye")
sys.exit(3)
