"""The model ``ag`` of lm-evaluation-harness: its tasks, with eviction between context and continuation.

``python -m ag.evaluate.lm_eval`` is the harness's command ``lm_eval`` with the model added (the harness finds models of
other packages only by import)::

    python -m ag.evaluate.lm_eval --model ag --model_args pretrained=MODEL,policy=h2o,budget=0.25 --tasks piqa
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ag import engine
from ag.config.command_line import command
from ag.engine.cache_setup import CacheSetup
from ag.errors import UserError
from ag.evaluate.tasks.follow import score
from ag.gates import export
from ag.model.base import resolve

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    needed = "needs lm-evaluation-harness: pip install 'ag[lm_eval]'."
    if __name__ == "__main__":
        print(f"ag.evaluate.lm_eval: error: it {needed}", file=sys.stderr)
        raise SystemExit(2) from None
    raise ImportError(f"ag.evaluate.lm_eval {needed}") from error

log = logging.getLogger(__name__)

Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("ag")
class EvictingLM(HFLM):
    """The harness's ``hf`` model with eviction.

    The context of a request is the prompt, which is read and evicted before the continuation. Requests with equal
    contexts share one forward pass of it. ``loglikelihood_rolling`` evicts nothing: a rolling window has no prompt.

    Args:
        pretrained: hub id, local folder, an alias such as smollm2, or a model (then with ``tokenizer``).
        policy: see :func:`ag.policy`, as ``budget`` and ``schedule``; ``gates:EXPORT`` brings the adapter along.
        budget: tokens per KV head (int), or share of the context (float).
        schedule: when tokens are evicted.
        adapter: whether to load the adapter of ``gates:EXPORT``; False for a model with the merged adapter.
        hf_options: arguments of ``hf`` (dtype, peft, max_length, ...), and options of the policy (window, ...).
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        policy: str = "full",
        budget: int | float | None = None,
        schedule: str = "prefill",
        adapter: bool = True,
        **hf_options: Any,
    ) -> None:
        hf_parameters = inspect.signature(HFLM.__init__).parameters
        options = {name: hf_options.pop(name) for name in list(hf_options) if name not in hf_parameters}
        self.policy = engine.policy(policy, budget, schedule, **options)
        path = self.policy.spec.path
        if adapter and path and (adapter_path := export.adapter_path(path)):
            hf_options.setdefault("peft", str(adapter_path))
        super().__init__(pretrained=resolve(pretrained) if isinstance(pretrained, str) else pretrained, **hf_options)
        self.policy = self.policy.with_tokenizer(self.tokenizer)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **hf_options: Any
    ) -> list[tuple[float, bool]]:
        if requests and requests[0][0] is None:  # the windows of loglikelihood_rolling have no text
            windows: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, **hf_options)
            return windows
        groups: dict[tuple[int, ...], list[int]] = {}
        cut = 0
        for index, (_, context, continuation) in enumerate(requests):
            # as in hf, all tokens before the last are fed and must fit the model
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(f"A continuation of {len(continuation)} tokens exceeds the context: no task for it.")
            groups.setdefault(tuple(context[-room:]), []).append(index)
            cut += len(context) > room
        if cut:
            log.warning("%d of %d contexts do not fit the model: their first tokens are cut.", cut, len(requests))
        single = sum(all(len(requests[index][2]) == 1 for index in members) for members in groups.values())
        if single and self.policy.spec.evicts and CacheSetup.of(self.model, self.policy, None).prompt_sees == "dense":
            log.warning(
                "%d of %d contexts have continuations of one token, which %r predicts before it evicts: as with a full "
                "cache. schedule=blocks:m evicts before.",
                single,
                len(groups),
                self.policy,
            )
        results: dict[int, tuple[float, bool]] = {}
        for context, members in tqdm(groups.items(), disable=disable_tqdm or self.rank != 0, desc="Contexts"):
            prompt = torch.tensor([context], device=self.device)
            [(cache, last_hidden)] = engine.read_prompt(self.model, [self.policy], prompt)
            scores = score(self.model, cache, last_hidden, [requests[index][2] for index in members])
            for index, (nats, greedy) in zip(members, scores, strict=True):
                results[index] = float(nats.sum()), bool(greedy.all())
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
        return [results[index] for index in range(len(requests))]

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        cache = engine.EvictionCache(self.model, self.policy)
        generated: torch.Tensor = super()._model_generate(context, max_length, stop, past_key_values=cache, **settings)
        return generated


@command("ag.evaluate.lm_eval")
def main(argv: list[str]) -> int:
    """Run the harness's command, which reads the arguments of the process; returns the exit code."""
    try:
        cli_evaluate()
    except OSError as error:  # a model or a file that is not there
        raise UserError(" ".join(str(error).split())[:500]) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
