"""Answer the same requests under several policies, at the same memory: ``python -m benchmarks.serving requests=24``.

Requests arrive at random times (Poisson), with prompts and answers of random lengths; prompts are random words of one
token each, and no answer ends before its length. ``through`` lists the servers, each in its own process: ``server`` is
``python -m ag.serve``, ``transformers`` the server of transformers with continuous batching, which never evicts.

Writes ``serving.json`` into ``output``, and prints a table.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from ag import load_base
from ag.config import key
from ag.config.command_line import command, parse
from ag.errors import UserError
from ag.model.base import resolve

PROGRAM = "serving"
SECONDS = 3600  # longest time between two events of an answer
BLOCK = 256  # tokens of a block of transformers' cache
WARMUP = 32  # tokens of the prompt and of the answer with which a contestant begins, before the clock starts


@dataclass
class Config:
    """The keys of the measurement."""

    model: str = key("smollm2", "folder, hub id or alias of the model")
    policies: list[str] = key(
        ["full", "h2o 0.25 every", "gates:recipes/gates/smollm2 0.3 every"],
        "policies, each with its budget and its schedule behind it",
    )
    through: list[str] = key(["server", "transformers"], "servers: server, transformers")
    memory: int = key(400 * 2**20, "bytes for keys and values", ge=1)
    requests: int = key(24, "requests", ge=1)
    rate: float = key(60.0, "requests a minute, on average", ge=0.1)
    prompt: list[int] = key([256, 2048], "tokens of a prompt, from and to")
    answer: list[int] = key([32, 128], "tokens of an answer, from and to")
    system: int = key(0, "first tokens that all prompts have in common", ge=0)
    batch: int = key(64, "most answers at once", ge=1)
    prompt_lookup: int = key(0, "draft tokens in a step of the server", ge=0)
    threads: int = key(2, "CPU threads of each contestant", ge=1)
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
    """The measurements of one contestant.

    Attributes:
        contestant: name of the server and its policy.
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
        """Add the times of an answer's tokens."""
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
    """Name a contestant: the server, and the policy without the folder of its gates."""
    text, *more = policy.split()
    return f"{by}, {' '.join([text.partition(':')[0], *more])}"


# ---- the servers


def by_server(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Measure ``python -m ag.serve``."""
    text, budget, schedule, held = parts(policy)
    port = _free_port()
    command = [sys.executable, "-m", "ag.serve", f"model={config.model}", f"policy={text}", f"memory={config.memory}"]
    command += [] if budget is None else [f"budget={budget}", f"schedule={schedule}"]
    command += [f"kv_dtype={held}", "served_name=base", f"batch={config.batch}", f"port={port}"]
    command += [f"prompt_lookup={config.prompt_lookup}"]
    ends = load_base(config.model)[0].generation_config.eos_token_id
    never = {str(token): -100 for token in ([ends] if isinstance(ends, int) else ends or ())}
    body = {"model": "base", "temperature": 0, "logit_bias": never}
    found = Found(called("server", policy), at_once=0)
    return _asked(config, command, port, _Client(port, body, [ask.tokens for ask in todo]), found, todo)


def by_transformers(config: Config, policy: str, todo: list[Ask]) -> Found:
    """Measure the server of transformers, which takes texts alone."""
    model, tokenizer = load_base(config.model)
    port, base = _free_port(), resolve(config.model)
    width = model.config.head_dim * model.config.num_key_value_heads * 2 * model.config.num_hidden_layers
    blocks, batch = int(config.memory // (width * model.dtype.itemsize * BLOCK)), 512 + config.batch
    command = [str(Path(sys.executable).with_name("transformers")), "serve", base, "--device", "cpu"]
    command += ["--dtype", str(model.dtype).removeprefix("torch."), "--continuous-batching", "--port", str(port)]
    command += ["--cb-block-size", str(BLOCK), "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(batch)]
    settings = json.dumps({"do_sample": False, "eos_token_id": -1, "max_new_tokens": WARMUP})
    texts = tokenizer.batch_decode([ask.tokens for ask in todo])
    asked = _Client(port, {"model": base, "generation_config": settings}, texts)
    return _asked(config, command, port, asked, Found("transformers serve, whole cache"), todo)


def _asked(config: Config, command: list[str], port: int, client: _Client, found: Found, todo: list[Ask]) -> Found:
    """Start a server in its own process, let a client send the requests, and end the server."""
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(config.threads)})
    try:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return asyncio.run(client.all(found, todo, process.pid))
            time.sleep(0.2)
        raise UserError(f"{' '.join(command)} ended with {process.returncode}; see above.")
    finally:
        process.terminate()
        process.wait(60)


class _Client:
    """A client that asks a server for completions.

    Args:
        port: of the server, on this machine.
        body: keys of each request beside its prompt and its length.
        prompts: of the requests, token ids or texts.
    """

    def __init__(self, port: int, body: dict[str, Any], prompts: list[Any]) -> None:
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(SECONDS)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits)
        self._body, self._prompts = body, prompts

    async def all(self, found: Found, todo: list[Ask], process: int) -> Found:
        """Send each request at its time; returns the measurements, with the peak memory of the process."""
        async with self._client:
            await self._times(self._prompts[0][:WARMUP], WARMUP)
            begun = time.perf_counter()

            async def one(prompt: Any, ask: Ask) -> None:
                await asyncio.sleep(max(0.0, begun + ask.at - time.perf_counter()))
                found.take(begun + ask.at, await self._times(prompt, ask.answer))
                found.seconds = max(found.seconds, time.perf_counter() - begun)

            watching = asyncio.create_task(self._watch(found))
            await asyncio.gather(*map(one, self._prompts, todo))
            watching.cancel()
        found.tokens = sum(ask.answer for ask in todo)
        status = Path(f"/proc/{process}/status").read_text().splitlines()
        found.peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        return found

    async def _times(self, prompt: Any, length: int) -> list[float]:
        """Return the time of each part of an answer."""
        heard = []
        body = {**self._body, "prompt": prompt, "max_tokens": length, "stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as stream:
            if stream.status_code != 200:
                raise UserError(f"server: {stream.status_code}: {(await stream.aread()).decode():.200}")
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    heard.append(time.perf_counter())
        return heard

    async def _watch(self, found: Found) -> None:
        """Record the number of answers that ``ag.serve`` writes at once."""
        while found.at_once is not None:
            lines = (await self._client.get("/metrics")).text.splitlines()
            running = next(line for line in lines if line.startswith('ag_answers{state="running"}'))
            found.at_once = max(found.at_once, int(float(running.split()[-1])))
            await asyncio.sleep(1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _words(tokenizer: Any) -> list[int]:
    """Return tokens that are whole words: a text of them is tokenized into the same tokens."""
    return sorted(token for piece, token in tokenizer.get_vocab().items() if piece[:1] in "Ġ▁" and piece[1:].isalpha())


BY = {"server": by_server, "transformers": by_transformers}


def measured(config: Config) -> Iterator[Found]:
    """Measure each contestant with the same requests."""
    todo = asks(config, _words(load_base(config.model)[1]))
    for by in config.through:
        if by not in BY:
            raise UserError(f"through: {by!r}: expected {', '.join(BY)}.")
        for policy in config.policies[:1] if by == "transformers" else config.policies:
            yield BY[by](config, policy, todo)


def table(results: list[Found]) -> str:
    """Return the measurements as a table."""
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
    """Measure, and write ``serving.json``."""
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
