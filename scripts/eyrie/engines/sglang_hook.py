"""Hooks that let an SGLang server leave each prompt's hidden states in a file, without a patch.

Not run on SGLang: written after reading 0.5.23, tested on plain torch modules of Kimi's and Llama's shape.

SGLang takes `--forward-hooks`, a list of {name, target_modules, hook_factory, config}, and calls hook_factory
with config for a hook(module, inputs, output) on the matching modules. `hook_specs` writes that list: for
Kimi-K2.5 the modules are below `language_model.model`, for Llama below `model`. The server needs `scripts` on
its PYTHONPATH and

    --disable-radix-cache --chunked-prefill-size -1 --disable-overlap-schedule --disable-cuda-graph

so that a prompt is run whole in its pass of prefill; no pipeline or two-batch overlap. A layer gives out
(hidden_states, residual), whose sum is the stream that enters the next: the state of layer i is taken behind
layer i - 1, that of layer 0 behind the embedding, the last behind the final norm. Where tensor parallelism
puts off a layer's sum to the next one, the sum is not whole; the numbering proof would say so.

The passes tell no request's name. A file's name is the digest of its prompt's tokens (`file_name`): whoever
sent them knows it. It appears whole, by a rename: `hidden_states` [tokens, layers + 1, H], the wanted layers
and the last state after the norm, and `token_ids`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Hook = Callable[[torch.nn.Module, Any, Any], None]

_FACTORY = "eyrie.engines.sglang_hook:make_hook"


def hook_specs(folder: Path, layer_ids: Sequence[int], decoder: str) -> list[dict[str, Any]]:
    """What --forward-hooks takes, as JSON. decoder: the name of the module that holds `layers`."""
    config = {"folder": str(folder), "layer_ids": list(layer_ids)}
    places = {f"{decoder}.embed_tokens": "embedding", f"{decoder}.norm": "norm"}
    # Layer 0 tells where prompts begin, whether or not its own output is wanted.
    places |= {
        f"{decoder}.layers.{index}": str(index) for index in {0, *(one - 1 for one in layer_ids if one)}
    }
    return [
        {
            "name": f"eyrie {place}",
            "target_modules": [module],
            "hook_factory": _FACTORY,
            "config": {**config, "place": place},
        }
        for module, place in places.items()
    ]


def file_name(token_ids: Sequence[int]) -> str:
    """The name of the file with a prompt's states."""
    data = torch.tensor(list(token_ids), dtype=torch.int64).numpy().tobytes()
    return f"{hashlib.sha256(data).hexdigest()[:32]}.safetensors"


def make_hook(config: Mapping[str, Any]) -> Hook:
    """The hook for one place: embedding, a layer's number, or norm; those of one folder work together."""
    folder = str(config["folder"])
    if folder not in _PASSES:
        _PASSES[folder] = Passes(Path(folder), list(config["layer_ids"]))
    passes, place = _PASSES[folder], str(config["place"])
    if place == "embedding":
        return passes.on_embedding
    if place == "norm":
        return passes.on_norm
    return passes.on_layer(int(place))


class Passes:
    """The states of the pass that is running, and the files of those that are done."""

    def __init__(self, folder: Path, layer_ids: list[int]) -> None:
        self._folder = folder
        self._layer_ids = layer_ids
        self._ids: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._states: dict[int, torch.Tensor] = {}
        self._writing = ThreadPoolExecutor(max_workers=4)
        folder.mkdir(parents=True, exist_ok=True)

    def on_embedding(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A pass begins: its tokens [N], those of all its prompts one after the other."""
        self._states.clear()
        self._positions = None
        self._ids = inputs[0]
        if 0 in self._layer_ids:
            self._states[0] = output.clone()

    def on_layer(self, index: int) -> Hook:
        """The hook behind a layer; its first argument is the tokens' positions [N]."""

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if self._positions is None:
                self._positions = inputs[0]
            if index + 1 in self._layer_ids:
                hidden, residual = output[0], output[1]
                # A new tensor: the next layer adds to these in place.
                self._states[index + 1] = hidden.clone() if residual is None else hidden + residual

        return hook

    def on_norm(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A pass ends: its prompts are cut apart and written. Raises RuntimeError where they can't be."""
        last = output[0] if isinstance(output, tuple) else output
        ids, positions = self._ids, self._positions
        # One process of a group writes: each has the whole stream.
        if ids is None or not _is_first_rank():
            return
        if positions is None or positions.shape != ids.shape or len(self._states) < len(self._layer_ids):
            raise RuntimeError(
                f"eyrie's hooks saw states of layers {sorted(self._states)} of {self._layer_ids}, and "
                f"positions {None if positions is None else list(positions.shape)} for tokens "
                f"{list(ids.shape)}; this version of SGLang calls its layers otherwise"
            )
        # What stands before the first beginning, all of it in a pass of generation, goes on a prompt.
        bounds = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
        if len(bounds) == 1:
            return
        stacked = torch.stack([*(self._states[layer] for layer in self._layer_ids), last], dim=1).cpu()
        for start, end in itertools.pairwise(bounds):
            if _is_whole(positions[start:end]):
                self._writing.submit(self._write, ids[start:end].cpu(), stacked[start:end])

    def _write(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        path = self._folder / file_name(ids.tolist())
        temporary = path.with_suffix(f".{os.getpid()}.{id(states)}.tmp")
        save_file({"hidden_states": states.contiguous(), "token_ids": ids.long().contiguous()}, temporary)
        temporary.replace(path)

    def finish(self) -> None:
        """Wait until all files are written."""
        self._writing.shutdown()


_PASSES: dict[str, Passes] = {}


def _is_whole(positions: torch.Tensor) -> bool:
    """Whether these are the positions of one prompt from its first token on, with nothing between."""
    return bool((positions == torch.arange(len(positions), device=positions.device)).all())


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
