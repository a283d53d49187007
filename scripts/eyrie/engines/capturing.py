"""Finished samples captured by servers: each is a prompt with one token to answer, and leaves its states."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from eyrie.config import SamplingSettings
from eyrie.engines import Answered, EngineError
from eyrie.engines.checks import agreeing
from eyrie.engines.requesting import RequestingEngine
from eyrie.gates import GateError
from eyrie.groups import GROUP_BYTES
from eyrie.records import content_key
from eyrie.store import States

_LOG = logging.getLogger(__name__)

# Samples a group whose last state is held against the token that the server answered. The head is read once
# for them, which for each sample by itself would take longer than its prefill.
_CHECKED = 16
# Near ties count as agreeing; of the others some may be rounding of 16 bits through many layers.
_AGREEMENT = 0.75


class ServerCapture:
    """Captures states by an engine whose servers leave them; head: the target's, [V, H]."""

    def __init__(self, engine: RequestingEngine, head: torch.Tensor, in_flight: int) -> None:
        self._engine = engine
        self._head = head
        self._sampling = SamplingSettings(max_new_tokens=1, max_in_flight=in_flight)

    def capture(self, samples: Sequence[list[int]], state_dtype: str) -> Iterator[list[States]]:
        """The samples' states in groups, as they come.

        Raises EngineError for samples that have no states after all repetitions, GateError where the last
        states do not give the tokens that the server answered, StoreError for states that can't be right.
        """
        by_key = {content_key(ids): ids for ids in sorted(samples, key=len, reverse=True)}
        failures: Counter[str] = Counter()
        first = ""
        group: list[Answered] = []
        size = 0
        for results in self._engine.answer(by_key.items(), self._sampling):
            for one in results:
                if not isinstance(one, Answered):
                    failures[one.reason] += 1
                    first = first or f"a sample of {len(by_key[one.key])} tokens: {one.reason}: {one.detail}"
                    continue
                assert one.states is not None
                group.append(one)
                size += _bytes(one.states)
                if size >= GROUP_BYTES:
                    yield self._checked(group)
                    group, size = [], 0
        if group:
            yield self._checked(group)
        if failures:
            raise EngineError(
                f"{failures.total()} of {len(by_key)} samples have no hidden states: {dict(failures)}\n"
                f"  the first one: {first}\n"
                "  expected: the states of every sample\n"
                "  change: the server (its log tells more), or engine.retries; what was captured is in the "
                "store, and the same command asks for the rest alone"
            )

    def _checked(self, group: Sequence[Answered]) -> list[States]:
        states = [one.states for one in group if one.states is not None]
        lasts = torch.stack([one.last[-1] for one in states[:_CHECKED] if one.last is not None])
        answers = torch.tensor([one.token_ids[0] for one in group[: len(lasts)]])
        agreed = agreeing(lasts, answers, self._head)
        seen = f"the last states give the server's own next token for {agreed} of {len(lasts)} samples"
        _LOG.info(seen)
        if agreed < _AGREEMENT * len(lasts):
            raise GateError(
                f"{seen}\n"
                f"  expected: all but near ties, at least {_AGREEMENT:.0%}\n"
                "  change: the last of the layers in the server's command, which must be the state before "
                "the final norm; or target.path, whose norm and head must be the served model's"
            )
        return states


def _bytes(states: States) -> int:
    tensors = [one for one in (states.aux, states.last) if one is not None]
    return sum(one.numel() * one.element_size() for one in tensors)
