"""Iteration-level batching: between two tokens requests join and leave one batch, whose memory is one pool of pages."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy, policy
from ag.engine.pool import Pool, PoolFullError
from ag.engine.step import NextToken
from ag.errors import UserError
from ag.serve.admission import Admission, Need
from ag.serve.answer import Answer, Prompt
from ag.serve.beginnings import Beginnings
from ag.serve.request import Event, Reason, Request, Stream
from ag.serve.sampler import Sampler
from ag.serve.snapshot import Counts, Running, Snapshot


class Busy(UserError):
    """The queue of requests is full; try again later."""


class Batcher:
    """Answers requests with one model, under one policy, out of one pool.

    Requests are admitted in the order in which they come, each as soon as the pages that it may take are free. Prompts
    are read in parts beside the tokens of others; a beginning that several have in common is read once, and held for
    as long as nobody needs its pages. Where the pool runs out nevertheless, the answer that came last gives its pages
    back and is read again later, with its tokens so far.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: its tokenizer.
        spec: the policy, or its text; see :func:`ag.policy`.
        pool: holds the keys and values of all requests.
        budget: for a text: tokens per KV head, or a share of each prompt.
        prefill_tokens: of prompts that are read at once, between two tokens of the batch.
        batch: most answers at once.
        queue: most requests that wait.
        prompt_lookup: draft tokens in a step, all answers together: what followed the last tokens of an answer where
            they stood before. None under a policy that cannot take tokens back.
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
        prompt_lookup: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        made = spec if isinstance(spec, Policy) else policy(spec, budget)
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.policy = made.with_tokenizer(tokenizer)
        self.prefill_tokens, self.batch, self.queue = prefill_tokens, batch, queue
        self.counts = Counts()
        self._clock, self._numbers = clock, count()
        self._cache = EvictionCache(model, self.policy, pool=pool)  # of the batch
        self._next = NextToken(model, self._cache)
        self._drafts = prompt_lookup if _takes_back(self._cache) else 0
        self._running: list[Answer] = []  # the sequences of the batch
        self._reading: Prompt | None = None
        self._waiting: deque[list[Answer]] = deque()  # the answers to each request
        self._crowded = False  # whether the pool ran out since an answer ended
        self._lock = threading.Condition()
        self._stopping = False
        self._at_once = _reads_at_once(self._cache)
        #: None: what is read of a prompt depends on what follows.
        self._beginnings = None if self._at_once or self.policy.block is not None else Beginnings()
        self._admission = Admission(self._cache, model.config, sys.maxsize if self._at_once else prefill_tokens)
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        self._ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        self._show()

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
        need = self._admission.need(request)
        self._check(request, need)
        text, now = torch.tensor(request.tokens, dtype=torch.long), self._clock()
        answers = [
            Answer(
                number=next(self._numbers),
                request=request,
                stream=Stream(hear and partial(hear, number)),
                sampler=Sampler(request, self.tokenizer, self._ends, number),
                text=text,
                since=now,
                need=need,
            )
            for number in range(request.n)
        ]
        with self._lock:
            if len(self._waiting) >= self.queue:
                raise Busy(f"{len(self._waiting)} requests are waiting, as many as may: try again later.")
            self._waiting.append(answers)
            if self._beginnings is not None:
                self._beginnings.remember(answers[0].marked())
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

    def snapshot(self) -> Snapshot:
        """Return what is going on, as it was after the last step; who waits is known to the moment."""
        with self._lock:
            waiting = sum(map(len, self._waiting))
        now, (answers, held, shown) = self._clock(), self._shown
        running = tuple(
            Running(number, prompt, written, now - since, tuple(layers))
            for (number, prompt, written, since), layers in zip(answers, held.tolist(), strict=True)
        )
        return replace(shown, waiting=waiting, running=running)

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """Read parts of prompts, and write one token of each answer of the batch."""
        self._drop()
        self._read(self.prefill_tokens)
        self._write()
        self._show()

    def _show(self) -> None:
        """Leave for other threads what :meth:`snapshot` returns; they read it as one object."""
        answers = [(x.number, len(x.request.tokens), x.written, x.since) for x in self._running]
        self._shown = (
            answers,
            self._cache.held_tokens(),
            Snapshot(
                waiting=0,
                reading=0 if self._reading is None else len(self._reading.answers),
                running=(),
                pages=self.pool.size,
                free=self.pool.free,
                page_nbytes=self.pool.page_nbytes(),
                beginnings=0 if self._beginnings is None else len(self._beginnings),
                beginning_pages=0 if self._beginnings is None else self._beginnings.pages,
                counts=replace(self.counts, ended=self.counts.ended.copy()),
            ),
        )

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
        reason = answer.stream.cancelled or ("timeout" if late else None)
        if reason is not None:
            self._end(answer, reason)
        return reason is not None

    def _end(self, answer: Answer, reason: Reason | None, error: Exception | None = None) -> None:
        self.counts.ended[reason or "error"] += 1
        answer.stream.end(reason, error)

    def _release(self, places: list[int]) -> None:
        """Take sequences out of the batch."""
        if places:
            self._cache.release(places)
            self._running = [answer for place, answer in enumerate(self._running) if place not in places]
            self._crowded = False

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
            need = self._admission.need(answers[0].request)  # of flags more is known than when it was asked
            wanted = max(need.reading, need.writing * len(answers))
            fits = sum(answer.need.writing for answer in self._running) + wanted <= self.pool.size
            if self._running and (self._crowded or not fits or len(self._running) + len(answers) > self.batch):
                return False
            self._waiting.popleft()
        for answer in answers:
            answer.need = need
        self._reading = self._prompt(answers)
        self._spare(wanted - self._reading.shared_pages)
        return True

    def _prompt(self, answers: list[Answer]) -> Prompt:
        """Return a prompt of which nothing is read yet but the beginning that is held, if there is one."""
        text, found = answers[0].marked()[: len(answers[0].prompt)], None
        reading = Prompt(answers, EvictionCache(self.model, self.policy, pool=self.pool))
        if self._beginnings is not None:
            found = self._beginnings.find(text)
            with self._lock:
                reading.mark = 0 if self._crowded else self._beginnings.common(text)
        if found is not None:
            reading.cache = deepcopy(found.cache)
            reading.read = reading.shared = len(found.text)
            reading.shared_pages = len(found.numbers())
        if reading.mark <= reading.read:
            reading.mark = 0
        reading.cache.expect(torch.ones(1, len(text), dtype=torch.bool))
        reading.cache.protect(answers[0].request.protect)
        return reading

    def _spare(self, pages: int) -> bool:
        """Have so many pages free, if beginnings must be given up for that; returns whether any was."""
        gone = False
        while self._beginnings is not None and self.pool.free < pages and self._beginnings.drop():
            gone = True
        return gone

    def _read_part(self, prompt: Prompt, tokens: int) -> int:
        """Read a part of a prompt; at its end its answers begin, and join the batch. Returns how many were read."""
        text, behind = prompt.answers[0].prompt, prompt.answers[0].need.writing * len(prompt.answers)
        whole, until = len(text), prompt.mark or len(text)
        part = text[prompt.read : until][: None if self._at_once else tokens]
        last = prompt.read + len(part) == whole
        try:
            # where pages are shared what stays of the prompt is written elsewhere
            self._spare(prompt.cache.demand(len(part)) + (behind if last else 0))
            logits = self._fed(prompt.cache, part)
            prompt.read += len(part)
            if prompt.read == prompt.mark:
                self._hold(prompt, behind)
            if not last:
                return len(part)
            self.counts.prompts += whole - prompt.shared
            self.counts.reused += prompt.shared
            self._admission.learn(prompt.cache, whole)
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

    def _hold(self, prompt: Prompt, behind: int) -> None:
        """Hold what was read of a prompt so far for others, where there is room for the rest and what stays of it."""
        read, prompt.mark, first = prompt.mark, 0, prompt.answers[0]
        rest = first.need.reading * (len(first.prompt) - read) // len(first.prompt)
        if self._beginnings is not None and self.pool.free >= rest + behind:
            self._beginnings.add(first.marked()[:read], prompt.cache)

    def _fed(self, cache: EvictionCache, tokens: Tensor) -> Tensor:
        """Read tokens ``[T]`` behind those of a cache; returns the logits ``[V]`` of the next one, on the CPU."""
        ids = tokens[None].to(self.model.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits.float().cpu()

    def _begin(self, prompt: Prompt, answer: Answer, cache: EvictionCache, logits: Tensor) -> None:
        """Let an answer join the batch behind its prompt; one that was put back has its tokens, and chooses none."""
        answer.read = len(answer.request.tokens)
        if answer.written or self._add(answer, logits):
            self._cache.join(cache)
            self._running.append(answer)
        else:
            cache.reset()
        prompt.answers.remove(answer)

    def _put_off(self, prompt: Prompt, error: PoolFullError) -> None:
        """Give the pages of a prompt back until others have answered; where there are none it cannot be answered."""
        self._reading = None
        gone = self._spare(self.pool.size)
        if not gone and not self._running:
            self._fail(prompt.answers, prompt.cache, error)
            return
        prompt.cache.reset()
        self._queue_first(prompt.answers)

    def _queue_first(self, answers: list[Answer]) -> None:
        """Let answers wait before all others, until some answer has ended."""
        self._crowded = True
        with self._lock:
            self._waiting.appendleft(answers)

    def _fail(self, answers: list[Answer], cache: EvictionCache, error: Exception) -> None:
        """End answers that the model or the policy failed at; what waits goes on."""
        cache.reset()
        for answer in answers:
            self._end(answer, None, error)
        answers.clear()

    # ---- answers

    def _write(self) -> None:
        """Write a token of each answer, and more where drafts are right.

        One that was put back reads its own tokens again before it goes on.
        """
        if not self._running:
            return
        drafts = self._drafts // len(self._running)
        coming = [answer.coming(drafts) for answer in self._running]
        try:
            self._spare(self._cache.demand(max(map(len, coming))))
            logits = self._step(coming)
        except PoolFullError as error:
            self._put_back(error)
            return
        except Exception as error:
            self._fail(self._running, self._cache, error)
            return
        self.counts.steps += 1
        over, wrong = [], []
        for place, (answer, tokens, after) in enumerate(zip(self._running, coming, logits, strict=True)):
            end = answer.read + len(tokens)
            drafted = end - min(end, len(answer.text))
            if not self._take(answer, tokens, after):
                over.append(place)
            wrong.append(end - answer.read)
            self.counts.drafted += drafted
            self.counts.accepted += drafted - wrong[-1]
        self._cache.crop(wrong)
        self._release(over)

    def _step(self, coming: list[Tensor]) -> list[Tensor]:
        """Read tokens ``[T_i]`` of each answer; returns the logits ``[T_i, V]`` behind each of them, on the CPU."""
        width = max(map(len, coming))
        ids = torch.stack([F.pad(tokens, (width - len(tokens), 0)) for tokens in coming]).to(self.model.device)
        if width == 1:
            return [*self._next(ids).float().cpu()[:, None]]
        real = torch.stack([torch.arange(width) >= width - len(tokens) for tokens in coming])
        mask = torch.cat([self._cache.valid, real.to(self._cache.valid.device)], 1)
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=self._cache, use_cache=True)
        return [x[width - len(tokens) :] for x, tokens in zip(out.logits.float().cpu(), coming, strict=True)]

    def _take(self, answer: Answer, read: Tensor, logits: Tensor) -> bool:
        """Go on with an answer, of which tokens ``[T]`` were read; returns whether more is to come.

        Those that it has already are skipped; drafts count as read for as long as they are what is chosen.

        Args:
            answer: where ``read`` of it becomes what counts.
            read: tokens of the text, then drafts.
            logits: ``[T, V]`` behind each of them.
        """
        for token, after in zip(read, logits, strict=True):
            if answer.text[answer.read] != token:
                return True
            answer.read += 1
            if answer.read == len(answer.text) and not self._add(answer, after):
                return False
        return True

    def _add(self, answer: Answer, logits: Tensor) -> bool:
        """Choose the next token of an answer; returns whether it goes on."""
        try:
            token = answer.sampler(answer.text, logits)
        except Exception as error:  # such as probabilities that are none, at a temperature near 0
            self._end(answer, None, error)
            return False
        answer.text = torch.cat([answer.text, torch.tensor([token.id])])
        answer.stream.put(token)
        self.counts.tokens += 1
        if answer.written == 1:
            self.counts.started += 1
            self.counts.first_seconds += self._clock() - answer.since
        reason: Reason | None = answer.sampler.ended(answer.text, answer.written)
        if reason is not None:
            self._end(answer, reason)
            if self._beginnings is not None:
                with self._lock:
                    self._beginnings.remember(answer.marked())
        return reason is None

    def _put_back(self, error: PoolFullError) -> None:
        """Let the request that came last give its pages back; it is read again before others."""
        last = max(range(len(self._running)), key=lambda place: self._running[place].since)
        answer, reading = self._running[last], self._reading
        if reading is not None and reading.answers[0].since >= answer.since:
            self._put_off(reading, error)
            return
        alone = len(self._running) == 1 and reading is None
        self._release([last])
        if alone:
            self._end(answer, None, error)
            return
        self.counts.put_back += 1
        self._queue_first([answer])

    def _check(self, request: Request, need: Need) -> None:
        """Refuse a request that no context or no empty pool could hold."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        wanted = len(request.tokens) + request.max_tokens
        if context is not None and wanted > context:
            raise UserError(
                f"{len(request.tokens)} tokens and an answer of {request.max_tokens} are {wanted}: expected at most "
                f"{context}, the context of the model; shorten one of them."
            )
        pages, page = max(need.reading, need.writing * request.n), self.pool.page_nbytes()
        if pages > self.pool.size:
            raise UserError(
                f"{len(request.tokens)} tokens and {request.n} answers of {request.max_tokens} may take "
                f"{pages * page} bytes, and the pool has {self.pool.size * page}: expected no more than that; shorten "
                "one of them, keep less, or make a larger pool."
            )


def _takes_back(cache: EvictionCache) -> bool:
    """Tell whether drafts can be taken back."""
    try:
        cache.activate_past_recording()
    except UserError:
        return False
    return True


def _reads_at_once(cache: EvictionCache) -> bool:
    """Tell whether a prompt that is read in parts would be evicted differently, or not be read at all."""
    by_whole = cache.gates is not None and cache.gates.config.scope == "prompt"
    moves = cache.policy.positions == "slot" and cache.prompt_sees == "sparse"
    return by_whole or moves
