"""Makes the proof of which layer is which, by the model itself where it can be run here: see numbering.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from eyrie.config import SamplingSettings
from eyrie.engines import Engine, EngineError, Failed
from eyrie.engines.checks import agreeing, check_against_reference
from eyrie.engines.numbering import note_proof, proved
from eyrie.engines.opening import Wanted
from eyrie.records import content_key
from eyrie.states import wanted_layer_ids
from eyrie.store import States, StateStore, StoreError
from eyrie.target import Target
from eyrie.target_weights import TargetWeights

# Weights of 16 bits are twice as large in float32, and other jobs need memory, too.
_MEMORY_OF_WEIGHTS = 4
# Enough of an answer to see whether its states are those of its own tokens.
_PROOF_TOKENS = 8
# Near ties count as agreeing; of the others some may be rounding of 16 bits through many layers.
_AGREEMENT = 0.75


def prove_layers(
    store: StateStore,
    dataset: str,
    engine: Mapping[str, Any],
    wanted: Wanted,
    sample: Callable[[], States],
    target: Target | None = None,
) -> None:
    """See that the engine's layers are proved, and note that the dataset's states rest on it.

    engine: its description. sample: captures one sample by it. target: the target where this process runs
    it anyway. Raises StoreError where the layers are not what they are called.
    """
    facts = {
        "engine": engine["engine"],
        "version": engine.get("version") or version("transformers"),
        # What a command names itself, rather than by {layer_ids}, is no other setting.
        "command": engine.get("command"),
        "dtype": engine["dtype"],
        "target_revision": wanted.target["revision"],
        "layer_ids": wanted_layer_ids(wanted.states, wanted.target["layers"]),
        "states_dtype": wanted.states.dtype,
    }

    def prove() -> dict[str, Any]:
        states = sample()
        if target is None and not fits(wanted.path):
            # Layer 0 was held against the embedding when the sample was read: see state_files.py.
            check_next_tokens(states, len(wanted.canary_prompt), wanted)
            return {"proof": "anchors"}
        model = target or Target(wanted.path, "float32", facts["layer_ids"])
        difference = check_against_reference(model, whole_rows(states), dtype=facts["dtype"])
        compared = f"all hidden states of transformers {version('transformers')} in {model.dtype_name()}"
        return {"proof": "reference", "compared_with": compared, "difference": round(difference, 4)}

    note_proof(store, dataset, proved(store, facts, prove))


def prove_answers(store: StateStore, dataset: str, engine: Engine, wanted: Wanted) -> None:
    """See that the states that answers leave are of the layers that they are called by. Raises StoreError."""

    def sample() -> States:
        sampling = SamplingSettings(max_new_tokens=_PROOF_TOKENS)
        results = engine.answer([(content_key(wanted.canary_prompt), wanted.canary_prompt)], sampling)
        one = next(result for group in results for result in group)
        if isinstance(one, Failed):
            raise EngineError(f"no hidden states of the first sample: {one.reason}: {one.detail}")
        assert one.states is not None
        return one.states

    target = getattr(engine, "target", None)
    prove_layers(store, dataset, engine.described(), wanted, sample, target)


def check_next_tokens(states: States, prompt: int, wanted: Wanted) -> None:
    """Hold the last states of a greedy answer, after `prompt` tokens, to its tokens. Raises StoreError.

    A sample without an answer is held to the server's own token by capturing.py.
    """
    answer = states.token_ids[prompt:]
    if not answer or states.last is None:
        return
    head = TargetWeights(wanted.path, wanted.target["files"]).head()
    agreed = agreeing(states.last[prompt - 1 : -1], torch.tensor(answer), head)
    if agreed < _AGREEMENT * len(answer):
        raise StoreError(
            f"the last states give {agreed} of {len(answer)} tokens of the server's own greedy answer\n"
            f"  expected: all but near ties, at least {_AGREEMENT:.0%}\n"
            "  change: the last of the layers in the server's command, which must be the state before the "
            "final norm; or target.path, whose norm and head must be the served model's"
        )


def whole_rows(states: States) -> States:
    """Without the last token where a server's answering pass has left an empty row for it."""
    if states.aux[-1].any() or states.last is None:
        return states
    return States(states.token_ids[:-1], states.aux[:-1], states.last[:-1])


def fits(path: Path) -> bool:
    """Whether a target can be loaded here, by its files' size and the memory that is free."""
    needed = sum(file.stat().st_size for file in path.glob("*.safetensors")) * _MEMORY_OF_WEIGHTS
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return needed <= int(value.split()[0]) * 1024
    return False
