"""A random Llama small enough for milliseconds, and random drafters for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.target import Target

VOCABULARY = 24
LAYER_IDS = (0, 1, 2)
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide logits: the two best must not lie within rounding of each other.
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_tiny_target(folder: Path, window: int | None = None) -> Path:
    """A random target (with attention windows, if asked) and a tokenizer of one character a token."""
    torch.manual_seed(5)
    model = (
        LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
        if window is None
        else MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=window))
    )
    model.save_pretrained(folder)
    words = ["<s>", "</s>", *"abcdefghijklmnopqrstu<"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return folder


def drafter_config(draft_vocabulary: int = 20) -> DrafterConfig:
    """The shape of drafters for the tiny target."""
    return DrafterConfig(
        hidden_size=16,
        target_hidden_size=16,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocabulary,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=256,
        layer_ids=LAYER_IDS,
        bos_token_id=0,
        eos_token_id=1,
    )


def random_drafter(target: Target, seed: int, token_ids: Sequence[int] | None = None) -> Drafter:
    """An untrained drafter; its proposals are arbitrary but depend on all of its inputs.

    token_ids: the tokens that it can propose; twenty random ones where not given.
    """
    torch.manual_seed(seed)
    ids = sorted(torch.randperm(VOCABULARY)[:20].tolist() if token_ids is None else token_ids)
    drafter = Drafter(drafter_config(len(ids)), ids, target.embedding_weight())
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return drafter.eval()
