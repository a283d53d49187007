"""The store of hidden states: finished work under content keys, which outlives failures and reruns.

Safetensors shards, each holding many samples without padding, with a journal that says where each sample
lies. A manifest names samples by key and digest, never by shard: shards may be laid out anew without making a
manifest stale. The answers' journals are in journals.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save

from eyrie.journals import Journal, StoreError, described_folder, read_journals
from eyrie.records import atomic_write, canonical_json, content_key

__all__ = ["StateRef", "StateStore", "StateWriter", "States", "StoreError", "TopTokens"]


@dataclass(frozen=True)
class TopTokens:
    """The target's distribution over the draft vocabulary, cut to its k likeliest tokens.

    ids: int32 [T, k], rows of the draft vocabulary (0..D-1), falling probability, ties by id. logs: float16
    [T, k], log-probabilities, renormalised over the draft vocabulary. rest: float32 [T], probability mass of
    the other D - k tokens (0 where k >= D). choices: int32 [T], the target's most likely token over its whole
    vocabulary (target id).
    """

    ids: torch.Tensor
    logs: torch.Tensor
    rest: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True)
class States:
    """The target's hidden states over one sample; exactly one of last and top is there.

    token_ids: the sample's T tokens. aux: [T, layers * H], the captured layers side by side in the order of
    the layer ids. last: [T, H], after the final norm, from which the target's distribution follows.
    """

    token_ids: list[int]
    aux: torch.Tensor
    last: torch.Tensor | None
    top: TopTokens | None = None

    def digest(self) -> str:
        """SHA-256 over the tokens and both tensors' bytes: what a manifest vouches for."""
        sha = hashlib.sha256(canonical_json(self.token_ids).encode())
        for tensor in (self.aux, self.last):
            sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class StateRef:
    """Where a sample's states lie: rows `start` to `start + tokens` of a shard, and their digest."""

    key: str
    shard: str
    start: int
    tokens: int
    sha256: str


class StateStore:
    """Hidden states of samples under content keys, for one recipe.

    The recipe holds what changes the numbers: target revision, layer ids, dtype. A sample's key is the hash
    of the recipe and its token ids; no row index is ever an identity.
    """

    def __init__(self, store: Path, recipe: Mapping[str, Any]) -> None:
        self.recipe = dict(recipe)
        self.folder = described_folder(store / "hidden_states", recipe)

    def key(self, token_ids: Sequence[int]) -> str:
        """The content key of a sample's states."""
        return content_key(self.recipe, list(token_ids))

    def find(self, keys: Iterable[str]) -> dict[str, StateRef]:
        """The references of those keys whose shard is there; a shard that vanished counts as not captured."""
        shards = {path.name for path in self.folder.glob("*.safetensors")}
        rows = read_journals(self.folder, keys, "index-*.jsonl", lambda row: row["shard"] in shards)
        return {key: StateRef(**row) for key, row in rows.items()}

    def writer(self, name: str) -> StateWriter:
        """The writer for one job (a dataset's name); use it with `with`."""
        return StateWriter(self, Journal(self.folder / f"index-{name}.jsonl"))

    def load(self, refs: Sequence[StateRef]) -> Iterator[States]:
        """The states behind the references, in their order; one shard is open at a time."""
        opened: tuple[str, Any] | None = None
        for ref in refs:
            if opened is None or opened[0] != ref.shard:
                opened = (ref.shard, _open_shard(self.folder / ref.shard))
            rows = slice(ref.start, ref.start + ref.tokens)
            handle = opened[1]
            yield States(
                token_ids=handle.get_slice("input_ids")[rows].tolist(),
                aux=handle.get_slice("aux_hidden_states")[rows],
                last=handle.get_slice("last_hidden_state")[rows],
            )


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise StoreError(
            f"{path} cannot be read as a shard of hidden states: {error}. "
            "Delete the file and run again: only its samples are captured anew."
        ) from error


class StateWriter:
    """Adds samples to a StateStore, a shard at a time."""

    def __init__(self, store: StateStore, journal: Journal) -> None:
        self.store = store
        self._journal = journal

    def __enter__(self) -> Self:
        self._journal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    def add(self, samples: Sequence[States]) -> list[StateRef]:
        """Write one shard of these samples and then its index rows; both are durable on return."""
        if not samples:
            return []
        digests = [sample.digest() for sample in samples]
        name = f"{content_key(digests)}.safetensors"
        refs, start = [], 0
        for sample, digest in zip(samples, digests, strict=True):
            tokens = len(sample.token_ids)
            if not (tokens == sample.aux.shape[0] == sample.last.shape[0]):
                raise StoreError(
                    f"a sample of {tokens} tokens came with {sample.aux.shape[0]} rows of layers and "
                    f"{sample.last.shape[0]} of the last state; expected one row a token"
                )
            refs.append(StateRef(self.store.key(sample.token_ids), name, start, tokens, digest))
            start += tokens
        tensors = {
            "input_ids": torch.cat([torch.tensor(s.token_ids, dtype=torch.int32) for s in samples]),
            "aux_hidden_states": torch.cat([s.aux for s in samples]).contiguous(),
            "last_hidden_state": torch.cat([s.last for s in samples]).contiguous(),
        }
        index = canonical_json([[ref.key, ref.start, ref.tokens, ref.sha256] for ref in refs])
        with atomic_write(self.store.folder / name) as file:
            file.write(
                save(tensors, metadata={"recipe": canonical_json(self.store.recipe), "samples": index})
            )
        self._journal.append([ref.__dict__ for ref in refs])
        return refs
