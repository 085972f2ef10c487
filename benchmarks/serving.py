"""Answer the same requests under several policies, at the same memory: ``python -m benchmarks.serving requests=24``.

Requests arrive at random times (Poisson), with prompts and answers of random lengths; prompts are random words of one
token each, and no answer ends before its length. ``through`` says who answers, each in a process of its own:

- ``server``: ``python -m ag.serve``, asked by HTTP;
- ``scheduler``: ``ag.serve.Scheduler``, which is what the server costs less;
- ``transformers``: ``transformers serve`` with continuous batching, asked by HTTP. Its cache is always whole.

Writes ``serving.json`` into ``output``, and prints a table.
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
from collections.abc import Iterator, Sequence
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
BLOCK = 256  # tokens of a block of transformers' cache
WARMUP = 32  # tokens of the prompt and of the answer with which a contestant begins, before the clock starts


@dataclass
class Config:
    """What the measurement can be told."""

    model: str = key("smollm2", "folder, hub id or alias of the model")
    policies: list[str] = key(
        ["full", "h2o 0.25 every", "gates:recipes/gates/smollm2 0.3 every"],
        "policies, each with its budget and its schedule behind it",
    )
    through: list[str] = key(["server", "scheduler", "transformers"], "who answers: server, scheduler, transformers")
    memory: int = key(400 * 2**20, "bytes for keys and values", low=1)
    requests: int = key(24, "requests", low=1)
    rate: float = key(60.0, "requests a minute, on average", low=0.1)
    prompt: list[int] = key([256, 2048], "tokens of a prompt, from and to")
    answer: list[int] = key([32, 128], "tokens of an answer, from and to")
    system: int = key(0, "first tokens that all prompts have in common", low=0)
    batch: int = key(64, "most answers at once", low=1)
    prompt_lookup: int = key(0, "draft tokens in a step of the scheduler and its server", low=0)
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
        at_once: most answers that were written at once; None means that it is not known.
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


def asks(config: Config, words: Sequence[int]) -> list[Ask]:
    """Draw the requests, whose prompts have these tokens, in the order of their times."""
    draw, at, found = random.Random(config.seed), 0.0, []
    system = draw.choices(words, k=config.system)
    for _ in range(config.requests):
        own = draw.choices(words, k=draw.randint(*config.prompt))
        found.append(Ask(at, system + own, draw.randint(*config.answer)))
        at += draw.expovariate(config.rate / 60)
    return found


def parts(policy: str) -> tuple[str, str | None, str, str]:
    """Split a policy of the command line into its text, its budget, its schedule and its kv_dtype."""
    text, budget, schedule, held, *more = (*policy.split(), None, None, None)[:5]
    if text is None or any(more):
        words = "POLICY [BUDGET [SCHEDULE [KV_DTYPE]]], such as 'h2o 0.25 every' or 'full null prefill int8'"
        raise UserError(f"policies: {policy!r}: expected {words}.")
    return text, None if budget == "null" else budget, schedule or "prefill", held or "float"


def called(by: str, policy: str) -> str:
    """Name a contestant: who answers, and the policy without the folder of its gates."""
    text, *more = policy.split()
    return f"{by}, {' '.join([text.partition(':')[0], *more])}"


# ---- who answers


def by_scheduler(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Let a scheduler answer, in this process."""
    import torch

    import ag
    from ag.serve import Request, Scheduler

    torch.set_num_threads(config.threads)
    model, tokenizer = ag.load_base(config.model)
    text, budget, schedule, held = parts(policy)
    made = ag.policy(text, None if budget is None else json.loads(budget), schedule, kv_dtype=held)
    scheduler = Scheduler(
        model.eval(),
        tokenizer,
        made,
        ag.Pool(model, config.memory, made.kv_dtype),
        batch=config.batch,
        prompt_lookup=config.prompt_lookup,
    )
    ends, found = sorted(scheduler._ends), Found(called("scheduler", policy), at_once=0)
    times: list[list[float]] = [[] for _ in range(len(todo) + 1)]

    def submit(number: int, ask: Ask) -> None:
        def hear(_: int, event: object) -> None:
            times[number].append(time.perf_counter())
            found.at_once = max(found.at_once or 0, len(scheduler._running))
            if isinstance(event, Exception):
                raise event

        never = dict.fromkeys(ends, -100.0)
        scheduler.submit(Request(tokens=ask.tokens, max_tokens=ask.answer, logit_bias=never), hear)

    worker = Thread(target=scheduler.run)
    worker.start()
    submit(len(todo), Ask(0.0, todo[0].tokens[:WARMUP], WARMUP))
    while scheduler.busy:
        time.sleep(0.01)
    begun = time.perf_counter()
    for number, ask in enumerate(todo):
        time.sleep(max(0.0, begun + ask.at - time.perf_counter()))
        submit(number, ask)
    scheduler.stop()
    worker.join()
    for ask, heard in zip(todo, times, strict=False):
        found.take(begun + ask.at, heard[:-1])  # the last event is the end
    found.seconds, found.tokens = max(heard[-1] for heard in times[:-1]) - begun, sum(ask.answer for ask in todo)
    found.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def by_server(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Ask a server in a process of its own by HTTP."""
    text, budget, schedule, held = parts(policy)
    command = [sys.executable, "-m", "ag.serve", f"model={config.model}", f"policy={text}", f"memory={config.memory}"]
    command += [] if budget is None else [f"budget={budget}", f"schedule={schedule}"]
    command += [f"kv_dtype={held}", "served_name=base", f"batch={config.batch}"]
    command += [f"prompt_lookup={config.prompt_lookup}"]
    port = _free_port()
    never = {str(token): -100 for token in _ends(config.model)}
    with _started([*command, f"port={port}"], port, config) as process:
        body = {"model": "base", "temperature": 0, "logit_bias": never}
        found = Found(called("server", policy), at_once=0)
        return asyncio.run(_ask(port, body, [ask.tokens for ask in todo], todo, found, process.pid))


def by_transformers(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Ask the server of transformers in a process of its own by HTTP; it takes texts alone."""
    import ag
    from ag.model.base import resolve

    model, tokenizer = ag.load_base(config.model)
    port, blocks, batch, base = _free_port(), _blocks(config, model), 512 + config.batch, resolve(config.model)
    command = [str(Path(sys.executable).with_name("transformers")), "serve", base, "--device", "cpu"]
    command += ["--dtype", str(model.dtype).removeprefix("torch."), "--continuous-batching", "--port", str(port)]
    command += ["--cb-block-size", str(BLOCK), "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(batch)]
    settings = json.dumps({"do_sample": False, "eos_token_id": -1, "max_new_tokens": WARMUP})
    with _started(command, port, config) as process:
        texts = tokenizer.batch_decode([ask.tokens for ask in todo])
        body, found = {"model": base, "generation_config": settings}, Found("transformers serve, whole cache")
        return asyncio.run(_ask(port, body, texts, todo, found, process.pid))


async def _ask(
    port: int, body: dict[str, Any], prompts: Sequence[Any], todo: list[Ask], found: Found, process: int
) -> Found:
    """Ask a server for completions as it is time for each request; returns what came of it.

    Args:
        port: of the server, on this machine.
        body: what each request says beside its prompt and its length.
        prompts: of the requests, token ids or texts.
        todo: the requests.
        found: is filled; where ``at_once`` is not None, it is read from the server's metrics.
        process: of the server, whose most memory is read.
    """
    import httpx

    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(SECONDS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits) as client:

        async def times(prompt: Any, length: int) -> list[float]:
            """Return when each part of an answer came."""
            heard = []
            asked = {**body, "prompt": prompt, "max_tokens": length, "stream": True}
            async with client.stream("POST", "/v1/completions", json=asked) as stream:
                if stream.status_code != 200:
                    raise UserError(f"server: {stream.status_code}: {(await stream.aread()).decode():.200}")
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        heard.append(time.perf_counter())
            return heard

        async def one(prompt: Any, ask: Ask) -> None:
            await asyncio.sleep(max(0.0, begun + ask.at - time.perf_counter()))
            found.take(begun + ask.at, await times(prompt, ask.answer))
            found.seconds = max(found.seconds, time.perf_counter() - begun)

        async def watch() -> None:
            """Note how many answers a server of ours writes at once."""
            while found.at_once is not None:
                lines = (await client.get("/metrics")).text.splitlines()
                running = next(line for line in lines if line.startswith('ag_answers{state="running"}'))
                found.at_once = max(found.at_once, int(float(running.split()[-1])))
                await asyncio.sleep(1)

        await times(prompts[0][:WARMUP], WARMUP)
        begun = time.perf_counter()
        watching = asyncio.create_task(watch())
        await asyncio.gather(*map(one, prompts, todo))
        watching.cancel()
    found.tokens = sum(ask.answer for ask in todo)
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    found.peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return found


@contextmanager
def _started(command: list[str], port: int, config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it answers; it ends with the block."""
    import httpx

    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(config.threads)})
    try:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.2)
        else:
            raise UserError(f"{' '.join(command)} ended with {process.returncode}; see above.")
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _blocks(config: Config, model: Any) -> int:
    """Return the blocks of transformers' cache that have the memory."""
    width = model.config.head_dim * model.config.num_key_value_heads * 2 * model.config.num_hidden_layers
    return int(config.memory // (width * model.dtype.itemsize * BLOCK))


def _words(tokenizer: Any) -> list[int]:
    """Return tokens that are whole words, so that a text of them has them again."""
    return sorted(token for piece, token in tokenizer.get_vocab().items() if piece[:1] in "Ġ▁" and piece[1:].isalpha())


def _ends(model: str) -> list[int]:
    """Return the tokens that end a text."""
    import ag

    found = ag.load_base(model)[0].generation_config.eos_token_id
    return [found] if isinstance(found, int) else list(found or ())


BY = {"server": by_server, "scheduler": by_scheduler, "transformers": by_transformers}


def measured(config: Config) -> Iterator[Found]:
    """Measure each contestant, in a process of its own, with the same requests."""
    from ag import load_base

    todo = asks(config, _words(load_base(config.model)[1]))
    for by in config.through:
        if by not in BY:
            raise UserError(f"through: {by!r}: expected {', '.join(BY)}.")
        for policy in config.policies[:1] if by == "transformers" else config.policies:
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
    """Write the median and the 95th percentile of values, times a factor."""
    high = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return f"{median(values) * factor:.{digits}f}, {high * factor:.{digits}f}"


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Measure, and write down what was found."""
    config, results = parse(argv, Config, PROGRAM).config, []
    for found in measured(config):
        results.append(found)
        print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)  # as it comes
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"settings": asdict(config), "found": [asdict(one) for one in results]}
    (folder / "serving.json").write_text(json.dumps(record) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
