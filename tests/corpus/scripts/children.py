# Processes of every kind, and one that is left behind by each rank.
#> [run]
#> flags = ["--nproc", "2"]
#> long = true
#> lines = ["run 0", "run 1", "fork 4", "fork 4", "spawn 9", "spawn 9", "forkserver 16", "forkserver 16", "futures 25", "futures 25", "shell 0", "shell 1", "end", "end"]
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor


class Own:
    def __init__(self, x):
        self.x = x


def square(own):
    return own.x**2


def main():
    subprocess.run([sys.executable, "-c", "import os; print('run', os.environ['RANK'])"], check=True)
    for x, method in enumerate(("fork", "spawn", "forkserver"), 2):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.apply(square, (Own(x),)))
    with ProcessPoolExecutor(1) as pool:
        print("futures", pool.submit(square, Own(5)).result())
    sys.stdout.flush()
    os.system("echo shell $RANK")
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("end")


if __name__ == "__main__":
    main()
