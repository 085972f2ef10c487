"""``python -m ag.generate``: a continuation of a text under a policy, and its cost."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ag.commands.generate import GenerateConfig
from ag.commands.shared import SharedPolicy
from ag.config.command_line import Invocation
from ag.config.spec import specs_by_name
from ag.engine import EvictionCache, Policy, policy
from ag.engine.block_pool import BLOCK
from ag.engine.decode import COLDEST, decode
from ag.engine.report import Report
from ag.errors import BudgetWarning, UserError
from ag.loading import load_model
from ag.model.chat import Chat, Part, spans
from ag.model.generation import own_settings

if TYPE_CHECKING:
    from ag.loading import Model

WARM_PROMPT, WARM_NEW = 256, 4  # tokens of the warm-up before the measurement on a CPU; on a GPU the whole prompt


@dataclass
class Generation:
    """A continuation and its cost, measured after a warm-up."""

    text: str
    prompt_tokens: int
    new_tokens: int
    evicted: float  # evicted share of the prompt's (token, layer, KV head) entries at the end
    kv_bytes: int  # allocated for keys and values at the end
    kept_share: float  # cached share of all entries, of prompt and new tokens, at the end
    prefill_seconds: float  # until the first new token; includes a second pass of the policy over the prompt
    decode_seconds: float  # for the new tokens after the first
    report: Report  # contents of each layer at the end
    evicts: bool  # False for a full cache


def run(invocation: Invocation[GenerateConfig]) -> int:
    """Generate and print, as ``python -m ag.generate`` does; returns the exit code."""
    if invocation.dry_run:
        print(*_policies(invocation.config), sep="\n")
        return 0
    generations = generate(invocation.config)
    for name, generation in generations.items():
        print(f"--- {name} ---\n{generation.text}\n" if len(generations) > 1 else f"{generation.text}\n")
    Console().print(table(generations))
    first = next(iter(generations.values()))
    print(savings(first))
    if invocation.config.layers:
        print(f"\n{first.report}")
    return 0


def savings(generation: Generation) -> str:
    """Return a sentence: what eviction saved, and why this is not the evicted share."""
    used, plain = (n / 2**20 for n in (generation.kv_bytes, generation.report.plain_nbytes))
    sizes = f"The cache takes {used:.2f} MiB, transformers' own {plain:.2f} MiB"
    if not generation.evicts:
        return f"{sizes}."
    if generation.evicted == 0:
        return (
            f"Nothing was evicted: {generation.prompt_tokens} prompt tokens are too few for this policy and its "
            f"budget. {sizes}."
        )
    return (
        f"{sizes}: {1 - used / plain:.0%} saved. {generation.evicted:.0%} of the prompt went, and "
        f"{1 - generation.kept_share:.0%} of prompt and new tokens; a row's last block of {BLOCK} tokens may not be "
        "full."
    )


def table(generations: dict[str, Generation]) -> Table:
    """Return the table of costs."""
    first = next(iter(generations.values()))
    caption = "after a warm-up; evicted: of the prompt; of full: tokens held, of prompt and new tokens"
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    costs = Table(title=f"{first.prompt_tokens} prompt tokens", caption=caption, **style)
    costs.add_column("cache", overflow="fold")
    for column in ("evicted", "new\ntokens", "KV bytes", "of full", "prefill\ntokens/s", "decoding\ntokens/s"):
        costs.add_column(column, justify="right", no_wrap=True)
    for name, row in generations.items():
        decoding = f"{(row.new_tokens - 1) / row.decode_seconds:.1f}" if row.decode_seconds else ""
        costs.add_row(
            name,
            f"{row.evicted:.1%}",
            f"{row.new_tokens}",
            f"{row.kv_bytes:,}",
            f"{row.kept_share:.1%}",
            f"{row.prompt_tokens / row.prefill_seconds:.1f}",
            decoding,
        )
    return costs


def generate(config: GenerateConfig) -> dict[str, Generation]:
    """Return continuations by name of the policy: under the policy, then with a full cache for ``compare=true``."""
    prompt, policies, protected = config.prompt_or_chat, _policies(config), config.spans()
    gates = next(iter(policies.values())).spec.path or config.gates
    model, tokenizer = load_model(gates, config.model, config.dtype, config.device, adapter=config.adapter)
    text = prompt.text(tokenizer) if isinstance(prompt, Chat) else prompt
    if isinstance(prompt, Chat) and (parts := [word for word in config.protect if word in get_args(Part)]):
        protected += spans(tokenizer, prompt, parts)
    special = not isinstance(prompt, Chat)  # a chat template writes its own special tokens
    ids = tokenizer(text, add_special_tokens=special, return_tensors="pt", verbose=False)["input_ids"]
    context, length = model.config.get_text_config().max_position_embeddings, ids.shape[1]
    longest = context - config.max_new_tokens
    if longest < 1:
        raise UserError(
            f"max_new_tokens={config.max_new_tokens}: expected less than {context}, the model's context, which "
            "holds the prompt too."
        )
    if not 0 < length <= longest:
        raise UserError(
            f"The prompt has {length} tokens: expected 1 to {longest}, which leave room for "
            f"max_new_tokens={config.max_new_tokens} in the model's context."
        )
    with own_settings(model, tokenizer):
        return {
            name: _generate(model, tokenizer, ids.long(), policy, protected, config)
            for name, policy in policies.items()
        }


def read_policy(config: SharedPolicy) -> Policy:
    """Return the policy of a command; unknown names and bad budgets raise before a model is loaded."""
    kv_options = {} if config.kv_dtype == "float" else {"kv_dtype": config.kv_dtype}
    return policy(config.spec(), config.budget, config.schedule, **kv_options | config.options)


def _policies(config: GenerateConfig) -> dict[str, Policy]:
    """Return the policies by name."""
    chosen, full = read_policy(config), policy("full")
    name = "full cache" if chosen == full else next(iter(specs_by_name([config.policy_text])))
    return {name: chosen} | ({"full cache": full} if config.compare else {})


class _Clock(BaseStreamer):
    """Records the time of the prompt and of each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    policy: Policy,
    protected: list[tuple[int, int]],
    config: GenerateConfig,
) -> Generation:
    policy = policy.with_tokenizer(tokenizer)
    # On a GPU kernels are tuned for each class of lengths, on a CPU the whole prompt would double the time.
    warm_ids = ids if torch.device(config.device).type == "cuda" else ids[:, :WARM_PROMPT]
    with suppress(UserError), warnings.catch_warnings():  # a policy may refuse or warn about a short prompt
        warnings.simplefilter("ignore", BudgetWarning)
        _continue(model, EvictionCache(model, policy), warm_ids, replace(config, max_new_tokens=WARM_NEW))
    torch.manual_seed(config.seed)
    cache = EvictionCache(model, policy)
    cache.protect(protected)
    new, (start, first, *_, last) = _continue(model, cache, ids, config)
    return Generation(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        evicted=1 - cache.kept_share(prompt=True),
        kv_bytes=cache.nbytes,
        kept_share=cache.kept_share(),
        prefill_seconds=first - start,
        decode_seconds=last - first,
        report=cache.report(),
        evicts=policy.spec.evicts,
    )


def _continue(model: Model, cache: EvictionCache, ids: Tensor, config: GenerateConfig) -> tuple[list[int], list[float]]:
    """Return the new tokens, and the times of the prompt and of each new token."""
    clock = _Clock()
    sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    output = model.generate(  # type: ignore[operator]  # PEFT and transformers declare it differently
        input_ids=ids.to(config.device),
        attention_mask=torch.ones_like(ids, device=config.device),
        past_key_values=cache,
        max_new_tokens=config.max_new_tokens,
        streamer=clock,
        custom_generate=partial(decode, streamer=clock),  # transformers passes no streamer to a custom loop
        **(sampling if config.temperature >= COLDEST else {"do_sample": False}),
    )
    return output[0, ids.shape[1] :].tolist(), [*clock.times, clock.times[-1]]
