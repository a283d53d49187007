"""States that an answering pass left with a last state, made into ones with top tokens by the head alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyrie.config import ConfigError
from eyrie.console import Progress
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.encoding import Encoded, decode
from eyrie.groups import GROUP_BYTES, groups
from eyrie.store import StateRef, StateStore, StoreError
from eyrie.target_weights import TargetWeights
from eyrie.top_tokens import Likeliest, vocabulary_digest


def convert_found(
    samples: Mapping[str, Mapping[str, Any]],
    dataset: str,
    left: StateStore,
    states: StateStore,
    likeliest: Likeliest,
    each: int,
    log: logging.Logger,
) -> int:
    """Store the samples {key: row} whose last states are in `left` with top tokens instead; returns how many.

    The layers are taken over to the bit, and the target is not run. each: bytes of a token in `left`.
    """
    with states.writer(dataset) as writer:
        done = states.find(samples)
        keys = [left.key(row["input_ids"]) for key, row in samples.items() if key not in done]
        refs = sorted(left.find(keys).values(), key=lambda ref: (ref.shard, ref.start))
        if not refs:
            return 0
        progress = Progress(sum(ref.tokens for ref in refs), "tokens converted", log)
        most = GROUP_BYTES // each
        for group in groups(refs, [ref.tokens for ref in refs], len(refs), most):
            pairs = zip(group, left.read(group), strict=True)
            writer.add_encoded([_converted(ref, stored, likeliest) for ref, stored in pairs])
            progress.advance(sum(ref.tokens for ref in group))
        progress.close()
    return len(refs)


def _converted(ref: StateRef, stored: Encoded, likeliest: Likeliest) -> Encoded:
    if stored.digest() != ref.sha256:
        raise StoreError(
            f"{ref.shard}: sample {ref.key} is not what was stored: digest {stored.digest()}, expected "
            f"{ref.sha256}\n  change: `python scripts/verify_store.py`, then run again"
        )
    last = decode(stored).last
    assert last is not None
    return stored.with_top(likeliest.of(last))


def make_likeliest(
    vocabulary: Path | None, k: int | None, target: Mapping[str, Any], path: Path
) -> tuple[Likeliest | None, str | None]:
    """What makes top tokens, and the digest of their vocabulary; nothing where none are wanted."""
    if k is None:
        return None, None
    if vocabulary is None:
        raise ConfigError("hidden_states.top_tokens needs a draft vocabulary: --vocabulary vocabulary.json")
    token_ids = read_vocabulary(vocabulary, target["vocab_size"])

    def head() -> torch.Tensor:
        return TargetWeights(path, target["files"]).head()

    return Likeliest(head, token_ids, k), vocabulary_digest(token_ids)
