"""What is wrong with a drafter's checkpoint, and what engines would do with it without a word.

Engines fill in what they miss: maps of zeros, a random head, other layers. The drafter then loads, and
nothing that it proposes is accepted. So everything that they would guess is checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyrie.eagle3.checkpoint import same_embedding
from eyrie.eagle3.drafter_layouts import ARCHITECTURE, EMBEDDING
from eyrie.eagle3.fingerprint import FC, fingerprint
from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.records import RecordError, read_json
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights

# How far the largest singular value may lie above that of independent noise and still count as noise.
_NOISE_SPECTRUM = 1.1
# Standard deviations of the mean cosine of independent rows.
_NOISE_AGREEMENT = 5.0
_POWER_STEPS = 30


@dataclass(frozen=True)
class LintTarget:
    """What a drafter must fit: the target's sizes, its embedding and its head, both [V, H]."""

    hidden_size: int
    vocab_size: int
    layers: int
    embedding: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where, what was seen, what was expected, and what engines make of it."""

    where: str
    seen: str
    expected: str
    vllm: str
    sglang: str

    def in_words(self) -> str:
        """The fault in four lines."""
        return (
            f"{self.where}: saw {self.seen}; expected {self.expected}\n"
            f"  vLLM would: {self.vllm}\n  SGLang would: {self.sglang}"
        )


_LAYER_IDS = "config.json: eagle_config.eagle_aux_hidden_state_layer_ids"
_REFUSE = "refuse to load it"
_SHAPES = "stop with an error about shapes"
# What each engine makes of a missing tensor, beside refusing it.
_MISSING = {
    "lm_head.weight": (
        "take the target's head in its place: less is accepted, no error",
        "serve with a random head: accept length 1.00, no error",
    ),
    "d2t": (
        "take draft id i for target id i: less is accepted, or almost nothing, no error",
        "take draft id i for target id i: less is accepted, or almost nothing, no error",
    ),
    "t2d": ("not notice: it skips the tensor", "not notice: it skips the tensor"),
}


def read_lint_target(path: Path) -> LintTarget:
    """What the checkpoint must fit."""
    config, weights = read_text_config(path), TargetWeights(path, None)
    return LintTarget(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        embedding=weights.embedding(),
        head=weights.head(bool(config.tie_word_embeddings)),
    )


def lint(folder: Path, target: LintTarget, longest: int | None = None) -> list[Fault]:
    """All faults of the checkpoint in the folder. longest: tokens of the longest sample it is meant for.

    Raises RecordError for files that can't be read at all.
    """
    config = read_json(folder / "config.json")
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except Exception as error:
        raise RecordError(f"{path} cannot be read: {error}. Export the drafter anew.") from error
    faults = list(_config_faults(config, target, longest))
    shape = _shape(config, target)
    if shape is not None:
        faults += _tensor_faults(tensors, shape)
    faults += _map_faults(tensors)
    faults += _value_faults(tensors, target)
    training = folder / "training.json"
    written = read_json(training).get("written") if training.exists() else None
    if written is not None:
        faults += _changes(config, tensors, target, written, [fault.where for fault in faults])
    return faults


def _config_faults(config: Mapping[str, Any], target: LintTarget, longest: int | None) -> Iterator[Fault]:
    def wrong(key: str, expected: object, vllm: str, sglang: str) -> Fault:
        seen = repr(config[key]) if key in config else "nothing"
        return Fault(f"config.json: {key}", seen, str(expected), vllm, sglang)

    if config.get("architectures") != [ARCHITECTURE]:
        yield wrong("architectures", [ARCHITECTURE], "take it for another model, or refuse it", _REFUSE)
    if config.get("num_hidden_layers") != 1:
        yield wrong(
            "num_hidden_layers",
            1,
            "build layers that the file has no weights for",
            'stop with "eagle3 only supports one layer"',
        )
    if "norm_output" in config:
        yield wrong(
            "norm_output",
            "no such key",
            "feed the normed state to the next step if it is true, with other states than in training",
            "do the same; SpecForge means the opposite by it",
        )
    size = config.get("draft_vocab_size")
    if not isinstance(size, int):
        yield wrong(
            "draft_vocab_size",
            "the number of the draft vocabulary's tokens",
            "take the target's vocabulary for the drafter's: wrong shapes",
            "crash without the key; with null, use the target's head instead of the drafter's",
        )
    if config.get("tie_word_embeddings") is not False:
        yield wrong(
            "tie_word_embeddings", False, "use the embedding for a head", "use the embedding for a head"
        )
    for key, expected in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if config.get(key) != expected:
            yield wrong(key, f"the target's, {expected}", _SHAPES, _SHAPES)
    yield from _layer_faults(config, target)
    if longest is not None and (config.get("max_position_embeddings") or 0) < longest:
        yield wrong(
            "max_position_embeddings",
            f"at least {longest}, the longest sample",
            "stop, or accept little, where a prompt is longer",
            "accept little, or crash, where a prompt is longer",
        )


def _layer_ids(config: Mapping[str, Any]) -> Any:
    return (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def _layer_faults(config: Mapping[str, Any], target: LintTarget) -> Iterator[Fault]:
    ids = _layer_ids(config)
    guess = f"take layers [2, {target.layers // 2}, {target.layers - 3}] without a word"
    if not isinstance(ids, list) or not ids:
        yield Fault(
            _LAYER_IDS,
            repr(ids) if ids is not None else "nothing",
            "the captured layers",
            guess,
            guess,
        )
    elif not all(isinstance(layer, int) and 0 <= layer <= target.layers for layer in ids):
        missing = "capture fewer layers than the drafter takes"
        yield Fault(
            _LAYER_IDS,
            str(ids),
            f"ids from 0 to the target's {target.layers} layers",
            missing,
            missing,
        )
    elif ids != sorted(set(ids)):
        order = "capture layers in rising order, whatever the order here: a block of fc gets another's"
        yield Fault(_LAYER_IDS, str(ids), "ids that rise", order, order)


def _changes(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: LintTarget,
    written: Mapping[str, Any],
    named: Collection[str],
) -> Iterator[Fault]:
    """What is no longer what training wrote, or is for another target; less what is named already."""
    nothing = "serve it: little or nothing is accepted, no error"
    ids = _layer_ids(config)
    if ids != written["layer_ids"] and _LAYER_IDS not in named:
        yield Fault(
            _LAYER_IDS, str(ids), f"{written['layer_ids']}, which it was trained on", nothing, nothing
        )
    now = fingerprint(tensors, written["layer_ids"], target.embedding)
    # With an embedding of its own in the file that one is served.
    if now["target_embedding"] != written["target_embedding"] and EMBEDDING not in tensors:
        yield Fault(
            "the target",
            "another embedding than the one that the drafter was trained with",
            "the target that it was trained for",
            nothing,
            nothing,
        )
    for name, digest in written["tensors"].items():
        seen = now["tensors"].get(name)
        if seen in (None, digest) or any(name in where.split() for where in named):
            continue
        swapped = name == FC and sorted(seen) == sorted(digest)
        yield Fault(
            name,
            "the layers' blocks of columns in another order" if swapped else "other numbers",
            f"the blocks of layers {written['layer_ids']} in this order" if swapped else "what was trained",
            nothing,
            nothing,
        )


def _shape(config: Mapping[str, Any], target: LintTarget) -> DrafterConfig | None:
    """What the configuration says of the tensors' shapes, or None where it says too little."""
    ids = _layer_ids(config) or [0, 0, 0]
    heads = config.get("num_attention_heads")
    try:
        return DrafterConfig(
            hidden_size=config["hidden_size"],
            target_hidden_size=target.hidden_size,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // (heads or 1),
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=1.0,
            max_position_embeddings=1,
            layer_ids=tuple(ids),
            bos_token_id=None,
            eos_token_id=None,
        )
    except KeyError:
        return None


