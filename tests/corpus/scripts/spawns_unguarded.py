# Without `if __name__ == "__main__"` a spawned child runs the script again, and Python refuses, as everywhere.
#> [run]
#> code = 100
#> traceback = true
#> long = true
#> lines = []
#> absent = ["never"]
import multiprocessing

with multiprocessing.get_context("spawn").Manager() as manager:
    print("never", manager.list())
