"""Held-out prompts asked of both servers in turns, their times, and where their answers differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from eyrie.acceptance import first_difference
from eyrie.config import SamplingSettings
from eyrie.console import Progress
from eyrie.engines.canary import best_two
from eyrie.held_out import HeldOutPrompt
from eyrie.serving_check.servers import Running


@dataclass(frozen=True)
class Answers:
    """One server's answers to all prompts in one round, in the prompts' order, and the seconds of each."""

    token_ids: list[list[int]]
    seconds: list[float]

    def tokens_per_second(self) -> float:
        """New tokens by second of waiting."""
        return sum(map(len, self.token_ids)) / sum(self.seconds)


@dataclass(frozen=True)
class Round:
    """Both servers' answers."""

    plain: Answers
    drafted: Answers

    def figures(self) -> dict[str, float]:
        """Tokens per second of both, and how much faster the drafted one is."""
        plain, drafted = self.plain.tokens_per_second(), self.drafted.tokens_per_second()
        return {"plain": plain, "drafted": drafted, "speed_up": drafted / plain}


@dataclass(frozen=True)
class ServedDifference:
    """Where the drafted answer first leaves the plain one; margin: by how much the plain server's best
    log-probability there lies above its second; None where the server does not tell."""

    id: str
    dataset: str
    position: int
    margin: float | None


def ask_in_turns(
    plain: Running,
    drafted: Running,
    prompts: Sequence[HeldOutPrompt],
    max_new_tokens: int,
    rounds: int,
    progress: Progress | None = None,
) -> list[Round]:
    """Ask both servers every prompt, one request at a time.

    A prompt's two requests follow each other, and which server is first changes from prompt to prompt and
    from round to round: a machine that slows down does so for both.
    """
    sampling = SamplingSettings(max_new_tokens=max_new_tokens)
    made = []
    for number in range(rounds):
        both = (Answers([], []), Answers([], []))
        for at, prompt in enumerate(prompts):
            pairs = list(zip((plain, drafted), both, strict=True))
            for running, answers in pairs if (number + at) % 2 == 0 else reversed(pairs):
                running.server.check()
                start = time.perf_counter()
                ids, _ = running.ask.answer(running.dialect, prompt.prompt_ids, sampling)
                answers.seconds.append(time.perf_counter() - start)
                answers.token_ids.append(ids)
            if progress is not None:
                progress.advance(1, f"round {number + 1} of {rounds}")
        made.append(Round(*both))
    return made


def speed_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Tokens per second over all rounds, each round's own, and the median speed-up."""
    each = [one.figures() for one in rounds]
    return {
        "tokens_per_second": {name: median(one[name] for one in each) for name in ("plain", "drafted")},
        "rounds": each,
        "speed_up": median(one["speed_up"] for one in each),
    }


def equality_figures(
    plain: Running, prompts: Sequence[HeldOutPrompt], rounds: Sequence[Round]
) -> dict[str, Any]:
    """How many prompts' answers are equal in every round, and where each of the others first differs."""
    differences = []
    for at, prompt in enumerate(prompts):
        places = [
            (one, place)
            for one in rounds
            if (place := first_difference(one.plain.token_ids[at], one.drafted.token_ids[at])) is not None
        ]
        if places:
            first, place = places[0]
            written = [*prompt.prompt_ids, *first.plain.token_ids[at][:place]]
            differences.append(ServedDifference(prompt.id, prompt.dataset, place, _margin(plain, written)))
    return {
        "equal": len(prompts) - len(differences),
        "total": len(prompts),
        "differences": [asdict(one) for one in differences],
    }


def _margin(plain: Running, token_ids: Sequence[int]) -> float | None:
    """The distance of the two best log-probabilities after the tokens, as the server without a drafter has
    them."""
    more = {"logprobs": 2, "return_tokens_as_token_ids": True}
    _, reply = plain.ask.answer(plain.dialect, token_ids, SamplingSettings(max_new_tokens=1), more)
    for (best, _), (second, _) in best_two("vllm", reply):
        return round(best - second, 4)
    return None
