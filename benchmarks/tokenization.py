"""How long it takes to turn a long conversation into token ids and a loss mask, against the common way.

The common way (prefix re-encoding) renders the conversation once and encodes the text once; then, for every
turn of the assistant, it encodes the text up to where the turn's content begins, and the text up to where it
ends, and counts the tokens: work that grows with the square of the number of messages. It stands here as it
is usually written, on the same template and tokenizer. Both must agree on ids and mask for the conversations
measured. The seconds are the process's own on the processor, so that other work on the machine hardly
matters; the best of several rounds counts. `~` is extrapolated from 42 turns.

    python benchmarks/tokenization.py [--target models/smollm2-135m-instruct] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.chat import Chat

LENGTHS = (10, 84, 500, 2000)
DOUBLING = (1000, 2000)
WORDS_A_TURN = (40, 400, 120, 250, 60, 300, 180)
# The common way takes three quarters of an hour for 2,000 messages: of more turns than these, as many are
# timed, evenly chosen, and the time is multiplied.
TIMED_TURNS = 42
TEXT = """the test fails because parser returns an empty list when input has no header so I will look at
the function that reads it and add a check before loop def parse(lines): return [line.split(",") for line in
lines] Traceback (most recent call last): File "/repo/src/parser.py", line 42, in parse ValueError: expected
"""


def make_conversation(messages: int, seed: int = 0) -> list[dict[str, Any]]:
    """Alternating turns of an agent and its tools, long and short ones as in a software task."""
    draw, words = random.Random(seed), TEXT.split()
    turns = [{"role": "system", "content": "You fix bugs in a repository. Think, then act."}]
    while len(turns) < messages:
        role = "user" if len(turns) % 2 else "assistant"
        text = " ".join(draw.choices(words, k=WORDS_A_TURN[len(turns) % len(WORDS_A_TURN)]))
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
        text, ids = self._whole(messages)
        mask = [0] * len(ids)
        for found in self._answer.finditer(text):
            start, end = self._positions(text, found)
            mask[start:end] = [1] * (end - start)
        return ids, mask

    def seconds(self, messages: list[dict[str, Any]]) -> float:
        """Its time, extrapolated where there are many turns."""
        start = time.process_time()
        text, _ = self._whole(messages)
        turns = list(self._answer.finditer(text))
        whole = time.process_time() - start
        step = max(1, len(turns) // TIMED_TURNS)
        timed = turns[step // 2 :: step]
        start = time.process_time()
        for found in timed:
            self._positions(text, found)
        return whole + (time.process_time() - start) * len(turns) / len(timed)

    def _whole(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text, self._encode(text)

    def _positions(self, text: str, found: re.Match[str]) -> tuple[int, int]:
        return len(self._encode(text[: found.start(1)])), len(self._encode(text[: found.end(1)]))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


class OneText:
    """Ours."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def __call__(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Ids and loss mask."""
        [row] = self._chat.rows(messages)
        return row.ids, row.loss_mask

    def seconds(self, messages: list[dict[str, Any]]) -> float:
        """Its time."""
        start = time.process_time()
        self(messages)
        return time.process_time() - start


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

    ours = OneText(chat)

    print(f"{'messages':>8} {'tokens':>9} {'ours s':>9} {'prefix re-encoding s':>21} {'ratio':>8}")
    report: dict[str, Any] = {"target": str(arguments.target), "lengths": []}
    for length in LENGTHS:
        messages = make_conversation(length)
        ids, mask = ours(messages)
        extrapolated = length > 2 * TIMED_TURNS
        if not extrapolated and (ids, mask) != common(messages):
            raise SystemExit(f"the two ways disagree on {length} messages")
        fast = min(ours.seconds(messages) for _ in range(arguments.rounds))
        slow = min(common.seconds(messages) for _ in range(1 if extrapolated else arguments.rounds))
        about = "~" if extrapolated else ""
        print(
            f"{length:>8} {len(ids):>9} {fast:>9.4f} {about + f'{slow:.2f}':>21} {slow / fast:>7.1f}x",
            flush=True,
        )
        report["lengths"].append(
            {
                "messages": length,
                "tokens": len(ids),
                "ours_s": fast,
                "prefix_reencoding_s": slow,
                "extrapolated": extrapolated,
                "ratio": slow / fast,
            }
        )
    pair = [make_conversation(length) for length in DOUBLING]
    rounds = [[ours.seconds(messages) for messages in pair] for _ in range(3 * arguments.rounds)]
    once, twice = map(min, zip(*rounds, strict=True))
    print(f"{DOUBLING[0]} to {DOUBLING[1]} messages: {once:.4f} s to {twice:.4f} s, {twice / once:.2f} times")
    report["doubling"] = {"messages": DOUBLING, "seconds": [once, twice], "factor": twice / once}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
