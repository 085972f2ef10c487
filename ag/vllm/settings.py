"""What a user asks of vLLM: ``--additional-config '{"ag": {"gates": "smollm2", "budget": 0.3}}'``."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ag.config.choice import Choice
from ag.config.spec import PolicySpec, parse_budget
from ag.engine.policy import Policy, policy
from ag.errors import UserError, check_known
from ag.gates.gate import TokenGate

KEY = "ag"  # of vLLM's additional_config
PROTECT = "ag_protect"  # of a request's vllm_xargs: first tokens of its prompt that are never evicted
GATES_VARIABLE, BUDGET_VARIABLE = "AG_GATES", "AG_BUDGET"
#: Scorers whose scores need no attention weights: those of a token by itself, or of the keys of the prompt.
SCORERS = ("gates", "keydiff", "knorm", "random", "streaming_llm")
ALLOCATORS = ("global", "uniform")
CACHE_TYPES = ("auto", "bfloat16", "float16", "float32")  # types of keys and values that the pages may have


@dataclass(frozen=True)
class Settings:
    """A policy in values that can be hashed and sent to other processes.

    Attributes:
        policy: text of the policy, with the export of the gates if it reads any.
        budget: tokens per KV head (int), or share of each prompt (float).
        options: options of the policy by name, as JSON.
        is_share: whether the budget is a share: 1 (one token) and 1.0 (all tokens) are equal to Python and its caches.
    """

    policy: str
    budget: int | float
    options: str = "{}"
    is_share: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(parse_budget(self.budget), float))

    @classmethod
    def parse(cls, additional_config: object, environment: Mapping[str, str]) -> Settings | None:
        """Read the settings from vLLM's ``additional_config`` or, if it has none, from environment variables.

        Args:
            additional_config: a mapping, whose key ``ag`` has ``gates`` or ``policy``, ``budget``, and options of the
                policy by name, or ``choice``, a file of ``ag.choose``.
            environment: has AG_GATES, which is not empty, and AG_BUDGET if the variables ask for eviction.

        Returns:
            None if nothing asks for eviction.

        Raises:
            UserError: a key or a value is not known, or vLLM cannot run the policy.
        """
        settings_given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if settings_given is None and environment.get(GATES_VARIABLE):
            settings_given = {"gates": environment[GATES_VARIABLE]}
            if BUDGET_VARIABLE in environment:
                settings_given["budget"] = environment[BUDGET_VARIABLE]
                with suppress(ValueError):  # a text that is no number stays, for the message
                    settings_given["budget"] = json.loads(environment[BUDGET_VARIABLE])
        if settings_given is None:
            return None
        if isinstance(settings_given, Mapping) and "choice" in settings_given:
            return _checked(cls._chosen(settings_given))
        if (
            not isinstance(settings_given, Mapping)
            or not {"gates", "policy"} & {*settings_given}
            or "budget" not in settings_given
        ):
            raise UserError(
                f"additional_config {KEY}={settings_given!r:.80}: expected gates (or policy) and a budget, such as "
                '{"gates": "smollm2", "budget": 0.3}.'
            )
        for name in ("gates", "policy", "schedule"):
            if not isinstance(value := settings_given.get(name, ""), str):
                raise UserError(f"additional_config {KEY}: {name}={value!r:.80}: expected a text.")
        options = {name: value for name, value in settings_given.items() if name not in ("gates", "policy", "budget")}
        spec, gates = PolicySpec.parse(settings_given.get("policy", "gates")), settings_given.get("gates")
        if gates:
            same_export = spec.reads_gates and Path(gates) == Path(spec.path or gates)
            if not same_export:
                reads = f"names {spec.path}" if spec.path else "reads no gates"
                raise UserError(
                    f"additional_config {KEY}: gates={gates} and policy={spec}, which {reads}: leave one out."
                )
        spec = spec.with_gates(gates or None, '"gates": "EXPORT"')
        return _checked(cls(str(spec), settings_given["budget"], json.dumps(options, sort_keys=True)))

    @classmethod
    def _chosen(cls, settings_given: Mapping[str, Any]) -> Settings:
        """Return the settings of a file that ``ag.choose`` wrote."""
        if len(settings_given) > 1:
            raise UserError(f"additional_config {KEY}={settings_given!r:.80}: expected nothing beside choice.")
        chosen = Choice.read(str(settings_given["choice"]))
        if chosen.gates is not None:
            raise UserError(
                f"choice={settings_given['choice']}: measured with the LoRA adapter of {chosen.gates}: expected a "
                "choice without an adapter; merge it into the model and choose again, or serve it by ag.serve."
            )
        options = chosen.options | ({} if chosen.schedule == "prefill" else {"schedule": chosen.schedule})
        return cls(chosen.policy, chosen.budget, json.dumps(options, sort_keys=True))

    @property
    def made_policy(self) -> Policy:
        """The policy, with its gates read once in each process."""
        return _made(self)

    def check(self) -> None:
        """Refuse a policy that vLLM cannot run.

        Raises:
            UserError: the message names the part and what is expected.
        """
        spec = PolicySpec.parse(self.policy).resolved()
        if not spec.evicts or PolicySpec.parse(self.policy).scorer == "flags":
            raise UserError(
                f"Policy '{self.policy}' in vLLM: its scheduler has to know how many tokens stay: expected a policy "
                "with a budget; use gates:EXPORT."
            )
        check_known(spec.scorer, SCORERS, "policy of vLLM", self.policy)
        check_known(str(spec.allocator), ALLOCATORS, "allocator of vLLM", self.policy)
        policy = self.made_policy
        refused = {
            f"+{spec.wrapper}": spec.wrapper is not None,
            f"positions={policy.positions}": policy.positions != "original",
            f"kv_dtype={policy.kv_dtype}": policy.kv_dtype != "float",
            "floor": bool(getattr(policy.allocator, "floor", 0)),
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise UserError(
                    f"Policy '{self.policy}' in vLLM: {name}: expected a scorer and an allocator alone; leave it out, "
                    "or serve it by ag.serve."
                )
        gates = policy.gates
        if gates is None:
            return
        config, evicts_again = gates.config, policy.schedule != "prefill"
        partial = {
            f"gate.covers={config.covers}": config.covers != "all" and policy.steps is not None,
            f"gate.first_layer={config.first_layer}": config.first_layer > 0 and evicts_again,
        }
        for name, is_partial in partial.items():
            if is_partial:
                raise UserError(
                    f"Policy '{self.policy}' in vLLM: schedule={policy.schedule} with {name}: expected gates of all "
                    "layers and, after the prompt, of all tokens; use schedule=prefill, or serve these by ag.serve."
                )
        unsupported = {
            f"gate.kind={config.kind}": not all(isinstance(x, TokenGate) for x in gates.layers.values()),
            f"gate.scope={config.scope}": config.scope != "causal",
            f"gate.layer_offset={config.layer_offset}": config.layer_offset != 0,
        }
        for name, is_wrong in unsupported.items():
            if is_wrong:
                raise UserError(
                    f"Policy '{self.policy}' in vLLM: {name}: expected gates that read each token alone (linear, "
                    "affine, mlp, fast_kvzip, retention) in its own layer; serve these gates by ag.serve."
                )


def settings_of(config: Any) -> Settings | None:
    """Return the settings of vLLM's configuration of an engine, which carries them to all of its processes."""
    return Settings.parse(config.additional_config, os.environ)


@functools.cache
def _made(settings: Settings) -> Policy:
    return policy(settings.policy, settings.budget, **json.loads(settings.options))


@functools.cache
def _checked(settings: Settings) -> Settings:
    settings.check()
    return settings


def protected_tokens(params: Any, prompt: int) -> int:
    """Return how many first tokens of a prompt a request protects, at most all ``prompt`` tokens.

    Args:
        params: vLLM's sampling parameters of the request. None: it has none, and protects nothing.
        prompt: tokens of the prompt.

    Raises:
        UserError: the value is not a number of tokens.
    """
    value = (getattr(params, "extra_args", None) or {}).get(PROTECT, 0)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 0:
        raise UserError(f"{PROTECT}={value!r:.80}: expected a number of first tokens of the prompt, 0 or more.")
    return min(int(value), prompt)
