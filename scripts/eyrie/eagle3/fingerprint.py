"""What training wrote, in digests: so that a later change of a checkpoint is named by the tensor it is in.

A file whose blocks were put in another order, or whose layer ids were edited, is a valid checkpoint: nothing
in it is wrong but that it is not what was trained. Nor does it tell whose embedding it was trained with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FC = "fc.weight"


def fingerprint(
    tensors: Mapping[str, torch.Tensor], layer_ids: Sequence[int], embedding: torch.Tensor
) -> dict[str, Any]:
    """The digests of a checkpoint's tensors, its layers, and the target's embedding [V, H].

    fc takes the layers side by side: it has a digest for each layer's block of columns.
    """
    return {
        "layer_ids": list(layer_ids),
        "target_embedding": digest(embedding.bfloat16()),
        "tensors": {
            name: [digest(block) for block in tensor.chunk(len(layer_ids), dim=1)]
            if name == FC
            else digest(tensor)
            for name, tensor in sorted(tensors.items())
        },
    }


def digest(tensor: torch.Tensor) -> str:
    """The first 16 hex digits of the SHA-256 of a tensor's bytes, dtype and shape."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