def _tensor_faults(tensors: Mapping[str, torch.Tensor], shape: DrafterConfig) -> Iterator[Fault]:
    with torch.device("meta"):
        model = Drafter(shape, range(shape.draft_vocab_size), torch.empty(0))
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys() - {EMBEDDING}):
        if name not in tensors:
            vllm, sglang = _MISSING.get(name, (_REFUSE, "leave the weight as it was made, random"))
            yield Fault(name, "nothing", f"a tensor of shape {expected[name]}", vllm, sglang)
            continue
        tensor = tensors[name]
        if name not in expected:
            yield Fault(
                name, f"shape {list(tensor.shape)}", "no such tensor", _REFUSE, "leave it out without a word"
            )
            continue
        if list(tensor.shape) != expected[name]:
            yield Fault(name, f"shape {list(tensor.shape)}", f"{expected[name]}", _SHAPES, _SHAPES)
        kinds = {"d2t": [torch.int64], "t2d": [torch.bool]}.get(name, [torch.bfloat16, torch.float16])
        if tensor.dtype not in kinds:
            cast = "cast it without a word, if it can"
            yield Fault(name, str(tensor.dtype), " or ".join(map(str, kinds)), cast, cast)


def _map_faults(tensors: Mapping[str, torch.Tensor]) -> Iterator[Fault]:
    if "d2t" not in tensors or "t2d" not in tensors:
        return
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    marked = tensors["t2d"].nonzero()[:, 0]
    wrong = "map drafted tokens to other ones: almost nothing is accepted, no error"
    if not bool((ids.diff() > 0).all()):
        yield Fault("d2t", "ids that repeat or fall", "offsets to rising target ids", wrong, wrong)
    if torch.equal(marked, tensors["d2t"].long()):
        yield Fault("d2t", "the target's ids", "offsets: the target's id less the drafter's", wrong, wrong)
    elif not torch.equal(marked, ids):
        yield Fault(
            "d2t and t2d",
            f"{len(marked)} marked tokens, other than the {len(ids)} that d2t leads to",
            "nonzero(t2d) == d2t + arange(D)",
            wrong,
            wrong,
        )


