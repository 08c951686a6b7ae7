"""One process, or many under torchrun: the same command."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class World:
    """Which of the processes that train together this is, and where it computes."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and tells people."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """Let the gradients of all processes be averaged."""
        if self.ranks == 1:
            return module
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=True)

    def average(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the means of numbers over all processes; each must call this, with the same names."""
        if self.ranks == 1 or not values:
            return values
        stacked = torch.stack(list(values.values()))
        distributed.all_reduce(stacked)
        return dict(zip(values, stacked / self.ranks, strict=True))

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.ranks > 1:
            distributed.barrier()


@contextmanager
def join_world(*, device: str = "auto") -> Iterator[World]:
    """Join the processes that torchrun started, if it did, and leave them at the end of the block.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    where = torch.device("cuda", local) if gpu else torch.device("cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if gpu:
        torch.cuda.set_device(where)
    if ranks == 1:
        yield World(0, 1, where)
        return
    distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield World(distributed.get_rank(), ranks, where)
    finally:
        distributed.destroy_process_group()
