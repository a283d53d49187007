"""On a GPU: losses as on the CPU, flex attention as the own one, bfloat16 learning, rates. See check.sh.

A random Llama of middle size stands for the target. Exits with 1 if two ways disagree; the last line is one
JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Batch, Sample, candidate_places, make_batch
from eyrie.eagle3.loss import unrolled_loss
from eyrie.eagle3.model import Drafter, DrafterConfig
from eyrie.eagle3.moving import moved
from eyrie.eagle3.unroll import unroll

STEPS = 3


def make_drafter(width: int, vocabulary: int, draft_vocabulary: int) -> Drafter:
    """A random drafter, head and norm as they come."""
    config = DrafterConfig(
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocabulary,
        intermediate_size=width * 3,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        layer_ids=(2, 15, 27),
        bos_token_id=1,
        eos_token_id=2,
    )
    return Drafter(config, range(draft_vocabulary), torch.randn(vocabulary, width))


def make_samples(drafter: Drafter, lengths: list[int]) -> list[Sample]:
    """Random samples, the second halves supervised."""
    samples, width = [], drafter.config.hidden_size
    for length in lengths:
        mask = torch.arange(length) >= length // 2
        places = candidate_places(mask, "aligned")
        ids = torch.randint(0, drafter.config.vocab_size, (length,))
        aux, last = torch.randn(length, 3 * width), torch.randn(length, width)
        samples.append(Sample("", ids, mask, aux, last, places, torch.zeros_like(places)))
    return samples


def gradients(drafter: Drafter, loss: torch.Tensor) -> torch.Tensor:
    """All gradients in one vector on the CPU."""
    drafter.zero_grad()
    torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten().cpu() for p in drafter.parameters() if p.grad is not None])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The size of a - b in terms of b's."""
    return float((a.cpu() - b.cpu()).norm() / b.cpu().norm())


def seconds_of(act: Callable[[], Any], device: torch.device, rounds: int = 5) -> float:
    """The shortest of several rounds, after one that warms up."""
    best = float("inf")
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def agreement(
    drafter: Drafter, batch: Batch, head_rows: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """How far the device's float32 figures are from the CPU's, and flex attention's from the own."""
    made = TrainingSettings()
    loss = unrolled_loss(drafter, batch, head_rows, made, torch.float32)
    expected = gradients(drafter, loss)
    drafter.to(device)
    there = moved(batch, device)
    other = unrolled_loss(drafter, there, head_rows.to(device), made, torch.float32)
    found = gradients(drafter, other)
    figures = {
        "loss": abs(float(other.detach()) - float(loss.detach())) / float(loss.detach()),
        "gradients": difference(found, expected),
    }
    with torch.set_grad_enabled(device.type == "cuda"):
        own = unroll(drafter, there.layout, flex=False)
        flex = unroll(drafter, there.layout, flex=True)
        figures["flex_states"] = difference(flex[-1].detach(), own[-1].detach())
        if device.type == "cuda":
            first = gradients(drafter, torch.stack(flex).square().mean())
            second = gradients(drafter, torch.stack(own).square().mean())
            figures["flex_gradients"] = difference(first, second)
    return figures


def train(drafter: Drafter, batch: Batch, head_rows: torch.Tensor, steps: int) -> list[float]:
    """Losses of bfloat16 steps on one batch over float32 weights."""
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        loss = unrolled_loss(drafter, batch, head_rows, TrainingSettings(), torch.bfloat16)
        torch.autograd.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def step_products(drafter: Drafter, batch: Batch) -> float:
    """Floating-point operations of a step's matrix products, forward and backward, attention's left out."""
    config, layout = drafter.config, batch.layout
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    keys, queries = len(layout.key_positions), len(layout.query_positions)
    layer = width * (heads + kv) + heads * width + 3 * width * config.intermediate_size
    # Forward, weight gradient and input gradient; fc's input and the embedding have none.
    forward_backward = 2 * keys * 3 * width * width * 2 + queries * STEPS * layer * 6
    rows = sum(len(part) for part in batch.step_queries)
    head = width * config.draft_vocab_size * (rows * 6 + len(batch.choices) * 2)
    return float(forward_backward + head)


def capture_rates(device: torch.device, width: int, layers: int, tokens: int) -> dict[str, float]:
    """Tokens a second of a bare forward pass of a random target, and of one that keeps three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - only this part needs it

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval().model
    ids = torch.randint(0, 32000, (8, tokens // 8), device=device)
    kept: list[torch.Tensor] = []

    def bare() -> None:
        with torch.inference_mode():
            model(ids, use_cache=False)

    def capture() -> None:
        kept.clear()
        bare()
        torch.cat(kept, dim=-1).cpu()

    rates = {"bare": tokens / seconds_of(bare, device)}
    for index in (1, layers // 2, layers - 2):
        model.layers[index].register_forward_pre_hook(lambda _module, seen: kept.append(seen[0]))
    rates["captured"] = tokens / seconds_of(capture, device)
    rates["share"] = rates["captured"] / rates["bare"]
    return rates


def main() -> None:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU: tries the script alone")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --cpu tries the script on tiny shapes")
    device = torch.device("cpu" if arguments.cpu else "cuda")
    torch.manual_seed(0)
    small = make_drafter(128, 1000, 300)
    samples = make_samples(small, [40, 25, 61])
    batch = make_batch(samples, [sample.candidates for sample in samples], STEPS)
    figures: dict[str, Any] = {"agreement": agreement(small, batch, torch.randn(300, 128), device)}

    width, vocabulary, lengths = (128, 2000, [64] * 4) if arguments.cpu else (2048, 64000, [1024] * 16)
    drafter = make_drafter(width, vocabulary, vocabulary // 2)
    samples = make_samples(drafter, lengths)
    batch = moved(make_batch(samples, [sample.candidates for sample in samples], STEPS), device)
    drafter.to(device)
    head_rows = torch.randn(vocabulary // 2, width, device=device) / width**0.5
    figures["losses"] = train(drafter, batch, head_rows, 10)
    seconds = seconds_of(lambda: train(drafter, batch, head_rows, 1), device)
    size = 256 if arguments.cpu else 8192
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    limit = 2 * size**3 / seconds_of(lambda: square @ square, device)
    figures["tokens_per_second"] = sum(lengths) / seconds
    figures["share_of_matmul_limit"] = step_products(drafter, batch) / seconds / limit
    figures["capture"] = capture_rates(
        device, width, 4 if arguments.cpu else 16, 256 if arguments.cpu else 8192
    )

    wrong = {name: value for name, value in figures["agreement"].items() if value > 1e-3}
    if figures["losses"][-1] >= figures["losses"][0]:
        wrong["bfloat16 does not learn"] = figures["losses"][-1]
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(json.dumps({"device": str(device), "wrong": wrong, **figures}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
