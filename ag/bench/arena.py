"""The model of a bench, the caches of its contestants, and random gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

import ag
from ag.bench.contestants import FULL, Contestant
from ag.commands.bench import BenchConfig
from ag.config.gate import GateConfig
from ag.config.policies import FLAGS
from ag.config.sections import base_model
from ag.engine import EvictionCache, Policy, policy
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers import Scorer
from ag.engine.scorers.controls import Random
from ag.engine.step_runner import StepRunner
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.model.base import load_base
from ag.model.geometry import attention_layers, fingerprint
from ag.model.interceptor import AttentionCall, cache_argument
from ag.model.structure import attention_of, decoder_of

CALIBRATION_TOKENS = 8192
GATES_SHARE = 0.03  # largest size of gates, as a share of the model's parameters
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Arena:
    """The model of a bench, with the caches, policies and gates of its contestants.

    Args:
        config: configuration of the bench.
        model: None: the model of the configuration is loaded on first use.
    """

    def __init__(self, config: BenchConfig, model: PreTrainedModel | None = None) -> None:
        self.config = config
        if model is not None:
            self.model = model
        self._gates: dict[float, AttentionGates] = {}
        self._static: dict[Contestant, tuple[StaticCache, Callable[[Tensor, Cache], Tensor]]] = {}
        self._sizes = (0, 0)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, loaded on first use."""
        return load(self.config)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def _cache_name(self) -> str:
        """Name of the model's argument for the cache."""
        return cache_argument(type(self.model))

    def tokens(self, batch: int, length: int) -> Tensor:
        """Sample token ids ``[B, T]``."""
        make = torch.Generator().manual_seed(self.config.seed)
        high = decoder_of(self.model).config.vocab_size
        return torch.randint(0, high, (batch, length), generator=make).to(self.device)

    def cache(self, contestant: Contestant, batch: int = 1, room: int = 0) -> Cache:
        """Make an empty cache and prepare the model for it; a static cache has room for ``room`` tokens a sequence."""
        ag.detach(self.model)
        if self.model.config._attn_implementation != contestant.attention:
            self.model.set_attn_implementation(contestant.attention)
        if contestant.static:
            return self._empty_static_cache(contestant, batch, room)
        if contestant.policy is None:
            return DynamicCache(config=self.model.config)
        if contestant.policy == FLAGS and contestant.keep is not None:
            ag.attach(self.model, self._calibrated(contestant.keep))
        return EvictionCache(self.model, self.policy(contestant))

    def policy(self, contestant: Contestant) -> Policy:
        """Return the policy of a contestant."""
        assert contestant.policy is not None
        kv_options: dict[str, Any] = {} if contestant.kv_dtype == "float" else {"kv_dtype": contestant.kv_dtype}
        if contestant.keep is None or contestant.policy == FLAGS:
            return policy(contestant.policy, **kv_options)
        if contestant.policy == "random" and self.config.uneven:
            scorer: Scorer = Uneven(seed=self.config.seed)
            drawn = policy("random@heads", contestant.keep, self.config.schedule, floor=0.0, **kv_options)
            return replace(drawn, scorer=scorer)
        return policy(contestant.policy, contestant.keep, self.config.schedule, **kv_options)

    def read(self, cache: Cache, ids: Tensor, contestant: Contestant = FULL) -> None:
        """Run the prompt ``[B, T]`` through the decoder."""
        with pinned(contestant.backend):
            decoder_of(self.model)(input_ids=ids, use_cache=True, **{self._cache_name: cache})

    def fill(self, cache: Cache, batch: int, length: int) -> None:
        """Put random keys and values of a prompt into a cache; the cache's policy evicts."""
        decoder = decoder_of(self.model)
        size = fingerprint(decoder.config)
        dtype = next(self.model.parameters()).dtype
        make = torch.Generator(self.device).manual_seed(self.config.seed)

        def draw(heads: int, tokens: int) -> Tensor:
            shape = (batch, heads, tokens, size["head_dim"])
            return torch.randn(shape, generator=make, device=self.device, dtype=dtype)

        parts: Iterable[tuple[Tensor | None, Tensor | None]] = [(None, None)]
        if isinstance(cache, EvictionCache):
            tokens_of_prompt = torch.zeros(batch, length, dtype=torch.long, device=self.device)
            cache.interceptor.begin(decoder, None, tokens_of_prompt)
            parts = cache.interceptor.passes(None)
        for columns, _ in parts:
            tokens = length if columns is None else columns.shape[1]
            for attention_index, index in enumerate(attention_layers(decoder.config)):
                k, v = (draw(size["num_kv_heads"], tokens) for _ in "kv")
                cache.update(k, v, index)
                if isinstance(cache, EvictionCache):
                    scorer = cache.policy.scorer
                    blind = scorer is None or isinstance(scorer, Random)
                    q = k[:, :1].expand(-1, size["num_heads"], -1, -1) if blind else draw(size["num_heads"], tokens)
                    attention = attention_of(decoder.layers[index])
                    scaling = size["head_dim"] ** -0.5
                    cache.interceptor.attend(_Unattended(attention, attention_index, q, k, v, scaling, None))

    def decode(self, cache: Cache, token: Tensor, contestant: Contestant = FULL) -> Iterator[Tensor]:
        """Generate greedily; yield each token ``[B, 1]``."""
        if isinstance(cache, EvictionCache):
            step: Callable[[Tensor], Tensor] = StepRunner(self.model, cache)
        else:
            forward = self._static[contestant][1] if contestant.static else self._step
            step = lambda token: forward(token, cache)  # noqa: E731
        while True:
            with pinned(contestant.backend):
                token = step(token).argmax(-1, keepdim=True)
            yield token

    def _step(self, token: Tensor, cache: Cache) -> Tensor:
        """Return the logits ``[B, V]`` of the next token."""
        logits: Tensor = self.model(
            input_ids=token, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}
        ).logits
        return logits[:, -1]

    def _empty_static_cache(self, contestant: Contestant, batch: int, room: int) -> StaticCache:
        """Return the static cache of a contestant, emptied; its compiled step reuses the cache's tensors."""
        if self._sizes != (batch, room):
            torch.compiler.reset()
            self._static, self._sizes = {}, (batch, room)
        if contestant not in self._static:

            def step(token: Tensor, cache: Cache) -> Tensor:
                return self._step(token, cache)

            # torch keeps compiled code, with the backend in it, by code object: each contestant needs one
            step.__code__ = step.__code__.replace()
            mode = "reduce-overhead" if self.device.type == "cuda" else "default"
            compiled = torch.compile(step, mode=mode, fullgraph=True, dynamic=False)
            self._static[contestant] = StaticCache(config=self.model.config, max_cache_len=room), compiled
        cache = self._static[contestant][0]
        cache.reset()
        return cache

    def _calibrated(self, keep: float) -> AttentionGates:
        """Return random gates whose flags keep about a share ``keep`` of random tokens."""
        if keep not in self._gates:
            torch.manual_seed(self.config.seed)
            gates = gates_for(self.model).to(self.device)
            ids = self.tokens(1, min(max(self.config.context), CALIBRATION_TOKENS))
            for _ in range(2):  # eviction changes the inputs of the gates of later layers
                ag.attach(self.model, gates)
                gating = Gating(gates, torch.ones_like(ids), hard=True)
                decoder_of(self.model)(input_ids=ids, use_cache=False, gating=gating)
                ag.detach(self.model)
                logits = torch.cat([x.flatten() for x in gating.logits.values()]).sort().values
                boundary_index = min(len(logits) - 1, math.floor((1 - keep) * len(logits)))
                gates.config = replace(gates.config, bias=-float(logits[boundary_index]))
            self._gates[keep] = gates
        return self._gates[keep]


