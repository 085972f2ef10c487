"""One decoding step of each sequence: recorded as a CUDA graph if possible, else run directly."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from ag.engine.cache import EvictionCache
from ag.engine.scorer_inputs import COLUMNS
from ag.errors import UserError
from ag.kernels.dispatch import VARIABLE, no_triton
from ag.kernels.pages import WIDEST, Facts
from ag.model.support import check_one_position_per_token

#: Runs a function and records it: returns its result, and a function that computes the result again in place.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
#: Of steps that are recorded apart: whether they evict, the columns of the scorer's rows, and what gates hold.
Kind = tuple[bool, int, Hashable]
log = logging.getLogger(__name__)


def cuda_graph(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Callable[[], None]]:
    """Record a function as a CUDA graph of a device, and run that once."""
    graph = torch.cuda.CUDAGraph()
    record = torch.cuda.graph(graph, stream=_recording_stream(device), capture_error_mode="thread_local")
    with torch.cuda.device(device), record:  # other threads may allocate memory of the device
        out = run()
    graph.replay()
    return out, graph.replay


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream in which all graphs of a device are recorded; torch's own is of the device that came first."""
    return torch.cuda.Stream(device)


def host_waits(model: nn.Module, facts: Facts) -> bool:
    """Return whether the host waits for the card in each step, which cannot be recorded then.

    It waits where Triton's kernels cannot run, and for the tokens of each expert: ``grouped_mm`` of PyTorch leaves
    their numbers on the card only in bfloat16 on Hopper and Blackwell (compute capability 9 and 10).
    """
    if os.environ.get(VARIABLE) == "reference" or no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST):
        return True
    if not any(type(module).__name__.endswith("Experts") for module in model.modules()):
        return False
    device = next(model.parameters()).device
    return facts.dtypes[0] != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10)


class StepRunner:
    """The forward pass of one token of each sequence after a prompt.

    The host counts and takes blocks before a step. The device then runs a fixed list of operations on fixed memory.
    There are two kinds: steps that evict, and steps that do not. On a card the first step of a kind runs as it is, the
    second is recorded as a CUDA graph, and later ones replay it. Steps are recorded again where the pool grew. All
    begins anew where rows outgrew the block table (it gets room for 128 tokens or an eighth more), sequences came or
    went, tokens were cropped, or other calls of the model read some. Steps of policies and models that cannot be
    recorded (hybrid models, chunked attention) run as they are. So do evictions that make the host wait for the numbers
    of kept tokens (heads, global).

    Args:
        model: that the cache was made for, in evaluation mode.
        cache: which has read a prompt.
        record: records a step; None means as a CUDA graph where the model is on a card, and not at all elsewhere.
    """

    def __init__(self, model: nn.Module, cache: EvictionCache, record: Record | None = None) -> None:
        self.model, self.cache = model, cache
        on_card = all(x.device.type == "cuda" for x in model.parameters())
        if record is None and on_card and not host_waits(model, cache.state.stores[0].pages().facts):
            record = functools.partial(cuda_graph, device=next(model.parameters()).device)
        self._record = record
        self._tokens = torch.empty(0)  # [B, 1], the tokens of a step that is recorded
        self._memory: tuple[object, ...] = ()  # that recorded steps work on
        self._version = -1  # of the pool's memory
        #: By kind; None means that a step of the kind ran once.
        self._recorded: dict[Kind, tuple[Tensor, Callable[[], None]] | None] = {}

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read the next tokens.

        Args:
            tokens: ids ``[B, 1]``, one of each sequence.

        Returns:
            The logits ``[B, V]`` of the next token; a later call may write over them.

        Raises:
            UserError: before a prompt was read, for several tokens of a sequence, or for other positions.
        """
        sequences, interceptor = self.cache.state.sequences, self.cache.interceptor
        decoder = self.cache.setup.decoder
        if tokens.ndim != 2 or tokens.shape[1] != 1 or not sequences.ready:
            raise UserError(
                f"StepRunner: tokens {list(tokens.shape)} after {sequences.columns} columns: expected [B, 1] "
                "after a prompt; read that by model(ids, past_key_values=cache)."
            )
        check_one_position_per_token(decoder, "StepRunner")
        sequences.check_positions_skip_padding("StepRunner")
        interceptor.begin(decoder, None, tokens)
        interceptor.step_prepared = True  # the device's part follows
        try:
            logits = self._step(tokens)
        finally:
            interceptor.step_prepared = False
        interceptor.end_pass()
        return logits

    def _step(self, tokens: Tensor) -> Tensor:
        kind = None if torch.is_grad_enabled() else self._kind()
        if self._record is None or kind is None:
            return self._run(tokens)
        state, pool = self.cache.state, self.cache.setup.pool
        sequences = state.sequences
        memory = *(store.memory for store in state.stores), sequences.step_token_indices, sequences.protected
        if [*map(id, memory)] != [*map(id, self._memory)]:
            self._recorded.clear()
            self._memory, self._tokens = memory, tokens.clone()
        elif pool.version != self._version:  # the pool's memory moved, as when it grew
            self._recorded = dict.fromkeys(self._recorded)
        self._version = pool.version
        self._tokens.copy_(tokens)
        if kind not in self._recorded:  # the first step makes records and other tensors that are made once
            # lengths in columns only grow: steps of another one are not replayed again, and hold memory
            self._recorded = {other: step for other, step in self._recorded.items() if other[1] == kind[1]}
            self._recorded[kind] = None
            return self._run(self._tokens)
        recorded_step = self._recorded[kind]
        if recorded_step is None:
            log.info("a step of kind %s is recorded", kind)
            recorded_step = self._recorded[kind] = self._record(lambda: self._run(self._tokens))
        else:
            recorded_step[1]()
            for layer in state.layers:
                layer.gate_memory.stepped()
        return recorded_step[0]

    def _kind(self) -> Kind | None:
        """Return the kind of the current step; None means that it cannot be recorded."""
        state, setup, batch = self.cache.state, self.cache.setup, self.cache.interceptor.batch
        assert batch is not None
        policy, evictor = setup.policy, state.evictor
        evicts = batch.evicting is not None
        acts = policy.steps is not None
        waits = evictor is not None and evicts and not evictor.step_is_counted
        if evictor is not None and acts and (waits or not evictor.scorer.needs.steady):
            return None
        gates = tuple(layer.gate_memory.step_key() for layer in state.layers)
        if None in gates or policy.positions != "original" or state.states is not None or setup.chunk is not None:
            return None
        if setup.rope is not None and not setup.rope.steady(state.sequences.text_len):
            return None
        return evicts, -(-batch.max_length // COLUMNS) if acts else 0, gates

    def _run(self, tokens: Tensor) -> Tensor:
        out = self.model(
            input_ids=tokens,
            position_ids=self.cache.state.sequences.step_token_indices,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits
