# Workers of a DataLoader, however they are started, with a dataset and a collate function of the script.
#> [run]
#> flags = ["--nproc", "2"]
#> long = true
#> lines = ["fork [0, 2, 4] 2", "spawn [0, 2, 4] 2", "forkserver [0, 2, 4] 2", "fork [1, 3, 5] 2", "spawn [1, 3, 5] 2", "forkserver [1, 3, 5] 2"]
import dataclasses
import os

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

RANK = int(os.environ["RANK"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    workers: int


class Numbers(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return 2 * index + int(os.environ["RANK"])


def collate(items):
    return Batch(torch.tensor(items), get_worker_info().num_workers)


if __name__ == "__main__":
    os.environ["TMPDIR"] = os.getcwd()  # Python's own forkserver leaves a folder behind
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(
            Numbers(), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context=method,
            persistent_workers=True,
        )
        batches = list(loader)
        print(method, torch.cat([batch.x for batch in batches]).tolist(), batches[0].workers)
