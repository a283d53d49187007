"""The drafter at the start: its shape and weights, taken from the target or random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from eyrie.config import ConfigError, DrafterSettings
from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.target_weights import TargetWeights

_LAYER_PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def drafter_config(
    settings: DrafterSettings, target: Any, layer_ids: Sequence[int], eos_ids: Sequence[int]
) -> DrafterConfig:
    """The drafter's shape. target: the target's text configuration, which fills in what is null."""
    heads = settings.num_attention_heads or target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    eos = list(eos_ids)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=settings.draft_vocab_size,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or target.num_key_value_heads,
        head_dim=settings.head_dim or getattr(target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=settings.rms_norm_eps or target.rms_norm_eps,
        rope_theta=float(settings.rope_theta or rope.get("rope_theta") or 10000.0),
        max_position_embeddings=settings.max_position_embeddings or target.max_position_embeddings,
        layer_ids=tuple(layer_ids),
        bos_token_id=target.bos_token_id,
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"drafter.num_attention_heads: saw {config.num_attention_heads}, expected a multiple of "
            f"drafter.num_key_value_heads, which is {config.num_key_value_heads}"
        )
    return config


def initialise_randomly(drafter: Drafter, seed: int) -> None:
    """As published: every matrix uniform within 1 / sqrt(inputs), every norm one."""
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)


@torch.no_grad()
def initialise_from_target(drafter: Drafter, weights: TargetWeights, layers: int, tied: bool) -> None:
    """Start as the target's last layer, norm and head, fed with the last captured layer.

    Call it after initialise_randomly: what the target has no counterpart for stays random. That is the
    embedding's half of the attention (small for queries and keys, so that attention starts as the target's)
    and, scaled down, the mixing of captured layers. Raises ConfigError where the shapes differ.
    """
    found = {
        name: _same_shape(drafter, name, weights.get(f"layers.{layers - 1}.{name}.weight"))
        for name in _LAYER_PARTS
    }
    layer, width = drafter.midlayer, drafter.config.hidden_size
    for projection, scale in (("q_proj", 0.2), ("k_proj", 0.2), ("v_proj", 1.0)):
        weight = getattr(layer.self_attn, projection).weight
        weight[:, :width] *= scale
        weight[:, width:] = found[f"self_attn.{projection}"]
    layer.self_attn.o_proj.weight.copy_(found["self_attn.o_proj"])
    for projection in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, projection).weight.copy_(found[f"mlp.{projection}"])
    layer.hidden_norm.weight.copy_(found["input_layernorm"])
    layer.post_attention_layernorm.weight.copy_(found["post_attention_layernorm"])
    drafter.fc.weight *= 0.1
    drafter.fc.weight[:, -width:] += torch.eye(width)
    norm = weights.get("norm.weight")
    if norm is not None:
        drafter.norm.weight.copy_(norm)
    drafter.lm_head.weight.copy_(weights.head(tied)[drafter.draft_token_ids()])


def _same_shape(drafter: Drafter, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    own = list(drafter.midlayer.get_submodule(name).weight.shape)  # type: ignore[union-attr, arg-type]
    if name.startswith("self_attn.") and not name.endswith("o_proj"):
        own[1] = drafter.config.hidden_size
    if tensor is None or list(tensor.shape) != own:
        seen = "no such tensor" if tensor is None else f"shape {list(tensor.shape)}"
        raise ConfigError(
            f"training.initialise: target_layer needs the target's last layer to be of the drafter's shape, "
            f"but {name} has {seen} there; expected {own}. Set training.initialise: random, or let "
            "drafter.intermediate_size, drafter.num_attention_heads, drafter.num_key_value_heads and "
            "drafter.head_dim be the target's"
        )
    return tensor
