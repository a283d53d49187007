"""The ways in which a drafter's files are written, read as the classic one.

classic, which vLLM and SGLang load: `midlayer.` tensors, the layer ids in `eagle_config`. SpecForge's is the
same with a copy of the target's embedding and the rotary base in `rope_parameters`. speculators': `layers.0.`
tensors, a copy of the embedding, the layer's shape nested in `transformer_layer_config`. A drafter with the
later additions (norms before or after fc, another residual, more layers) is refused: it would load and
propose rubbish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eyrie.eagle3.model import DrafterConfig
from eyrie.records import RecordError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATORS = "Eagle3DraftModel"
EMBEDDING = "embed_tokens.weight"
# What turns the classic drafter into another one, and the values under which it stays what it is.
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "use_aux_norm": (False, None),
    "norm_output": (False, None),
    "bias": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "tie_word_embeddings": (False, None),
    "num_hidden_layers": (1, None),
    "hidden_act": ("silu", None),
}


def read_drafter_config(data: Mapping[str, Any], where: str) -> DrafterConfig:
    """The drafter's shape from a config.json of any of the layouts. Raises RecordError."""
    try:
        names = data["architectures"]
        if names == [_SPECULATORS] and data.get("speculators_model_type") == "eagle3":
            flat = {**data["transformer_layer_config"], **data}
            # speculators' own default of an absent key is the other residual.
            flat.setdefault("norm_before_residual", True)
            layer_ids = data["eagle_aux_hidden_state_layer_ids"]
        elif names == [ARCHITECTURE]:
            flat = dict(data)
            layer_ids = data["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        else:
            raise RecordError(
                f"{where}: expected architectures [{ARCHITECTURE}], or [{_SPECULATORS}] with "
                f"speculators_model_type eagle3, saw {names}"
            )
        _refuse_variants(flat, where)
        heads = flat["num_attention_heads"]
        return DrafterConfig(
            hidden_size=flat["hidden_size"],
            target_hidden_size=flat.get("target_hidden_size") or flat["hidden_size"],
            vocab_size=flat["vocab_size"],
            draft_vocab_size=data["draft_vocab_size"],
            intermediate_size=flat["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=flat["num_key_value_heads"],
            head_dim=flat.get("head_dim") or flat["hidden_size"] // heads,
            rms_norm_eps=flat["rms_norm_eps"],
            rope_theta=_rope_theta(flat, where),
            max_position_embeddings=flat["max_position_embeddings"],
            layer_ids=tuple(layer_ids),
            bos_token_id=flat.get("bos_token_id"),
            eos_token_id=flat.get("eos_token_id"),
        )
    except KeyError as error:
        raise RecordError(
            f"{where}: expected the key {error} of an EAGLE-3 drafter's configuration"
        ) from error


def _refuse_variants(flat: Mapping[str, Any], where: str) -> None:
    odd = {name: flat[name] for name, plain in _VARIANTS.items() if flat.get(name) not in plain}
    if odd:
        raise RecordError(
            f"{where}: a drafter of another make than the classic one: {odd}; expected "
            f"{ {name: _VARIANTS[name][0] for name in odd} } or nothing.\n  change: train it without; or, if "
            "the key is a left-over (SpecForge writes norm_output: true and means the classic drafter), "
            "remove it"
        )


def _rope_theta(flat: Mapping[str, Any], where: str) -> float:
    parameters = flat.get("rope_parameters") or {}
    scaling = {**(flat.get("rope_scaling") or {}), **parameters}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise RecordError(f"{where}: rotary positions of kind {kind!r}; expected the default ones")
    theta = flat.get("rope_theta") or parameters.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    return float(theta)


def classic_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the classic names; an embedding among them stays as EMBEDDING."""
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
    }
