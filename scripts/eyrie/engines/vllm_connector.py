"""A hidden-states connector for vLLM on a CPU; it runs inside the server, in vLLM's own environment.

vLLM's ExampleHiddenStatesConnector copies with CUDA streams and pinned memory, which a CPU has not: there it
ends the engine. Here the copy out of the cache is an ordinary one; everything else is vLLM's. A server on a
GPU takes vLLM's connector as it is. Named to the server by

    --kv-transfer-config '{"kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "eyrie.engines.vllm_connector", ...}'

with the folder `scripts` on its PYTHONPATH. Nothing of Eyrie's that needs another environment is imported.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class _Done:
    """Stands for the CUDA event of a copy: here the copy is done when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is to be waited for."""


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's connector with its one device-dependent step done on the CPU, and done sooner."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take a step's metadata before its forward pass, and write what finished in the step before.

        vLLM's own writes after the pass. The states of a batch would then come when the next batch is done,
        and until then their requests keep others from being asked.
        """
        super().bind_connector_metadata(connector_metadata)
        for pending in connector_metadata.pending_saves:
            self._submit_async_write(pending)

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a finished request's states out of the cache and have a thread write them to its file.

        The cache is [blocks, layers, tokens of a block, H]. Its blocks are free for others once this
        returns, so that they are copied here; they are put in the tokens' order in the thread. Done once:
        vLLM asks for it again after the forward pass.
        """
        if not self._is_tp_rank_zero or pending.req_id in self._req_copy_events:
            return
        blocks = self._kv_cache[torch.tensor(pending.block_ids, dtype=torch.long)]
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        future = self._executor.submit(
            _write, blocks, pending.token_ids, pending.filename, self._lock_of(pending)
        )
        self._req_copy_events[pending.req_id] = _Done()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _lock_of(self, pending: Any) -> int | None:
        """The descriptor of the request's lock, held since the request came; None without locks."""
        descriptor = self._lock_fds.pop(pending.req_id, None)
        if descriptor is None and self.use_lock:
            descriptor = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor


def _write(blocks: torch.Tensor, token_ids: torch.Tensor, filename: str, lock: int | None) -> None:
    """Write hidden_states [tokens, layers, H] and token_ids [tokens], then let go of the lock."""
    try:
        rows = blocks.transpose(1, 2).flatten(0, 1)[: len(token_ids)].contiguous()
        save_file({"hidden_states": rows, "token_ids": token_ids.contiguous()}, filename)
    finally:
        if lock is not None:
            os.close(lock)
