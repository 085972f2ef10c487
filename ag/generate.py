"""Continue a text under a policy: ``python -m ag.generate policy=h2o budget=0.25 prompt=TEXT``."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag.config import ModelConfig, key, mapping
from ag.config.command_line import parse
from ag.engine import EvictionCache, Policy, policy
from ag.engine.report import Report
from ag.engine.spec import BUDGET, PolicySpec, named
from ag.errors import UserError
from ag.gates import export
from ag.model import base as models
from ag.model import smollm2
from ag.model.geometry import fingerprint
from ag.plugins import load

Model = PreTrainedModel | PeftModel


@dataclass
class GenerateConfig:
    """The keys of ``python -m ag.generate``."""

    gates: str | None = key(None, "folder of exported gates, which a policy named gates uses")
    policy: str | None = key(None, "what to evict, such as h2o or gates; null: gates where there are some, else full")
    budget: Any = key(None, "what the policy keeps", words=f"{BUDGET} | null")
    schedule: str = key("prefill", "when something is evicted: prefill, blocks:m, every, steps:n, joined by +")
    options: dict[str, Any] = mapping("options of the policy, as options.window=16")
    plugins: list[str] = key(
        [], "modules to import first, which add scorers, wrappers, allocators or tasks of your own"
    )
    adapter: bool = key(True, "put the export's LoRA adapter on the model; false: it is merged into the model already")
    model: str | None = key(None, "hub id, local folder or alias, instead of the base model that the export names")
    prompt: str | None = key(None, "the text to continue")
    file: str | None = key(None, "file with that text, instead of prompt")
    chat: bool = key(False, "put the text into the tokenizer's chat template, as a user's message")
    max_new_tokens: int = key(64, "longest continuation in tokens", low=1)
    temperature: float = key(0.0, "0: always the likeliest token; above: sample at this temperature", low=0)
    top_p: float = key(1.0, "sample from the likeliest tokens that together have this probability", low=0, high=1)
    seed: int = key(0, "seed of the samples", low=0, high=2**32 - 1)
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the model's weights")
    compare: bool = key(False, "continue with a full cache as well")

    def __post_init__(self) -> None:
        load(self.plugins)


@dataclass
class Generation:
    """A continuation and what its cache cost.

    Attributes:
        text: the new text.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the continuation.
        evicted: share of the prompt's (token, layer, KV head) entries that were gone at the end.
        kv_bytes: bytes allocated for keys and values at the end.
        full_kv_bytes: bytes of the keys and values of every token seen.
        seconds: for prefill and decoding.
        report: what each layer holds at the end.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    evicted: float
    kv_bytes: int
    full_kv_bytes: int
    seconds: float
    report: Report


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    config = parse(sys.argv[1:] if argv is None else argv, GenerateConfig, "ag.generate").config
    try:
        generations = generate(config)
    except UserError as error:
        print(f"ag.generate: error: {error}", file=sys.stderr)
        return 2
    for name, generation in generations.items():
        print(f"--- {name} ---\n{generation.text}\n" if len(generations) > 1 else f"{generation.text}\n")
    Console().print(table(generations))
    if config.policy is not None:
        print(f"\n{next(iter(generations.values())).report}")
    return 0


def generate(config: GenerateConfig) -> dict[str, Generation]:
    """Continue the prompt under the policy, with a full cache, or with both, in that order.

    Raises:
        UserError: (ModelError, ExportError, ...) naming what is wrong and the fix.
    """
    text, chosen = _read_prompt(config), _policy(config)
    model, tokenizer = _load(config, chosen.spec.path or config.gates)
    if config.chat and tokenizer.chat_template is None:
        raise UserError("chat=true: the model's tokenizer has no chat template; set chat=false.")
    if config.chat:
        messages = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(text, add_special_tokens=not config.chat, return_tensors="pt", verbose=False)["input_ids"]
    context, length = model.config.get_text_config().max_position_embeddings, ids.shape[1]
    if not 0 < length <= context - config.max_new_tokens:
        raise UserError(
            f"The prompt has {length} tokens: expected 1 to {context - config.max_new_tokens}, which leave room for "
            f"max_new_tokens={config.max_new_tokens} in the model's context."
        )
    policies = {} if chosen.scorer is None else {_called(config): chosen}
    if config.compare or not policies:
        policies["full cache"] = policy("full")
    return {name: _generate(model, tokenizer, ids.long(), policy, config) for name, policy in policies.items()}


