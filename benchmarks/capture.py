"""How fast hidden states are captured beside the bare forward pass, in process and through vLLM.

In process: the bare pass is the model's own decoder on the same batches of tokens, with no hooks, nothing
checked and nothing kept. Ours is the whole capture: hooks, checks, digests, and shards written and synced.
They take turns in one run, and the best round of each counts, since other work on the machine only ever slows
one down. On a busy machine the clock tells little even so: the processor's time, of this process and of the
servers, is given beside it.

Through vLLM (where .venv-vllm is there): the bare pass is vLLM's own prefill, one token answered for each
prompt, by a server that leaves no states. Ours is the same prompts at a server that leaves them, until they
are in the store. The servers run at the same time and are asked in turns; only the
clock is read there.

    python benchmarks/capture.py [--threads 1] [--rounds 5] [--samples 64] [--ways in_process vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from capture_states import WrittenBehind
from eyrie.config import EngineSettings, HiddenStatesSettings, SamplingSettings, TargetSettings
from eyrie.engines import Capture
from eyrie.engines.capturing import ServerCapture
from eyrie.engines.in_process import InProcessEngine
from eyrie.engines.opening import Wanted, _state_reader
from eyrie.engines.replies import AnswerRules
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.vllm import Vllm, served_model
from eyrie.serving import HOST, Server, fill_command, free_port
from eyrie.states import command_values, states_recipe
from eyrie.stopping import StopRequest
from eyrie.store import StateStore
from eyrie.target import Target
from eyrie.target_weights import TargetWeights
from identify_target import describe_target

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "models/smollm2-135m-instruct"
STATES = HiddenStatesSettings()
KIMI_HIDDEN, CAPTURED_LAYERS = 7168, 3


@dataclass(frozen=True)
class Measured:
    """Seconds of the best round of the bare pass and of ours, by the clock and by the processor."""

    tokens: int
    bare: tuple[float, float]
    ours: tuple[float, float]

    def rates(self) -> dict[str, float]:
        """Tokens per second by the clock, their ratio, and the ratio by the processor's time."""
        return {
            "bare": round(self.tokens / self.bare[0], 1),
            "capture": round(self.tokens / self.ours[0], 1),
            "ratio": round(self.bare[0] / self.ours[0], 3),
            "processor_ratio": round(self.bare[1] / self.ours[1], 3),
        }


def make_samples(count: int, vocabulary: int) -> list[list[int]]:
    """Random tokens in samples of the default build's lengths: 60 to 300, most of them short."""
    draw = random.Random(0)
    lengths = [min(300, 60 + int(draw.expovariate(1 / 70))) for _ in range(count)]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def in_turns(tokens: int, rounds: int, bare: Callable[[], object], ours: Callable[[], object]) -> Measured:
    """The best of some rounds, after one that does not count."""
    taken: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds + 1):
        for mine, way in zip(taken, (bare, ours), strict=True):
            clock, processor = time.perf_counter(), processor_seconds()
            way()
            mine.append((time.perf_counter() - clock, processor_seconds() - processor))
    best = [tuple(min(column) for column in zip(*mine[1:], strict=True)) for mine in taken]
    return Measured(tokens, (best[0][0], best[0][1]), (best[1][0], best[1][1]))


def processor_seconds() -> float:
    """The processor's time of this process and of all that it started and that still run."""
    parents, spent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            spent[int(file.parent.name)] = int(fields[11]) + int(fields[12])
    total = 0
    for process in spent:
        above = process
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and process != above:
            total += spent[process]
    return time.process_time() + total / os.sysconf("SC_CLK_TCK")


@contextmanager
def new_store(folder: Path, target: dict[str, Any]) -> Iterator[StateStore]:
    """A store that is gone after the block."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield StateStore(place, states_recipe(target, STATES, "float32"))
    finally:
        shutil.rmtree(place)


def captured(capture: Capture, samples: list[list[int]], folder: Path, target: dict[str, Any]) -> None:
    """All that a capture job does with its samples."""
    with new_store(folder, target) as store:
        with store.writer("benchmark") as writer, WrittenBehind(writer) as behind:
            for group in capture.capture(samples, STATES.dtype):
                behind.add(group)
        keys = [store.key(ids) for ids in samples]
        if len(store.find(keys)) != len(samples):
            raise SystemExit("not every sample was captured")


def in_process(
    samples: list[list[int]], settings: EngineSettings, rounds: int, folder: Path, target: dict[str, Any]
) -> Measured:
    """The bare decoder beside the in-process capture."""
    engine = InProcessEngine(Target(TARGET, "float32"), settings)
    plain = Target(TARGET, "float32", layer_ids=[])
    passes = [
        torch.tensor([ids + [0] * (len(batch[-1]) - len(ids)) for ids in batch])
        for group in engine.capture_plan(samples, STATES.dtype)
        for batch in group
    ]

    @torch.inference_mode()
    def bare() -> None:
        for ids in passes:
            plain.decoder()(input_ids=ids, use_cache=False)

    tokens = sum(map(len, samples))
    return in_turns(tokens, rounds, bare, lambda: captured(engine, samples, folder, target))


def through_vllm(
    samples: list[list[int]], arguments: argparse.Namespace, folder: Path, target: dict[str, Any]
) -> Measured:
    """vLLM's own prefill beside the capture through vLLM."""
    command = yaml.safe_load((ROOT / "configs/vllm-capture.yaml").read_text())["engine"]["command"]
    threads = f"OMP_NUM_THREADS={arguments.server_threads}"
    command = re.sub(r"OMP_NUM_THREADS=\d+", threads, command)
    in_flight = arguments.in_flight
    bare_command = command.split(" --speculative-config")[0]
    wanted = Wanted(
        target=target,
        path=TARGET,
        dtype="float32",
        states=STATES,
        sampling=SamplingSettings(max_new_tokens=1, max_in_flight=in_flight),
        context=max(map(len, samples)) + 1,
        canary_prompt=[],
        canaries=folder,
        server_log=folder / "server.log",
        arriving=folder / "arriving",
    )
    with server(bare_command, wanted, "bare") as plain, server(command, wanted, "capturing") as capturing:
        # The longest first, as the capture has them.
        ordered = sorted(samples, key=len, reverse=True)
        prompts = [(str(number), ids) for number, ids in enumerate(ordered)]
        asking = requesting(plain, wanted, None)

        def bare() -> None:
            answered = [one for group in asking.answer(prompts, wanted.sampling) for one in group]
            if len(answered) != len(samples):
                raise SystemExit("not every prompt was answered")

        head = TargetWeights(TARGET, target["files"]).head()
        reading = requesting(capturing, wanted, _state_reader(wanted, with_answer=False))
        ours = ServerCapture(reading, head, in_flight)
        tokens = sum(map(len, samples))
        return in_turns(tokens, arguments.rounds, bare, lambda: captured(ours, samples, folder, target))


