"""Iteration-level batching: between two tokens requests join and leave one batch, whose memory is one pool of pages."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy, policy
from ag.engine.pool import PAGE, Pool, PoolFullError
from ag.engine.step import NextToken
from ag.errors import UserError
from ag.serve.request import Event, Reason, Request, Stream
from ag.serve.sampler import Sampler

MARGIN = 1.25  # over the share that flags have kept so far, for prompts to come


class Busy(UserError):
    """The queue of requests is full; try again later."""


@dataclass(eq=False)
class Answer:
    """An answer that is waiting, being read, or being written.

    Attributes:
        request: what is asked.
        stream: where its tokens go.
        sampler: chooses them.
        text: ids ``[T]`` on the CPU, of the prompt and of the answer so far.
        since: when it was asked for, in seconds of ``time.monotonic``.
        most: pages that it may take at once; see :meth:`Batcher._pages`.
    """

    request: Request
    stream: Stream
    sampler: Sampler
    text: Tensor
    since: float
    most: int

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.text) - len(self.request.tokens)


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read, part by part.

    Attributes:
        answers: that begin with it.
        cache: what is held of it.
        read: tokens read so far.
    """

    answers: list[Answer]
    cache: EvictionCache
    read: int = 0


@dataclass
class Counts:
    """What went by in a batcher.

    Attributes:
        prompts: tokens of prompts that were read.
        steps: steps of the batch.
        tokens: of answers.
        put_back: answers that had to give their pages back, and were read again.
        kept: tokens that flags have kept of prompts, per KV head and layer.
        told: tokens of those prompts.
    """

    prompts: int = 0
    steps: int = 0
    tokens: int = 0
    put_back: int = 0
    kept: float = 0.0
    told: int = 0


