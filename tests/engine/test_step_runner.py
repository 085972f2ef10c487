"""What StepRunner refuses, what a step asks the device, and the decoding loop that is made of steps."""

import copy
import functools
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ag
from ag.engine import evictor, step_runner
from ag.engine.cache import EvictionCache
from ag.engine.decode import decode
from ag.engine.evictor import NonFiniteScoreError
from ag.engine.step_runner import StepRunner, host_waits
from ag.errors import UserError
from ag.kernels.native import Kernel
from ag.kernels.pages import Facts
from tests.engine.test_replay import CASES, tokens
from tests.support.batches import columns, padded, row
from tests.support.common import factory
from tests.support.gates_for import gates_for
from tests.support.refused import refuses
from tests.support.tape import WAITS, Recorder, host_reads


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


class DeviceMemory(TorchDispatchMode):
    """Take the memory of some tensors, and all that is computed from it, for a device's: the host may not read it.

    Attributes:
        reads: what the host read there all the same.
    """

    def __init__(self, there):
        super().__init__()
        self.reads = []
        self._storages = {}
        for x in there:
            self.mark(x)

    def mark(self, x):
        self._storages[x.untyped_storage()._cdata] = x.untyped_storage()  # kept, so that no other gets its address

    def has(self, *given):
        return any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in self._storages for x in given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, given = func.overloadpacket.__name__, tree_leaves((args, kwargs or {}))
        there = self.has(*given)
        if there and (name in WAITS or (name == "copy_" and not self.has(args[0]))):
            self.reads.append(name)
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if there and isinstance(x, torch.Tensor):
                self.mark(x)
        return out

    @contextmanager
    def running(self):
        """Notice operations, and reads that are none; what a kernel in C++ is given lies there too."""
        call = Kernel.__call__

        def called(kernel, *arguments):
            for x in arguments:
                if isinstance(x, torch.Tensor):  # what it writes
                    self.mark(x)
            call(kernel, *arguments)

        reads = host_reads(lambda name, x: self.reads.append(name) if self.has(x) else None)
        with reads, patch.object(Kernel, "__call__", called), self:
            yield self


@pytest.mark.parametrize(
    ("name", "shares"), [("full", False), ("full", True), ("h2o, interval", False), ("tova@pyramid", False)]
)
@torch.no_grad()
def test_the_host_reads_nothing_of_the_device_in_a_step(model, name, shares):
    """But once in a while whether scores were finite. A fork shares blocks of a pool of fixed size."""
    given, options, _, _, _ = CASES[name]
    prompt = EvictionCache(model, *given, **options, pool=ag.Pool(model, 2**20) if shares else None)
    model(torch.stack([row(40, 0), row(40, 1)]), past_key_values=prompt)
    cache = copy.deepcopy(prompt) if shares else prompt
    step = StepRunner(model, cache)
    for number in range(3):
        step(tokens(2, number))
    (store,) = cache.state.stores
    there = [*cache.setup.pool.columns(), store.block_table, store.lengths, cache.state.sequences.step_token_indices]
    there += [cache.state.sequences.mask, *model.parameters(), *(x for part in store.records for x in part.values())]
    there += [] if cache.state.evictor is None else cache.state.evictor._scores.values()
    with DeviceMemory(there).running() as seen:
        assert seen.has(step(tokens(2, 3)))
        for number in range(4, 3 + evictor.CHECK_INTERVAL):
            step(tokens(2, number))
    assert seen.reads == (["tolist"] if "every" in given else [])
    if name == "full" and not shares:  # heads that compete ask how many of their tokens stayed: a read is noticed
        cache = EvictionCache(model, "h2o@heads", 20, "every")
        model(row(40)[None], past_key_values=cache)
        with DeviceMemory(
            [cache.state.stores[0].lengths, *cache.setup.pool.columns(), *model.parameters()]
        ).running() as seen:
            StepRunner(model, cache)(tokens(1, 0))
        assert seen.reads.count("cpu") >= 3  # once a layer