@contextmanager
def server(command: str, wanted: Wanted, name: str) -> Iterator[str]:
    """A vLLM server's address."""
    port = free_port()
    values = command_values(wanted.states, wanted.path, wanted.arriving)
    words = fill_command(command, model=wanted.path, host=HOST, port=port, **values)
    log = wanted.server_log.with_name(f"{name}.log")
    with Server(words, f"http://{HOST}:{port}", log=log, ready_timeout=900, stop_grace=5) as started:
        yield started.url


def requesting(url: str, wanted: Wanted, reader: Any) -> RequestingEngine:
    """The engine that asks this server."""
    rules = AnswerRules(wanted.target["vocab_size"], frozenset(wanted.target["eos_ids"]))
    settings = EngineSettings(kind="vllm", retries=0)
    return RequestingEngine([url], Vllm(served_model(url, None), rules, reader), settings, StopRequest(0.0))


def bytes_per_token(hidden: int, layers: int) -> dict[str, int]:
    """Bytes of a token's states in the formats that the store has."""
    aux, last = layers * hidden, hidden
    scaled = aux + layers * 4
    # 64 likeliest tokens: int32 id and float16 log each, the rest's mass and the most likely token.
    top = 64 * 6 + 4 + 4
    return {"bfloat16": 2 * (aux + last), "float8": scaled + 2 * last, "float8, top 64": scaled + top}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once to vLLM")
    parser.add_argument("--server-threads", type=int, default=1, help="of each vLLM")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "work", help="where stores and servers' files go"
    )
    ways = ["in_process", *(["vllm"] if (ROOT / ".venv-vllm/.ready").exists() else [])]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="what is measured")
    arguments = parser.parse_args()
    target = describe_target(TargetSettings(name=TARGET.name, path=TARGET))
    samples = make_samples(arguments.samples, target["vocab_size"])
    arguments.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as name:
        folder = Path(name).resolve()
        settings = EngineSettings(threads=arguments.threads)
        found = {}
        if "in_process" in arguments.ways:
            found["in_process"] = in_process(samples, settings, arguments.rounds, folder, target)
        if "vllm" in arguments.ways:
            found["vllm"] = through_vllm(samples, arguments, folder, target)
    report(found, len(samples), target, arguments)


def report(
    found: dict[str, Measured], samples: int, target: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """The table, and the JSON line."""
    tokens = next(iter(found.values())).tokens
    print(f"{samples} samples, {tokens} tokens, float32, best of {arguments.rounds} rounds in turns")
    print(f"{'tokens per second':22}{'bare pass':>12}{'capture':>12}{'ratio':>8}{'processor':>12}")
    for name, measured in found.items():
        rates = measured.rates()
        print(
            f"{name:22}{rates['bare']:12.1f}{rates['capture']:12.1f}{rates['ratio']:8.3f}"
            f"{rates['processor_ratio']:12.3f}"
        )
    sizes = {
        target["name"]: bytes_per_token(target["hidden_size"], CAPTURED_LAYERS),
        "kimi-k2.5": bytes_per_token(KIMI_HIDDEN, CAPTURED_LAYERS),
    }
    print(f"{'bytes a token':22}" + "".join(f"{name:>18}" for name in sizes["kimi-k2.5"]))
    for name, formats in sizes.items():
        print(f"{name:22}" + "".join(f"{size:18,}" for size in formats.values()))
    print(
        json.dumps(
            {
                "benchmark": "capture",
                "threads": arguments.threads,
                "tokens": tokens,
                **{name: measured.rates() for name, measured in found.items()},
                "bytes_per_token": sizes,
                "share_of_bfloat16": {
                    name: round(size / sizes["kimi-k2.5"]["bfloat16"], 3)
                    for name, size in sizes["kimi-k2.5"].items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
