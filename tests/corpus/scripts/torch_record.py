# torchrun's own decorator and error file, and an agent's variables that libraries look for.
#> [run]
#> flags = ["--nproc", "2", "--max-restarts", "1"]
#> code = 100
#> traceback = true
#> long = true
#> said = ["ValueError: attempt 1"]
#> lines = ["elastic True attempt 0 of 1", "elastic True attempt 0 of 1", "elastic True attempt 1 of 1", "elastic True attempt 1 of 1"]
import os
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("elastic", dist.is_torchelastic_launched(), "attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError(f"attempt {attempt}")
    time.sleep(60)


main()