def test_steps_are_recorded_on_the_device_of_the_model(monkeypatch):
    """Whichever device is the current one, and whichever recorded first."""
    current, recorded = [0], []

    @contextmanager
    def device(chosen):
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before

    @contextmanager
    def graph(graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads may allocate memory
        recorded.append((current[0], stream))
        yield

    stubs = {"device": device, "graph": graph, "CUDAGraph": MagicMock, "Stream": lambda device: f"of {device}"}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    uncached = step_runner._recording_stream.__wrapped__
    monkeypatch.setattr(step_runner, "_recording_stream", functools.cache(uncached))
    monkeypatch.setattr(step_runner, "host_waits", lambda *_: False)
    for index in (1, 0):
        weight = SimpleNamespace(device=torch.device("cuda", index))
        on_card = SimpleNamespace(parameters=lambda weight=weight: iter([weight]))
        StepRunner(on_card, MagicMock())._record(lambda: torch.zeros(1))
    assert recorded == [(1, "of cuda:1"), (0, "of cuda:0")]


def test_steps_that_make_the_host_wait_are_not_recorded(model, monkeypatch):
    """Without Triton's kernels, and where the tokens of each expert are counted."""
    pytest.importorskip("triton")
    monkeypatch.delenv("AG_KERNELS", raising=False)
    experts = factory("Mixtral", head_dim=16)(num_hidden_layers=1)

    def facts(dtype):
        return Facts("cuda", (dtype, dtype), (16, 16), stored=16, coded=False, gaps=None)

    single, half, double = (facts(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    monkeypatch.setattr("ag.kernels.dispatch.INTERPRETED", False)
    for capability, waits in (((8, 9), True), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert host_waits(experts, half) == waits
        assert host_waits(experts, single) and host_waits(model, double)
        assert not host_waits(model, half) and not host_waits(model, single)
    monkeypatch.setenv("AG_KERNELS", "reference")
    assert host_waits(model, single)


def recorded_steps(model, count):
    """Take steps that evict, of which the second is recorded; return cache, recorder and runner."""
    cache, record = EvictionCache(model, "h2o", 20, "every"), Recorder()
    model(row(40)[None], past_key_values=cache)
    step = StepRunner(model, cache, record)
    for number in range(count):
        step(tokens(1, number))
    return cache, record, step


@torch.no_grad()
def test_recorded_steps_that_are_over_are_dropped(model):
    """Lengths in columns of 1,024 tokens only grow."""
    _, _, step = recorded_steps(model, 3)
    [kind] = step._recorded
    step._recorded = {(kind[0], 7, kind[2]): step._recorded[kind]}
    step(tokens(1, 3))
    assert [*step._recorded] == [kind]


@torch.no_grad()
def test_scores_that_are_not_finite_are_found_within_sixteen_steps(model):
    cache, record, step = recorded_steps(model, 20)
    cache.state.stores[0].records[1]["sums"][:, :, 6:8] = float("nan")
    with refuses(NonFiniteScoreError, "H2O", "layer 1", "finite"):
        for number in range(evictor.CHECK_INTERVAL):
            step(tokens(1, number))
    assert record.replays >= 18


@torch.no_grad()
def test_a_fork_is_refused_after_scores_that_are_not_finite(model):
    """The copy would not know of them."""
    cache = EvictionCache(model, "h2o", 20, "every")
    model(row(40)[None], past_key_values=cache)
    cache.state.stores[0].records[1]["sums"][:, :, 6:8] = float("nan")
    model(tokens(1, 0), past_key_values=cache)
    with refuses(NonFiniteScoreError, "H2O", "layer 1"):
        copy.deepcopy(cache)


@pytest.mark.parametrize("given", [(1, 2), (1,)])
@torch.no_grad()
def test_one_token_of_each_sequence_behind_a_prompt(model, given):
    cache = EvictionCache(model, "full")
    with refuses(UserError, "0 columns", "prompt"):
        StepRunner(model, cache)(tokens(1, 0))
    model(row(40)[None], past_key_values=cache)
    with refuses(UserError, str(list(given)), "[B, 1]"):
        StepRunner(model, cache)(torch.ones(given, dtype=torch.long))
    with refuses(UserError, "1 sequences", "2"):
        StepRunner(model, cache)(tokens(2, 0))
    StepRunner(model, cache)(tokens(1, 0))  # and it goes on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "given"),
    [(("flags",), {"do_sample": True, "temperature": 1.3, "top_p": 0.9})],
)
def test_the_decoding_loop_is_that_of_transformers(model, policy, given):
    """Of sequences that end at different tokens, and of a text that goes on."""
    ag.attach(model, gates_for(model, covers="all", scope="causal", recent_tokens=4))
    ids, mask = padded([row(20, 0), row(14, 1), row(20, 2)]).values()
    found = []
    for extra in ({}, {"custom_generate": decode}):
        torch.manual_seed(1)
        cache = EvictionCache(model, *policy)
        options = {"past_key_values": cache, "max_new_tokens": 25, "eos_token_id": list(range(5, 12)), **given, **extra}
        text = model.generate(input_ids=ids, attention_mask=mask, **options)
        longer = torch.cat([mask, torch.ones(3, text.shape[1] + 2 - 20, dtype=torch.long)], 1)
        text = model.generate(input_ids=F.pad(text, (0, 2), value=7), attention_mask=longer, **options)
        found.append((text.tolist(), columns(cache), cache.state.sequences.num_tokens.tolist()))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0][0]}) == 3


def test_the_decoding_loop_reads_new_tokens_alone(model):
    """Of a later turn, with the mask of the whole text."""
    texts = []
    for extra in ({}, {"custom_generate": decode}):
        cache = EvictionCache(model, "full")
        options = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False, **extra}
        text = F.pad(model.generate(row(20)[None], **options), (0, 5), value=7)
        mask, new = torch.ones_like(text), text[:, cache.seen_tokens :]
        texts.append(model.generate(new, attention_mask=mask, **options).tolist())
    assert texts[0] == texts[1]


def test_what_the_decoding_loop_does_not_do(model):
    with refuses(UserError, "custom_generate", "num_beams=2"):
        cache = EvictionCache(model, "full")
        model.generate(row(20)[None], past_key_values=cache, custom_generate=decode, max_new_tokens=3, num_beams=2)
    with refuses(UserError, "past_key_values=cache"):
        model.generate(row(20)[None], custom_generate=decode, max_new_tokens=3)
