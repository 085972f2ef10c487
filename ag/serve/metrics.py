"""The metrics of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ag.serve.request import Request
from ag.serve.snapshot import Snapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # upper bounds of the histograms' bins
COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)  # upper bounds of the bins of completions per prompt
REASONS = ("stop", "length", "cancelled", "timeout", "error")


class Status(NamedTuple):
    """The status of a server, or of several replicas together."""

    snapshot: Snapshot  # state of the scheduler
    metrics: list[Metric]  # for Prometheus
    is_healthy: bool  # False if every scheduler has failed
    context_length: int | None  # largest number of tokens of a sequence; None: no limit


class Metrics:
    """Counters, gauges and histograms of a server.

    Args:
        snapshot: returns the snapshot of the scheduler.
        context_length: largest number of tokens of a sequence. None: no limit.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], context_length: int | None = None) -> None:
        self._snapshot, self._registry = snapshot, CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, open files and CPU time of the process
        ttft_text = "Seconds from a request to the first token of its answer"
        inter_token_text = "Seconds from a token of an answer to the next one"
        self._ttft = Histogram("ag_time_to_first_token_seconds", ttft_text, buckets=SECONDS, registry=self._registry)
        self._inter_token = Histogram(
            "ag_time_per_token_seconds", inter_token_text, buckets=SECONDS, registry=self._registry
        )
        bins: dict[str, Any] = {"buckets": token_bins(context_length), "registry": self._registry}
        self._prompt_tokens = Histogram("ag_request_prompt_tokens", "Tokens of each prompt that was accepted", **bins)
        self._max_tokens = Histogram("ag_request_params_max_tokens", "Most tokens of an answer, by prompt", **bins)
        self._generated = Histogram("ag_request_generation_tokens", "Tokens of each answer that ended", **bins)
        count_bins: dict[str, Any] = {"buckets": COMPLETIONS, "registry": self._registry}
        self._num_completions = Histogram("ag_request_params_n", "Answers that were asked for, by prompt", **count_bins)
        finished_text, label = "Answers that ended, by the finish reason that the client reads", ["finished_reason"]
        self._finished = Counter("ag_request_success", finished_text, label, registry=self._registry)
        for reason in ("stop", "length"):
            self._finished.labels(reason)  # Prometheus shows a 0 for them from the start

    def record_token(self, seconds: float, first: bool) -> None:
        """Record the seconds of one token; ``first`` is True for a completion's first token."""
        (self._ttft if first else self._inter_token).observe(seconds)

    def record_request(self, request: Request) -> None:
        """Record the prompt length, ``max_tokens`` and ``n`` of an accepted request."""
        self._prompt_tokens.observe(len(request.tokens))
        self._max_tokens.observe(request.max_tokens)
        self._num_completions.observe(request.n)

    def record_end(self, reason: str, tokens: int) -> None:
        """Record why a completion ended, and its number of tokens."""
        self._finished.labels(reason).inc()
        self._generated.observe(tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from self._registry.collect()
        snapshot = self._snapshot()
        counts, memory, gauge, counter = snapshot.counts, snapshot.memory, GaugeMetricFamily, CounterMetricFamily
        states = {"waiting": snapshot.num_waiting, "reading": snapshot.num_prefilling, "running": len(snapshot.running)}
        blocks = {"taken": snapshot.blocks - snapshot.free, "free": snapshot.free}
        num_ended = {reason: counts.num_ended[reason] for reason in REASONS}
        table: list[tuple[Any, str, str, str, Any]] = [
            (gauge, "ag_answers", "Answers by state", "state", states),
            (gauge, "ag_blocks", "Blocks of keys and values by state", "state", blocks),
            (gauge, "ag_block_bytes", "Bytes of a block", "", snapshot.block_nbytes),
            (gauge, "ag_kept_share", "Share of the tokens of running answers that is held", "", memory.kept_share),
            (gauge, "ag_saved_bytes", "Bytes of a whole cache that running answers save", "", memory.saved_bytes),
            (
                gauge,
                "ag_prefix_blocks",
                "Blocks of cached prefixes, which any request may take",
                "",
                snapshot.prefix_blocks,
            ),
            (counter, "ag_answers_ended", "Answers that ended, by reason", "reason", num_ended),
            (counter, "ag_prompt_tokens", "Prompt tokens that were read", "", counts.prompts),
            (counter, "ag_prompt_tokens_reused", "Prompt tokens taken from a cached prefix", "", counts.cached),
            (counter, "ag_answer_tokens", "Generated tokens", "", counts.tokens),
            (counter, "ag_steps", "Decoding steps of the batch", "", counts.steps),
            (counter, "ag_draft_tokens", "Draft tokens that the model read", "", counts.drafted),
            (counter, "ag_draft_tokens_accepted", "Draft tokens that became part of an answer", "", counts.accepted),
            (counter, "ag_preempted", "Preemptions of answers", "", counts.preempted),
        ]
        for kind, name, text, label, value in table:
            family = kind(name, text, labels=[label]) if label else kind(name, text, value=value)
            for state, number in value.items() if label else ():
                family.add_metric([state], number)
            yield family


def token_bins(max_tokens: int | None) -> list[int]:
    """Return upper bounds of bins 1, 2, 5, 10, ... up to ``max_tokens``. None: up to a million."""
    bounds = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= (max_tokens or 10**6)]


def prometheus_text(metrics: Sequence[Metric]) -> bytes:
    """Return metrics in Prometheus' text format."""
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: metrics)))
