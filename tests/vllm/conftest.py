"""Engines of vLLM with SmolLM2, one after another in this process; where vLLM is missing all of this is skipped."""

import contextlib
import gc
import os
import random

import pytest
import torch

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, of which little is touched
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
LENGTHS = (33, 150, 200, 260, 400)
TOKENS = 12


def prompts_of(lengths, seed=0):
    """Token ids of prompts whose words repeat, so that attention has something to find."""
    draw = random.Random(seed)
    made = []
    for length in lengths:
        words = [draw.randrange(200, 40000) for _ in range(max(8, length // 5))]
        made.append([draw.choice(words) for _ in range(length)])
    return made


@pytest.fixture(scope="session")
def prompts():
    return prompts_of(LENGTHS)


@pytest.fixture(scope="session")
def reference(smollm2):
    """Greedy tokens of :class:`ag.EvictionCache` by policy, in this process, and tokens kept of each prompt."""
    from transformers import AutoModelForCausalLM

    import ag

    model, known = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), {}

    def tokens(prompt, policy="gates:smollm2", budget=0.3, count=TOKENS, protected=0, **options):
        key = (tuple(prompt), policy, budget, count, protected, *options.items())
        if key not in known:
            cache = ag.EvictionCache(model, policy, budget=budget, **options)
            if protected:
                cache.protect([(0, min(protected, len(prompt)))])
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    past_key_values=cache,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key]

    return tokens


@pytest.fixture(scope="session")
def engine(smollm2):
    """A context with an engine; ``ag=None`` means plain vLLM."""
    from vllm import LLM

    @contextlib.contextmanager
    def made(ag=(("gates", "smollm2"), ("budget", 0.3)), **options):
        options = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "block_size": 16,
            "enable_prefix_caching": False,
            "seed": 0,
        } | options
        llm = LLM(str(smollm2), additional_config={} if ag is None else {"ag": dict(ag)}, **options)
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()

    return made


class Engine:
    """An engine that counts what its scheduler does."""

    def __init__(self, llm):
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.most_running = self.preempted = 0
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            out = schedule(*args, **kwargs)
            self.most_running = max(self.most_running, len(self.scheduler.running))
            return out

        self.scheduler.schedule = counted
        preempt = self.scheduler._preempt_request

        def preempting(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempting

    @property
    def blocks(self):
        """Free blocks, and all blocks beside the null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1

    @property
    def builder(self):
        return self.core.model_executor.driver_worker.worker.model_runner.ag_builders[0]

    def outputs(self, prompts, count=TOKENS, **options):
        from vllm import SamplingParams

        # as in the reference the end token cannot come before the last token
        whole = {"temperature": 0, "max_tokens": count, "min_tokens": count, "ignore_eos": True}
        params = SamplingParams(**(whole | options))
        return self.llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)

    def tokens(self, prompts, count=TOKENS, **options):
        return [list(x.outputs[0].token_ids) for x in self.outputs(prompts, count, **options)]
