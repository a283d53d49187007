"""The target model in process: its forward pass, the captured layers, and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from eyrie.config import ConfigError
from eyrie.kv_cache import roomy_cache
from eyrie.remote_code import named_code
from eyrie.skinny import SKINNY_ROWS, use_skinny_products
from eyrie.states import default_layer_ids

# How families of models call the norm after the last layer.
_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def text_config(config: Any) -> Any:
    """The language model's part of a configuration; multimodal targets nest it under `text_config`."""
    return getattr(config, "text_config", None) or config


def read_text_config(path: Path) -> Any:
    """The language model's configuration of a target folder, read without its weights."""
    return text_config(_config_of(path))


def _config_of(path: Path) -> Any:
    """The whole configuration of a target folder, read by the library alone: code of the folder never runs.

    Raises ConfigError where the library knows no class for it.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        code = named_code(path).get("config.json")
        if code is None:
            raise
        raise ConfigError(
            f"target.path: {path}/config.json needs code of its own, {', '.join(code)}, which is never run\n"
            f"  expected: a model_type that transformers {version('transformers')} knows\n"
            "  change: a newer transformers that knows it (envs/), or another target"
        ) from error


def read_eos_ids(path: Path) -> list[int]:
    """The token ids that end an answer, read from a target folder without its weights, sorted."""
    try:
        settings = GenerationConfig.from_pretrained(path)
    except OSError:  # no generation_config.json; transformers then derives it from the model's, as here
        settings = GenerationConfig.from_model_config(_config_of(path))
    return _sorted_ids(settings.eos_token_id)


def _sorted_ids(eos: int | list[int] | None) -> list[int]:
    return sorted([eos] if isinstance(eos, int) else eos or [])


def _load_model(path: Path, dtype: str) -> Any:
    """The model of a folder; of one that also takes images, the whole, of which only the language is run."""
    config = _config_of(path)
    nested = text_config(config) is not config
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    try:
        return kind.from_pretrained(path, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False)
    except ValueError as error:
        # The library has no class for it, as for models that bring their own code along.
        raise ConfigError(
            f"target.path: {path} cannot be run in process: {str(error).splitlines()[0]}\n"
            "  expected: a model that transformers has a class for\n"
            "  change: engine.kind and engine.capture, to a server that runs it"
        ) from error


@dataclass(frozen=True)
class TargetStates:
    """What one forward pass leaves: aux [B, S, layers * H] and last [B, S, H] (after the final norm)."""

    aux: torch.Tensor
    last: torch.Tensor


class Target:
    """A causal language model from a local folder, with hooks on the layers to capture.

    layer_ids are indices into Hugging Face's `hidden_states`: id i is the residual stream that enters layer
    i, which is what layer i - 1 put out. The last index (the number of layers) is after the final norm
    there and is always returned as `last`, so it can't be among them.
    """

    def __init__(self, path: Path, dtype: str, layer_ids: Sequence[int] | None = None) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model = _load_model(path, dtype).eval()
        self.model.requires_grad_(False)
        self.config = text_config(self.model.config)
        self.layers = self.config.num_hidden_layers
        self.hidden_size = self.config.hidden_size
        self.layer_ids = list(default_layer_ids(self.layers) if layer_ids is None else layer_ids)
        if any(not 0 <= layer < self.layers for layer in self.layer_ids):
            raise ConfigError(
                f"layer ids {self.layer_ids} for a target of {self.layers} layers: expected ids from 0 to "
                f"{self.layers - 1} (Hugging Face's hidden_states numbering). Change hidden_states.layer_ids."
            )
        self._captured: dict[int, torch.Tensor] = {}
        decoder = self.decoder()
        for layer in self.layer_ids:
            decoder.layers[layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)
        if dtype == "float32":
            use_skinny_products(self.model)
            if decoder.config._attn_implementation == "sdpa":
                decoder.set_attn_implementation(_SKINNY_ATTENTION)

    def _capture(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def decoder(self) -> Any:
        """The language model without its head: embedding, layers, final norm."""
        return self.model.get_decoder()

    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the head."""
        decoder = self.decoder()
        found = [getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name)]
        if len(found) != 1:
            raise ConfigError(
                f"the final norm of {type(decoder).__name__} is not known: expected one of "
                f"{', '.join(_FINAL_NORMS)}. It must be named in eyrie/target.py"
            )
        return found[0]

    def dtype_name(self) -> str:
        """The numbers that it computes with: float32, bfloat16, float16."""
        return str(self.model.dtype).removeprefix("torch.")

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache; `cache.crop(-n)` drops the last n positions."""
        return roomy_cache(self.config)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> TargetStates:
        """Run tokens [B, S] after what the cache holds.

        attention_mask is [B, cached + S], 1 for tokens and 0 for padding on the left; None means no padding.
        """
        last = self._run(input_ids, cache, attention_mask, position_ids)
        aux = torch.cat([self._captured[layer] for layer in self.layer_ids], dim=-1)
        self._captured.clear()
        return TargetStates(aux, last)

    @torch.inference_mode()
    def packed(
        self,
        input_ids: torch.Tensor,
        dtype: torch.dtype,
        cache: DynamicCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As forward, with all states side by side in one copy: [B, S, layers * H + H] as dtype.

        Beside them the last state of each row, [B, H], in the numbers it was computed with.
        """
        last = self._run(input_ids, cache, attention_mask, position_ids)
        parts = [*(self._captured[layer] for layer in self.layer_ids), last]
        self._captured.clear()
        packed = torch.empty(*last.shape[:2], len(parts), last.shape[-1], dtype=dtype)
        for number, part in enumerate(parts):
            packed[:, :, number] = part
        return packed.flatten(2), last[:, -1]

    def _run(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        output = self.decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """The head's logits [..., vocabulary] of states [..., H].

        The rows are made one contiguous matrix first: a strided batch would have the head's weight copied
        once a row.
        """
        rows = last.reshape(-1, last.shape[-1]).contiguous()
        return self.model.get_output_embeddings()(rows).view(*last.shape[:-1], -1)

    def embedding_weight(self) -> torch.Tensor:
        """The input embedding [vocabulary, H]."""
        return self.model.get_input_embeddings().weight

    def head_weight(self) -> torch.Tensor:
        """The output head [vocabulary, H] (the embedding itself where they are tied)."""
        return self.model.get_output_embeddings().weight

    def eos_ids(self) -> list[int]:
        """The token ids that end an answer, from the generation config, sorted."""
        return _sorted_ids(self.model.generation_config.eos_token_id)


def _skinny_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence's few queries [1, heads, Q, d] over keys and values [1, kv_heads, K, d].

    Where there is a mask, the library copies keys and values for each head of a group and takes a slow path.
    Here a group's heads are so many more queries of its key head. Everything else is left to it.
    """
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    alone = batch == 1 and queries <= SKINNY_ROWS and query.device.type == "cpu"
    if not alone or attention_mask is None or scaling is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows = query.reshape(batch, kv_heads, -1, size) * scaling
    scores = (rows @ key.transpose(-1, -2)).view(batch, heads, queries, -1)
    scores.masked_fill_(~attention_mask, -torch.inf)
    mixed = scores.softmax(dim=-1).view(batch, kv_heads, -1, key.shape[2]) @ value
    return mixed.view(batch, heads, queries, size).transpose(1, 2), None


_SKINNY_ATTENTION = "eyrie_skinny"
AttentionInterface.register(_SKINNY_ATTENTION, _skinny_attention)
AttentionMaskInterface.register(_SKINNY_ATTENTION, sdpa_mask)