def table(generations: dict[str, Generation]) -> Table:
    """Return the table that the command prints."""
    first = next(iter(generations.values()))
    out = Table(title=f"{first.prompt_tokens} prompt tokens")
    for column in ("cache", "evicted", "new tokens", "KV bytes", "of full", "tokens/s"):
        out.add_column(column, justify="left" if column == "cache" else "right")
    for name, row in generations.items():
        share, speed = row.kv_bytes / row.full_kv_bytes, row.new_tokens / row.seconds
        cells = (f"{row.evicted:.1%}", f"{row.new_tokens}", f"{row.kv_bytes:,}", f"{share:.1%}", f"{speed:.1f}")
        out.add_row(name, *cells)
    return out


def _read_prompt(config: GenerateConfig) -> str:
    if (config.prompt is None) == (config.file is None):
        raise UserError("Expected one text to continue: give either prompt=TEXT or file=PATH.")
    if config.prompt is not None:
        return config.prompt
    try:
        return Path(str(config.file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"file={config.file}: {error}; expected a text file in UTF-8.") from error


def _called(config: GenerateConfig) -> str:
    """What the table calls the policy: its label, or its text with a path shortened."""
    return next(iter(named([config.policy or "gates"])))


def _policy(config: GenerateConfig) -> Policy:
    """Return the policy; unknown names and bad budgets are found before a model is loaded."""
    spec = PolicySpec.parse(config.policy or ("gates" if config.gates else "full"))
    if config.gates and spec.path and Path(config.gates) != Path(spec.path):
        raise UserError(f"gates={config.gates} and policy={spec} name two exports; leave gates= out.")
    if spec.reads_gates and spec.path is None:
        if config.gates is None:
            raise UserError(f"policy={spec}: expected gates=EXPORT beside it, the folder of exported gates.")
        spec = replace(spec, path=config.gates)
    return policy(spec, config.budget, config.schedule, **config.options)


def _load(config: GenerateConfig, gates: str | None) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load the base model, with the adapter of exported gates where they have one, and the tokenizer."""
    base = export.read_info(gates)["base_model"] if gates else {"name": "", "revision": None}
    name = config.model or base["name"]
    if not name:
        raise UserError("No base model is named: give model=NAME, or gates=EXPORT of an export that names one.")
    revision = None if config.model or base["revision"] == smollm2.REQUIREMENT else base["revision"]
    model, tokenizer = models.load_base(ModelConfig(name, revision, config.dtype), config.device)
    if gates and config.adapter and export.adapter_path(gates):
        return export.load_adapter(model, gates), tokenizer
    return model, tokenizer


def _generate(
    model: Model, tokenizer: PreTrainedTokenizerBase, ids: Tensor, policy: Policy, config: GenerateConfig
) -> Generation:
    cache = EvictionCache(model, policy.with_tokenizer(tokenizer))
    sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    torch.manual_seed(config.seed)
    start = time.perf_counter()
    output = model.generate(  # type: ignore[operator]  # PEFT and transformers declare it differently
        input_ids=ids.to(config.device),
        attention_mask=torch.ones_like(ids, device=config.device),
        past_key_values=cache,
        max_new_tokens=config.max_new_tokens,
        **(sampling if config.temperature else {"do_sample": False}),
    )
    length = ids.shape[1]
    new = output[0, length:].tolist()
    seconds = time.perf_counter() - start
    size = fingerprint(model.config)
    entry = size["num_layers"] * size["num_kv_heads"] * size["head_dim"] * next(model.parameters()).element_size()
    return Generation(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=length,
        new_tokens=len(new),
        evicted=(1 - cache.kept_share()) * cache.seen_tokens / length,
        kv_bytes=cache.nbytes,
        full_kv_bytes=2 * cache.seen_tokens * entry,
        seconds=seconds,
        report=cache.report(),
    )


if __name__ == "__main__":
    sys.exit(main())
