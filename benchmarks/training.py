"""How fast the trainer's step is, and how much memory it takes, beside speculators 0.9.0's on the same
samples.

Both run in processes of their own and take turns, step by step; each has the same weights, samples, optimiser
(AdamW), trainable tensors (speculators freezes the head, so ours is frozen here, too) and convention: loss
where the mask says so, mean over those, every step weighed alike. What ours does beside, laying out the
batch, counts; speculators' collation does not. The loss is shown as speculators has it, cross-entropy less
the target's entropy: both curves must be the same. Memory is the most that the process held during the steps,
less what it held before any weight was loaded; `steps` is what the steps alone added. GFLOP counts a step's
matrix products: where both sides run near the processor's limit, its ratio is what speed can be won by.

Other work on the machine only ever slows a step down: the best of the rounds counts, by the clock and, where
that is too noisy, on the processor. The environment of speculators is set up by `make oracle-env`.

    python benchmarks/training.py [--threads 2] [--rounds 6] [--widths 576 1024] [--shares 20 60 100]
    [--bfloat16]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode, flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Sample, candidate_places, make_batch
from eyrie.eagle3.loss import target_distribution, unrolled_loss
from eyrie.eagle3.model import Drafter, DrafterConfig, rms_normalise
from parity.oracle import PYTHON, WORKER, Target, Worker, make_sample, write_case

STEPS, DECAY, RATE = 3, 1.0, 1e-3
TOKENS = 160
EMBEDDING = "target.embedding"
# The counter does not know the product that adds in place.
flop_registry[torch.ops.aten.addmm_] = flop_registry[torch.ops.aten.addmm]
CONVENTION = TrainingSettings(step_decay=DECAY, mask_shift="shifted", position_mask=False)


# ---- Ours, in a process of its own


class Ours:
    """The trainer's step on a case; see parity/speculators_worker.py for the files."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        about = json.loads((folder / "case.json").read_text())
        tensors = load_file(folder / "case.safetensors")
        config = DrafterConfig(**about["shape"] | {"layer_ids": tuple(about["shape"]["layer_ids"])})
        ids = tensors["drafter.t2d"].nonzero()[:, 0]
        self.head_rows = tensors["target.head"][ids]
        # Copies, as a file that is read has none of its pages counted once it is closed. The embedding is
        # mapped, as the trainer has the target's: of that the pages count that were looked at.
        tensors = {name: t.clone() for name, t in tensors.items() if name not in ("target.head", EMBEDDING)}
        with safe_open(folder / "case.safetensors", framework="pt") as file:
            self.drafter = Drafter(config, ids.tolist(), file.get_tensor(EMBEDDING))
        own = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("drafter.")}
        self.drafter.load_state_dict(own)
        self.drafter.lm_head.weight.requires_grad_(False)
        self.dtype = dtype
        self.samples = self._samples(tensors, about["tokens"], config.rms_norm_eps)
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=about["rate"], weight_decay=0.0, fused=True)

    @staticmethod
    def _samples(tensors: dict[str, torch.Tensor], tokens: list[int], eps: float) -> list[Sample]:
        last = rms_normalise(tensors["verifier_last_hidden_states"], eps) * tensors["target.norm"]
        columns = (tensors["input_ids"], tensors["loss_mask"].bool(), tensors["hidden_states"], last)
        samples = []
        for ids, mask, aux, own in zip(*(column.split(tokens) for column in columns), strict=True):
            places = candidate_places(mask, CONVENTION.mask_shift)
            samples.append(Sample("", ids, mask, aux, own, places, torch.zeros_like(places)))
        return samples

    def entropy(self) -> float:
        """What cross-entropy has more than speculators' divergence, summed over the steps."""
        total = 0.0
        for step in range(STEPS):
            values = []
            for sample in self.samples:
                assert sample.last is not None
                target = target_distribution(sample.last[sample.candidates], self.head_rows, torch.float32)
                inside = sample.candidates > step
                values.append(-torch.xlogy(target, target).sum(-1)[inside])
            total += float(torch.cat(values).mean()) * DECAY**step
        return total

    def step(self) -> dict[str, float]:
        """One optimiser step; its loss, and how long it took by the clock and on the processor."""
        clock, processor = time.perf_counter(), time.process_time()
        places = [sample.candidates for sample in self.samples]
        batch = make_batch(self.samples, places, STEPS)
        loss = unrolled_loss(self.drafter, batch, self.head_rows, CONVENTION, self.dtype)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        seconds, spent = time.perf_counter() - clock, time.process_time() - processor
        return {"loss": float(loss.detach()), "seconds": seconds, "processor_seconds": spent}

    def operations(self) -> int:
        """Floating-point operations of a step's matrix products."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return counter.get_total_flops()


def memory(field: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS now, VmHWM at the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def answer(request: dict[str, Any], held: dict[str, Ours]) -> dict[str, Any]:
    """Do what a request asks for, as speculators_worker.py does."""
    match request["do"]:
        case "load":
            held["case"] = Ours(Path(request["folder"]), getattr(torch, request["dtype"]))
            return {}
        case "entropy":
            return {"entropy": held["case"].entropy()}
        case "step":
            return dict(held["case"].step())
        case "operations":
            return {"operations": held["case"].operations()}
        case "memory":
            return {"now": memory("VmRSS"), "peak": memory("VmHWM")}
        case "reset_peak":
            Path("/proc/self/clear_refs").write_text("5")
            return {"now": memory("VmRSS")}
    raise ValueError(f"unknown request {request}")


def serve(threads: int) -> None:
    """Answer requests line by line until the input ends."""
    torch.set_num_threads(threads)
    held: dict[str, Ours] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), held)), flush=True)


# ---- The comparison


def make_case(folder: Path, width: int, share: int, samples: int) -> int:
    """Write a case with that share of supervised tokens, in per cent; returns its tokens."""
    config = DrafterConfig(
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=49152,
        draft_vocab_size=8192,
        intermediate_size=round(width * 8 / 3 / 16) * 16,
        num_attention_heads=width // 64,
        num_key_value_heads={64: 1, 576: 3}.get(width, 4),
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        layer_ids=(2, 15, 27),
        bos_token_id=1,
        eos_token_id=2,
    )
    generator = torch.Generator().manual_seed(width + share)
    torch.manual_seed(0)
    head = torch.randn(config.vocab_size, width, generator=generator) * 2 / width**0.5
    # As the files of targets have it, in bfloat16, which float32 holds exactly.
    embedding = torch.randn(config.vocab_size, width, generator=generator).bfloat16()
    target = Target(embedding, head, torch.ones(width))
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids.tolist(), target.embedding)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(head[ids])
    # speculators lets a packed document's last positions look into the next one's first tokens.
    answer_tokens = min(TOKENS * share // 100, TOKENS - STEPS - 1)
    mask = [0] * (TOKENS - answer_tokens) + [1] * answer_tokens
    pairs = [make_sample(target, generator, mask, 3, config.rms_norm_eps) for _ in range(samples)]
    write_case(folder, drafter, target, pairs, STEPS, DECAY, RATE)
    return TOKENS * samples


@dataclass
class Measured:
    """What one side did: the best step, by the clock and on the processor, and what it took.

    operations: floating-point operations of a step's matrix products.
    """

    seconds: float
    processor_seconds: float
    memory: int
    steps_memory: int
    operations: int
    losses: list[float]


def measure(folder: Path, small: Path, arguments: argparse.Namespace) -> dict[str, Measured]:
    """Both sides on one case, in turns."""
    dtype = "bfloat16" if arguments.bfloat16 else "float32"
    commands = {"ours": [sys.executable, __file__, "--worker"], "speculators": [PYTHON, WORKER]}
    with (
        Worker(commands["ours"], arguments.threads) as ours,
        Worker(commands["speculators"], arguments.threads) as theirs,
    ):
        sides = {"ours": ours, "speculators": theirs}
        before, loaded = {}, {}
        for name, side in sides.items():
            # A small step first: the libraries' own pages are then in memory on both sides.
            side.ask(do="load", folder=str(small), attention=arguments.attention, dtype=dtype)
            side.ask(do="step")
            before[name] = side.ask(do="reset_peak")["now"]
            side.ask(do="load", folder=str(folder), attention=arguments.attention, dtype=dtype)
            loaded[name] = side.ask(do="reset_peak")["now"]
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                taken[name].append(side.ask(do="step"))
        peaks = {name: side.ask(do="memory")["peak"] for name, side in sides.items()}
        operations = {name: side.ask(do="operations")["operations"] for name, side in sides.items()}
        offset = ours.ask(do="entropy")["entropy"]
    return {
        name: Measured(
            seconds=min(step["seconds"] for step in steps),
            processor_seconds=min(step["processor_seconds"] for step in steps),
            memory=peaks[name] - before[name],
            steps_memory=peaks[name] - loaded[name],
            operations=operations[name],
            losses=[step["loss"] - (offset if name == "ours" else 0.0) for step in steps],
        )
        for name, steps in taken.items()
    }


def report(width: int, share: int, tokens: int, sides: dict[str, Measured]) -> dict[str, Any]:
    """Print a case's lines; returns its figures and ratios."""
    ours, theirs = sides["ours"], sides["speculators"]
    for name, side in sides.items():
        rates = f"{tokens / side.seconds:10.0f}{tokens / side.processor_seconds:12.0f}"
        held = f"{side.memory / 2**20:10.0f}{side.steps_memory / 2**20:8.0f}{side.operations / 1e9:8.0f}"
        losses = " ".join(f"{loss:.4f}" for loss in side.losses[:4])
        print(f"{width:6} {share:5} %  {name:12}{rates}{held}   {losses}")
    ratios = {
        "speed": theirs.seconds / ours.seconds,
        "processor_speed": theirs.processor_seconds / ours.processor_seconds,
        "memory": ours.memory / theirs.memory,
        "steps_memory": ours.steps_memory / theirs.steps_memory,
        "operations": theirs.operations / ours.operations,
        "loss_difference": max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
    }
    print(
        f"{'':16}ratio       {ratios['speed']:9.2f}x{ratios['processor_speed']:11.2f}x"
        f"{ratios['memory']:9.2f}x{ratios['steps_memory']:7.2f}x{ratios['operations']:7.2f}x   "
        f"curves differ by at most {ratios['loss_difference']:.5f}"
    )
    return {"width": width, "share": share, "tokens": tokens, "ratio": ratios} | {
        name: {key: value for key, value in vars(side).items() if key != "losses"}
        for name, side in sides.items()
    }


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--worker"]:
        serve(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help=f"packed samples of {TOKENS} tokens")
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 1024])
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[20, 60, 100], help="supervised, in per cent"
    )
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa", help="speculators'")
    parser.add_argument("--bfloat16", action="store_true", help="without AVX512 far slower than float32")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: make oracle-env sets up speculators' environment")
    print(
        f"{arguments.samples} x {TOKENS} tokens packed, V = 49,152, D = 8,192, {STEPS} steps, "
        f"{arguments.threads} threads, {'bfloat16' if arguments.bfloat16 else 'float32'}, best of "
        f"{arguments.rounds}; tokens a second by the clock and on the processor, MiB in all and of the steps"
    )
    print(
        f"{'H':>6} {'share':>7}  {'':12}{'tokens/s':>10}{'processor':>12}{'memory':>10}{'steps':>8}"
        f"{'GFLOP':>8}   losses"
    )
    figures = []
    for width in arguments.widths:
        for share in arguments.shares:
            with tempfile.TemporaryDirectory() as folder:
                case, small = Path(folder) / "case", Path(folder) / "small"
                tokens = make_case(case, width, share, arguments.samples)
                make_case(small, 64, share, 1)
                figures.append(report(width, share, tokens, measure(case, small, arguments)))
    print(json.dumps({"benchmark": "training", "threads": arguments.threads, "cases": figures}))


if __name__ == "__main__":
    main()
