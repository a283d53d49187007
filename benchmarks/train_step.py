"""How fast the trainer's step is against the published algorithm written out plainly.

The plain step pads the samples to one length and computes every position at every step: queries, the whole
S x (i + 1)S mask, head and loss, with the target's logits over its whole vocabulary. `dense, draft targets`
is the same with the target's distribution over the draft vocabulary alone, as the trainer has it. All three
take the same samples, weights and optimiser, in float32; their first losses must agree. Rounds alternate and
the best of each counts, since other work on the machine only ever slows one down.

    python benchmarks/train_step.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Sample, candidate_places, make_batch
from eyrie.eagle3.loss import unrolled_loss
from eyrie.eagle3.model import Drafter, DrafterConfig, rotary, rotate

DECAY = 0.8


def make_drafter(arguments: argparse.Namespace) -> Drafter:
    """A drafter of the default target's shape with random weights."""
    config = DrafterConfig(
        hidden_size=576,
        target_hidden_size=576,
        vocab_size=arguments.vocabulary,
        draft_vocab_size=arguments.draft_vocabulary,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        layer_ids=(2, 15, 27),
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return Drafter(config, range(config.draft_vocab_size), torch.randn(config.vocab_size, config.hidden_size))


def make_samples(arguments: argparse.Namespace, head: torch.Tensor) -> list[Sample]:
    """Random samples of the default build's shape: prompts of about 70 tokens, answers of 64."""
    samples = []
    for index in range(arguments.samples):
        prompt, answer = 55 + 10 * (index % 4), 64
        mask = torch.tensor([False] * prompt + [True] * answer)
        last = torch.randn(len(mask), 576).bfloat16()
        candidates = candidate_places(mask, "aligned")
        samples.append(
            Sample(
                key=str(index),
                token_ids=torch.randint(0, arguments.vocabulary, mask.shape),
                loss_mask=mask,
                aux=torch.randn(len(mask), 3 * 576).bfloat16(),
                last=last,
                candidates=candidates,
                choices=(last[candidates].float() @ head.t()).argmax(dim=-1),
            )
        )
    return samples


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square norm."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """[B, S, ...] moved left by one along S, zeros entering on the right."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def dense_loss(
    drafter: Drafter, samples: list[Sample], head: torch.Tensor, steps: int, whole_vocabulary: bool
) -> torch.Tensor:
    """The published training-time test over padded samples."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length = max(len(sample.token_ids) for sample in samples)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])

    def mask_of(places: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(length)
        mask[places] = 1.0
        return mask

    ids = shifted(torch.stack([padded(sample.token_ids) for sample in samples]))
    last = torch.stack([padded(sample.last) for sample in samples]).float()
    aux = torch.stack([padded(sample.aux) for sample in samples]).float()
    with torch.no_grad():
        if whole_vocabulary:
            logits = last @ head.t()
            mask = torch.stack([mask_of(sample.candidates) for sample in samples])
            mask = shifted(mask * drafter.t2d[logits.argmax(dim=-1)])
            target = shifted(logits[..., drafter.t2d].softmax(dim=-1))
        else:
            mask = shifted(torch.stack([mask_of(sample.supervised(drafter.t2d)) for sample in samples]))
            target = shifted((last @ head[drafter.t2d].t()).softmax(dim=-1))
    hidden = drafter.fc(aux)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    causal, diagonal = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    total = hidden.new_zeros(())
    for step in range(steps):
        embedding = norm(drafter.embed(ids), layer.input_layernorm.weight)
        both = torch.cat([embedding, norm(hidden, layer.hidden_norm.weight)], dim=-1)
        angles = rotary(torch.arange(length) + step, attention.head_dim, attention.theta)
        shape = (len(samples), length, -1, attention.head_dim)
        query = rotate(attention.q_proj(both).view(shape), *angles).transpose(1, 2)
        keys.append(rotate(attention.k_proj(both).view(shape), *angles).transpose(1, 2))
        values.append(attention.v_proj(both).view(shape).transpose(1, 2))
        mixed = functional.scaled_dot_product_attention(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=torch.cat([causal] + [diagonal] * step, dim=1),
            enable_gqa=True,
        )
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(norm(hidden, layer.post_attention_layernorm.weight))
        logs = drafter.lm_head(norm(hidden, drafter.norm.weight)).log_softmax(dim=-1)
        entropy = -(target * logs).sum(-1)
        total = total + DECAY**step * (entropy * mask).sum() / mask.sum()
        ids, target, mask = shifted(ids), shifted(target), shifted(mask)
    return total


def gathered_loss(
    drafter: Drafter, samples: list[Sample], head_rows: torch.Tensor, steps: int
) -> torch.Tensor:
    """The trainer's loss, the laying out of the batch included."""
    batch = make_batch(samples, [sample.supervised(drafter.t2d) for sample in samples], steps)
    return unrolled_loss(drafter, batch, head_rows, TrainingSettings(step_decay=DECAY), torch.float32)


def seconds_of_step(
    drafter: Drafter, optimiser: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]
) -> tuple[float, float]:
    """The loss and the seconds of one optimiser step."""
    start = time.perf_counter()
    loss = loss_of()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach()), time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4, help="samples of a step, 64 answer tokens each")
    parser.add_argument("--steps", type=int, default=3, help="steps of the training-time test")
    parser.add_argument("--draft-vocabulary", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    drafter = make_drafter(arguments)
    head = torch.randn(arguments.vocabulary, 576) * 0.1
    # Every choice within the draft vocabulary, so that every answer token is supervised.
    head[arguments.draft_vocabulary :] *= 0.01
    samples = make_samples(arguments, head)
    head_rows = head[drafter.t2d]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "trainer": lambda: gathered_loss(drafter, samples, head_rows, arguments.steps),
        "dense": lambda: dense_loss(drafter, samples, head, arguments.steps, True),
        "dense, draft targets": lambda: dense_loss(drafter, samples, head, arguments.steps, False),
    }
    losses = {name: float(way().detach()) for name, way in ways.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"the ways disagree: {losses}")
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            seconds[name].append(seconds_of_step(drafter, optimiser, way)[1])
    supervised = sum(len(sample.supervised(drafter.t2d)) for sample in samples)
    rates = {name: supervised / min(taken) for name, taken in seconds.items()}
    print(
        f"{len(samples)} samples, {supervised} supervised tokens, D = {arguments.draft_vocabulary}, "
        f"{arguments.steps} steps, {arguments.threads} threads, float32, best of {arguments.rounds}"
    )
    print(f"{'':22}{'ms a step':>12}{'tokens/s':>12}{'trainer is':>12}")
    for name, rate in rates.items():
        ratio = f"{rates['trainer'] / rate:.2f}x"
        print(f"{name:22}{1000 * min(seconds[name]):12.0f}{rate:12.0f}{ratio:>12}")
    print(
        json.dumps(
            {
                "benchmark": "train_step",
                "threads": arguments.threads,
                "draft_vocab_size": arguments.draft_vocabulary,
                "ttt_steps": arguments.steps,
                "supervised_tokens": supervised,
                "tokens_per_second": rates,
                "ratio": {name: rates["trainer"] / rate for name, rate in rates.items() if name != "trainer"},
            }
        )
    )


if __name__ == "__main__":
    main()
