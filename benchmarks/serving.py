"""Answer the same requests under several policies, at the same memory: ``python -m benchmarks.serving requests=24``.

Requests arrive at random times (Poisson), with prompts and answers of random lengths; prompts are random token ids, and
no answer ends before its length. ``through=server`` starts ``python -m ag.serve`` in a process of its own for each
policy and asks by HTTP, ``through=batcher`` gives the same requests to ``ag.serve.Batcher`` in a process of its own,
which is what the server costs less, and ``through=transformers`` to transformers' continuous batching, whose cache is
always whole. Writes ``serving.json`` into ``output``, and prints a table.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from threading import Thread
from typing import Any

from ag.config import key
from ag.config.command_line import command, parse
from ag.errors import UserError

PROGRAM = "serving"
SECONDS = 3600  # longest time between two events of an answer
WARMUP = 32  # tokens of the prompt and of the answer with which a contestant begins, before the clock starts


@dataclass
class Config:
    """What the measurement can be told."""

    model: str = key("smollm2", "folder, hub id or alias of the model")
    policies: list[str] = key(
        ["full", "h2o 0.25 every", "gates:recipes/gates/smollm2 0.3 every"],
        "policies, each with its budget and its schedule behind it",
    )
    through: list[str] = key(["server", "batcher", "transformers"], "who answers: server, batcher, transformers")
    memory: int = key(400 * 2**20, "bytes for keys and values", low=1)
    requests: int = key(24, "requests", low=1)
    rate: float = key(60.0, "requests a minute, on average", low=0.1)
    prompt: list[int] = key([256, 2048], "tokens of a prompt, from and to")
    answer: list[int] = key([32, 128], "tokens of an answer, from and to")
    system: int = key(0, "first tokens that all prompts have in common", low=0)
    batch: int = key(64, "most answers at once", low=1)
    threads: int = key(2, "CPU threads of each contestant", low=1)
    seed: int = key(0, "of lengths, tokens and times")
    output: str = key("runs/bench", "folder for serving.json")


@dataclass
class Ask:
    """A request: when it comes, in seconds, its prompt, and how long its answer is."""

    at: float
    tokens: list[int]
    answer: int


@dataclass
class Found:
    """What came of the requests to one contestant.

    Attributes:
        contestant: who answered, and under which policy.
        first: seconds from each request to its first token.
        between: seconds from each token to the next one of the same answer.
        seconds: from the first request to the last token.
        tokens: of all answers.
        at_once: most answers that were written at once; None: it is not known.
        peak: most bytes of memory of the process.
    """

    contestant: str
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    at_once: int | None = None
    peak: int = 0

    def take(self, asked: float, times: list[float]) -> None:
        """Take the times of an answer's tokens in."""
        self.first.append(times[0] - asked)
        self.between += [later - sooner for sooner, later in zip(times, times[1:], strict=False)]


def asks(config: Config, vocabulary: int) -> list[Ask]:
    """Draw the requests, in the order of their times."""
    draw, at, found = random.Random(config.seed), 0.0, []
    system = [draw.randrange(vocabulary) for _ in range(config.system)]
    for _ in range(config.requests):
        own = [draw.randrange(vocabulary) for _ in range(draw.randint(*config.prompt))]
        found.append(Ask(at, system + own, draw.randint(*config.answer)))
        at += draw.expovariate(config.rate / 60)
    return found


def parts(policy: str) -> tuple[str, str | None, str]:
    """Split a policy of the command line into its text, its budget and its schedule."""
    text, budget, schedule, *more = (*policy.split(), None, None)[:4]
    if text is None or any(more):
        raise UserError(f"policies: {policy!r}: expected POLICY [BUDGET [SCHEDULE]], such as 'h2o 0.25 every'.")
    return text, budget, schedule or "prefill"


# ---- who answers


