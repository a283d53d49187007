"""How long it takes to turn a long conversation into token ids and a loss mask, against the common way.

The common way (prefix re-encoding) renders the conversation once and encodes the text once; then, for every
turn of the assistant, it encodes the text up to where the turn's content begins, and the text up to where it
ends, and counts the tokens: work that grows with the square of the number of messages. It stands here as it
is usually written, on the same template and tokenizer. Both must agree on ids and mask for the conversations
measured. Rounds alternate and the best of each counts.

    python benchmarks/tokenization.py [--target models/smollm2-135m-instruct] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.chat import Chat

LENGTHS = (10, 84, 500, 2000)
DOUBLING = (1000, 2000)
# The common way on 2,000 messages takes minutes a round; one is enough.
SLOW_FROM = 500
WORDS = """the test fails because parser returns an empty list when input has no header so I will look at the
function that reads it and add a check before loop def parse(lines): return [line.split(",") for line in lines]
Traceback (most recent call last): File "/repo/src/parser.py", line 42, in parse ValueError: expected 3 columns
""".split()


def make_conversation(messages: int, seed: int = 0) -> list[dict[str, Any]]:
    """Alternating turns of an agent and its tools, of 40 to 400 words as in a software task."""
    draw = random.Random(seed)
    turns = [{"role": "system", "content": "You fix bugs in a repository. Think, then act."}]
    while len(turns) < messages:
        role = "user" if len(turns) % 2 else "assistant"
        text = " ".join(draw.choices(WORDS, k=draw.randint(40, 400)))
        turns.append({"role": role, "content": f"{role} step {len(turns)}:\n{text}."})
    return turns


class PrefixReencoding:
    """The common way: token positions by encoding the text before them."""

    def __init__(self, chat: Chat, answer_header: str, answer_end: str) -> None:
        self._tokenizer = chat.tokenizer
        pattern = re.escape(answer_header) + r"([\s\S]*?" + re.escape(answer_end) + ")"
        self._answer = re.compile(pattern)

    def __call__(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Ids and loss mask."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        ids = self._encode(text)
        mask = [0] * len(ids)
        for found in self._answer.finditer(text):
            start, end = (len(self._encode(text[: found.start(1)])), len(self._encode(text[: found.end(1)])))
            mask[start:end] = [1] * (end - start)
        return ids, mask

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def best_seconds(
    ways: list[Callable[[list[dict[str, Any]]], Any]], messages: list[dict[str, Any]], rounds: list[int]
) -> list[float]:
    """The least time of each way; rounds says how many of each."""
    best = [float("inf")] * len(ways)
    for number in range(max(rounds)):
        for at, way in enumerate(ways):
            if number < rounds[at]:
                start = time.perf_counter()
                way(messages)
                best[at] = min(best[at], time.perf_counter() - start)
    return best


def main() -> None:
    """Measure, print a table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--answer-header", default="<|im_start|>assistant\n", help="in the target's template")
    parser.add_argument("--answer-end", default="<|im_end|>", help="in the target's template")
    arguments = parser.parse_args()
    chat = Chat(arguments.target)
    common = PrefixReencoding(chat, arguments.answer_header, arguments.answer_end)

    def ours(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        [row] = chat.rows(messages)
        return row.ids, row.loss_mask

    print(f"{'messages':>8} {'tokens':>9} {'ours s':>9} {'prefix re-encoding s':>21} {'ratio':>8}")
    report: dict[str, Any] = {"target": str(arguments.target), "lengths": []}
    for length in LENGTHS:
        messages = make_conversation(length)
        ids, mask = ours(messages)
        if length < SLOW_FROM and (ids, mask) != common(messages):
            raise SystemExit(f"the two ways disagree on {length} messages")
        rounds = [arguments.rounds, 1 if length >= SLOW_FROM else arguments.rounds]
        fast, slow = best_seconds([ours, common], messages, rounds)
        print(f"{length:>8} {len(ids):>9} {fast:>9.4f} {slow:>21.4f} {slow / fast:>7.1f}x", flush=True)
        report["lengths"].append(
            {
                "messages": length,
                "tokens": len(ids),
                "ours_s": fast,
                "prefix_reencoding_s": slow,
                "ratio": slow / fast,
            }
        )
    once, twice = (
        best_seconds([ours], make_conversation(length), [2 * arguments.rounds])[0] for length in DOUBLING
    )
    print(f"{DOUBLING[0]} to {DOUBLING[1]} messages: {once:.4f} s to {twice:.4f} s, {twice / once:.2f} times")
    report["doubling"] = {"messages": DOUBLING, "seconds": [once, twice], "factor": twice / once}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
