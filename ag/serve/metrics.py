"""What Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ag.serve.snapshot import Snapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # upper bounds of the histograms' bins


class Metrics:
    """Counters, gauges and histograms of a server.

    Args:
        snapshot: tells what its scheduler is doing.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(snapshot))
        ProcessCollector(registry=self._registry)  # memory, files and time of the process
        first = "Seconds from a request to the first token of its answer"
        between = "Seconds from a token of an answer to the next one"
        self._first = Histogram("ag_time_to_first_token_seconds", first, buckets=SECONDS, registry=self._registry)
        self._between = Histogram("ag_time_per_token_seconds", between, buckets=SECONDS, registry=self._registry)

    def timed(self, seconds: float, first: bool) -> None:
        """Take note of how long a token took, and whether it was the first of its answer."""
        (self._first if first else self._between).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Gauges and counters of the moment at which somebody asks."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        answers = GaugeMetricFamily("ag_answers", "Answers by state", labels=["state"])
        for state, count in (("waiting", now.waiting), ("reading", now.reading), ("running", len(now.running))):
            answers.add_metric([state], count)
        blocks = GaugeMetricFamily("ag_blocks", "Blocks of keys and values by state", labels=["state"])
        for state, count in (("taken", now.blocks - now.free), ("free", now.free)):
            blocks.add_metric([state], count)
        ended = CounterMetricFamily("ag_answers_ended", "Answers that ended, by reason", labels=["reason"])
        for reason in ("stop", "length", "cancelled", "timeout", "error"):
            ended.add_metric([reason], now.counts.ended[reason])
        yield from (answers, blocks, ended)
        yield GaugeMetricFamily("ag_block_bytes", "Bytes of a block", value=now.block_nbytes)
        cached = "Blocks of cached prefixes, which are free for others"
        yield GaugeMetricFamily("ag_prefix_blocks", cached, value=now.prefix_blocks)
        for name, text, count in (
            ("ag_prompt_tokens", "Tokens of prompts that were read", now.counts.prompts),
            ("ag_prompt_tokens_reused", "Tokens of prompts whose prefix was cached", now.counts.reused),
            ("ag_answer_tokens", "Tokens of answers", now.counts.tokens),
            ("ag_steps", "Steps of the batch", now.counts.steps),
            ("ag_draft_tokens", "Draft tokens that were looked up", now.counts.drafted),
            ("ag_draft_tokens_accepted", "Draft tokens that answers have", now.counts.accepted),
            ("ag_preempted", "Answers that gave their blocks back and were read again", now.counts.preempted),
        ):
            yield CounterMetricFamily(name, text, value=count)
