"""Time on a card that is not there: its stream runs behind the host, and tells the time of events it has passed."""

import copy

import pytest
import torch

from ag.engine import stopwatch
from ag.engine.stopwatch import OPEN, Stopwatch
from tests.support.batches import read

CARD = torch.device("cuda")


class Stream:
    """Work in a card's queue: the host asks for milliseconds of it, which pass when somebody waits."""

    def __init__(self):
        self.asked = self.passed = 0.0
        self.waited = 0

    def event(self, enable_timing=False):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self, stream):
        assert stream is self.stream
        self.at = self.stream.asked

    def query(self):
        return self.stream.passed >= self.at

    def synchronize(self):
        if not self.query():
            self.stream.waited += 1
            self.stream.passed = self.at

    def elapsed_time(self, other):
        assert self.query() and other.query(), "the card has not got there"
        return other.at - self.at


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def run(watch, stream, *milliseconds):
    """Let the card work in between, too."""
    for time in milliseconds:
        stream.asked += 1000.0
        with watch.running(CARD):
            stream.asked += time


def test_the_time_is_the_cards_and_nobody_waits_before_it_is_asked_for(stream):
    watch = Stopwatch(1.0)
    run(watch, stream, 2.0, 3.0)
    assert stream.waited == 0
    assert watch.seconds == pytest.approx(1.005) and stream.waited == 2
    run(watch, stream, 10.0)
    assert watch.seconds == pytest.approx(1.015)


def test_a_long_run_keeps_few_events_and_waits_for_none(stream):
    watch = Stopwatch()
    for _ in range(10 * OPEN):
        run(watch, stream, 1.0)
        stream.passed = stream.asked - 3.0  # the card is a little behind
    assert stream.waited == 0 and len(watch._open) <= OPEN
    assert watch.seconds == pytest.approx(10 * OPEN / 1000)


def test_a_copy_has_the_sum(stream):
    watch = Stopwatch()
    run(watch, stream, 4.0)
    twin = copy.deepcopy(watch)
    run(watch, stream, 1.0)
    assert (twin.seconds, watch.seconds) == pytest.approx((0.004, 0.005))


def test_a_layer_times_scores_where_they_are_made(tiny_llama, monkeypatch):
    """Scores and decisions, in every layer, by the device of the queries."""
    devices = []

    class Noted(Stopwatch):
        def running(self, device):
            devices.append(device)
            return super().running(device)

    monkeypatch.setattr("ag.engine.layer.Stopwatch", Noted)
    monkeypatch.setattr(stopwatch.time, "perf_counter", iter(range(1000)).__next__)
    cache = read(tiny_llama(), torch.arange(3, 23), "h2o", 0.5)
    assert devices == [torch.device("cpu")] * 3
    assert cache.report().seconds == [1.0] * 3
    assert cache.scoring_seconds == 3.0
