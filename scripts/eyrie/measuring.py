"""Decoding held-out prompts both ways, comparing the outputs, and timing what a cycle is made of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

from eyrie.acceptance import first_difference
from eyrie.console import Progress
from eyrie.decoding import DraftedOutput, DraftPass, PlainOutput, TargetPass, greedy, speculative
from eyrie.eagle3.checkpoint import load_drafter
from eyrie.eagle3.model import Drafter
from eyrie.held_out import HeldOutPrompt
from eyrie.records import read_json
from eyrie.skinny import use_skinny_products
from eyrie.target import Target

_REPEATS = 9

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Decoded:
    """One prompt's outputs and their seconds: by the target alone (or not), and by length of the drafts."""

    prompt: HeldOutPrompt
    plain: PlainOutput | None
    plain_seconds: float
    drafted: dict[int, DraftedOutput]
    drafted_seconds: dict[int, float]


@dataclass(frozen=True)
class Difference:
    """Where a drafted output first differs from the plain one, and how close the plain choice was.

    margin: distance of the two highest logits in the plain run at that position.
    """

    id: str
    dataset: str
    draft_tokens: int
    position: int
    margin: float


@dataclass(frozen=True)
class Costs:
    """Medians in milliseconds; by length of the drafts where it matters.

    plain_step: the target over one token. verify_step: the target over draft_tokens + 1. draft_step: a
    draft_tokens-th part of one draft, the intake of verified positions included.
    """

    plain_step: float
    verify_step: dict[int, float]
    draft_step: dict[int, float]


def load_pair(target_path: Path, checkpoint: Path, dtype: str) -> tuple[Target, Drafter]:
    """The target, captured at the layers that the drafter was trained on, and the drafter."""
    # The layers must be known before the drafter is loaded, which checks the rest of the file.
    layers = read_json(checkpoint / "config.json").get("eagle_config") or {}
    target = Target(target_path, dtype, layers.get("eagle_aux_hidden_state_layer_ids"))
    embedding = target.embedding_weight()
    drafter = load_drafter(checkpoint, embedding, embedding.dtype)
    if dtype == "float32":
        use_skinny_products(drafter, least_rows=2)
    return target, drafter


def decode_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[HeldOutPrompt],
    exact: int,
    lengths: Sequence[int],
    max_new_tokens: int,
    progress: Progress | None = None,
) -> list[Decoded]:
    """Decode every prompt with drafts of the first length, and the first `exact` prompts plainly, too.

    Further lengths get the first third of each dataset's prompts, rounded up: they cost as much time again
    and only say how far longer drafts pay. A prompt's decodings follow each other, so that a machine that
    slows down does so for all of them.
    """
    of_dataset = Counter(prompt.dataset for prompt in prompts)
    seen: Counter[str] = Counter()
    decoded = []
    for number, prompt in enumerate(prompts):
        in_first_third = 3 * seen[prompt.dataset] < of_dataset[prompt.dataset]
        seen[prompt.dataset] += 1
        plain, plain_seconds = None, 0.0
        if number < exact:
            plain, plain_seconds = _timed(greedy, target, prompt.prompt_ids, max_new_tokens)
        drafted, drafted_seconds = {}, {}
        for length in lengths if in_first_third else lengths[:1]:
            drafted[length], drafted_seconds[length] = _timed(
                speculative, target, drafter, prompt.prompt_ids, max_new_tokens, length
            )
        decoded.append(Decoded(prompt, plain, plain_seconds, drafted, drafted_seconds))
        if progress is not None:
            progress.advance(1, prompt.dataset)
    return decoded


def differences(target: Target, decoded: Sequence[Decoded]) -> list[Difference]:
    """Every prompt and length whose drafted output is not the plain one."""
    found = []
    for one in decoded:
        for length, output in one.drafted.items():
            position = None if one.plain is None else first_difference(one.plain.token_ids, output.token_ids)
            if position is not None:
                again = greedy(target, one.prompt.prompt_ids, position + 1, with_margins=True)
                found.append(
                    Difference(one.prompt.id, one.prompt.dataset, length, position, again.margins[-1])
                )
    return found


def measure_costs(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], lengths: Sequence[int]
) -> Costs:
    """Time the parts of a cycle right after a prompt, in turns, each several times."""
    reader = TargetPass(target, rewinds=True)
    chain = DraftPass(drafter, reader.device)
    aux, last = reader.read(prompt_ids)
    reader.forget(0)
    token = int(reader.logits(last[-1:]).argmax())
    chain.draft(aux, [*prompt_ids[1:], token], 1)

    def pass_over(tokens: int) -> None:
        reader.logits(reader.read([token] * tokens)[1]).argmax(dim=-1).tolist()
        reader.forget(tokens)

    plain: list[float] = []
    verify: dict[int, list[float]] = {length: [] for length in lengths}
    drafting: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(_REPEATS):
        plain.append(_timed(pass_over, 1)[1])
        for length in lengths:
            verify[length].append(_timed(pass_over, length + 1)[1])
            drafting[length].append(_timed(chain.draft, aux[:, -1:], [token], length)[1] / length)
    return Costs(
        1e3 * median(plain),
        {length: 1e3 * median(seconds) for length, seconds in verify.items()},
        {length: 1e3 * median(seconds) for length, seconds in drafting.items()},
    )


def _timed(
    work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> tuple[Result, float]:
    start = time.perf_counter()
    result = work(*args, **kwargs)
    return result, time.perf_counter() - start
