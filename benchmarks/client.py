"""How full the client keeps a server, and what it costs, beside the plain way of asking.

The server is simulated, in a process of its own: 200 slots, a fixed rate of tokens in each, answers with a
long tail of lengths, time compressed. It knows when each slot was busy. Counted are the slot-seconds that
went into answers which were received, over all slot-seconds from the first request until only the last 200
prompts are unanswered; after that there is nothing to fill the slots with.

The plain way stands here as it is usually written: a thread pool, one new client for each sample, all
futures made at once, results written as they complete, all of them kept. Memory is the growth of the
process's largest size since its modules were loaded; it is measured on short answers, since it is about their
number. Other work on the machine delays server and clients alike and shows as slots that stay empty.

    python benchmarks/client.py [--prompts 2000] [--many 20000]
    python benchmarks/client.py --url http://127.0.0.1:8000 --prompts 200 --vocabulary 49152 --eos 2

The second form asks a real vLLM, and tells rates and cost only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.config import EngineSettings, SamplingSettings
from eyrie.engines import Answered
from eyrie.engines.replies import AnswerRules, Request
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.vllm import Vllm, served_model
from eyrie.journals import Journal
from eyrie.stopping import StopRequest

SLOTS = 200
PROMPT_TOKENS = 300
LONGEST = 10_240
MEDIAN_TOKENS, SIGMA = 1100, 0.9
LAST = 200


# The simulated server.


def answer_tokens(number: int, longest: int) -> int:
    """How long the answer to prompt `number` is: log-normal, cut at the longest."""
    return min(longest, max(1, int(random.Random(number).lognormvariate(0.0, SIGMA) * MEDIAN_TOKENS)))


class SimulatedServer:
    """Slots that are busy for as long as an answer has tokens; the busy times are its book."""

    def __init__(self, tokens_per_second: float) -> None:
        self._rate = tokens_per_second
        self._slots = asyncio.Semaphore(SLOTS)
        self.book: list[tuple[int, float, float]] = []
        """(number of the prompt, when its slot was taken, when it was free again)."""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept open for as long as the client likes."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *headers = head.decode().split("\r\n")
                lengths = [h.partition(":")[2] for h in headers if h.lower().startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                reply = await self._reply(line.split()[1], body)
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(reply)}\r\n\r\n".encode() + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(self, path: str, body: bytes) -> bytes:
        if path == "/book":
            book, self.book = self.book, []
            return json.dumps(book).encode()
        if path != "/v1/completions":
            return json.dumps({"data": [{"id": "simulated"}]}).encode()
        request = json.loads(body)
        ids, limit = request["prompt"], request["max_tokens"]
        tokens = answer_tokens(ids[0], limit)
        async with self._slots:
            start = time.monotonic()
            await asyncio.sleep(tokens / self._rate)
            self.book.append((ids[0], start, time.monotonic()))
        return _completion(ids, tokens, limit)


def _completion(ids: list[int], tokens: int, limit: int) -> bytes:
    """A reply as vLLM gives it; put together from text, as the server is not what is measured."""
    ended = tokens < limit
    answer = ",".join(["17"] * (tokens - ended) + ["2"] * ended)
    reason = "stop" if ended else "length"
    return (
        f'{{"model":"simulated","choices":[{{"index":0,"text":"","finish_reason":"{reason}",'
        f'"token_ids":[{answer}],"prompt_token_ids":{json.dumps(ids)}}}],'
        f'"usage":{{"prompt_tokens":{len(ids)},"completion_tokens":{tokens}}}}}'
    ).encode()


async def serve(tokens_per_second: float) -> None:
    """Serve until the process is ended; prints the address."""
    simulated = SimulatedServer(tokens_per_second)
    server = await asyncio.start_server(simulated.talk, "127.0.0.1", 0, limit=1 << 22, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


# The two clients; each measurement is a process of its own.


def prompts(count: int, vocabulary: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Prompts of random tokens; the first token is the prompt's number, where the vocabulary has so many.

    seed: each way has its own, or a real server would have the second one's prompts in its cache.
    """
    draw = random.Random(seed)
    for number in range(count):
        ids = [draw.randrange(3, min(vocabulary, 20_000)) for _ in range(PROMPT_TOKENS)]
        ids[0] = number if vocabulary > count else ids[0]
        yield f"{number:032x}", ids


