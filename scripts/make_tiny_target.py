"""Make a tiny target for tests: a random Llama whose answers vary and sometimes end.

    python scripts/make_tiny_target.py --out models/tiny

Its tokenizer is a byte-level one trained on the text below, its chat template has SmolLM2's form. All bytes
follow from the seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from eyrie.console import run_command, start_log

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 600
HIDDEN = 64
LAYERS = 6
# The end token's row in the head is this much longer than the others, so that it wins every so often.
END_SCALE = 1.4

TEMPLATE = """\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a small helpful assistant<|im_end|>\\n' }}\
{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEXT = """\
A lighthouse keeper counts the ships that pass at night and writes their names in a book. When the fog
comes in from the sea, she lights the second lamp and sounds the horn once a minute until it lifts.
How do I sort a list of numbers in place? Call the method sort on the list; it returns nothing, and the
list itself is changed. To keep the old order, use sorted, which makes a new list.
def area(width, height):
    return width * height
Water boils at a lower temperature on a mountain, because the air above it presses less. Bread takes
longer to bake there, and tea is never quite as strong as it is at home.
Write a function that finds the largest value in a table. What is the sum of the first ten odd numbers?
The answer is 100: 1 + 3 + 5 + 7 + 9 + 11 + 13 + 15 + 17 + 19. Each new odd number adds the next
square. The file was opened, read line by line, and closed again; the program then printed the total.
for (int i = 0; i < count; i++) { total += values[i]; }
Please explain what the error message means, and what I should change. It says that the key is missing:
the dictionary has "name" and "size", but the code asks for "colour". Either add it or ask for another.
In spring the river rises over the lower fields, and the storks come back to the mill. Nobody has worked
there since the bridge was built, yet the wheel still turns when the water is high enough.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of VOCABULARY tokens with SmolLM2's control tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=CONTROL_TOKENS[1],
        eos_token=CONTROL_TOKENS[2],
        pad_token=CONTROL_TOKENS[2],
        unk_token=CONTROL_TOKENS[0],
        chat_template=TEMPLATE,
    )


def make_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A random Llama; its weights are wide, so that logits differ clearly and answers vary."""
    torch.manual_seed(seed)
    end = CONTROL_TOKENS.index("<|im_end|>")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=CONTROL_TOKENS.index("<|im_start|>"),
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[end] *= END_SCALE
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


def write_target(folder: Path, seed: int = 0) -> None:
    """Write the tiny target's model and tokenizer."""
    disable_progress_bar()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer), seed).save_pretrained(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the target's folder")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args()
    log = start_log("make_tiny_target", arguments.log)
    write_target(arguments.out, arguments.seed)
    log.info("%s: %d tokens, %d layers of %d", arguments.out, VOCABULARY, LAYERS, HIDDEN)


if __name__ == "__main__":
    run_command(main)
