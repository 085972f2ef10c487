"""Continuous batching: requests join and leave one batch between two steps, and share one pool of blocks."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ag.engine.block_pool import Pool, PoolFullError
from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy, policy
from ag.engine.step_runner import StepRunner
from ag.errors import UserError
from ag.serve.admission import Admission, Need
from ag.serve.detokenizer import Detokenizer, Vocabulary
from ag.serve.prefix_cache import PrefixCache, key_of
from ag.serve.request import Event, Reason, Request, Stream, Token
from ag.serve.sampler import Sampler, scored
from ag.serve.snapshot import Counts, Running, Snapshot
from ag.serve.structured import Masks, advance


class Busy(UserError):
    """The queue of requests is full; try again later."""


class StoppedError(UserError):
    """The scheduler has stopped or failed; every answer ends."""


class WaitedError(UserError):
    """A request waited longer than ``wait_seconds`` before its prompt was read."""


@dataclass(eq=False)
class _Answer:
    """An answer: queued, with its prompt being read, or in the batch."""

    number: int  # of the answer, in the order of submission
    request: Request  # its request
    stream: Stream  # receives its tokens
    sampler: Sampler  # samples its tokens
    text: Tensor  # ids ``[T]`` on the CPU, of the prompt and of the answer so far
    since: float  # time of submission, in seconds of the scheduler's clock
    need: Need  # blocks that it may take
    ends: Set[int]  # tokens that end it
    batch: _Batch  # that it joins
    matcher: Any  # of its grammar, has read what was generated; None means free text
    read: int = 0  # tokens of the text that the model has read, while the answer is in the batch

    @property
    def prompt(self) -> Tensor:
        """The ids of the prompt."""
        return self.text[: len(self.request.tokens)]

    @property
    def written(self) -> int:
        """Number of generated tokens."""
        return len(self.text) - len(self.request.tokens)

    def key(self) -> Tensor:
        """Return the key of the text so far, see :mod:`ag.serve.prefix_cache`."""
        rope, prompt = self.batch.cache.rope, torch.tensor(len(self.request.tokens))
        return key_of(self.text, self.request.marks(), 0 if rope is None else int(rope.set_of(prompt)))

    def coming(self, drafts: int) -> Tensor:
        """Return the ids that the model reads next: one of the text, then up to ``drafts`` of the text or looked up."""
        known = self.text[self.read :][: 1 + drafts]
        more = min(1 + drafts - len(known), self.request.max_tokens - self.written - 1)
        if more <= 0 or self.read + len(known) < len(self.text):
            return known
        lookup = PromptLookupCandidateGenerator(num_output_tokens=more, max_length=sys.maxsize)
        found, _ = lookup.get_candidates(cast("Any", self.text[None]))
        return torch.cat([known, found[0, len(self.text) :]])


@dataclass(eq=False)
class _Prompt:
    """A prompt that is being read, part by part."""

    answers: list[_Answer]  # the answers to it
    cache: EvictionCache  # has read ``read`` tokens of it
    read: int  # tokens read so far, ``shared`` among them
    shared: int  # tokens of a cached prefix, which were not read again
    mark: int  # length at which the prefix is cached for other texts; 0 means that it is not
    scores: list[Token] = field(default_factory=list)  # the tokens that were read, if their likelihood was requested


class _Batch:
    """The running answers under one policy, in one cache.

    Args:
        model: causal language model.
        policy: of the answers.
        pool: of their blocks.
        prefill_tokens: most tokens of a prompt that are read at once.
        prompt_lookup: most draft tokens of a step.
    """

    def __init__(
        self, model: PreTrainedModel, policy: Policy, pool: Pool, prefill_tokens: int, prompt_lookup: int
    ) -> None:
        self.policy, self.cache = policy, EvictionCache(model, policy, pool=pool)
        self.next = StepRunner(model, self.cache)
        croppable = self.cache.is_croppable and self.cache.states is None  # of each sequence other numbers of tokens
        self.drafts = prompt_lookup if croppable else 0
        self.running: list[_Answer] = []  # in the order of the cache's sequences
        self.at_once = _reads_at_once(self.cache)
        #: None means that the cache of a prefix depends on what follows it, so that none is shared.
        self.prefixes = None if self.at_once or policy.block is not None else PrefixCache(pool)
        self.admission = Admission(self.cache, model.config, sys.maxsize if self.at_once else prefill_tokens)


class Scheduler:
    """Answers requests with one model from one pool of blocks, under one policy or that of each request.

    Requests are admitted in order of arrival, each as soon as the blocks that it may take are free. Prompts are read in
    chunks between the steps of the batch; a common prefix of several prompts is read once, and cached until its blocks
    are needed. If the pool runs out nevertheless, the newest answer is preempted: its blocks are freed, and its text so
    far is read again later.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: its tokenizer, a fast one.
        spec: the policy of requests without their own, or its text; see :func:`ag.policy`.
        pool: holds the keys and values of all requests.
        budget: of a policy given as text: tokens per KV head, or a share of each prompt.
        prefill_tokens: most prompt tokens that are read between two steps of the batch.
        batch: most answers in the batch.
        queue: most queued requests.
        prompt_lookup: most draft tokens of a step, all answers of a policy together, found by prompt lookup decoding. A
            policy that evicts generated tokens cannot reject drafts, and has none.
        clock: returns seconds, for the time limits of requests.

    Raises:
        UserError: when the pool was made for another model, or the tokenizer is not a fast one.
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
        self.policy, self.vocabulary = made.with_tokenizer(tokenizer), Vocabulary(tokenizer)
        self.prefill_tokens, self.batch, self.queue = prefill_tokens, batch, queue
        self.counts = Counts()
        text = model.config.get_text_config()
        #: Most tokens of a text; None means that the model has no limit.
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        self._clock, self._numbers = clock, count()
        self._made = partial(_Batch, model, pool=pool, prefill_tokens=prefill_tokens, prompt_lookup=prompt_lookup)
        self._main = self._made(self.policy)
        self._batches = {repr(self.policy): self._main}  # budgets of 1 token and of 1.0, a share, are equal
        self._masks = Masks(text.vocab_size)
        self._reading: _Prompt | None = None
        self._waiting: deque[list[_Answer]] = deque()  # queued answers, by request
        self._crowded = False  # True from a preemption until an answer leaves the batch; nothing is admitted then
        self._lock = threading.Condition()
        self._stopping = False
        self._stopped: StoppedError | None = None  # the error that ends every answer
        #: True when :meth:`run` has raised.
        self.failed = False
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        #: The bounds of requests under its own policy.
        self.admission = self._main.admission
        #: Ids of tokens that end a text.
        self.ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        self._show()

    def context_of(self, prompt: int) -> int | None:
        """Return the most tokens of a prompt of this number and its answer; None means that there is no limit.

        A RoPE with other frequencies for long texts rotates a text by those of its prompt, which an answer cannot
        outgrow; its last token is never read.
        """
        rope = self._main.cache.rope
        if rope is None or prompt > rope.changes:
            return self.context
        return rope.changes + 1 if self.context is None else min(self.context, rope.changes + 1)

    # ---- for other threads

    def submit(self, request: Request, hear: Callable[[int, Event], None] | None = None) -> list[Stream]:
        """Queue a request; returns the streams of its ``n`` answers.

        Args:
            request: the request.
            hear: is called with the index of an answer and each event of its stream; see :class:`Stream`.

        Raises:
            Busy: when the queue is full.
            StoppedError: when the scheduler has stopped or failed.
            UserError: for a request that no empty pool and no context could hold.
        """
        policy = self.policy if request.policy is None else request.policy.with_tokenizer(self.tokenizer)
        batch = self._batches.get(repr(policy)) or self._made(policy)
        need = batch.admission.need(request)
        self._check(request, need)
        text, now = torch.tensor(request.tokens, dtype=torch.long), self._clock()
        answers = []
        ends, special = self.ends_of(request)
        for number in range(request.n):
            detokenizer = Detokenizer(
                self.vocabulary,
                request.stop,
                include_stop=request.include_stop_str_in_output,
                least=request.min_tokens,
                continues=request.continues,
                special=request.special,
            )
            stream = Stream(detokenizer, hear and partial(hear, number))
            sampler = Sampler(request, number, ends | special)
            matcher = None if request.grammar is None else request.grammar.deep_copy()
            number_of = next(self._numbers)
            answers.append(_Answer(number_of, request, stream, sampler, text, now, need, ends, batch, matcher))
        streams = [answer.stream for answer in answers]  # before another thread takes the answers off this list
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if len(self._waiting) >= self.queue:
                raise Busy(f"{len(self._waiting)} requests wait, the most that the queue takes: try again later.")
            batch = self._batches.setdefault(repr(policy), batch)
            for answer in answers:
                answer.batch = batch
            self._waiting.append(answers)
            if batch.prefixes is not None:
                batch.prefixes.remember(answers[0].key())
            self._lock.notify()
        return streams

    def ends_of(self, request: Request) -> tuple[set[int], set[int]]:
        """Return the tokens that end the answers to a request: by their ids, and by a stop text that is their name.

        Raises:
            UserError: when all tokens do, and ``min_tokens`` forbids them.
        """
        ends = {*request.stop_token_ids} | (set() if request.ignore_eos else self.ends)
        special = {self.vocabulary.special[stop] for stop in request.stop if stop in self.vocabulary.special}
        if request.min_tokens and len(ends | special) >= self.model.config.get_text_config().vocab_size:
            raise UserError(
                f"min_tokens={request.min_tokens}: each token of the model ends the answer, by stop_token_ids, stop or "
                "as an end token of the model, so that no answer can have so many: expected min_tokens=0, or fewer "
                "stop tokens."
            )
        return ends, special

    def run(self) -> None:
        """Answer requests until :meth:`stop` is called and no request is left.

        Raises:
            Exception: an error that is not of a single request; every answer has ended by then.
        """
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self.busy or self._stopping)
                if not self.busy:
                    return
                self.step()
        except Exception:
            self.failed = True
            self.stop("the scheduler has failed: start the server again.")
            self._end_unwanted()
            raise

    def stop(self, why: str = "") -> None:
        """Let :meth:`run` return once no request is left; with a reason, every answer ends now.

        An answer without a token ends with that error, as does every one if the scheduler has failed; another one ends
        with what was written of it.
        """
        with self._lock:
            self._stopping = True
            self._stopped = StoppedError(why) if why else None
            self._lock.notify()

    @property
    def busy(self) -> bool:
        """True while an answer is not complete."""
        return bool(self._running or self._reading or self._waiting)

    @property
    def _running(self) -> list[_Answer]:
        """The running answers under all policies."""
        return [answer for batch in [*self._batches.values()] for answer in batch.running]

    def snapshot(self) -> Snapshot:
        """Return the state after the last step, with the current length of the queue. Any thread may call this."""
        with self._lock:
            return replace(self._shown, waiting=sum(map(len, self._waiting)))

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """Read up to ``prefill_tokens`` of prompts, then decode one token of each running answer."""
        self._end_unwanted()
        tokens = self.prefill_tokens
        while tokens > 0 and (self._reading is not None or self._admit()):
            assert self._reading is not None
            tokens -= self._prefill(self._reading, tokens)
        for batch in [*self._batches.values()]:
            if batch.running:
                self._decode(batch)
        if len(self._batches) > 1:
            self._drop_unused()
        self._show()

    def _drop_unused(self) -> None:
        """Drop the batches of policies that no answer has, but for the scheduler's own."""
        with self._lock:
            going = [*self._running, *(answer for answers in self._waiting for answer in answers)]
            going += [] if self._reading is None else self._reading.answers
            used = {id(self._main), *(id(answer.batch) for answer in going)}
            unused = [batch for batch in self._batches.values() if id(batch) not in used]
            self._batches = {name: batch for name, batch in self._batches.items() if id(batch) in used}
        for batch in unused:
            while batch.prefixes is not None and batch.prefixes.drop():
                pass

    def _show(self) -> None:
        """Store the state for :meth:`snapshot`, as one object that other threads may read."""
        batches, now = [*self._batches.values()], self._clock()
        prefixes = [batch.prefixes for batch in batches if batch.prefixes is not None]
        self._shown = Snapshot(
            waiting=0,
            reading=0 if self._reading is None else len(self._reading.answers),
            running=tuple(
                Running(x.number, len(x.request.tokens), x.written, now - x.since, tuple(layers))
                for batch in batches
                for x, *layers in zip(batch.running, *_held(batch.cache), strict=True)
            ),
            blocks=self.pool.capacity,
            free=self.pool.free,
            block_nbytes=self.pool.block_nbytes(),
            prefixes=sum(map(len, prefixes)),
            prefix_blocks=sum(each.num_blocks for each in prefixes),
            counts=replace(self.counts, ended=self.counts.ended.copy()),
        )

    # ---- admission

    def _check(self, request: Request, need: Need) -> None:
        """Refuse a request that no context and no empty pool could hold."""
        wanted, context = len(request.tokens) + request.max_tokens, self.context_of(len(request.tokens))
        if context is not None and wanted > context:
            which = "the context of the model" if context == self.context else "at which the model's RoPE changes"
            raise UserError(
                f"{len(request.tokens)} tokens and an answer of {request.max_tokens} are {wanted}: expected at most "
                f"{context}, {which}; shorten one of them."
            )
        blocks, size = max(need.reading, need.writing * request.n), self.pool.block_nbytes()
        if blocks > self.pool.capacity:
            raise UserError(
                f"{len(request.tokens)} tokens and {request.n} answers of {request.expected} may take "
                f"{blocks * size} bytes, and the pool has {self.pool.capacity * size}: expected no more than that; "
                "shorten one of them, keep less, or make a larger pool."
            )

    def _admit(self) -> bool:
        """Admit the next request, if the pool holds what it and the batch may take; returns whether it was admitted."""
        with self._lock:
            if not self._waiting:
                return False
            answers = self._waiting[0]
            # flags: the estimate is better than at submission
            need = answers[0].batch.admission.need(answers[0].request)
            wanted = max(need.reading, need.writing * len(answers))
            running = self._running
            fits = sum(answer.need.writing for answer in running) + wanted <= self.pool.capacity
            if running and (self._crowded or not fits or len(running) + len(answers) > self.batch):
                return False
            self._waiting.popleft()
        for answer in answers:
            answer.need = need
        self._reading = self._prompt(answers)
        return True

    def _prompt(self, answers: list[_Answer]) -> _Prompt:
        """Return the prompt of some answers, read up to the end of a cached prefix."""
        first, cache, shared, mark = answers[0], None, 0, 0
        prefixes = first.batch.prefixes
        if prefixes is not None and first.request.prompt_logprobs is None:  # else it is read whole, each time
            key = first.key()[: len(first.prompt)]
            with self._lock:
                found = prefixes.find(key)
                mark = 0 if self._crowded else prefixes.common(key)
            if found is not None:
                cache, shared = deepcopy(found.cache), len(found.key)
        if cache is None:
            cache = EvictionCache(self.model, first.batch.policy, pool=self.pool)
        cache.expect(torch.ones(1, len(first.prompt), dtype=torch.bool), first.prompt[None])
        cache.protect(first.request.protect)
        return _Prompt(answers, cache, read=shared, shared=shared, mark=mark if mark > shared else 0)

    # ---- prefill

    def _prefill(self, prompt: _Prompt, tokens: int) -> int:
        """Read a chunk of a prompt; at its end its answers join the batch. Returns the number of tokens read."""
        first, until = prompt.answers[0], prompt.mark or None
        best = None if first.stream.prompt else first.request.prompt_logprobs  # a preempted answer has told it
        text, batch = first.prompt, first.batch
        part = text[prompt.read : until][: None if batch.at_once else tokens]
        try:
            ends = prompt.read + len(part) == len(text)
            masks = self._masks.begin([(answer.matcher, []) for answer in prompt.answers] if ends else [])
            ids = part[None].to(self.model.device)
            keep = 1 if best is None else 0  # 0 means all logits
            out = self.model(input_ids=ids, past_key_values=prompt.cache, use_cache=True, logits_to_keep=keep)
            if best is not None:
                following = text[prompt.read + 1 :][: len(part)]
                prompt.scores += scored(out.logits[0, : len(following)], following, best)
            prompt.read += len(part)
            if prompt.read == prompt.mark:
                self._cache_prefix(prompt)
            if not ends:
                return len(part)
            self.counts.prompts += len(text) - prompt.shared
            self.counts.reused += prompt.shared
            batch.admission.learn(prompt.cache, len(text))
            kept = prompt.cache.kept_share() if first.request.kept else None
            for answer, allowed in zip(list(prompt.answers), masks.result(), strict=True):
                answer.stream.shared, answer.stream.kept = prompt.shared, kept
                if best is not None:
                    answer.stream.prompt = (Token(int(text[0])), *prompt.scores)
                fork = prompt.cache if answer is prompt.answers[-1] else deepcopy(prompt.cache)
                self._begin(prompt, answer, fork, out.logits[0, -1].float().cpu(), next(allowed))
        except PoolFullError as error:
            self._put_off(prompt, error)
            return tokens
        except Exception as error:  # ends the answers to this prompt only
            self._fail(prompt.answers, prompt.cache, error)
        self._reading = None
        return len(part)

    def _cache_prefix(self, prompt: _Prompt) -> None:
        """Cache the prefix read so far, if the pool holds the rest of the prompt and its answers beside it."""
        read, prompt.mark, first = prompt.mark, 0, prompt.answers[0]
        rest = first.need.reading * (len(first.prompt) - read) // len(first.prompt)
        prefixes = first.batch.prefixes
        free = self.pool.free + sum(x.prefixes.spare for x in [*self._batches.values()] if x.prefixes is not None)
        if prefixes is not None and free >= rest + first.need.writing * len(prompt.answers):
            prefixes.add(first.key()[:read], deepcopy(prompt.cache))

    def _begin(
        self, prompt: _Prompt, answer: _Answer, cache: EvictionCache, logits: Tensor, allowed: Tensor | None
    ) -> None:
        """Sample the first token of an answer, unless it was preempted, and add the answer to the batch."""
        answer.read = len(answer.request.tokens)
        if answer.request.max_tokens == 0:
            self._finish(answer, "length")
            cache.reset()
        elif answer.written or self._add(answer, logits, allowed):
            answer.batch.cache.add(cache)
            answer.batch.running.append(answer)
        else:
            cache.reset()
        prompt.answers.remove(answer)

    # ---- decoding

    def _decode(self, batch: _Batch) -> None:
        """Decode a token of each answer of a batch, and more where drafts are right.

        A preempted answer first reads its own tokens again.
        """
        drafts = batch.drafts // len(batch.running)
        coming = [answer.coming(drafts) for answer in batch.running]
        masks = self._masks.begin(
            [(x.matcher, ids[len(x.text) - x.read :].tolist()) for x, ids in zip(batch.running, coming, strict=True)]
        )
        try:
            logits = self._step(batch, coming)
            allowed = masks.result()
        except PoolFullError as error:
            self._preempt(batch, error)
            return
        except Exception as error:
            self._fail(batch.running, batch.cache, error)
            return
        self.counts.steps += 1
        over, wrong = [], []
        for answer, tokens, after, masked in zip(batch.running, coming, logits, allowed, strict=True):
            end = answer.read + len(tokens)
            drafted = end - min(end, len(answer.text))
            if not self._take(answer, tokens, after, masked):
                over.append(answer)
            wrong.append(end - answer.read)
            self.counts.drafted += drafted
            self.counts.accepted += drafted - wrong[-1]
        batch.cache.crop(wrong)
        self._remove(over)

    def _step(self, batch: _Batch, coming: list[Tensor]) -> list[Tensor]:
        """Read tokens ``[T_i]`` of each answer i; returns the logits ``[T_i, V]`` after each of them, on the CPU."""
        width = max(map(len, coming))
        ids = torch.stack([F.pad(tokens, (width - len(tokens), 0)) for tokens in coming]).to(self.model.device)
        if width == 1:
            return [*batch.next(ids).float().cpu()[:, None]]
        real = torch.stack([torch.arange(width) >= width - len(tokens) for tokens in coming])
        seen = batch.cache.valid
        mask = torch.cat([seen, real.to(seen.device)], 1)
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=batch.cache, use_cache=True)
        return [x[width - len(tokens) :] for x, tokens in zip(out.logits.float().cpu(), coming, strict=True)]

    def _take(self, answer: _Answer, read: Tensor, logits: Tensor, allowed: Iterator[Tensor | None]) -> bool:
        """Sample after the tokens that were read of an answer; returns whether the answer goes on.

        Nothing is sampled after a token that has a successor in the text. A draft is accepted if it is the token that
        was sampled.

        Args:
            answer: its ``read`` advances by the accepted tokens.
            read: ids ``[T]`` of the text, then drafts.
            logits: ``[T, V]`` after each of them.
            allowed: the tokens that may come next, ``[V]`` bool, after the text and after each draft; None means all.
        """
        for token, after in zip(read, logits, strict=True):
            if answer.text[answer.read] != token:
                return True
            answer.read += 1
            if answer.read == len(answer.text) and not self._add(answer, after, next(allowed)):
                return False
        return True

    def _add(self, answer: _Answer, logits: Tensor, allowed: Tensor | None) -> bool:
        """Sample the next token of an answer; returns whether the answer goes on."""
        detokenizer = answer.stream.text
        try:
            token = answer.sampler(answer.text, logits, allowed)
            if answer.matcher is not None:
                advance(answer.matcher, token.id)
        except Exception as error:  # such as invalid probabilities
            self._finish(answer, None, error)
            return False
        answer.text = torch.cat([answer.text, torch.tensor([token.id])])
        ended, place = token.id in answer.ends, detokenizer.length
        spoken = answer.request.include_stop_str_in_output or not ended
        answer.stream.put(replace(token, place=place, text=detokenizer.add(token.id) if spoken else ""))
        self.counts.tokens += 1
        if answer.written == 1:
            self.counts.started += 1
            self.counts.first_seconds += self._clock() - answer.since
        complete = answer.matcher is not None and answer.matcher.is_stopped()
        if ended or detokenizer.stopped or complete:
            self._finish(answer, "stop")
        elif answer.written >= answer.request.max_tokens:
            self._finish(answer, "length")
        else:
            if answer.written == answer.request.expected:  # longer than its reserve
                answer.request = replace(answer.request, reserved=2 * answer.written)
                answer.need = answer.batch.admission.need(answer.request)
            return True
        if answer.batch.prefixes is not None:
            with self._lock:
                answer.batch.prefixes.remember(answer.key())
        return False

    # ---- preemption

    def _preempt(self, batch: _Batch, error: PoolFullError) -> None:
        """Free the blocks of the newest answer and queue it first; its text so far is read again later.

        A step of a batch that broke off in the middle leaves the whole cache invalid: all of its answers are preempted.
        """
        oldest_first = sorted(self._running, key=lambda answer: answer.since)
        newest, reading = oldest_first[-1], self._reading
        if reading is not None and reading.answers[0].since >= newest.since:
            self._put_off(reading, error)
            if not batch.cache.broken:
                return
        broken = batch.cache.broken
        preempted = [answer for answer in oldest_first if answer.batch is batch] if broken else [newest]
        alone = len(oldest_first) == 1 and reading is None
        self._remove(preempted)
        if alone:
            unlimited = newest.request.reserved is not None
            self._finish(newest, "length" if unlimited else None, None if unlimited else error)
            return
        self.counts.preempted += len(preempted)
        for answer in reversed(preempted):
            self._queue_first([answer])

    def _put_off(self, prompt: _Prompt, error: PoolFullError) -> None:
        """Free the blocks of a prompt and queue it first; with an empty batch, where no block comes free, it fails."""
        self._reading = None
        if not self._running:
            self._fail(prompt.answers, prompt.cache, error)
            return
        prompt.cache.reset()
        self._queue_first(prompt.answers)

    def _queue_first(self, answers: list[_Answer]) -> None:
        """Queue answers before all others, and admit nothing until an answer leaves the batch."""
        self._crowded = True
        with self._lock:
            self._waiting.appendleft(answers)

    # ---- ends

    def _end_unwanted(self) -> None:
        """End the answers that were cancelled or are past a time limit; after :meth:`stop` with a reason, all."""
        with self._lock:
            for answers in self._waiting:
                answers[:] = [answer for answer in answers if not self._unwanted(answer, waiting=answer.written == 0)]
            self._waiting = deque(answers for answers in self._waiting if answers)
        if self._reading is not None:
            self._reading.answers = [x for x in self._reading.answers if not self._unwanted(x)]
            if not self._reading.answers:
                self._reading.cache.reset()
                self._reading = None
        self._remove([answer for answer in self._running if self._unwanted(answer)])

    def _unwanted(self, answer: _Answer, waiting: bool = False) -> bool:
        """End an answer if it was cancelled or is past a time limit; returns whether it ended."""
        if self._stopped is not None:
            cut = answer.written > 0 and not self.failed
            self._finish(answer, "timeout" if cut else None, None if cut else self._stopped)
            return True
        limits = [answer.request.answer_seconds, answer.request.wait_seconds if waiting else None]
        late, waited = (limit is not None and self._clock() - answer.since > limit for limit in limits)
        reason: Reason | None = "cancelled" if answer.stream.cancelled else "timeout" if late or waited else None
        if reason is not None:
            message = f"no token came within {answer.request.wait_seconds} seconds: ask again later."
            self._finish(answer, reason, WaitedError(message) if waited and reason == "timeout" else None)
        return reason is not None

    def _finish(self, answer: _Answer, reason: Reason | None, error: Exception | None = None) -> None:
        self.counts.ended[reason or "error"] += 1
        answer.stream.reason = reason
        answer.stream.put(error)

    def _remove(self, answers: list[_Answer]) -> None:
        """Remove answers from their batches."""
        for batch in {id(answer.batch): answer.batch for answer in answers}.values():
            batch.cache.remove([place for place, answer in enumerate(batch.running) if answer in answers])
            batch.running = [answer for answer in batch.running if answer not in answers]
            self._crowded = False

    def _fail(self, answers: list[_Answer], cache: EvictionCache, error: Exception) -> None:
        """End answers by an error of the model or the policy; queued requests go on."""
        cache.reset()
        for answer in answers:
            self._finish(answer, None, error)
        answers.clear()


def _held(cache: EvictionCache) -> list[list[float]]:
    """Return the tokens of each sequence of a cache, by layer, the mean over KV heads."""
    return [store.held[layer].float().mean(1).tolist() for layer, store in enumerate(cache.store_of)]


def _reads_at_once(cache: EvictionCache) -> bool:
    """Return whether prompts are read at once, as chunks would be evicted differently, read slowly, or not at all."""
    if cache.sequences.goes_on is False:
        return True
    if cache.gates is None:
        return False
    moves = cache.policy.positions == "slot" and cache.prompt_sees == "sparse"
    return cache.gates.config.scope == "prompt" or moves
