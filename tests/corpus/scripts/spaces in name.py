# A path with spaces, and torch.distributed.launch's old argument.
#> [run]
#> flags = ["--nproc=2"]
#> long = true
#> lines = ["local 0 spaces in name.py ''", "local 1 spaces in name.py ''"]
import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
args = parser.parse_args()
print("local", args.local_rank, os.path.basename(__file__), repr(sys.stdin.read()))