def by_batcher(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Let a batcher answer, in this process."""
    import torch

    import ag
    from ag.serve import Batcher, Request

    torch.set_num_threads(config.threads)
    model, tokenizer = ag.load_base(config.model)
    text, budget, schedule = parts(policy)
    made = ag.policy(text, None if budget is None else json.loads(budget), schedule)
    batcher = Batcher(model.eval(), tokenizer, made, ag.Pool(model, config.memory), batch=config.batch)
    ends, found = sorted(batcher._ends), Found(f"batcher, {text}", at_once=0)
    times: list[list[float]] = [[] for _ in range(len(todo) + 1)]

    def submit(number: int, ask: Ask) -> None:
        def hear(_: int, event: object) -> None:
            times[number].append(time.perf_counter())
            found.at_once = max(found.at_once or 0, len(batcher._running))
            if isinstance(event, Exception):
                raise event

        never = dict.fromkeys(ends, -100.0)
        batcher.submit(Request(tokens=ask.tokens, max_tokens=ask.answer, logit_bias=never), hear)

    worker = Thread(target=batcher.run)
    worker.start()
    submit(len(todo), Ask(0.0, todo[0].tokens[:WARMUP], WARMUP))
    while batcher.busy:
        time.sleep(0.01)
    begun = time.perf_counter()
    for number, ask in enumerate(todo):
        time.sleep(max(0.0, begun + ask.at - time.perf_counter()))
        submit(number, ask)
    batcher.stop()
    worker.join()
    for ask, heard in zip(todo, times, strict=False):
        found.take(begun + ask.at, heard[:-1])  # the last event is the end
    found.seconds, found.tokens = max(heard[-1] for heard in times[:-1]) - begun, sum(ask.answer for ask in todo)
    found.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def by_transformers(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Let transformers' continuous batching answer, in this process."""
    import torch
    from transformers import ContinuousBatchingConfig

    import ag

    torch.set_num_threads(config.threads)
    model: Any = ag.load_base(config.model)[0]
    settings = model.generation_config
    settings.do_sample, settings.eos_token_id = False, -1
    width = model.config.head_dim * model.config.num_key_value_heads * 2 * model.config.num_hidden_layers
    blocks = config.memory // (width * model.dtype.itemsize * 256)
    room = ContinuousBatchingConfig(block_size=256, num_blocks=blocks, max_batch_tokens=512 + config.batch)
    found, times, asked = Found("transformers, whole cache"), dict[str, list[float]](), dict[str, float]()
    with model.continuous_batching_context_manager(settings, continuous_batching_config=room) as manager:
        manager.add_request(todo[0].tokens[:WARMUP], max_new_tokens=WARMUP)
        while not (out := manager.get_result(timeout=1)) or not out.is_finished():
            pass
        begun, number = time.perf_counter(), 0
        while sum(len(x) for x in times.values()) < sum(ask.answer for ask in todo):
            while number < len(todo) and time.perf_counter() - begun >= todo[number].at:
                name, ask = f"ask {number}", todo[number]
                asked[name], times[name] = begun + ask.at, []
                manager.add_request(ask.tokens, request_id=name, max_new_tokens=ask.answer, streaming=True)
                number += 1
            out = manager.get_result(timeout=0.01)
            if out is not None:
                new = len(out.generated_tokens) - len(times[out.request_id])
                times[out.request_id] += [time.perf_counter()] * new
    for name, heard in times.items():
        found.take(asked[name], heard)
    found.seconds, found.tokens = max(x[-1] for x in times.values()) - begun, sum(map(len, times.values()))
    found.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def by_server(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Ask a server in a process of its own by HTTP."""
    import httpx

    text, _, _ = parts(policy)

    async def ask_all(url: str, ends: list[int]) -> Found:
        found = Found(f"server, {text}", at_once=0)
        never = {str(token): -100 for token in ends}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(SECONDS), limits=limits) as client:

            async def answer(ask: Ask) -> list[float]:
                heard = []
                body = {"model": (await client.get("/v1/models")).json()["data"][0]["id"], "prompt": ask.tokens}
                body |= {"max_tokens": ask.answer, "stream": True, "temperature": 0, "logit_bias": never}
                async with client.stream("POST", "/v1/completions", json=body) as stream:
                    if stream.status_code != 200:
                        raise UserError(f"server: {stream.status_code}: {(await stream.aread()).decode():.200}")
                    async for line in stream.aiter_lines():
                        if line.startswith("data: {"):
                            heard.append(time.perf_counter())
                return heard

            async def one(ask: Ask) -> None:
                await asyncio.sleep(max(0.0, begun + ask.at - time.perf_counter()))
                found.take(begun + ask.at, await answer(ask))
                found.seconds = max(found.seconds, time.perf_counter() - begun)

            async def watch() -> None:
                while True:
                    lines = (await client.get("/metrics")).text.splitlines()
                    running = next(line for line in lines if line.startswith('ag_answers{state="running"}'))
                    found.at_once = max(found.at_once or 0, int(float(running.split()[-1])))
                    await asyncio.sleep(1)

            await answer(Ask(0.0, todo[0].tokens[:WARMUP], WARMUP))
            begun, watching = time.perf_counter(), asyncio.create_task(watch())
            await asyncio.gather(*map(one, todo))
            watching.cancel()
        found.tokens = sum(ask.answer for ask in todo)
        return found

    with _server(config, policy) as (url, process):
        found = asyncio.run(ask_all(url, _ends(config.model)))
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        found.peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return found


@contextmanager
def _server(config: Config, policy: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server; gives its address and its process, and ends it."""
    import httpx

    text, budget, schedule = parts(policy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [f"model={config.model}", f"policy={text}", f"memory={config.memory}", f"port={port}"]
    words += [f"batch={config.batch}", *([] if budget is None else [f"budget={budget}", f"schedule={schedule}"])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads)}
    process = subprocess.Popen([sys.executable, "-m", "ag.serve", *words], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.2)
        else:
            raise UserError(f"ag.serve {' '.join(words)} ended with {process.returncode}; see above.")
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def _ends(model: str) -> list[int]:
    """Return the tokens that end a text."""
    import ag

    found = ag.load_base(model)[0].generation_config.eos_token_id
    return [found] if isinstance(found, int) else list(found or ())


BY = {"server": by_server, "batcher": by_batcher, "transformers": by_transformers}


def measured(config: Config) -> Iterator[Found]:
    """Measure each contestant, in a process of its own, with the same requests."""
    from ag import load_base

    todo = asks(config, load_base(config.model)[0].config.vocab_size - 1)
    for by in config.through:
        if by not in BY:
            raise UserError(f"through: {by!r}: expected {', '.join(BY)}.")
        for policy in config.policies if by != "transformers" else config.policies[:1]:
            with multiprocessing.get_context("spawn").Pool(1) as one:
                yield one.apply(BY[by], (config, policy, todo))


def table(results: list[Found]) -> str:
    """Return what was found as a table."""
    head = "| | requests/min | tokens/s | first token, s: median, 95th | next token, ms: median, 95th | at once | GiB |"
    lines = [head, "|---" * 7 + "|"]
    for x in results:
        first, between = _spread(x.first, 1, 1), _spread(x.between, 1000, 0)
        speed = f"{60 * len(x.first) / x.seconds:.1f} | {x.tokens / x.seconds:.1f}"
        at_once = "" if x.at_once is None else x.at_once
        lines.append(f"| {x.contestant} | {speed} | {first} | {between} | {at_once} | {x.peak / 2**30:.2f} |")
    return "\n".join(lines)


def _spread(values: list[float], factor: float, digits: int) -> str:
    high = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return ", ".join(f"{x * factor:.{digits}f}" for x in (median(values), high))


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Measure, and write down what was found."""
    config = parse(argv, Config, PROGRAM).config
    results = []
    for found in measured(config):
        results.append(found)
        print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"settings": asdict(config), "found": [asdict(x) for x in results]}
    (folder / "serving.json").write_text(json.dumps(record) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