def ask_as_eyrie_does(arguments: argparse.Namespace, folder: Path) -> tuple[int, dict[str, int]]:
    """The engine and the journal, as the answering job uses them."""
    settings = EngineSettings(kind="vllm", urls=[arguments.url])
    rules = AnswerRules(arguments.vocabulary, frozenset(arguments.eos))
    dialect = Vllm(served_model(arguments.url, None), rules)
    engine = RequestingEngine([arguments.url], dialect, settings, StopRequest(0.0))
    answered = 0
    with Journal(folder / "answers.jsonl") as journal:
        for group in engine.answer(
            prompts(arguments.prompts, arguments.vocabulary, 0), sampling_of(arguments)
        ):
            rows = [
                {"key": one.key, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
                for one in group
                if isinstance(one, Answered)
            ]
            answered += len(rows)
            if rows:
                journal.append(rows)
    return answered, engine.errors()


def ask_plainly(arguments: argparse.Namespace, folder: Path) -> tuple[int, dict[str, int]]:
    """A thread pool and a new client for each sample, as it is usually written."""
    dialect = Vllm(served_model(arguments.url, None), AnswerRules(arguments.vocabulary, frozenset()))
    sampling = sampling_of(arguments)

    def one_answer(key: str, ids: list[int]) -> dict[str, Any]:
        reply = requests.post(
            f"{arguments.url}/v1/completions",
            json=dialect.body(Request(key, key, ids, sampling)),
            timeout=3600,
        ).json()
        choice = reply["choices"][0]
        return {"key": key, "token_ids": choice["token_ids"], "finish_reason": choice["finish_reason"]}

    results = []
    with ThreadPoolExecutor(SLOTS) as pool, (folder / "answers.jsonl").open("w") as file:
        asked = prompts(arguments.prompts, arguments.vocabulary, 1)
        futures = [pool.submit(one_answer, key, ids) for key, ids in asked]
        for future in as_completed(futures):
            results.append(future.result())
            file.write(json.dumps(results[-1]) + "\n")
    return len(results), {}


def sampling_of(arguments: argparse.Namespace) -> SamplingSettings:
    """Greedy, as many in flight as there are slots."""
    return SamplingSettings(max_new_tokens=arguments.longest, max_in_flight=SLOTS)


def be_client(arguments: argparse.Namespace) -> None:
    """Ask all prompts one way; prints what it took."""
    ask = ask_as_eyrie_does if arguments.client == "eyrie" else ask_plainly
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answered, errors = ask(arguments, Path(folder))
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "answered": answered,
        "seconds": time.monotonic() - start,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "grown_mib": (after.ru_maxrss - before.ru_maxrss) / 1024,
        "errors": errors,
    }
    print(json.dumps(figures))


# The measurement.


def measured(
    way: str, url: str, prompts_asked: int, longest: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One client's run, and how busy the slots were where the server is the simulated one."""
    command = [sys.executable, __file__, "--client", way, "--url", url, "--prompts", str(prompts_asked)]
    command += ["--longest", str(longest), "--vocabulary", str(arguments.vocabulary)]
    command += ["--eos", *map(str, arguments.eos)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    if arguments.url is None:
        figures["useful_share"] = useful_share(requests.get(f"{url}/book", timeout=60).json())
    figures["cpu_seconds_per_1000"] = 1000 * figures["cpu_seconds"] / figures["answered"]
    return figures


def useful_share(book: list[tuple[int, float, float]]) -> float | None:
    """Busy slot-seconds over available ones, up to when only the last prompts are unanswered.

    A prompt that was answered twice is useful once. None where there were not enough prompts.
    """
    last = {number: (start, end) for number, start, end in book}
    if len(last) <= 2 * LAST:
        return None
    begin = min(start for start, _ in last.values())
    until = sorted(end for _, end in last.values())[-LAST]
    busy = sum(max(0.0, min(end, until) - start) for start, end in last.values())
    return busy / (SLOTS * (until - begin))


def main() -> None:
    """Run the measurement, or one of its processes."""
    arguments = _arguments()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve))
    elif arguments.client is not None:
        be_client(arguments)
    elif arguments.url is not None:
        report(
            {
                way: measured(way, arguments.url, arguments.prompts, arguments.longest, arguments)
                for way in WAYS
            }
        )
    else:
        report(measured_on_simulation(arguments))


WAYS = ("eyrie", "plain")


def measured_on_simulation(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Fullness and cost with answers of all lengths; memory with few and many short ones."""
    runs = {}
    # Mean answer: exp(sigma**2 / 2) times the median.
    rate = MEDIAN_TOKENS * 2.718281828 ** (SIGMA**2 / 2) / arguments.mean_seconds
    with _server(rate) as url:
        for way in WAYS:
            runs[way] = measured(way, url, arguments.prompts, LONGEST, arguments)
    with _server(1e9) as url:
        for count in (1000, arguments.many):
            for way in WAYS if count == 1000 or arguments.plain_many else WAYS[:1]:
                runs[f"{way}, {count} short"] = measured(way, url, count, 64, arguments)
    return runs


class _server:
    """The simulated server as a process."""

    def __init__(self, rate: float) -> None:
        command = [sys.executable, __file__, "--serve", str(rate)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def report(runs: dict[str, dict[str, Any]]) -> None:
    """The table, and all figures as one JSON object."""
    print(f"{'':24} {'answers/s':>10} {'slots full':>11} {'CPU s/1,000':>12} {'grown MiB':>10}")
    for name, run in runs.items():
        share = run.get("useful_share")
        full = "" if share is None or "short" in name else f"{share:.3f}"
        print(
            f"{name:24} {run['answered'] / run['seconds']:10.1f} {full:>11} "
            f"{run['cpu_seconds_per_1000']:12.2f} {run['grown_mib']:10.1f}"
        )
    print(json.dumps(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="prompts of the main measurement")
    parser.add_argument("--many", type=int, default=20_000, help="prompts of the larger memory measurement")
    parser.add_argument("--plain-many", action="store_true", help="the plain way with so many prompts, too")
    parser.add_argument("--mean-seconds", type=float, default=4.0, help="simulated seconds of a mean answer")
    parser.add_argument("--url", help="a vLLM to ask instead of the simulated server")
    parser.add_argument("--longest", type=int, default=64, help="new tokens, with --url")
    parser.add_argument("--vocabulary", type=int, default=1 << 20, help="the model's, with --url")
    parser.add_argument("--eos", type=int, nargs="+", default=[2], help="the model's end tokens, with --url")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
