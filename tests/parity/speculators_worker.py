"""speculators 0.9.0 at the other end of a pipe, in its own environment (make oracle-env).

Reads one JSON request a line and answers one JSON object a line; it is the only file that imports
speculators. `train` is its trainer's loop over a case's samples: shuffled, packed, AdamW with a warm-up and a
cosine, for a given time. A case is a folder with `case.json` (the drafter's shape, tokens of each sample) and
`case.safetensors` (the drafter's tensors under the classic layout's names, the target's embedding, head and
final norm, and the samples side by side). Hyperparameters are the classic drafter's: no further norms, no
sliding window.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

Tensors = dict[str, torch.Tensor]


def memory(field: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS now, VmHWM at the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


def make_config(shape: dict[str, Any], attention: str, steps: int) -> Eagle3SpeculatorConfig:
    """speculators' configuration of a classic drafter."""
    layer = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        rms_norm_eps=shape["rms_norm_eps"],
        max_position_embeddings=shape["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=False,
        layer_types=["full_attention"],
        attn_implementation=attention,
    )
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        eagle_aux_hidden_state_layer_ids=list(shape["layer_ids"]),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )


def own_name(name: str) -> str:
    """speculators' name of a tensor of the classic layout."""
    return name.replace("midlayer.", "layers.0.")


def fill(model: Eagle3DraftModel, drafter: Tensors, target: Tensors, first_weights: str) -> None:
    """Give the model a classic drafter's tensors and the target's embedding, head rows and final norm.

    first_weights: `given`, the drafter's; `own`, what speculators starts from: random ones, and the target's
    rows as the head.
    """
    tensors = {own_name(name): tensor for name, tensor in drafter.items()}
    if first_weights == "own":
        given = {name: tensors[name] for name in ("t2d", "d2t")}
        tensors = model.state_dict() | given | {"lm_head.weight": target["head"][drafter["t2d"]]}
    tensors["embed_tokens.weight"] = target["embedding"]
    tensors["verifier_lm_head.weight"] = target["head"][drafter["t2d"]]
    tensors["verifier_norm.weight"] = target["norm"]
    model.load_state_dict(tensors, strict=True)


