"""What a user asks of vLLM: ``--additional-config '{"ag": {"gates": "smollm2", "budget": 0.3}}'``."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ag.config.choice import Choice
from ag.config.spec import PolicySpec
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
    """

    policy: str
    budget: int | float
    options: str = "{}"

    @classmethod
    def parse(cls, additional_config: object, environment: Mapping[str, str]) -> Settings | None:
        """Read the settings from vLLM's ``additional_config`` or, if it has none, from environment variables.

        Args:
            additional_config: a mapping, whose key ``ag`` has ``gates`` or ``policy``, ``budget``, and options of the
                policy by name, or ``choice``, a file of ``ag.choose``.
            environment: has AG_GATES and AG_BUDGET if the variables ask for eviction.

        Returns:
            None if nothing asks for eviction.

        Raises:
            UserError: a key or a value is not known, or vLLM cannot run the policy.
        """
        settings_given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if settings_given is None and GATES_VARIABLE in environment:
            settings_given = {"gates": environment[GATES_VARIABLE]}
            if BUDGET_VARIABLE in environment:
                settings_given["budget"] = _number(environment[BUDGET_VARIABLE])
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
        options = {name: value for name, value in settings_given.items() if name not in ("gates", "policy", "budget")}
        spec = PolicySpec.parse(str(settings_given.get("policy", "gates")))
        spec = spec.with_gates(settings_given.get("gates"), '"gates": "EXPORT"')
        return _checked(cls(str(spec), settings_given["budget"], json.dumps(options, sort_keys=True)))

    @classmethod
    def _chosen(cls, settings_given: Mapping[str, Any]) -> Settings:
        """Return the settings of a file that ``ag.choose`` wrote."""
        if len(settings_given) > 1:
            raise UserError(f"additional_config {KEY}={settings_given!r:.80}: expected nothing beside choice.")
        chosen = Choice.read(str(settings_given["choice"]))
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
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise UserError(f"{PROTECT}={value!r:.80}: expected a number of first tokens of the prompt, 0 or more.")
    return min(int(value), prompt)


def _number(text: str) -> int | float | str:
    """Return a number of a text as it is written; a text that is none stays, for the message of its reader."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
