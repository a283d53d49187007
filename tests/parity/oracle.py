"""Cases that ours and speculators both compute on, and the process in which speculators does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file

from eyrie.eagle3.batches import Sample, candidate_places
from eyrie.eagle3.model import Drafter, rms_normalise

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-oracle/bin/python"
WORKER = Path(__file__).with_name("speculators_worker.py")


@dataclass(frozen=True)
class Target:
    """What both trainers need of a target: embedding and head [V, H], the final norm's scale [H]."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor


def make_sample(
    target: Target, generator: torch.Generator, loss_mask: Sequence[int], layers: int, eps: float
) -> tuple[Sample, torch.Tensor]:
    """A random sample, and its last states [T, H] before the final norm, which speculators applies itself."""
    vocabulary, width = target.head.shape
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    raw = torch.randn(len(mask), width, generator=generator)
    last = rms_normalise(raw, eps) * target.norm
    candidates = candidate_places(mask, "shifted")
    sample = Sample(
        key="",
        token_ids=torch.randint(0, vocabulary, mask.shape, generator=generator),
        loss_mask=mask,
        aux=torch.randn(len(mask), layers * width, generator=generator),
        last=last,
        candidates=candidates,
        choices=(last[candidates] @ target.head.t()).argmax(dim=-1),
    )
    return sample, raw


def write_case(
    folder: Path,
    drafter: Drafter,
    target: Target,
    samples: Sequence[tuple[Sample, torch.Tensor]],
    steps: int,
    decay: float,
    rate: float = 0.0,
) -> None:
    """Write what speculators_worker.py loads. samples: with their last states before the norm."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"drafter.{name}": tensor for name, tensor in drafter.state_dict().items()}
    tensors |= {f"target.{name}": tensor for name, tensor in vars(target).items()}
    tensors |= {
        "input_ids": torch.cat([sample.token_ids for sample, _ in samples]),
        "hidden_states": torch.cat([sample.aux for sample, _ in samples]),
        "verifier_last_hidden_states": torch.cat([raw for _, raw in samples]),
        "loss_mask": torch.cat([sample.loss_mask for sample, _ in samples]).long(),
    }
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
              folder / "case.safetensors")  # fmt: skip
    about = {
        "shape": asdict(drafter.config),
        "tokens": [len(sample.token_ids) for sample, _ in samples],
        "steps": steps,
        "decay": decay,
        "rate": rate,
    }
    (folder / "case.json").write_text(json.dumps(about))


class Worker:
    """A process that answers requests line by line; use it with `with`."""

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [*map(str, command), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet,
        )
        self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises RuntimeError if the process has ended instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._process.args} ended with {self._process.wait()}; its errors are above"
            )
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
