"""The drafter on disk: the classic LlamaForCausalLMEagle3 files, which vLLM and SGLang both load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from eyrie.config import ConfigError
from eyrie.eagle3.drafter_layouts import ARCHITECTURE, EMBEDDING, classic_tensors, read_drafter_config
from eyrie.eagle3.fingerprint import fingerprint
from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.records import RecordError, atomic_write, read_json, sha256_file, write_json

CARD = "README.md"
"""The model card's name in the folder; scripts/write_card.py writes it, once the drafter is evaluated."""

# SGLang captures what a layer puts out where vLLM and Hugging Face count what enters it: its models add one
# to every id, but for those below.
_ADD_ONE_AFTER_A_FIRST_ID_OF_1 = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"})
# Since this day's change (sgl-project/sglang pull request 25454) those add one only where the first id is 1.
AS_IS_SINCE = date(2026, 5, 16)


def engine_layer_ids(
    engine: str,
    model_type: str,
    layer_ids: Sequence[int],
    layers: int | None = None,
    built: date | None = None,
) -> list[int]:
    """The ids to write for an engine, so that it captures these layers of Hugging Face's hidden_states.

    layers: the target's number of layers, where known. built: the day of SGLang's build; None: a recent one.
    Raises ConfigError for ids that the engine would take for others, or not capture at all.
    """
    ids = list(layer_ids)
    if layers is not None and not all(0 <= layer <= layers for layer in ids):
        raise ConfigError(f"layer ids {ids}: expected ids from 0 to the target's {layers} layers")
    if engine != "sglang":
        return ids
    if layers is not None and layers in ids:
        # The loop ends before it: not captured, and gpt_oss crashes (sglang pull request 32334).
        raise ConfigError(
            f"layer ids {ids}: SGLang never captures {layers}, the last layer's output, of a {model_type} "
            f"target with {layers} layers\n  change: hidden_states.layer_ids to earlier layers"
        )
    if model_type in _ADD_ONE_AFTER_A_FIRST_ID_OF_1 and (built is None or built >= AS_IS_SINCE):
        if ids[0] == 1:
            # It would add one to all; and written less one they start at 0, where nothing is added.
            raise ConfigError(
                f"layer ids {ids}: SGLang can't tell them: it takes a first id of 1 of a {model_type} target "
                "for the numbering that starts one lower\n"
                "  change: hidden_states.layer_ids to start at 2 or later"
            )
        return ids
    if 0 in ids:
        raise ConfigError(
            f"layer ids {ids}: SGLang adds one to the ids of a {model_type} target, so it can't capture 0, "
            "the embedding\n  change: hidden_states.layer_ids to start at 1 or later"
        )
    return [layer - 1 for layer in ids]


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The checkpoint's config.json; layer ids as Hugging Face and vLLM count them."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        },
    }


def same_embedding(own: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether a drafter's copy [V, H] is the target's embedding, but for the rounding of its dtype."""
    return own.shape == targets.shape and torch.equal(own.bfloat16(), targets.bfloat16())


def _check_maps(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> None:
    """Hold t2d's true places to be d2t plus the draft ids, whatever wrote them. Raises RecordError."""
    from_t2d = t2d.nonzero()[:, 0]
    from_d2t = d2t + torch.arange(len(d2t))
    if not torch.equal(from_t2d, from_d2t):
        raise RecordError(
            f"{where}: d2t and t2d disagree: t2d marks {len(from_t2d)} tokens and d2t leads to "
            f"{len(set(from_d2t.tolist()))}, and they must be the same, rising. A drafter with wrong maps "
            "loads everywhere and has nothing accepted; export it anew."
        )


def save_checkpoint(folder: Path, drafter: Drafter, manifest: Mapping[str, Any]) -> None:
    """Write model.safetensors (floats in bfloat16), config.json and training.json, each atomically.

    manifest: the content of training.json; digests of what is written join it. A model card of an earlier
    drafter is removed. Raises RecordError if the maps disagree.
    """
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    _check_maps(tensors["d2t"], tensors["t2d"], str(folder))
    (folder / CARD).unlink(missing_ok=True)
    with atomic_write(folder / "model.safetensors") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config_json(drafter.config))
    files = {name: sha256_file(folder / name) for name in ("config.json", "model.safetensors")}
    written = fingerprint(tensors, drafter.config.layer_ids, drafter.embedding)
    write_json(folder / "training.json", {**manifest, "files": files, "written": written})


def load_drafter(folder: Path, embedding: torch.Tensor, dtype: torch.dtype) -> Drafter:
    """The drafter of a checkpoint folder with the target's embedding [V, H], in inference mode.

    The folder may be of speculators' or SpecForge's layout, too: see drafter_layouts.py. Raises RecordError
    for missing or unknown tensors, wrong shapes, maps that disagree, and an embedding that is not the
    target's.
    """
    config = read_drafter_config(read_json(folder / "config.json"), str(folder / "config.json"))
    path = folder / "model.safetensors"
    try:
        tensors = classic_tensors(load_file(path))
    except Exception as error:
        raise RecordError(f"{path} cannot be read: {error}. Export the drafter anew.") from error
    if list(embedding.shape) != [config.vocab_size, config.hidden_size]:
        raise RecordError(
            f"{folder}: the drafter is for a target embedding of shape "
            f"{[config.vocab_size, config.hidden_size]}, but this target's has {list(embedding.shape)}"
        )
    own = tensors.pop(EMBEDDING, None)
    if own is not None and not same_embedding(own, embedding):
        raise RecordError(
            f"{path}: its {EMBEDDING} is not the target's embedding, which it was trained with or will be "
            "served with\n  change: give the target that it was trained for, or remove the tensor"
        )
    drafter = Drafter(config, range(config.draft_vocab_size), embedding.to(dtype))
    expected = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    seen = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if seen != expected:
        names = sorted(n for n in expected.keys() | seen.keys() if expected.get(n) != seen.get(n))
        lines = [f"  {n}: expected {expected.get(n, 'nothing')}, saw {seen.get(n, 'nothing')}" for n in names]
        raise RecordError(
            f"{path} does not hold the tensors of its config.json:\n" + "\n".join(lines) + "\n"
            "  change: export the drafter anew, or put the matching config.json beside it"
        )
    _check_maps(tensors["d2t"], tensors["t2d"], str(path))
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval().requires_grad_(False)
