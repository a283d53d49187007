"""The processes that train one drafter together: torchrun's, or this one alone.

Each has all weights and computes its share of every step; gradients are added up, so that all take the same
step. The first one alone validates and writes. A lone process needs nothing of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from eyrie.config import ConfigError
from eyrie.errors import BuildError

T = TypeVar("T")

# The longest that one process works while others wait is the fit of the first weights: minutes.
_SECONDS = 1800.0


class ProcessError(BuildError):
    """Another process of the same training is gone, or does not answer."""


@dataclass(frozen=True)
class Processes:
    """This process among the `count` that train together; rank 0 is the first."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that validates and writes."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by the sum over all processes, the same bytes in each of them."""
        if self.count > 1:
            for tensor in tensors:
                _answered(lambda tensor=tensor: torch.distributed.all_reduce(tensor))  # type: ignore[misc]

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by the first process's."""
        if self.count > 1:
            for tensor in tensors:
                _answered(lambda tensor=tensor: torch.distributed.broadcast(tensor, 0))  # type: ignore[misc]

    def agree(self, value: T) -> T:
        """The first process's value; what the others pass counts for nothing."""
        if self.count == 1:
            return value
        values = [value]
        _answered(lambda: torch.distributed.broadcast_object_list(values, 0))
        return values[0]

    def gather(self, values: list[T]) -> list[T]:
        """The values of all processes, one process after the other."""
        if self.count == 1:
            return values
        found: list[list[T]] = [[] for _ in range(self.count)]
        _answered(lambda: torch.distributed.all_gather_object(found, values))
        return [value for part in found for value in part]


ALONE = Processes()


def _answered(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise ProcessError(
            f"another process of this training is gone or did not answer within {_SECONDS:.0f} s\n"
            f"  seen: {error}\n  change: see what that process said, mend it and run again; training goes on "
            "from its last saved step"
        ) from error


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started with this one; without torchrun this one alone.

    device: where the tensors lie that will be added up.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    import torch.distributed  # noqa: PLC0415 - a lone process does without

    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=_SECONDS))
    yield Processes(torch.distributed.get_rank(), count)
    # Not after an error: leaving in order could wait for the others, and they learn of it by the broken line.
    torch.distributed.destroy_process_group()


def choose_device(wanted: str) -> torch.device:
    """The device of this process. wanted: auto, cpu or cuda. Raises ConfigError where there is none."""
    there = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not there):
        return torch.device("cpu")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if not there or place >= torch.cuda.device_count():
        raise ConfigError(
            f"training.device: cuda needs a CUDA device for each process, and process {place} of this "
            f"machine found {torch.cuda.device_count()} of them. Set training.device: cpu, or "
            "training.processes to the number of devices"
        )
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device
