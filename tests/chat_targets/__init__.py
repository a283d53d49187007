"""Folders of small targets that have a tokenizer and a chat template, and no weights."""

from __future__ import annotations

import base64
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eyrie.chat import Chat
from eyrie.chat.kimi import IDS
from make_tiny_target import TEXT

HERE = Path(__file__).parent
# What each template is like. `prefilled` and `strict` stand for templates that can't take everything.
FAST = {
    "chatml": "SmolLM2's: it knows neither tools nor reasoning",
    "trimming": "Llama 3's: contents are trimmed, arguments are written as an object",
    "thinking": "Qwen 3's: reasoning is stripped once the next question comes",
    "prefilled": "DeepSeek R1's: the prompt opens the thinking, and no answer shows any",
    "strict": "Mistral's: roles must alternate",
}
KIMI = "kimi"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>"]
CONTROL += ["<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|system|>", "<|tool|>"]
# Tokens of the vocabulary like any other, as they are in Qwen 3.
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MORE_TEXT = "你好，世界。今天天气很好。 café 😀 tomorrow's\n\n\n  spaces   \n\tTabs\n"


@functools.cache
def chat(name: str) -> Chat:
    """The chat of one target; made once for all tests of a run."""
    return Chat(folder(name), trusted=name == KIMI)


@functools.cache
def folder(name: str) -> Path:
    """A target's folder."""
    path = Path(tempfile.mkdtemp(prefix=f"eyrie-{name}-"))
    write_kimi(path) if name == KIMI else _write_fast(path, name)
    return path


def template(name: str) -> str:
    """A template's text, without the line feed at the end of its file."""
    return (HERE / f"{name}.jinja").read_text().removesuffix("\n")


def trained() -> Tokenizer:
    """A byte-level tokenizer of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT.splitlines(keepends=True), MORE_TEXT * 9, TEXT], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    return tokenizer


def _write_fast(path: Path, name: str) -> None:
    end = "<|eot_id|>" if name == "trimming" else "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained(),
        bos_token="<|begin_of_text|>",
        eos_token=end,
        chat_template=template(name),
    )
    tokenizer.save_pretrained(path)
    _write(path / "config.json", {"model_type": "llama"})
    _write(path / "generation_config.json", {"eos_token_id": tokenizer.convert_tokens_to_ids(end)})


def write_kimi(path: Path, **other_ids: int) -> None:
    """A target with Kimi's construction; other_ids move control tokens."""
    shutil.copy(HERE / "tokenization_kimi.py", path)
    tokens = [token for token in _byte_tokens() if token]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (path / "tiktoken.model").write_text("".join(lines))
    (path / "chat_template.jinja").write_text(template(KIMI))
    ids = {**IDS, "[UNK]": 163838, "[PAD]": 163839, **other_ids}
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "added_tokens_decoder": {
                str(number): {"content": token, **flags} for token, number in ids.items()
            },
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
        },
    )
    _write(path / "config.json", {"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3"}})
    # The published list of end tokens lacks the one that ends a turn.
    _write(path / "generation_config.json", {"eos_token_id": IDS["[EOS]"]})


def _byte_tokens() -> list[bytes]:
    """The trained tokenizer's tokens as bytes: single bytes first, then in the order of their merges."""
    byte_of = {sign: byte for byte, sign in _signs().items()}
    vocabulary = trained().get_vocab(with_added_tokens=False)
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word not in CONTROL]
    made = [bytes(byte_of[sign] for sign in word) for word in words]
    return [bytes([byte]) for byte in range(256)] + [token for token in made if len(token) > 1]


def _signs() -> dict[int, str]:
    """The byte-level alphabet: the sign for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def token_text(name: str, number: int) -> str:
    """A token's text; bytes that are no text by themselves as \\xNN."""
    token = chat(name).tokenizer.convert_ids_to_tokens(number)
    if name == KIMI:
        data = token.encode("latin-1")
    else:
        byte_of = {sign: byte for byte, sign in _signs().items()}
        data = token.encode() if token in CONTROL + PLAIN_ADDED else bytes(byte_of[sign] for sign in token)
    return data.decode("utf-8", "backslashreplace")
