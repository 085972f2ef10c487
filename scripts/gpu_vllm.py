"""Test and measure eviction inside vLLM on a GPU: ``python scripts/gpu_vllm.py [FOLDER] [--only NAME ...]``.

It makes a model with random weights and the geometry of Qwen 2.5 (1.5B), and gates with random weights, in FOLDER
(build/gpu_vllm), and then runs these rows, each in its own process, in about ten minutes on an H100:

- tokens: greedy tokens of vLLM with gates against ``ag.EvictionCache``, in bfloat16, where some answers may part, with
  and without a schedule;
- free: all blocks are free after 40 requests, with and without prefix caching;
- 8k, 32k: requests at once and tokens per second of 24 prompts, against vLLM without gates, in the same blocks.

It needs vLLM 0.32 or 0.33 and a CUDA device. Each row appends a line to ``FOLDER/rows.jsonl``. The exit code is 1 if a
row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GEOMETRY = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
BUDGET, SCHEDULE, SECONDS = 0.3, "blocks:512+steps:4", 240
ROWS = ("tokens", "free", "8k", "32k")


def make(folder: Path) -> None:
    """Write a model with random weights, and gates for it, if they are not there."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import ag

    if (folder / "gates" / "gate_config.json").exists():
        return
    torch.manual_seed(0)
    config = Qwen2Config(**GEOMETRY)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    gates = ag.AttentionGates(
        config, ag.GateConfig(kind="mlp", hidden=128, sink_tokens=4, recent_tokens=64, covers="all")
    )
    gates.save_pretrained(folder / "gates")


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]


def engine(folder: Path, *, gates: bool, schedule: str = "prefill", **options: Any) -> Any:
    """Return vLLM, in this process, with counts of its scheduler's steps in ``most_running``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # of the engine without gates too: the rows compare one runner
    from vllm import LLM

    settings = {"ag": {"gates": str(folder / "gates"), "budget": BUDGET, "schedule": schedule}} if gates else {}
    fixed = {"dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0, "max_model_len": 40960}
    llm = LLM(str(folder / "model"), additional_config=settings, **(fixed | options))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, llm.most_running = scheduler.schedule, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        llm.most_running = max(llm.most_running, len(scheduler.running))
        return out

    scheduler.schedule = counted
    llm.pool = scheduler.kv_cache_manager.block_pool
    return llm


def answers(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return greedy tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in out]


def tokens(folder: Path) -> dict[str, Any]:
    """Count answers, of prompts of different lengths at once, that are equal to those of ``ag.EvictionCache``."""
    import torch
    from transformers import AutoModelForCausalLM

    import ag

    prompts = [prompts_of(1, length, length)[0] for length in (300, 700, 1500, 3000, 5000, 7000)]
    answers_by_name: dict[str, list[list[int]]] = {}
    for name, schedule, options in (
        ("eager", "prefill", {"enforce_eager": True}),
        ("graphs", "prefill", {}),
        ("chunks", "prefill", {"max_num_batched_tokens": 512}),
        ("schedule", SCHEDULE, {}),
    ):
        llm = engine(folder, gates=True, schedule=schedule, gpu_memory_utilization=0.5, **options)
        answers_by_name[name] = answers(llm, prompts, 16)
        llm.llm_engine.engine_core.shutdown()
        del llm
        torch.cuda.empty_cache()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).cuda()
    wanted: dict[str, list[list[int]]] = {"prefill": [], SCHEDULE: []}
    for schedule, tokens_of_schedule in wanted.items():
        for prompt in prompts:
            cache = ag.EvictionCache(model, f"gates:{folder / 'gates'}", budget=BUDGET, schedule=schedule)
            ids = torch.tensor([prompt], device="cuda")
            out = model.generate(ids, past_key_values=cache, max_new_tokens=16, do_sample=False, eos_token_id=-1)
            tokens_of_schedule.append(out[0, len(prompt) :].tolist())
    equal, first = {}, {}
    for name, got in answers_by_name.items():
        pairs = [*zip(got, wanted[SCHEDULE if name == "schedule" else "prefill"], strict=True)]
        equal[name] = sum(x == y for x, y in pairs)
        first[name] = sum(x[:2] == y[:2] for x, y in pairs)
    return {"prompts": len(prompts), "equal": equal, "first two tokens equal": first}


def free(folder: Path) -> dict[str, Any]:
    """Count the free blocks after 40 requests: all must be free."""
    free_blocks = {}
    for shares in (False, True):
        llm = engine(folder, gates=True, enable_prefix_caching=shares, gpu_memory_utilization=0.4)
        answers(llm, [prompts_of(1, 300 + 97 * index, index)[0] for index in range(40)], 24)
        num_free, expected = llm.pool.get_num_free_blocks(), llm.pool.num_gpu_blocks - 1  # the null block is never free
        if num_free != expected:
            raise RuntimeError(f"prefix caching {shares}: {num_free} blocks are free at the end: expected {expected}")
        free_blocks[f"prefix caching {shares}"] = num_free
        llm.llm_engine.engine_core.shutdown()
        del llm
    return free_blocks


def speed(folder: Path, length: int) -> dict[str, Any]:
    """Measure 24 prompts in blocks that hold about eight of them whole."""
    speeds = {}
    for gates in (False, True):
        blocks = 8 * (length + 256) // 16
        llm = engine(folder, gates=gates, num_gpu_blocks_override=blocks, max_num_seqs=64, max_model_len=length + 512)
        answers(llm, prompts_of(2, length, 1), 8)
        llm.most_running, prompts = 0, prompts_of(24, length, 2)
        start = time.perf_counter()
        done = answers(llm, prompts, 128)
        seconds = time.perf_counter() - start
        rate = sum(map(len, done)) / seconds
        speeds["gates" if gates else "plain"] = {"at once": llm.most_running, "tokens/s": round(rate, 1)}
        llm.llm_engine.engine_core.shutdown()
        del llm
    return speeds


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a row in this process."""
    if name == "tokens":
        return tokens(folder)
    return free(folder) if name == "free" else speed(folder, {"8k": 8192, "32k": 32768}[name])


def main() -> int:
    """Run the rows, and print what each gives. Returns the exit code: 1 if a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "gpu_vllm")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.row:
        make(folder)
        print(json.dumps(run(given.row, folder)))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    any_failed = False
    for name in given.only:
        words = [sys.executable, __file__, str(folder), "--row", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        line: dict[str, Any] = {"row": name}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment)
            line |= (
                {"result": json.loads(done.stdout.strip().splitlines()[-1])}
                if done.returncode == 0
                else {"failed": (done.stdout + done.stderr)[-4000:]}
            )
        except subprocess.TimeoutExpired:
            line["failed"] = f"more than {SECONDS} seconds"
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        any_failed |= "failed" in line
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
