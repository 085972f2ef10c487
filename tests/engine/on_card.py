"""Runs the engine, the losses and vLLM's ranking on the CPU and on the card of :mod:`tests.support.card`.

``python -m tests.engine.on_card``; an error means that they differ, or that tensors of two devices met.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ag
from ag.config import LossConfig, WarmupConfig
from ag.training import replay as replay_losses
from ag.vllm.ranking import Candidates, keep_mask
from tests.support.bounds import hold, of_logits
from tests.support.card import Mode, on_card, register
from tests.support.common import factory
from tests.support.gates_for import gates_for
from tests.training import test_module, test_replay

POLICIES = {
    "full": ("prefill", None),
    "flags": ("prefill", None),
    "gates@global": ("steps:3", 0.4),
    "snapkv@heads": ("prefill", 0.5),
    "tova@pyramid": ("every", 0.5),
    "cake": ("prefill", 0.5),
    "kvzip": ("prefill", 0.5),
    "h2o+caote@preference": ("blocks:8+every", 0.5),
    "h2o": ("every", 20),
    "streaming_llm": ("every", 20),
    "scissorhands+vatp": ("every", 0.5),
    "expected_attention@heads": ("prefill", 0.5),
    "keydiff+criticalkv": ("prefill", 0.5),
    "rkv": ("steps:3", 0.5),
    "random@global": ("prefill", 0.5),
}
OPERATIONS = 2**20  # more than one number of a gradient goes through in these models; each rounds in float64
Put = Callable[[Any], Any]


def windowed(window: int) -> Any:
    return factory("Mistral", head_dim=16, sliding_window=window)(num_hidden_layers=2)


def read_and_decode(put: Put, policy: str) -> tuple[list[torch.Tensor], Any]:
    """Read two prompts, one of them padded, decode, reorder and take tokens back; return logits and kept tokens."""
    schedule, budget = POLICIES[policy]
    model = windowed(200 if policy == "kvzip" else 30)  # it refuses a window that hides the prompt
    if policy.startswith(("gates", "flags")):
        ag.attach(model, gates_for(model, recent_tokens=3))
    model = put(model)
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 128, (2, 40), generator=generator), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    ids, mask, order = (put(x) for x in (ids, mask, torch.tensor([1, 0])))
    cache = ag.EvictionCache(model, ag.policy(policy, budget, schedule=schedule))
    with torch.no_grad():
        logits = [model(ids, attention_mask=mask, past_key_values=cache).logits]
        positions = mask.sum(1, keepdim=True)
        for step in range(6):
            if step == 3:
                cache.reorder_cache(order)
                positions = positions[order]
            logits.append(model(ids[:, :1], position_ids=positions + step, past_key_values=cache).logits)
        if policy == "full":
            cache.crop(-2)
        positions = positions + torch.arange(4, 6, device=ids.device)
        logits.append(model(ids[:, 1:3], position_ids=positions, past_key_values=cache).logits)
    return logits, [[[head.tolist() for head in heads] for heads in cache.kept_positions(i)] for i in range(2)]


def train(put: Put, make: Callable[[], Any], batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss of a step, the gradients, and what validation measures."""
    module, batch = put(make().double()), put(batch)
    loss = module.training_step(batch, 0)
    loss.backward()
    with torch.no_grad():
        module.validation.update(batch, keep_samples=True)
    measured = module.validation.compute()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    return [loss.detach(), *gradients, *measured.values()]


def rank(put: Put, policy: str) -> torch.Tensor:
    """Return what stays in vLLM of a prompt of 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    keys, indices = put(torch.randn(3, 2, 30, 8, generator=generator)), put(torch.arange(30).expand(3, 2, -1))
    candidates = Candidates([0, 1, 2], indices, 30, 30, 4, keys.__getitem__, None)
    return keep_mask(ag.policy(policy, 0.4, recent=5), candidates, 12, None)


def on_both(compute: Callable[[Put], Any]) -> tuple[Any, Any]:
    """Return what a computation gives on the card, and on the CPU."""
    torch.manual_seed(0)
    expected = compute(lambda x: x)
    torch.manual_seed(0)
    with Mode():
        return compute(on_card), expected


def save_from_card(parts: dict[str, Any], path: Any) -> None:
    save_file({name: getattr(x, "host", x).contiguous() for name, x in parts.items()}, path)


def main() -> None:
    warnings.simplefilter("ignore")
    register()
    os.environ["AG_KERNELS"] = "reference"
    make = factory("Llama", head_dim=16)
    bound = of_logits(windowed(30))
    for policy in POLICIES:
        (logits, kept), (expected_logits, expected_kept) = on_both(partial(read_and_decode, policy=policy))
        assert kept == expected_kept, policy
        for index, pair in enumerate(zip(logits, expected_logits, strict=True)):
            hold(pair[0].host, pair[1], bound, f"{policy} {index}")
    # safetensors reads memory by its address, which these tensors lack
    replay_losses.save_file = save_from_card
    replay_losses.load_file = lambda path, device: {name: x.to(device) for name, x in load_file(path).items()}
    mlp = {"kind": "mlp", "hidden": 8, "scope": "causal", "covers": "all"}
    drawn = LossConfig(objective="kl", share_high=0.8)
    regression = WarmupConfig(regress_steps=2, target="kvzip", scale="global")
    modules = {
        "lm": lambda: test_module.build(make, gate={"sink_tokens": 1}),
        "LoRA": lambda: test_module.build(make, train="gates+lora", lora_noise=0.2, loss=LossConfig(objective="kl")),
        "drawn shares": lambda: test_module.build(make, loss=drawn, gate=mlp),
        "regression": lambda: test_module.build(make, loss=drawn, warmup=regression, gate=mlp),
    }
    runs = {name: (module, test_module.batch()) for name, module in modules.items()}
    runs["replay"] = lambda: test_replay.replay(make()), test_replay.batch()
    for name, (module, batch) in runs.items():
        got, expected = on_both(partial(train, make=module, batch=batch))
        for index, pair in enumerate(zip(got, expected, strict=True)):
            mine, right = getattr(pair[0], "host", pair[0]), pair[1]
            hold(mine, right, OPERATIONS * torch.finfo(torch.float64).eps * float(right.norm()), (name, index))
    for policy in ("knorm", "keydiff@global", "streaming_llm", "random"):
        got, expected = on_both(partial(rank, policy=policy))
        assert torch.equal(got.host, expected), policy
    print("equal")


if __name__ == "__main__":
    main()
