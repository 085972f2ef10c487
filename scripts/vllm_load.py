"""Tokens per CPU second of vLLM, of vLLM with gates, of ag.serve and of transformers' continuous batching.

    build/vllm/bin/python scripts/vllm_load.py [--only NAME ...] [--at-once 1,6] [--rounds 3] [--gates smollm2]

All answer the same prompts (600 random tokens, new in each round, and 64 tokens of answer), in bfloat16 with one
thread, one after another in each round. CPU seconds are those of a contestant's processes, so that other work on the
machine counts little. The others are stopped meanwhile: a server that waits may poll, and slow the core beside it. The
environment is that of scripts/vllm_env.sh.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
PROMPT, ANSWER, BUDGET = 600, 64, 0.3
VLLM = (
    "-m vllm.entrypoints.openai.api_server --served-model-name m --dtype bfloat16 --max-model-len 2048 --enforce-eager"
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
#: What another process runs to answer by transformers: a line with a number of prompts, and their tokens, a line each.
BATCHES = """
import sys, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
model.set_attn_implementation("sdpa")
tokens = int(sys.argv[2])
config = transformers.GenerationConfig(
    max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
# without a number of blocks it takes the machine's memory
batching = transformers.ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=512, use_cuda_graph=False)
print("ready", flush=True)
for line in sys.stdin:
    prompts = [[int(x) for x in sys.stdin.readline().split()] for _ in range(int(line))]
    found = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False)
    print(sum(len(x.generated_tokens) for x in found.values()), flush=True)
"""


def commands(model: str, gates: str, port: int) -> dict[str, list[str]]:
    """Return the words that start each server, by name."""
    settings = f'{{"ag": {{"gates": "{gates}", "budget": {BUDGET}}}}}'
    vllm = [*VLLM.split(), "--model", model, "--port", str(port)]
    ours = f"-m ag.serve model={model} served_name=m dtype=bfloat16 memory=1GiB port={port}"
    return {
        "vLLM": vllm,
        "vLLM, blocks of 32": [*vllm, "--block-size", "32"],
        "vLLM, gates": [*vllm, "--additional-config", settings],
        "ag.serve, full": ours.split(),
        "ag.serve, gates": [*ours.split(), f"policy=gates:{gates}", f"budget={BUDGET}"],
    }


def processes_of(root: int) -> list[psutil.Process]:
    """Return a process and those that it started."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and of those that it started."""
    return sum(sum(x.cpu_times()[:2]) for x in processes_of(root))


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(200, 40000) for _ in range(PROMPT)] for _ in range(count)]


def ask(port: int, prompt: list[int]) -> int:
    """Return the number of tokens of an answer."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    out = client.completions.create(
        model="m", prompt=prompt, max_tokens=ANSWER, temperature=0, extra_body={"ignore_eos": True}
    )
    assert out.usage is not None
    return out.usage.completion_tokens


class Contestant:
    """A server, or a process of transformers, that answers prompts."""

    def __init__(self, name: str, model: str, gates: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.answer: Callable[[list[list[int]]], int] = self._by_http
        words, pipes = commands(model, gates, self.port).get(name), {}
        if words is None:
            words, self.answer = ["-c", BATCHES, model, str(ANSWER)], self._by_pipe
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        log = tempfile.NamedTemporaryFile("w", suffix=".log", delete=False)  # noqa: SIM115 - the process writes to it
        options = {"stdout": log, "stderr": log} | pipes
        environment = os.environ | ENVIRONMENT
        self.process = subprocess.Popen([sys.executable, *words], env=environment, text=True, **options)  # type: ignore[call-overload]
        self._wait(log.name)

    def _wait(self, log: str) -> None:
        if self.process.stdout is not None:
            assert self.process.stdout.readline().strip() == "ready", Path(log).read_text()[-2000:]
            return
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).raise_for_status()
                return
            except httpx.HTTPError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{log}: the server ended:\n{Path(log).read_text()[-2000:]}") from None
                time.sleep(1)

    def _by_http(self, prompts: list[list[int]]) -> int:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(lambda prompt: ask(self.port, prompt), prompts))

    def _by_pipe(self, prompts: list[list[int]]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        lines = [str(len(prompts)), *(" ".join(map(str, prompt)) for prompt in prompts)]
        print(*lines, sep="\n", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def stop(self) -> None:
        """Stop the processes until :meth:`go_on`."""
        for process in processes_of(self.process.pid):
            process.suspend()

    def go_on(self) -> None:
        """Let stopped processes go on."""
        for process in processes_of(self.process.pid):
            process.resume()

    def per_second(self, prompts: list[list[int]]) -> float:
        """Return the answers' tokens per CPU second, of a contestant that is stopped before and afterwards."""
        self.go_on()
        before = cpu_seconds(self.process.pid)
        tokens = self.answer(prompts)
        rate = tokens / (cpu_seconds(self.process.pid) - before)
        self.stop()
        return rate


def main() -> None:
    """Print a line for each contestant and number of requests."""
    names = [*commands("", "", 0), "transformers, generate_batch"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--at-once", default="1,6")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gates", default="smollm2")
    parser.add_argument("--model", default=str(Path.home() / ".cache/ag/smollm2"))
    given = parser.parse_args()
    contestants: dict[str, Contestant] = {}
    try:
        for name in given.only:
            contestants[name] = Contestant(name, given.model, given.gates)
            contestants[name].answer(prompts_of(1, -1))
            contestants[name].stop()
        for at_once in map(int, given.at_once.split(",")):
            rates: dict[str, list[float]] = {name: [] for name in contestants}
            for number in range(given.rounds):
                for name, contestant in contestants.items():
                    rates[name].append(contestant.per_second(prompts_of(at_once, 1000 * at_once + number)))
            for name, found in rates.items():
                shown = " ".join(f"{rate:.1f}" for rate in found)
                print(f"{name}, {at_once} at once: {statistics.median(found):.1f} tokens per CPU second ({shown})")
                sys.stdout.flush()
    finally:
        for contestant in contestants.values():
            contestant.process.terminate()
            contestant.go_on()
        for contestant in contestants.values():
            contestant.process.wait(60)


if __name__ == "__main__":
    main()
