"""What captured hidden states must pass before they are stored, and the proof of which layer is which.

A wrong layer, a norm that was left out or rows that are one off against the tokens make a drafter that is
useless without a word. So each sample's states are checked by themselves, and those of one sample a job
against all that the model itself puts out for the tokens: a state that is not the one it is called is named
for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyrie.journals import StoreError
from eyrie.store import States
from eyrie.target import Target

# Largest difference between a captured state and the reference, as a share of its length: what storing with
# 8 bits of mantissa and computing in another batch, with other sums, may do.
_REFERENCE_LIMITS = {"float32": 0.02, "bfloat16": 0.2, "float16": 0.05}

# Two engines' rounding decides between tokens whose logits are so near, as a share of the logits' spread.
_NEAR_TIE = 0.1

LAST = "last"
RAW = "last before the final norm"
TWICE = "last normed twice"
_SHIFTS = {0: "", 1: " of the token before", -1: " of the token after"}


def checked_states(ids: list[int], values: torch.Tensor, layer_ids: Sequence[int], hidden: int) -> States:
    """A sample's States from [rows, layers * hidden + hidden]: the layers side by side, then the last state.

    Raises StoreError where they can't be the states of the tokens, or are not worth storing.
    """
    if values.shape[0] != len(ids):
        raise StoreError(f"{values.shape[0]} rows of states for {len(ids)} tokens; expected one a token")
    width = (len(layer_ids) + 1) * hidden
    if values.shape[1] != width:
        raise StoreError(
            f"hidden states {values.shape[1]} wide; expected {width}: layers {list(layer_ids)} and the last "
            f"one, {hidden} each. Change hidden_states.layer_ids, or the layers that the server gives out"
        )
    if not torch.isfinite(values).all():
        raise StoreError(
            f"hidden states of a sample of {len(ids)} tokens are not finite as {values.dtype}; "
            "change hidden_states.dtype (bfloat16 has float32's range) or target.dtype"
        )
    for name, layer in zip([*layer_ids, LAST], torch.split(values, hidden, dim=1), strict=True):
        if not layer.any():
            raise StoreError(f"hidden states of layer {name} are all zero; the layer was not captured")
    return States(ids, values[:, :-hidden].contiguous(), values[:, -hidden:].contiguous())


@dataclass(frozen=True)
class Reference:
    """All hidden states that the model itself puts out for a sample's tokens, by name, [T, H] each.

    Names are Hugging Face's indices, LAST, and what is taken for it by mistake: RAW and TWICE.
    """

    token_ids: list[int]
    states: dict[int | str, torch.Tensor]

    def difference(self, name: int | str, seen: torch.Tensor, limit: float) -> float:
        """The largest difference of a token's state from what it is called, relative to its length.

        Raises StoreError where it is more than rounding, or where another layer is nearer.
        """
        distances = self._distances(seen, self.states[name])
        worst = distances.max().item()
        # In 16 bits a layer may be within the limit of its neighbour: none may be clearly nearer. Several may
        # be equally near: a norm without weights changes nothing the second time.
        nearest, shift = self._nearest(seen)
        own, best = self._typical(seen, name, 0), self._typical(seen, nearest, shift)
        if worst <= limit and own <= 2 * best + 1e-6:
            return worst
        called = "the last state" if name == LAST else f"the state of layer {name}"
        found = nearest if isinstance(nearest, str) else f"layer {nearest}"
        if own > 2 * best and best <= limit:
            what = f"is that of {found}{_SHIFTS[shift]}"
            if shift:
                what += ": the rows are rotated against the tokens"
        else:
            what = f"differs from the model's own by {worst:.3f} of its length; expected at most {limit}"
        raise StoreError(
            f"captured hidden states: {called} {what}\n"
            "  expected: Hugging Face's hidden_states, one row a token, the last after the final norm\n"
            "  change: in process this is a fault in Eyrie; of a server, the layers that its command names, "
            "or its version. Nothing of it was stored"
        )

    def _nearest(self, seen: torch.Tensor) -> tuple[int | str, int]:
        candidates = [(name, shift) for name in self.states for shift in _SHIFTS]
        return min(candidates, key=lambda one: (self._typical(seen, *one), abs(one[1])))

    def _typical(self, seen: torch.Tensor, name: int | str, shift: int) -> float:
        """The mean difference; the first and the last row have no counterpart when rows are shifted."""
        expected = self.states[name].roll(shift, dims=0)
        inner = slice(1, -1) if len(seen) > 2 else slice(None)
        return self._distances(seen[inner], expected[inner]).mean().item()

    @staticmethod
    def _distances(seen: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return (seen.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)


@torch.inference_mode()
def reference_of(target: Target, token_ids: list[int]) -> Reference:
    """What the model gives out for the tokens, alone and in one pass."""
    raw: list[torch.Tensor] = []
    norm = target.final_norm()
    handle = norm.register_forward_pre_hook(lambda module, args: raw.append(args[0]))
    try:
        output = target.decoder()(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    finally:
        handle.remove()
    states = output.hidden_states
    named: dict[int | str, torch.Tensor] = {index: state[0] for index, state in enumerate(states[:-1])}
    named |= {LAST: states[-1][0], RAW: raw[0][0], TWICE: norm(states[-1])[0]}
    return Reference(token_ids, {name: state.float() for name, state in named.items()})


def check_against_reference(
    target: Target, states: States, layer_ids: Sequence[int] | None = None, dtype: str | None = None
) -> float:
    """Compare a sample's states with what the model itself gives out for its tokens, alone.

    layer_ids: what the layers are said to be, by default those that the target captures. dtype: the numbers
    that they were computed with, by default the target's. Returns the largest difference of a token's state
    in a layer, relative to its length. Raises StoreError where it is more than rounding.
    """
    assert states.last is not None
    reference = reference_of(target, states.token_ids)
    limit = max(_REFERENCE_LIMITS.get(name, 0.2) for name in (target.dtype_name(), dtype or "float32"))
    names: list[int | str] = [*(target.layer_ids if layer_ids is None else layer_ids), LAST]
    columns = [*torch.split(states.aux, target.hidden_size, dim=1), states.last]
    return max(reference.difference(name, seen, limit) for name, seen in zip(names, columns, strict=True))


def agreeing(states: torch.Tensor, tokens: torch.Tensor, head: torch.Tensor) -> int:
    """Of how many last states [N, H] these tokens [N] are the likeliest next ones, near ties included.

    A tie is near where the token's logit is less than a tenth of the logits' spread below the best.
    """
    logits = states.float() @ head.float().t()
    below = logits.amax(dim=-1) - logits.gather(1, tokens[:, None])[:, 0]
    return int((below <= _NEAR_TIE * logits.std(dim=-1)).sum())
