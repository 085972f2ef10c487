"""The figures of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ag.serve.request import Request
from ag.serve.snapshot import Snapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # upper bounds of the histograms' bins
ANSWERS = (1, 2, 5, 10, 20, 50, 100)  # the same of the histogram of answers
REASONS = ("stop", "length", "cancelled", "timeout", "error")


class Status(NamedTuple):
    """The status of a server, or of several replicas together."""

    snapshot: Snapshot  # of the scheduler
    figures: list[Metric]  # for Prometheus
    works: bool  # False when every scheduler has failed
    context: int | None  # most tokens of a text that the model takes; None means that there is no limit


class Metrics:
    """Counters, gauges and histograms of a server.

    Args:
        snapshot: returns the snapshot of the scheduler.
        context: most tokens of a text; None means that there is no limit.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], context: int | None = None) -> None:
        self._snapshot, self._registry = snapshot, CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, open files and CPU time of the process
        first = "Seconds from a request to the first token of its answer"
        between = "Seconds from a token of an answer to the next one"
        self._first = Histogram("ag_time_to_first_token_seconds", first, buckets=SECONDS, registry=self._registry)
        self._between = Histogram("ag_time_per_token_seconds", between, buckets=SECONDS, registry=self._registry)
        bins: dict[str, Any] = {"buckets": tokens_up_to(context), "registry": self._registry}
        self._prompts = Histogram("ag_request_prompt_tokens", "Tokens of each prompt that was accepted", **bins)
        self._limits = Histogram("ag_request_params_max_tokens", "Most tokens of an answer, by prompt", **bins)
        self._written = Histogram("ag_request_generation_tokens", "Tokens of each answer that ended", **bins)
        numbers: dict[str, Any] = {"buckets": ANSWERS, "registry": self._registry}
        self._numbers = Histogram("ag_request_params_n", "Answers that were asked for, by prompt", **numbers)
        done, label = "Answers that ended, by the finish reason that the client reads", ["finished_reason"]
        self._done = Counter("ag_request_success", done, label, registry=self._registry)
        for reason in ("stop", "length"):
            self._done.labels(reason)  # 0 is a figure too

    def timed(self, seconds: float, first: bool) -> None:
        """Record the seconds that a token took; ``first`` marks the first token of an answer."""
        (self._first if first else self._between).observe(seconds)

    def asked(self, request: Request) -> None:
        """Record what a request that was accepted asks for."""
        self._prompts.observe(len(request.tokens))
        self._limits.observe(request.max_tokens)
        self._numbers.observe(request.n)

    def ended(self, reason: str, tokens: int) -> None:
        """Record the end of an answer, and the number of its tokens."""
        self._done.labels(reason).inc()
        self._written.observe(tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        yield from self._registry.collect()
        now = self._snapshot()
        counts, gauge, counter = now.counts, GaugeMetricFamily, CounterMetricFamily
        states = {"waiting": now.waiting, "reading": now.reading, "running": len(now.running)}
        blocks = {"taken": now.blocks - now.free, "free": now.free}
        ended = {reason: counts.ended[reason] for reason in REASONS}
        table: list[tuple[Any, str, str, str, Any]] = [
            (gauge, "ag_answers", "Answers by state", "state", states),
            (gauge, "ag_blocks", "Blocks of keys and values by state", "state", blocks),
            (gauge, "ag_block_bytes", "Bytes of a block", "", now.block_nbytes),
            (gauge, "ag_prefix_blocks", "Blocks of cached prefixes, which any request may take", "", now.prefix_blocks),
            (counter, "ag_answers_ended", "Answers that ended, by reason", "reason", ended),
            (counter, "ag_prompt_tokens", "Prompt tokens that were read", "", counts.prompts),
            (counter, "ag_prompt_tokens_reused", "Prompt tokens taken from a cached prefix", "", counts.reused),
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


def tokens_up_to(most: int | None) -> list[int]:
    """Return upper bounds of bins of numbers of tokens, 1, 2, 5, 10 and so on; None stands for a million."""
    bounds = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= (most or 10**6)]


def labelled(figures: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Merge the figures of replicas, given by name; the label ``replica`` of each sample is that name."""
    families: dict[str, Metric] = {}
    for name, metrics in figures.items():
        for one in metrics:
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in one.samples]
    return [*families.values()]


def as_text(figures: Sequence[Metric]) -> bytes:
    """Return figures in Prometheus' text format."""
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: figures)))
