"""Make samples/kimi_native.jsonl: the default target's own answers to the generator's native problems.

    python samples/answer_native.py --target <folder of SmolLM2-135M-Instruct>

The problems come from generator/kimi_native.py in a fixed order. The target answers them through
transformers: float32, greedy, its own chat template with the default system prompt, at most 120 new
tokens, batches of 16 padded on the left with an attention mask. Only answers that ended with the end
token are kept, the first 80 of them, in the order of the problems. There is no thinking: the column is
empty and its token count 0. The file is committed, so this runs only when the problems change.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from generate_samples import SEED
from generator import kimi_native
from generator.common import Row, write_text

MAX_NEW_TOKENS = 120
BATCH = 16


def answer(problems: list[str], tokenizer: Any, model: Any) -> list[str | None]:
    """Return the greedy answer to each problem, or None where it did not end by itself."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], tokenize=False, add_generation_prompt=True
        )
        for problem in problems
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        generated = model.generate(
            **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    answers: list[str | None] = []
    for ids in generated[:, batch["input_ids"].shape[1] :].tolist():
        if tokenizer.eos_token_id in ids:
            spoken = ids[: ids.index(tokenizer.eos_token_id)]
            answers.append(tokenizer.decode(spoken, skip_special_tokens=False) or None)
        else:
            answers.append(None)
    return answers


def main() -> None:
    """Answer the problems batch by batch until enough answers have ended, then write the file."""
    parser = argparse.ArgumentParser(description="Let the default target answer the native problems.")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the samples")
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()

    rows = kimi_native.problems(random.Random(SEED))
    kept: list[Row] = []
    for start in range(0, len(rows), BATCH):
        if len(kept) >= kimi_native.ROWS:
            break
        batch = rows[start : start + BATCH]
        for row, response in zip(
            batch, answer([row["problem"] for row in batch], tokenizer, model), strict=True
        ):
            if response is not None and response.strip():
                kept.append({**row, "response": response})
        print(f"{start + len(batch)} problems asked, {len(kept)} answers ended", flush=True)
    if len(kept) < kimi_native.ROWS:
        raise SystemExit(f"only {len(kept)} answers ended, {kimi_native.ROWS} are needed: add problems")
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kept[: kimi_native.ROWS])
    write_text(arguments.out / kimi_native.FILE, "".join(lines))


if __name__ == "__main__":
    main()