class Case:
    """A model and a packed batch, as speculators' collator would hand it over without padding."""

    def __init__(self, folder: Path, attention: str, dtype: torch.dtype, first_weights: str) -> None:
        about = json.loads((folder / "case.json").read_text())
        tensors = load_file(folder / "case.safetensors")
        drafter = {name[8:]: t for name, t in tensors.items() if name.startswith("drafter.")}
        target = {name[7:]: t for name, t in tensors.items() if name.startswith("target.")}
        self.steps, self.decay = about["steps"], about["decay"]
        self.model = Eagle3DraftModel(make_config(about["shape"], attention, self.steps))
        fill(self.model, drafter, target, first_weights)
        self.model.to(dtype)
        self.documents = list(self._documents(tensors, about["tokens"], dtype))
        self.batch = self.packed(range(len(self.documents)))
        self.loss_config = resolve_loss_config("kl_div", "eager")
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=about["rate"], weight_decay=0.0, fused=True)

    @staticmethod
    def _documents(tensors: Tensors, tokens: list[int], dtype: torch.dtype) -> Iterator[Tensors]:
        names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask")
        for rows in zip(*(tensors[name].split(tokens) for name in names), strict=True):
            count = len(rows[0])
            sample = dict(zip(names, rows, strict=True))
            sample |= {"lengths": torch.tensor([count]), "position_ids": torch.arange(count)}
            shifted = shift_batch(sample)
            del shifted["lengths"]
            yield {name: t.to(dtype) if t.is_floating_point() else t for name, t in shifted.items()}

    def packed(self, indices: Sequence[int]) -> Tensors:
        """Some of the samples side by side."""
        parts = []
        for document, index in enumerate(indices):
            part = dict(self.documents[index])
            part["document_ids"] = torch.full_like(part["input_ids"], document)
            parts.append(part)
        return {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}

    def loss(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss and speculators' metrics."""
        _, loss, metrics = self.model(
            **self.batch, ttt_steps=self.steps, ttt_step_loss_decay=self.decay, loss_config=self.loss_config
        )
        return loss, metrics

    def step(self) -> dict[str, float]:
        """One optimiser step; its loss, and how long it took by the clock and on the processor."""
        clock, processor = time.perf_counter(), time.process_time()
        loss, _ = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        seconds, spent = time.perf_counter() - clock, time.process_time() - processor
        return {"loss": float(loss.detach()), "seconds": seconds, "processor_seconds": spent}

    def train(self, seconds: float, supervised: int, peak: float, warmup: int, seed: int) -> dict[str, Any]:
        """Train for so long, a step about `supervised` supervised tokens; returns steps, epochs and loss."""
        order: list[int] = []
        generator = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        epochs, start = 0, time.monotonic()
        while (spent := time.monotonic() - start) < seconds:
            chosen, count = [], 0
            while count < supervised:
                if not order:
                    order = torch.randperm(len(self.documents), generator=generator).tolist()
                    epochs += 1
                chosen.append(order.pop())
                count += int(self.documents[chosen[-1]]["loss_mask"].sum())
            self.batch = self.packed(chosen)
            rate = peak * min(1.0, (len(losses) + 1) / warmup) * (1 + math.cos(math.pi * spent / seconds)) / 2
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            losses.append(self.step()["loss"])
        tail = losses[-50:]
        return {"steps": len(losses), "epochs": epochs, "last_loss": sum(tail) / len(tail)}

    def operations(self) -> int:
        """Floating-point operations of a step's matrix products."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return counter.get_total_flops()

    def compare(self, out: Path) -> dict[str, Any]:
        """Write every step's logits and all gradients under the classic names; returns the losses."""
        logits: list[torch.Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda *seen: logits.append(seen[2].detach()[0]))
        loss, metrics = self.loss()
        hook.remove()
        self.model.zero_grad()
        loss.backward()
        gradients = {
            "gradient." + name.replace("layers.0.", "midlayer."): parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        save_file(gradients | {f"logits.{step}": t.contiguous() for step, t in enumerate(logits)}, out)
        steps = [float(metrics[f"loss_{step}_sum"]) for step in range(self.steps)]
        return {"loss": float(loss.detach()), "steps": steps}


def answer(request: dict[str, Any], held: dict[str, Case]) -> dict[str, Any]:
    """Do what a request asks for."""
    match request["do"]:
        case "load":
            dtype = getattr(torch, request["dtype"])
            first = request.get("first_weights", "given")
            held["case"] = Case(Path(request["folder"]), request["attention"], dtype, first)
            return {}
        case "step":
            return held["case"].step()
        case "train":
            return held["case"].train(**{name: value for name, value in request.items() if name != "do"})
        case "operations":
            return {"operations": held["case"].operations()}
        case "compare":
            return held["case"].compare(Path(request["out"]))
        case "save":
            held["case"].model.save_pretrained(request["folder"])
            return {}
        case "put":
            # Another drafter's weights under the classic names, as an engine would load them.
            drafter = {own_name(name): tensor for name, tensor in load_file(request["file"]).items()}
            problems = held["case"].model.load_state_dict(drafter, strict=False)
            return {"missing": sorted(problems.missing_keys), "unexpected": sorted(problems.unexpected_keys)}
        case "memory":
            return {"now": memory("VmRSS"), "peak": memory("VmHWM")}
        case "reset_peak":
            Path("/proc/self/clear_refs").write_text("5")
            return {"now": memory("VmRSS")}
    raise ValueError(f"unknown request {request}")


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    held: dict[str, Case] = {}
    # Libraries may print: the answers have the real output to themselves.
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), held)), file=out, flush=True)


if __name__ == "__main__":
    main()
