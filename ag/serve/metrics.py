"""What Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ag.serve.snapshot import Snapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # upper bounds of the histograms' bins
REASONS = ("stop", "length", "cancelled", "timeout", "error")


class Told(NamedTuple):
    """What a server tells of itself.

    Attributes:
        snapshot: what its scheduler is doing.
        figures: what Prometheus reads.
        works: whether there is a scheduler that answers.
    """

    snapshot: Snapshot
    figures: list[Metric]
    works: bool


class Metrics:
    """Counters, gauges and histograms of a server.

    Args:
        snapshot: tells what its scheduler is doing.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, files and time of the process
        first = "Seconds from a request to the first token of its answer"
        between = "Seconds from a token of an answer to the next one"
        self._first = Histogram("ag_time_to_first_token_seconds", first, buckets=SECONDS, registry=self._registry)
        self._between = Histogram("ag_time_per_token_seconds", between, buckets=SECONDS, registry=self._registry)

    def timed(self, seconds: float, first: bool) -> None:
        """Take note of how long a token took, and whether it was the first of its answer."""
        (self._first if first else self._between).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the moment."""
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
            (gauge, "ag_prefix_blocks", "Blocks of cached prefixes, which are free for others", "", now.prefix_blocks),
            (counter, "ag_answers_ended", "Answers that ended, by reason", "reason", ended),
            (counter, "ag_prompt_tokens", "Tokens of prompts that were read", "", counts.prompts),
            (counter, "ag_prompt_tokens_reused", "Tokens of prompts whose prefix was cached", "", counts.reused),
            (counter, "ag_answer_tokens", "Tokens of answers", "", counts.tokens),
            (counter, "ag_steps", "Steps of the batch", "", counts.steps),
            (counter, "ag_draft_tokens", "Draft tokens that were looked up", "", counts.drafted),
            (counter, "ag_draft_tokens_accepted", "Draft tokens that answers have", "", counts.accepted),
            (counter, "ag_preempted", "Answers that gave their blocks back and were read again", "", counts.preempted),
        ]
        for kind, name, text, label, value in table:
            family = kind(name, text, labels=[label]) if label else kind(name, text, value=value)
            for state, number in value.items() if label else ():
                family.add_metric([state], number)
            yield family


def labelled(figures: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Return figures of replicas, by their names, together: each has the label ``replica``."""
    families: dict[str, Metric] = {}
    for name, metrics in figures.items():
        for one in metrics:
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in one.samples]
    return [*families.values()]


def as_text(figures: Sequence[Metric]) -> bytes:
    """Return figures in Prometheus' text format."""
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: figures)))
