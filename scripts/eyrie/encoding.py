"""Hidden states as they are in memory, and how they are written down: named tensors with one row a token."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eyrie.journals import StoreError
from eyrie.records import canonical_json

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_LARGEST = 448.0
# A layer of zeros, or of numbers next to nothing, divides by this and stays what it is.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# In the order in which a sample's digest runs over them.
_AUX, _SCALES, _LAST = "aux_hidden_states", "aux_scales", "last_hidden_state"
_TOP_IDS, _TOP_LOGS, _TOP_REST, _CHOICES = "top_ids", "top_logs", "top_rest", "target_choices"
NAMES = (_AUX, _SCALES, _LAST, _TOP_IDS, _TOP_LOGS, _TOP_REST, _CHOICES)
_TOP = (_TOP_IDS, _TOP_LOGS, _TOP_REST, _CHOICES)


@dataclass(frozen=True)
class TopTokens:
    """The target's distribution over the draft vocabulary, cut to its k likeliest tokens.

    The probabilities of `logs` and `rest` sum to one but for the rounding of the logs: about 0.0001, at most
    0.002.
    """

    ids: torch.Tensor
    """int32 [T, k]: rows of the draft vocabulary (0 to D - 1), falling probability, ties by id."""
    logs: torch.Tensor
    """float16 [T, k]: log-probabilities, renormalised over the draft vocabulary."""
    rest: torch.Tensor
    """float32 [T]: the probability mass of the other D - k tokens; 0 where k >= D."""
    choices: torch.Tensor
    """int32 [T]: the target's most likely token over its whole vocabulary, as a target id."""


@dataclass(frozen=True)
class States:
    """The target's hidden states over one sample.

    token_ids: the sample's T tokens. aux: [T, layers * H], the captured layers side by side in the order of
    the layer ids; never float8, which is a way of storing. Either last: [T, H], after the final norm, from
    which the target's distribution follows, or top: the distribution itself. stored_sha256: the digest of
    what the store holds, where the states come from there.
    """

    token_ids: list[int]
    aux: torch.Tensor
    last: torch.Tensor | None = None
    top: TopTokens | None = None
    stored_sha256: str | None = None

    def __post_init__(self) -> None:
        if (self.last is None) == (self.top is None):
            raise ValueError("states have either a last state or top tokens")

    def digest(self) -> str:
        """SHA-256 over tokens and tensors; of loaded states over what is stored, as manifests have it."""
        return self.stored_sha256 or encode(self).digest()

    def is_finite(self) -> bool:
        """Whether no number is infinite or none at all."""
        return encode(self).is_finite()


@dataclass(frozen=True)
class Encoded:
    """A sample as it is stored: its T tokens, and tensors of NAMES with T rows each."""

    token_ids: list[int]
    tensors: Mapping[str, torch.Tensor]

    def digest(self) -> str:
        """SHA-256 over the tokens and the tensors' bytes."""
        sha = hashlib.sha256(canonical_json(self.token_ids).encode())
        for name in NAMES:
            if name in self.tensors:
                sha.update(self.tensors[name].contiguous().view(torch.uint8).view(-1).numpy().data)
        return sha.hexdigest()

    def is_finite(self) -> bool:
        """Whether no number is infinite or none at all."""
        return all(_is_finite(tensor) for tensor in self.tensors.values())

    def with_top(self, top: TopTokens) -> Encoded:
        """The same layers, to the bit, with the distribution in place of the last state."""
        layers = {name: self.tensors[name] for name in (_AUX, _SCALES) if name in self.tensors}
        return Encoded(self.token_ids, {**layers, **_encoded_top(top)})


def encode(states: States, dtype: str | None = None, layers: int = 1) -> Encoded:
    """The states as they are stored.

    dtype: `float8` packs the layers, of which there are so many; any other, and None, leaves the states in
    the dtype that they have. Raises StoreError for numbers that float8 can't hold.
    """
    tensors = {_AUX: states.aux, _LAST: states.last}
    if dtype == "float8":
        tensors[_AUX], tensors[_SCALES] = to_float8(states.aux, layers)
        tensors[_LAST] = None if states.last is None else states.last.bfloat16()
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Encoded(states.token_ids, kept | ({} if states.top is None else _encoded_top(states.top)))


def decode(encoded: Encoded, sha256: str | None = None) -> States:
    """The states behind what is stored; float8 layers become bfloat16. sha256: the digest, if known."""
    tensors = encoded.tensors
    aux = tensors[_AUX]
    if _SCALES in tensors:
        aux = from_float8(aux, tensors[_SCALES])
    top = None
    if _TOP_IDS in tensors:
        top = TopTokens(*(tensors[name] for name in _TOP))
    return States(encoded.token_ids, aux, tensors.get(_LAST), top, sha256)


def to_float8(aux: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [T, layers * H] as e4m3 and its float32 scales [T, layers]: each token's layer fills the range.

    Raises StoreError where a number is infinite or none: e4m3 would make a number of it.
    """
    values = aux.float().view(len(aux), layers, -1)
    scales = (values.abs().amax(dim=-1) / _FLOAT8_LARGEST).clamp(min=_SMALLEST_SCALE)
    if not scales.isfinite().all():
        raise StoreError("hidden states that are not finite can't be stored as float8; expected numbers")
    # Rounding may put the largest a little beyond the range.
    packed = (values / scales[..., None]).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST).to(FLOAT8)
    return packed.view(len(aux), -1), scales


def from_float8(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, layers * H] of e4m3 and scales [T, layers]; bfloat16 rounds 16 times finer than e4m3."""
    values = packed.float().view(*scales.shape, -1) * scales[..., None]
    return values.view(len(packed), -1).bfloat16()


def _encoded_top(top: TopTokens) -> dict[str, torch.Tensor]:
    return dict(zip(_TOP, (top.ids, top.logs, top.rest, top.choices), strict=True))


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FLOAT8:
        # There is no infinity in e4m3, and torch doesn't ask it for its one NaN.
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
