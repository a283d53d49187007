"""The store of hidden states: finished work under content keys, which outlives failures and reruns.

Safetensors shards, each holding many samples without padding, with a journal that says where each sample
lies. A manifest names samples by key and digest, never by shard: shards may be laid out anew without making a
manifest stale. The answers' journals are in journals.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyrie.encoding import NAMES, Encoded, States, TopTokens, decode, encode
from eyrie.journals import Journal, StoreError, described_folder, read_journals
from eyrie.records import atomic_write, canonical_json, content_key

__all__ = ["Encoded", "StateRef", "StateStore", "StateWriter", "States", "StoreError", "TopTokens"]

INDEXES = "index-*.jsonl"


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
        rows = read_journals(self.folder, keys, INDEXES, lambda row: row["shard"] in shards)
        return {key: StateRef(**row) for key, row in rows.items()}

    def writer(self, name: str) -> StateWriter:
        """The writer for one job (a dataset's name); use it with `with`."""
        return StateWriter(self, Journal(self.folder / f"index-{name}.jsonl"))

    def load(self, refs: Sequence[StateRef]) -> Iterator[States]:
        """The states behind the references, in their order, each with the digest of what is stored."""
        for encoded in self.read(refs):
            yield decode(encoded, encoded.digest())

    def read(self, refs: Sequence[StateRef]) -> Iterator[Encoded]:
        """What is stored under the references, in their order; one shard is open at a time.

        Raises StoreError for a shard that can't be read, naming it and the sample.
        """
        opened: tuple[str, Any] | None = None
        for ref in refs:
            path = self.folder / ref.shard
            try:
                if opened is None or opened[0] != ref.shard:
                    opened = (ref.shard, safe_open(path, framework="pt"))
                encoded = read_rows(opened[1], ref.start, ref.tokens)
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise StoreError(
                    f"{path}: sample {ref.key} cannot be read from this shard of hidden states: {error}\n"
                    "  change: `python scripts/verify_store.py` sets damaged shards aside; the next run then "
                    "captures their samples anew"
                ) from error
            yield encoded


def read_rows(handle: Any, start: int, tokens: int) -> Encoded:
    """The sample in `tokens` rows of an open shard. Raises ValueError where there are fewer."""
    rows = slice(start, start + tokens)
    tensors = {name: handle.get_slice(name)[rows] for name in handle.keys()}  # noqa: SIM118 - no mapping
    ids = tensors.pop("input_ids").tolist()
    if not tensors.keys() <= set(NAMES) or {len(ids), *map(len, tensors.values())} != {tokens}:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(f"{len(ids)} token ids and tensors of {shapes}; expected {tokens} rows of each")
    return Encoded(ids, tensors)


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
        """Write one shard of these samples as the store's recipe says, and then its index rows.

        Both are durable on return. Raises StoreError for states that can't be stored so.
        """
        recipe = self.store.recipe
        return self.add_encoded([encode(one, recipe["dtype"], len(recipe["layer_ids"])) for one in samples])

    def add_encoded(self, samples: Sequence[Encoded]) -> list[StateRef]:
        """The same for samples that are encoded already."""
        if not samples:
            return []
        digests = [sample.digest() for sample in samples]
        name = f"{content_key(digests)}.safetensors"
        refs, start = [], 0
        for sample, digest in zip(samples, digests, strict=True):
            tokens = len(sample.token_ids)
            rows = {part: len(tensor) for part, tensor in sample.tensors.items()}
            if {*rows.values()} != {tokens}:
                raise StoreError(f"a sample of {tokens} tokens came with rows {rows}; expected one a token")
            refs.append(StateRef(self.store.key(sample.token_ids), name, start, tokens, digest))
            start += tokens
        tensors = {
            part: torch.cat([sample.tensors[part] for sample in samples]).contiguous()
            for part in samples[0].tensors
        }
        tensors["input_ids"] = torch.cat([torch.tensor(s.token_ids, dtype=torch.int32) for s in samples])
        index = canonical_json([[ref.key, ref.start, ref.tokens, ref.sha256] for ref in refs])
        with atomic_write(self.store.folder / name) as file:
            file.write(
                save(tensors, metadata={"recipe": canonical_json(self.store.recipe), "samples": index})
            )
        self._journal.append([ref.__dict__ for ref in refs])
        return refs