class Batcher:
    """Answers requests with one model, under one policy, out of one pool.

    Requests are admitted in the order in which they come, each as soon as the pages that it may take are free. Prompts
    are read in parts beside the tokens of others. Where the pool runs out nevertheless, the answer that came last gives
    its pages back and is read again later, with its tokens so far.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: its tokenizer.
        spec: the policy, or its text; see :func:`ag.policy`.
        pool: holds the keys and values of all requests.
        budget: for a text: tokens per KV head, or a share of each prompt.
        prefill_tokens: of prompts that are read at once, between two tokens of the batch.
        batch: most answers at once.
        queue: most requests that wait.
        clock: seconds, for the limits of requests.

    Raises:
        UserError: when the pool was made for another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        spec: Policy | str,
        pool: Pool,
        budget: int | float | None = None,
        *,
        prefill_tokens: int = 512,
        batch: int = 64,
        queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        made = spec if isinstance(spec, Policy) else policy(spec, budget)
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.policy = made.with_tokenizer(tokenizer)
        self.prefill_tokens, self.batch, self.queue = prefill_tokens, batch, queue
        self.counts = Counts()
        self._clock = clock
        self._cache = EvictionCache(model, self.policy, pool=pool)  # of the batch
        self._next = NextToken(model, self._cache)
        self._running: list[Answer] = []  # the sequences of the batch
        self._reading: Prompt | None = None
        self._waiting: deque[list[Answer]] = deque()  # the answers to each request
        self._lock = threading.Condition()
        self._stopping = False
        self._rows: int = len(self._cache.evicting_layers) * model.config.get_text_config().num_key_value_heads
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        self._ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    # ---- for other threads

    def submit(self, request: Request, hear: Callable[[int, Event], None] | None = None) -> list[Stream]:
        """Queue a request; returns the streams of its ``n`` answers.

        Args:
            request: what is asked.
            hear: takes the number of an answer and each event of its stream; see :class:`Stream`.

        Raises:
            Busy: when the queue is full.
            UserError: for a prompt and answer that no empty pool or no context could hold.
        """
        self._check(request)
        text, now = torch.tensor(request.tokens, dtype=torch.long), self._clock()
        answers = [
            Answer(
                request=request,
                stream=Stream(hear and partial(hear, number)),
                sampler=Sampler(request, self.tokenizer, self._ends, number),
                text=text,
                since=now,
                most=self._pages(request),
            )
            for number in range(request.n)
        ]
        with self._lock:
            if len(self._waiting) >= self.queue:
                raise Busy(f"{len(self._waiting)} requests are waiting, as many as may: try again later.")
            self._waiting.append(answers)
            self._lock.notify()
        return [answer.stream for answer in answers]

    def run(self) -> None:
        """Answer requests until :meth:`stop` is called, and those that were queued before."""
        while True:
            with self._lock:
                while not (busy := self.busy) and not self._stopping:
                    self._lock.wait()
            if not busy:
                return
            self.step()

    def stop(self) -> None:
        """Let :meth:`run` return when everything is answered."""
        with self._lock:
            self._stopping = True
            self._lock.notify()

    @property
    def busy(self) -> bool:
        """Whether some request has no answer yet."""
        return bool(self._running or self._reading or self._waiting)

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """Read parts of prompts, and write one token of each answer of the batch."""
        self._drop()
        self._read(self.prefill_tokens)
        self._write()

    def _drop(self) -> None:
        """End the answers that nobody wants any more, and those whose time is over."""
        with self._lock:
            for answers in self._waiting:
                answers[:] = [answer for answer in answers if not self._over(answer, waiting=answer.written == 0)]
            self._waiting = deque(answers for answers in self._waiting if answers)
        if self._reading is not None:
            self._reading.answers = [x for x in self._reading.answers if not self._over(x)]
            if not self._reading.answers:
                self._reading.cache.reset()
                self._reading = None
        self._release([place for place, answer in enumerate(self._running) if self._over(answer)])

    def _over(self, answer: Answer, waiting: bool = False) -> bool:
        limits = [answer.request.answer_seconds, answer.request.wait_seconds if waiting else None]
        late = any(limit is not None and self._clock() - answer.since > limit for limit in limits)
        if answer.stream.cancelled or late:
            answer.stream.end("cancelled" if answer.stream.cancelled else "timeout")
            return True
        return False

    def _release(self, places: list[int]) -> None:
        """Take sequences out of the batch."""
        if places:
            self._cache.release(places)
            self._running = [answer for place, answer in enumerate(self._running) if place not in places]

    # ---- prompts

    def _read(self, tokens: int) -> None:
        """Read up to so many tokens of the prompts that come next."""
        while tokens > 0 and (self._reading is not None or self._admit()):
            assert self._reading is not None
            tokens -= self._read_part(self._reading, tokens)

    def _admit(self) -> bool:
        """Begin with the next request, if the pages that it may take are free beside those that others may take."""
        with self._lock:
            if not self._waiting:
                return False
            answers = self._waiting[0]
            taken = sum(answer.most for answer in self._running)
            fits = taken + sum(answer.most for answer in answers) <= self.pool.size
            if (not fits or len(self._running) + len(answers) > self.batch) and self._running:
                return False
            self._waiting.popleft()
        cache = EvictionCache(self.model, self.policy, pool=self.pool)
        cache.expect(torch.ones(1, len(answers[0].request.tokens), dtype=torch.bool))
        self._reading = Prompt(answers, cache)
        return True

    def _read_part(self, prompt: Prompt, tokens: int) -> int:
        """Read a part of a prompt; at its end its answers begin, and join the batch. Returns how many were read."""
        first, whole = prompt.answers[0], len(prompt.answers[0].request.tokens)
        gates = prompt.cache.gates
        at_once = gates is not None and gates.config.scope == "prompt"  # these look at the whole prompt
        part = first.text[prompt.read : whole][: None if at_once else tokens]
        try:
            logits = self._fed(prompt.cache, part)
            prompt.read += len(part)
            if prompt.read < whole:
                return len(part)
            self.counts.prompts += whole
            self._learn(prompt.cache, whole)
            for answer in list(prompt.answers):
                again = prompt.cache if answer is prompt.answers[-1] else deepcopy(prompt.cache)
                self._begin(prompt, answer, again, logits)
        except PoolFullError as error:
            self._put_off(prompt, error)
            return tokens
        except Exception as error:  # concerns this prompt alone
            self._fail(prompt.answers, prompt.cache, error)
        self._reading = None
        return len(part)

    def _fed(self, cache: EvictionCache, tokens: Tensor) -> Tensor:
        """Read tokens ``[T]`` behind those of a cache; returns the logits ``[V]`` of the next one, on the CPU."""
        ids = tokens[None].to(self.model.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits.float().cpu()

    def _begin(self, prompt: Prompt, answer: Answer, cache: EvictionCache, logits: Tensor) -> None:
        """Let an answer join the batch behind its prompt, and behind its tokens so far if it was put back."""
        for token in answer.text[len(answer.request.tokens) :]:  # one by one, as they came
            logits = self._fed(cache, token[None])
        if self._add(answer, logits):
            self._cache.join(cache)
            self._running.append(answer)
        else:
            cache.reset()
        prompt.answers.remove(answer)

    def _put_off(self, prompt: Prompt, error: PoolFullError) -> None:
        """Give the pages of a prompt back until others have answered; where there are none it cannot be answered."""
        self._reading = None
        if not self._running:
            self._fail(prompt.answers, prompt.cache, error)
            return
        prompt.cache.reset()
        with self._lock:
            self._waiting.appendleft(prompt.answers)

    def _fail(self, answers: list[Answer], cache: EvictionCache, error: Exception) -> None:
        """End answers that the model or the policy failed at; what waits goes on."""
        cache.reset()
        for answer in answers:
            answer.stream.end(error=error)
        answers.clear()

    # ---- answers

    def _write(self) -> None:
        """Write one token of each answer."""
        if not self._running:
            return
        tokens = torch.stack([answer.text[-1:] for answer in self._running]).to(self.model.device)
        try:
            logits = self._next(tokens).float().cpu()
        except PoolFullError as error:
            self._put_back(error)
            return
        except Exception as error:
            self._fail(self._running, self._cache, error)
            return
        self.counts.steps += 1
        self._release([place for place, answer in enumerate(self._running) if not self._add(answer, logits[place])])

    def _add(self, answer: Answer, logits: Tensor) -> bool:
        """Choose the next token of an answer; returns whether it goes on."""
        token = answer.sampler(answer.text, logits)
        answer.text = torch.cat([answer.text, torch.tensor([token.id])])
        answer.stream.put(token)
        self.counts.tokens += 1
        reason: Reason | None = answer.sampler.ended(answer.text, answer.written)
        if reason is not None:
            answer.stream.end(reason)
        return reason is None

    def _put_back(self, error: PoolFullError) -> None:
        """Take the answer that came last out of the batch; it is read again before others."""
        last = max(range(len(self._running)), key=lambda place: self._running[place].since)
        answer = self._running[last]
        alone = len(self._running) == 1
        self._release([last])
        if alone and self._reading is None:
            answer.stream.end(error=error)
            return
        self.counts.put_back += 1
        with self._lock:
            self._waiting.appendleft([answer])

    # ---- how much a request takes

    def _check(self, request: Request) -> None:
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        wanted = len(request.tokens) + request.max_tokens
        if context is not None and wanted > context:
            raise UserError(
                f"{len(request.tokens)} tokens and an answer of {request.max_tokens} are {wanted}: expected at most "
                f"{context}, the context of the model; shorten one of them."
            )
        pages = self._pages(request) * request.n
        if pages > self.pool.size:
            page = self.pool.page_nbytes()
            raise UserError(
                f"{len(request.tokens)} tokens and {request.n} answers of {request.max_tokens} may take "
                f"{pages * page} bytes, and the pool has {self.pool.size * page}: expected no more than that; shorten "
                "one of them, keep less, or make a larger pool."
            )

    def _pages(self, request: Request) -> int:
        """Return the pages that one answer to a request may take at once, its prompt included.

        A prompt is held whole while it is read in parts. What stays of it are the tokens of the budget, or under flags
        as many as they have kept of others, with a margin; each row may leave a part of a page free.
        """
        prompt, answer = len(request.tokens), request.max_tokens
        stays: float = prompt
        if self.policy.budget is not None:
            stays = min(prompt, int(self.policy.capacity(torch.tensor([prompt]))[0]))
        elif self.policy.by_gates and self.counts.told:
            stays = min(prompt, MARGIN * prompt * self.counts.kept / self.counts.told)
        grows = answer if self.policy.steps is None else 1
        return self._rows * max(-(-prompt // PAGE), int(stays + grows) // PAGE + 1)

    def _learn(self, cache: EvictionCache, tokens: int) -> None:
        """Take note of how much flags have kept of a prompt."""
        if self.policy.by_gates and self.policy.budget is None:
            self.counts.kept += cache.kept_share() * tokens
            self.counts.told += tokens
