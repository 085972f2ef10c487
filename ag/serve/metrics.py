"""The metrics of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ag.serve.snapshot import Snapshot

# upper bounds of the histograms' bins
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)
TOKENS = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]

REASONS = ("stop", "length", "cancelled", "timeout", "error")


class Metrics:
    """Counters, gauges and histograms of a server, in a registry of Prometheus' client.

    ``snapshot()`` is the scheduler's snapshot. ``context_length`` None means that sequences have no limit.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], context_length: int | None = None) -> None:
        self._snapshot, self.registry = snapshot, CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, open files and CPU time of the process
        self.registry.register(self)

        tokens = [bound for bound in TOKENS if bound <= (context_length or 10**6)]
        #: Histograms by name: of each token, of each accepted prompt, and of each answer that ended.
        self._histograms = {
            name: Histogram(f"ag_{name}", text, buckets=bins, registry=self.registry)
            for name, text, bins in (
                ("time_to_first_token_seconds", "Seconds from a request to the first token of its answer", SECONDS),
                ("time_per_token_seconds", "Seconds from a token of an answer to the next one", SECONDS),
                ("request_prompt_tokens", "Tokens of each prompt that was accepted", tokens),
                ("request_params_max_tokens", "Most tokens of an answer, by prompt", tokens),
                ("request_params_n", "Answers that were asked for, by prompt", COMPLETIONS),
                ("request_generation_tokens", "Tokens of each answer that ended", tokens),
            )
        }
        finished_text = "Answers that ended, by the finish reason that the client reads"
        self._finished = Counter("ag_request_success", finished_text, ["finished_reason"], registry=self.registry)
        for reason in ("stop", "length"):
            self._finished.labels(reason)  # Prometheus shows a 0 for them from the start

    def observe(self, **numbers: float) -> None:
        """Record numbers in the histograms of these names."""
        for name, number in numbers.items():
            self._histograms[name].observe(number)

    def record_end(self, reason: str, tokens: int) -> None:
        """Record why a completion ended, and its number of tokens."""
        self._finished.labels(reason).inc()
        self.observe(request_generation_tokens=tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the scheduler's snapshot."""
        now = self._snapshot()
        counts, memory, gauge, counter = now.counts, now.memory, GaugeMetricFamily, CounterMetricFamily
        states = {"waiting": now.num_waiting, "reading": now.num_prefilling, "running": len(now.running)}
        blocks = {"taken": now.blocks - now.free, "free": now.free}
        num_ended = {reason: counts.num_ended[reason] for reason in REASONS}
        for kind, name, text, value, *label in (
            (gauge, "ag_answers", "Answers by state", states, "state"),
            (gauge, "ag_blocks", "Blocks of keys and values by state", blocks, "state"),
            (gauge, "ag_block_bytes", "Bytes of a block", now.block_nbytes),
            (gauge, "ag_kept_share", "Share of the tokens of running answers that is held", memory.kept_share),
            (gauge, "ag_saved_bytes", "Bytes of a whole cache that running answers save", memory.saved_bytes),
            (gauge, "ag_prefix_blocks", "Blocks of cached prefixes, which any request may take", now.prefix_blocks),
            (counter, "ag_answers_ended", "Answers that ended, by reason", num_ended, "reason"),
            (counter, "ag_prompt_tokens", "Prompt tokens that were read", counts.prompts),
            (counter, "ag_prompt_tokens_reused", "Prompt tokens taken from a cached prefix", counts.cached),
            (counter, "ag_answer_tokens", "Generated tokens", counts.tokens),
            (counter, "ag_steps", "Decoding steps of the batch", counts.steps),
            (counter, "ag_draft_tokens", "Draft tokens that the model read", counts.drafted),
            (counter, "ag_draft_tokens_accepted", "Draft tokens that became part of an answer", counts.accepted),
            (counter, "ag_preempted", "Preemptions of answers", counts.preempted),
        ):
            family: Any = kind(name, text, labels=label)
            for state, number in value.items() if isinstance(value, dict) else [(None, value)]:
                family.add_metric([state] if label else [], number)
            yield family
