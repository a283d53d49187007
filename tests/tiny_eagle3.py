"""A tiny target with everything that training takes: its rows, their states in a store, and the manifests."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyrie.eagle3.batches import Sample, candidate_places, target_choices
from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.provenance import manifest_header
from eyrie.records import content_key, sha256_file, write_json, write_jsonl
from eyrie.store import States, StateStore
from eyrie.target import Target

HIDDEN = 32
VOCABULARY = 96
LAYER_IDS = [1, 2, 3]
_ANSWER = 20


def tiny_config(draft_vocabulary: int = 40, **changes: Any) -> DrafterConfig:
    """The shape of a drafter for the tiny target."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": draft_vocabulary,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "layer_ids": tuple(LAYER_IDS),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return DrafterConfig(**values | changes)


def random_drafter(seed: int = 0, draft_vocabulary: int = 40, **changes: Any) -> Drafter:
    """A drafter whose every weight is random, the norms' included."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCABULARY, generator=generator)[:draft_vocabulary].sort().values.tolist()
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    drafter = Drafter(tiny_config(draft_vocabulary, **changes), ids, embedding)
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2, generator=generator)
    return drafter


def random_sample(seed: int, loss_mask: list[int], head: torch.Tensor, mask_shift: str = "aligned") -> Sample:
    """A sample of random tokens and states under the given loss mask."""
    generator = torch.Generator().manual_seed(1000 + seed)
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    length = len(mask)
    last = torch.randn(length, HIDDEN, generator=generator).bfloat16()
    candidates = candidate_places(mask, mask_shift)
    return Sample(
        key=str(seed),
        token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
        loss_mask=mask,
        aux=torch.randn(length, len(LAYER_IDS) * HIDDEN, generator=generator).bfloat16(),
        last=last,
        candidates=candidates,
        choices=torch.cat(list(target_choices(last[candidates], head))),
    )


@dataclass
class TinyBuild:
    """A folder as the stages before training leave it."""

    folder: Path
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """The store's folder."""
        return self.folder / "store"

    def copied(self, folder: Path, **training: Any) -> TinyBuild:
        """The same in another folder, to be trained with these settings; of the recipe's own otherwise."""
        shutil.copytree(self.folder, folder)
        return TinyBuild(folder, tiny_recipe(**training))

    def arguments(self, out: Path, store: Path | None = None) -> list[str]:
        """train_drafter.py's command line."""
        flags = {
            "--tokenized": self.folder / "tokenized_data.jsonl",
            "--manifests": self.folder / "manifest.json",
            "--vocabulary": self.folder / "vocabulary.json",
            "--target": self.folder / "target.json",
            "--target-path": self.folder / "target",
            "--recipe": json.dumps(self.recipe),
            "--store": store or self.store,
            "--out-dir": out,
        }
        return [str(word) for pair in flags.items() for word in pair]


def tiny_recipe(**training: Any) -> dict[str, Any]:
    """A recipe that trains in a second."""
    settings = {"epochs": 3, "tokens_per_step": 60, "warmup_steps": 2, "threads": 1, "checkpoint_every": 4}
    return {"version": 1, "drafter": {"draft_vocab_size": 48}, "training": settings | training}


def make_tiny_build(folder: Path, rows: int = 50) -> TinyBuild:
    """Answer random prompts greedily with a random Llama and capture its states, as the stages would."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            # Answers that neither repeat one token nor are noise: there is something to learn.
            initializer_range=0.12,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    model.save_pretrained(folder / "target")
    target = Target(folder / "target", "float32", LAYER_IDS)
    revision = content_key("tiny")
    write_json(
        folder / "target.json",
        {
            "name": "tiny",
            "hub_id": None,
            "revision": revision,
            "files": {path.name: sha256_file(path) for path in sorted((folder / "target").iterdir())},
            "hidden_size": HIDDEN,
            "layers": 5,
            "vocab_size": VOCABULARY,
            "eos_ids": [1],
            "max_position_embeddings": 256,
        },
    )
    capture = {"version": 1, "dtype": "float32", "hidden_states": {}}
    state_recipe = {
        "target_revision": revision,
        "layer_ids": LAYER_IDS,
        "dtype": "bfloat16",
        "compute_dtype": "float32",
    }
    states = StateStore(folder / "store", state_recipe)
    records, samples = _answers(target, rows), []
    for record in records:
        passed = target.forward(torch.tensor([record["input_ids"]]))
        samples.append(States(record["input_ids"], passed.aux[0].bfloat16(), passed.last[0].bfloat16()))
    with states.writer("chat") as writer:
        refs = writer.add(samples[: rows // 2]) + writer.add(samples[rows // 2 :])
    write_jsonl(folder / "tokenized_data.jsonl", records)
    entries = [
        {"id": record["id"], "key": ref.key, "tokens": ref.tokens, "sha256": ref.sha256}
        for record, ref in zip(records, refs, strict=True)
    ]
    write_json(
        folder / "manifest.json",
        {
            **manifest_header("hidden_states", capture, [folder / "tokenized_data.jsonl"]),
            "dataset": "chat",
            "layer_ids": LAYER_IDS,
            "hidden_size": HIDDEN,
            "width": len(LAYER_IDS) * HIDDEN,
            "dtype": "bfloat16",
            "samples": entries,
        },
    )
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for record in records:
        ids = torch.tensor(record["input_ids"])[torch.tensor(record["loss_mask"], dtype=torch.bool)]
        counts += torch.bincount(ids, minlength=VOCABULARY)
    write_json(
        folder / "vocabulary.json",
        {
            "vocab_size": VOCABULARY,
            "draft_vocab_size": 48,
            "token_ids": counts.argsort(descending=True, stable=True)[:48].sort().values.tolist(),
        },
    )
    return TinyBuild(folder, tiny_recipe())


def _answers(target: Target, rows: int) -> list[dict[str, Any]]:
    """Rows with greedy answers; every fifth one is of the same prompt length, and those go together."""
    ids: dict[int, list[int]] = {}
    for first in range(5):
        members = list(range(first, rows, 5))
        prompts = [
            torch.randint(2, VOCABULARY, (4 + first,), generator=torch.Generator().manual_seed(index))
            for index in members
        ]
        tokens = torch.stack(prompts)
        for _ in range(_ANSWER):
            last = target.forward(tokens).last[:, -1]
            tokens = torch.cat([tokens, target.logits(last).argmax(dim=-1, keepdim=True)], dim=1)
        ids.update(zip(members, tokens.tolist(), strict=True))
    return [
        {
            "id": f"row-{index:03}",
            "dataset": "chat",
            "group": f"row-{index:03}",
            "split": ("held_out", "validation", "train", "train", "train")[index // 5 % 5],
            "input_ids": ids[index],
            "loss_mask": [0] * (len(ids[index]) - _ANSWER) + [1] * _ANSWER,
            "finish_reason": "length",
            "greedy": True,
        }
        for index in range(rows)
    ]