def _value_faults(tensors: Mapping[str, torch.Tensor], target: LintTarget) -> Iterator[Fault]:
    nothing = "serve it: nothing is accepted, no error"
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            yield Fault(name, "numbers that are not finite", "finite ones", nothing, nothing)
        elif not tensor.any():
            yield Fault(name, "zeros only", "trained weights", nothing, nothing)
    own = tensors.get(EMBEDDING)
    if own is not None and not same_embedding(own, target.embedding):
        yield Fault(
            EMBEDDING,
            "another embedding",
            "the target's, or no such tensor",
            "use it instead of the target's: little is accepted",
            "replace it by the target's",
        )
    head, t2d = tensors.get("lm_head.weight"), tensors.get("t2d")
    if head is not None and t2d is not None and len(t2d) == len(target.head):
        rows = target.head[t2d]
        if rows.shape == head.shape and head.isfinite().all() and looks_random(head.float(), rows.float()):
            yield Fault(
                "lm_head.weight", "what looks like random numbers", "a trained head", nothing, nothing
            )


def looks_random(head: torch.Tensor, target_rows: torch.Tensor) -> bool:
    """Whether a head [D, H] looks like independent noise, given the target head's rows for its tokens, [D,
    H].

    Two signs must come together. Its rows are no nearer to the target's rows for the same tokens than chance
    has them: the mean cosine of independent rows is about 1 / sqrt(D * H) around zero. And its largest
    singular value is that of noise of its size, s * (sqrt(D) + sqrt(H)); trained heads have a few strong
    directions far above. What this can't tell: a head that was trained too little to leave the noise it
    started as counts as random, which is no harm; one that is random and scaled by row or column passes, and
    so does one that was trained for other tokens.
    """
    count, width = head.shape
    agreement = torch.nn.functional.cosine_similarity(head, target_rows).mean()
    if agreement.abs() > _NOISE_AGREEMENT / (count * width) ** 0.5:
        return False
    vector = torch.randn(width, generator=torch.Generator().manual_seed(0))
    for _ in range(_POWER_STEPS):
        vector = torch.nn.functional.normalize(head.t() @ (head @ vector), dim=0)
    largest = (head @ vector).norm()
    return bool(largest < _NOISE_SPECTRUM * head.std() * (count**0.5 + width**0.5))