def kv_bytes(cache: Cache) -> int:
    """Return the bytes allocated for keys and values."""
    if isinstance(cache, EvictionCache):
        return cache.nbytes
    tensors = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def kept(cache: Cache) -> float:
    """Return the cached share of all tokens so far."""
    return cache.kept_share() if isinstance(cache, EvictionCache) else 1.0


def load(config: BenchConfig) -> PreTrainedModel:
    """Load the model of a configuration, or sample random weights for it."""
    return load_base(base_model(config, config.model), config.device)[0]


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decoding step reads: all, except an input embedding that is not the head."""
    embedding, head = next(model.get_input_embeddings().parameters()), model.get_output_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if embedding is head else total - embedding.nbytes


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values, over all layers and KV heads."""
    size = fingerprint(decoder_of(model).config)
    entries: int = 2 * size["num_layers"] * size["num_kv_heads"] * size["head_dim"]
    return entries * next(model.parameters()).element_size()


def gates_for(model: PreTrainedModel, **settings: Any) -> AttentionGates:
    """Make causal gates, as wide (4 heads of a power of 2) as GATES_SHARE of the model's parameters allows.

    ``settings`` are further settings of the gates; the width is chosen for attention gates, whatever the kind.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = fingerprint(decoder_of(model).config)
    head_dim = 128
    while head_dim > 8 and size["num_layers"] * 4 * head_dim * 3 * size["hidden_size"] > GATES_SHARE * parameters:
        head_dim //= 2
    gate_settings: dict[str, Any] = {"threshold": 0.5, "bias": 0.0, "scope": "causal", "prefill": "sparse"} | settings
    config = GateConfig(num_heads=4, head_dim=head_dim, **gate_settings)
    return AttentionGates(model.config, config).to(next(model.parameters()).dtype)


def pinned(backend: str | None) -> AbstractContextManager[None]:
    """Return a context that pins ``scaled_dot_product_attention`` to this implementation.

    None: torch's choice, which depends on version and card. Arguments that the implementation does not support, for
    example a mask, raise a RuntimeError.
    """
    return nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend])


@dataclass(frozen=True, kw_only=True)
class Uneven(Random):
    """Random scores that keep more tokens in some heads than in others, as trained gates do.

    Attributes:
        spread: standard deviation of the logarithm of a head's share.
    """

    spread: float = 0.7

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return random scores; a head with a larger share has more of a layer's highest scores."""
        make = torch.Generator().manual_seed(self.seed * 1000 + inputs.layer)
        share = (self.spread * torch.randn(inputs.key_indices.shape[:2], generator=make)).exp()
        return -super().score(inputs) / share.to(inputs.key_indices.device)[..., None]


class _Unattended(AttentionCall):
    """A call whose output is not needed."""

    def dense(self, valid: Tensor | None, left_padded: bool) -> Tensor:
        return self.q
