"""Time on a card that is not there: its stream runs behind the host, and tells the time of events it has passed."""

from types import SimpleNamespace

import pytest
import torch

from ag.engine import stopwatch
from ag.engine.stopwatch import OPEN, Stopwatch
from tests.support.batches import read, row


@pytest.fixture
def stream(monkeypatch):
    """Milliseconds of work in a card's queue: ``asked`` for, and ``passed``, which only a wait brings further."""
    state = SimpleNamespace(asked=0.0, passed=0.0, waited=0)

    class Event:
        def record(self, stream):
            self.at = state.asked

        def query(self):
            return state.passed >= self.at

        def synchronize(self):
            state.waited += not self.query()
            state.passed = max(state.passed, self.at)

        def elapsed_time(self, other):
            assert self.query() and other.query(), "the card has not got there"
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
    return state


def test_the_time_is_the_cards_and_nobody_waits_before_it_is_asked_for(stream):
    watch = Stopwatch(1.0)
    for number in range(10 * OPEN):
        stream.asked += 1000.0
        with watch.running(torch.device("cuda")):
            stream.asked += 2.0
        stream.passed = stream.asked - 3000.0 if number else 0.0  # the card is a little behind
    assert stream.waited == 0 and len(watch._open) <= OPEN
    assert watch.seconds == pytest.approx(1.0 + 20 * OPEN / 1000) and stream.waited


def test_a_layer_times_scores_where_they_are_made(tiny_llama, monkeypatch):
    """Scores and decisions, in every layer."""
    monkeypatch.setattr(stopwatch.time, "perf_counter", iter(range(1000)).__next__)
    cache = read(tiny_llama(), row(20), "h2o", 0.5)
    assert cache.report().seconds == [1.0] * 3
    assert cache.scoring_seconds == 3.0
