"""Continuous batching: requests join and leave the batch between two steps, and share a pool of blocks."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ag.engine.block_pool import Pool, PoolFullError
from ag.engine.cache import EvictionCache
from ag.engine.evictor import NonFiniteScoreError
from ag.engine.policy import Policy, policy
from ag.errors import UserError
from ag.model.structure import end_tokens
from ag.serve.admission import BlockNeed
from ag.serve.batch import Batch, Completion, PrefillJob
from ag.serve.prefix_cache import PrefixCache
from ag.serve.request import Reason, Request, Token
from ag.serve.sampler import Sampler, with_logprobs
from ag.serve.snapshot import Counts, Running, Snapshot, cached_tokens, memories
from ag.serve.stream import Detokenizer, Event, Stream, Vocabulary
from ag.serve.structured import Masks, advance

#: Smallest number of tokens that a pass over a prompt counts for in ``prefill_tokens``: reading the weights once takes
#: the time of tens of tokens, and many short prompts would delay the running completions.
MIN_PASS_TOKENS = 64


class QueueFullError(UserError):
    """The request queue is full; try again later."""


class StoppedError(UserError):
    """The scheduler has stopped or failed; every completion ends."""


class QueueTimeoutError(UserError):
    """A request waited longer than ``wait_seconds`` for its prefill."""


class Scheduler:
    """Answers requests with one model from one pool of blocks. A request may have its own policy.

    Requests are admitted in order of arrival, as soon as the blocks that they may take are free. Prompts are read in
    chunks between the steps of the batch. A common prefix of several prompts is read once, and cached until its blocks
    are needed. If the pool still runs out, the newest completion is preempted: its blocks are freed, and its tokens so
    far are read again later.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: the model's tokenizer, a fast tokenizer.
        spec: the policy of requests without their own policy, or its text; see :func:`ag.policy`.
        pool: holds the keys and values of all requests.
        budget: tokens per KV head, or a share of each prompt, if ``spec`` is a text.
        prefill_tokens: largest number of prompt tokens between two steps of the batch; a shorter prompt counts for
            ``MIN_PASS_TOKENS``.
        batch: largest number of completions in the batch.
        queue: largest number of queued requests.
        prompt_lookup: largest number of draft tokens of a step, for all completions of a policy together. Prompt lookup
            decoding proposes them. A policy that evicts generated tokens cannot reject drafts, and gets no drafts.
        clock: returns seconds, for the time limits of requests.

    Raises:
        UserError: when the pool was made for another model, or the tokenizer is not fast.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        spec: Policy | str,
        pool: Pool,
        budget: int | float | None = None,
        *,
        prefill_tokens: int = 1024,
        batch: int = 64,
        queue: int = 256,
        prompt_lookup: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.tokenizer, self.pool, self.vocabulary = model, tokenizer, pool, Vocabulary(tokenizer)
        self.policy = policy(spec, budget).with_tokenizer(tokenizer)
        self.prefill_tokens, self.batch, self.queue = prefill_tokens, batch, queue
        self.counts = Counts()
        text_config = model.config.get_text_config()
        #: Largest number of tokens of a sequence. None: no limit.
        self.context_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self._clock, self._indices = clock, count()
        self._last_step_at = -math.inf  # seconds of the clock at the beginning of the last step
        self._new_batch = partial(Batch, model, pool=pool, prefill_tokens=prefill_tokens, prompt_lookup=prompt_lookup)
        self._default_batch = self._new_batch(self.policy)
        self._batches = {self.policy: self._default_batch}
        self._masks = Masks(text_config.vocab_size)
        self._prefill_job: PrefillJob | None = None
        self._waiting: deque[list[Completion]] = deque()  # queued completions, by request
        self._hold_admissions = False  # True after a preemption, until a completion leaves the batch
        self._lock = threading.Condition()
        self._stopping = False
        self._stop_error: StoppedError | None = None  # the error that ends every completion
        self.failed = False  # True once :meth:`run` has raised
        self.admission = self._default_batch.admission  # bounds of requests under the scheduler's policy
        #: Ids of the end tokens of the model and of its tokenizer.
        self.end_tokens = end_tokens(model, tokenizer.eos_token_id)
        self._publish_snapshot()

    def context_length_of(self, num_prompt: int) -> int | None:
        """Return the largest number of tokens of a prompt of ``num_prompt`` tokens and its completion. None: no limit.

        A RoPE with other frequencies for long texts rotates a text by the frequencies of its prompt. A completion
        cannot outgrow them; its last token is never read.
        """
        rope, limits = self._default_batch.cache.setup.rope, [self.context_length]
        limits += [] if rope is None or num_prompt > rope.changes else [rope.changes + 1]
        return min((limit for limit in limits if limit is not None), default=None)

    # ---- for other threads

    def submit(self, request: Request, on_event: Callable[[int, Event], None] | None = None) -> list[Stream]:
        """Queue a request and return the streams of its ``n`` completions.

        Args:
            request: the request.
            on_event: called with a completion's index and each event of its stream; see :class:`Stream`.

        Raises:
            QueueFullError: when the queue is full.
            StoppedError: when the scheduler stops, has stopped or has failed.
            UserError: for a request that is too long for the pool or the context.
        """
        policy = self.policy if request.policy is None else request.policy.with_tokenizer(self.tokenizer)
        batch = self._batches.get(policy) or self._new_batch(policy)
        block_need = batch.admission.need(request)
        self._check(request, block_need)
        token_ids, submitted_at = torch.tensor(request.tokens, dtype=torch.long), self._clock()
        end_tokens, stop_tokens = self.end_tokens_of(request)
        completions = []
        for index in range(request.n):
            completion = Completion(
                next(self._indices),
                request,
                Stream(Detokenizer(self.vocabulary, request), on_event and partial(on_event, index)),
                Sampler(request, index, end_tokens | stop_tokens),
                token_ids,
                submitted_at,
                block_need,
                end_tokens,
                batch,
                matcher=None if request.grammar is None else request.grammar.deep_copy(),
            )
            completions.append(completion)
        # taken now: another thread may remove completions from the list later
        streams = [completion.stream for completion in completions]
        with self._lock:
            if self._stopping:
                raise self._stop_error or StoppedError("the scheduler is stopping: ask another one, or start it again.")
            if len(self._waiting) >= self.queue:
                raise QueueFullError(f"{len(self._waiting)} requests wait, and the queue is full: try again later.")
            batch = self._batches.setdefault(policy, batch)
            for completion in completions:
                completion.batch = batch
            self._waiting.append(completions)
            if batch.prefixes is not None:
                batch.prefixes.recent_keys.append(completions[0].key())
            self._lock.notify()
        return streams

    def end_tokens_of(self, request: Request) -> tuple[set[int], set[int]]:
        """Return the ids that end a request's completions: end tokens, and special tokens whose text is a stop text.

        Raises:
            UserError: when every token ends a completion and ``min_tokens`` is not 0.
        """
        end_tokens = {*request.stop_token_ids} | (set() if request.ignore_eos else self.end_tokens)
        stop_tokens = {self.vocabulary.special[stop] for stop in request.stop if stop in self.vocabulary.special}
        if request.min_tokens and len(end_tokens | stop_tokens) >= self.model.config.get_text_config().vocab_size:
            raise UserError(
                f"min_tokens={request.min_tokens}: every token of the model ends the answer, by stop_token_ids, stop "
                "or as an end token of the model: expected min_tokens=0, or fewer stop tokens."
            )
        return end_tokens, stop_tokens

    def run(self) -> None:
        """Answer requests until :meth:`stop` is called and no request is left.

        Raises:
            Exception: an error that concerns all requests; every completion has ended by then.
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
            self._end_cancelled()
            raise

    def stop(self, reason: str = "") -> None:
        """Let :meth:`run` return once no request is left. With a reason every completion ends now.

        A completion without a token then ends with that error, and a longer completion keeps its tokens. If the
        scheduler has failed, every completion ends with the error.
        """
        with self._lock:
            self._stopping = True
            self._stop_error = StoppedError(reason) if reason else None
            self._lock.notify()

    @property
    def busy(self) -> bool:
        """True while a completion has not ended."""
        return bool(self._running or self._prefill_job or self._waiting)

    @property
    def _running(self) -> list[Completion]:
        """The running completions under all policies."""
        return [completion for batch in [*self._batches.values()] for completion in batch.running]

    @property
    def _prefixes(self) -> list[PrefixCache]:
        """The cached prefixes under all policies."""
        return [batch.prefixes for batch in [*self._batches.values()] if batch.prefixes is not None]

    def snapshot(self) -> Snapshot:
        """Return the state after the last step, and the current queue length. Any thread may call this."""
        with self._lock:
            return replace(self._snapshot, num_waiting=sum(map(len, self._waiting)))

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """Prefill up to ``prefill_tokens`` prompt tokens, then decode a token of each running completion."""
        started_at = self._clock()
        self._end_cancelled()
        tokens = self.prefill_tokens
        while tokens > 0 and (job := self._prefill_job or self._admit()):
            tokens -= max(self._prefill_chunk(job, tokens), MIN_PASS_TOKENS)
        for batch in [*self._batches.values()]:
            if batch.running:
                self._decode(batch)
        if len(self._batches) > 1:
            self._drop_unused()
        self._publish_snapshot()
        self._last_step_at = started_at

    def _drop_unused(self) -> None:
        """Drop batches of policies without completions, except the scheduler's own policy."""
        with self._lock:
            groups = [self._running, *self._waiting, self._prefill_job.completions if self._prefill_job else []]
            used = {self._default_batch, *(completion.batch for group in groups for completion in group)}
            unused = [batch for batch in self._batches.values() if batch not in used]
            self._batches = {policy: batch for policy, batch in self._batches.items() if batch in used}
        for batch in unused:
            while batch.prefixes is not None and batch.prefixes.drop():
                pass

    def _publish_snapshot(self) -> None:
        """Store the state for :meth:`snapshot` as a new object, which other threads may read."""
        batches, current_time, prefixes = [*self._batches.values()], self._clock(), self._prefixes
        self._snapshot = Snapshot(
            num_waiting=0,
            num_prefilling=0 if self._prefill_job is None else len(self._prefill_job.completions),
            running=tuple(
                Running(
                    completion.index,
                    len(completion.request.tokens),
                    completion.num_generated,
                    current_time - completion.submitted_at,
                    tuple(cached),
                    completion.stream.memory,
                )
                for batch in batches
                for completion, *cached in zip(batch.running, *cached_tokens(batch.cache), strict=True)
            ),
            blocks=self.pool.capacity,
            free=self.pool.free,
            block_nbytes=self.pool.block_nbytes(),
            prefixes=sum(len(each.prefixes) for each in prefixes),
            prefix_blocks=sum(each.num_blocks for each in prefixes),
            counts=replace(self.counts, num_ended=self.counts.num_ended.copy()),
        )

    # ---- admission

    def _check(self, request: Request, block_need: BlockNeed) -> None:
        """Refuse a request that is too long for the context or the pool."""
        num_tokens = len(request.tokens) + request.max_tokens
        context_length = self.context_length_of(len(request.tokens))
        if context_length is not None and num_tokens > context_length:
            is_whole = context_length == self.context_length
            limit = "the context of the model" if is_whole else "at which the model's RoPE changes"
            raise UserError(
                f"{len(request.tokens)} tokens and an answer of {request.max_tokens} are {num_tokens}: expected at "
                f"most {context_length}, {limit}; shorten one of them."
            )
        blocks, size = max(block_need.prefill, block_need.decode * request.n), self.pool.block_nbytes()
        if blocks > self.pool.capacity:
            raise UserError(
                f"{len(request.tokens)} tokens and {request.n} answers of {request.num_reserved} may take "
                f"{blocks * size} bytes, and the pool has {self.pool.capacity * size}: expected no more than that; "
                "shorten one of them, keep less, or make a larger pool."
            )

    def _admit(self) -> PrefillJob | None:
        """Start the prefill of the next prompt, from a copy of a cached prefix. None: nothing waits, or blocks lack."""
        with self._lock:
            if not self._waiting:
                return None
            completions, running = self._waiting[0], self._running
            first, batch = completions[0], completions[0].batch
            need = batch.admission.need(first.request)  # under flags this estimate is better than at submission
            num_blocks = max(need.prefill, need.decode * len(completions))
            fits = sum(completion.block_need.decode for completion in running) + num_blocks <= self.pool.capacity
            if running and (self._hold_admissions or not fits or len(running) + len(completions) > self.batch):
                return None
            self._waiting.popleft()
            prefix, cache_prefix_at = None, 0
            # a prompt with log-probabilities is read whole
            if batch.prefixes is not None and first.request.prompt_logprobs is None:
                key = first.key()[: len(first.prompt)]
                prefix = batch.prefixes.find(key)
                cache_prefix_at = 0 if self._hold_admissions else batch.prefixes.shared_prefix_length(key)
        for completion in completions:
            completion.block_need = need
        num_cached = 0 if prefix is None else len(prefix.key)
        cache = EvictionCache(self.model, batch.policy, pool=self.pool) if prefix is None else deepcopy(prefix.cache)
        cache.expect(torch.ones(1, len(first.prompt), dtype=torch.bool), first.prompt[None])
        cache.protect(first.request.protect)
        cache_prefix_at = cache_prefix_at if cache_prefix_at > num_cached else 0
        self._prefill_job = PrefillJob(completions, cache, num_cached, num_cached, cache_prefix_at)
        return self._prefill_job

    # ---- prefill

    def _prefill_chunk(self, job: PrefillJob, max_tokens: int) -> int:
        """Read a chunk of a prompt; after the last chunk the completions join the batch. Returns the tokens read."""
        first, chunk_end = job.completions[0], job.cache_prefix_at or None
        # after a preemption the stream has the log-probabilities already
        num_logprobs = None if first.stream.prompt else first.request.prompt_logprobs
        prompt, batch = first.prompt, first.batch
        chunk = prompt[job.num_computed_tokens : chunk_end][: None if batch.whole_prompt else max_tokens]
        is_last_chunk = job.num_computed_tokens + len(chunk) == len(prompt)
        logits_to_keep = 1 if num_logprobs is None else 0  # 0: all logits
        options = {"past_key_values": job.cache, "use_cache": True, "logits_to_keep": logits_to_keep}
        try:
            masks = self._masks.begin([(each.matcher, []) for each in job.completions] if is_last_chunk else [])
            out = self.model(input_ids=chunk[None].to(self.model.device), **options)
            if num_logprobs is not None:
                next_tokens = prompt[job.num_computed_tokens + 1 :][: len(chunk)]
                job.scored_tokens += with_logprobs(out.logits[0, : len(next_tokens)], next_tokens, num_logprobs)
            job.num_computed_tokens += len(chunk)
            if job.num_computed_tokens == job.cache_prefix_at:
                self._cache_prefix(job)
            if not is_last_chunk:
                return len(chunk)
            self.counts.prompts += len(prompt) - job.num_cached_tokens
            self.counts.cached += job.num_cached_tokens
            batch.admission.record_kept_share(job.cache, len(prompt))
            kept_share = job.cache.kept_share() if first.request.report_kept_share else None
            [memory] = memories(job.cache)
            for completion, allowed in zip(list(job.completions), masks.result(), strict=True):
                stream = completion.stream
                stream.num_cached_tokens, stream.kept_share, stream.memory = job.num_cached_tokens, kept_share, memory
                if num_logprobs is not None:
                    stream.prompt = (Token(int(prompt[0])), *job.scored_tokens)
                fork = job.cache if completion is job.completions[-1] else deepcopy(job.cache)
                self._start_decoding(job, completion, fork, out.logits[0, -1].float().cpu(), next(allowed))
        except PoolFullError as error:
            self._requeue_prompt(job, error)
            return max_tokens
        except Exception as error:  # ends only this prompt's completions
            self._fail(job.completions, job.cache, error)
        self._prefill_job = None
        return len(chunk)

    def _cache_prefix(self, job: PrefillJob) -> None:
        """Cache the prefix read so far if the pool also has room for the remaining prompt and its completions."""
        prefix_length, job.cache_prefix_at, first = job.cache_prefix_at, 0, job.completions[0]
        needed_blocks = first.block_need.prefill * (len(first.prompt) - prefix_length) // len(first.prompt)
        free_blocks = self.pool.free + sum(prefixes.num_freeable_blocks for prefixes in self._prefixes)
        assert first.batch.prefixes is not None
        if free_blocks >= needed_blocks + first.block_need.decode * len(job.completions):
            first.batch.prefixes.add(first.key()[:prefix_length], deepcopy(job.cache))

    def _start_decoding(
        self, job: PrefillJob, completion: Completion, cache: EvictionCache, logits: Tensor, allowed: Tensor | None
    ) -> None:
        """Sample a completion's first token, unless it was preempted, and add it to the batch."""
        completion.num_computed_tokens = len(completion.request.tokens)
        if completion.request.max_tokens == 0:
            self._finish(completion, "length")
            cache.reset()
        elif completion.num_generated or self._sample_next(completion, logits, allowed):
            self._end_if_nonfinite(completion.batch)
            completion.batch.cache.add(cache)
            completion.batch.running.append(completion)
        else:
            cache.reset()
        job.completions.remove(completion)

    # ---- decoding

    def _decode(self, batch: Batch) -> None:
        """Decode a token of each completion of a batch, and more tokens where drafts are accepted.

        A preempted completion first reads its own tokens again.
        """
        max_drafts = batch.max_drafts // len(batch.running)
        next_token_ids = [completion.next_token_ids(max_drafts) for completion in batch.running]
        drafts = [
            token_ids[len(completion.token_ids) - completion.num_computed_tokens :].tolist()
            for completion, token_ids in zip(batch.running, next_token_ids, strict=True)
        ]
        matchers = [completion.matcher for completion in batch.running]
        masks = self._masks.begin([*zip(matchers, drafts, strict=True)])
        try:
            logits = self._step(batch, next_token_ids)
            allowed = masks.result()
        except PoolFullError as error:
            return self._preempt(batch, error)
        except Exception as error:
            return self._fail(batch.running, batch.cache, error)
        self.counts.steps += 1
        for completion, memory in zip(batch.running, memories(batch.cache), strict=True):
            completion.stream.memory = memory
        finished, num_rejected = [], []
        read = zip(batch.running, next_token_ids, logits, allowed, map(len, drafts), strict=True)
        for completion, token_ids, token_logits, token_masks, num_drafted in read:
            end = completion.num_computed_tokens + len(token_ids)
            if not self._accept_tokens(completion, token_ids, token_logits, token_masks):
                finished.append(completion)
            num_rejected.append(end - completion.num_computed_tokens)
            self.counts.drafted += num_drafted
            self.counts.accepted += num_drafted - num_rejected[-1]
        try:
            batch.cache.crop(num_rejected)
        except PoolFullError as error:  # for copies of blocks that other completions share
            self._remove(finished)
            return self._preempt(batch, error, freed=bool(finished)) if batch.running else None
        self._remove(finished)

    def _step(self, batch: Batch, next_token_ids: list[Tensor]) -> list[Tensor]:
        """Read tokens ``[T_i]`` of each completion i. Returns the logits ``[T_i, V]`` on the CPU."""
        width, device = max(map(len, next_token_ids)), self.model.device
        starts = [width - len(token_ids) for token_ids in next_token_ids]  # of the tokens after padding
        padded = [F.pad(token_ids, (start, 0)) for token_ids, start in zip(next_token_ids, starts, strict=True)]
        input_ids = torch.stack(padded).to(device)
        if width == 1:
            return [*batch.step_runner(input_ids).float().cpu()[:, None]]
        valid = torch.arange(width) >= torch.tensor(starts)[:, None]
        mask = torch.cat([batch.cache.valid, valid.to(batch.cache.valid.device)], 1)
        out = self.model(input_ids=input_ids, attention_mask=mask, past_key_values=batch.cache, use_cache=True)
        return [logits[start:] for logits, start in zip(out.logits.float().cpu(), starts, strict=True)]

    def _accept_tokens(
        self, completion: Completion, token_ids: Tensor, logits: Tensor, allowed: Iterator[Tensor | None]
    ) -> bool:
        """Accept the drafts that equal the sampled tokens, and sample the next token. Returns whether it goes on.

        ``token_ids`` ``[T]`` were read: the completion's own tokens, then drafts. ``logits`` ``[T, V]`` follow each of
        them, ``allowed`` the last own token and each draft. Where the successor is known nothing is sampled.
        """
        for token, token_logits in zip(token_ids, logits, strict=True):
            if completion.token_ids[completion.num_computed_tokens] != token:
                return True
            completion.num_computed_tokens += 1
            is_newest = completion.num_computed_tokens == len(completion.token_ids)
            if is_newest and not self._sample_next(completion, token_logits, next(allowed)):
                return False
        return True

    def _sample_next(self, completion: Completion, logits: Tensor, allowed: Tensor | None) -> bool:
        """Sample the next token of a completion. Returns whether the completion goes on."""
        detokenizer = completion.stream.detokenizer
        try:
            token = completion.sampler(completion.token_ids, logits, allowed)
            if completion.matcher is not None:
                advance(completion.matcher, token.id)
        except Exception as error:  # for example invalid probabilities
            self._finish(completion, None, error)
            return False
        completion.token_ids = torch.cat([completion.token_ids, torch.tensor([token.id])])
        is_end_token, text_offset = token.id in completion.end_tokens, detokenizer.length
        has_text = completion.request.include_stop_str_in_output or not is_end_token
        text = detokenizer.add(token.id) if has_text else ""
        completion.stream.put(replace(token, text_offset=text_offset, text=text))
        self.counts.tokens += 1
        if completion.num_generated == 1:
            self.counts.num_started += 1
            self.counts.ttft_seconds += self._clock() - completion.submitted_at
        is_complete = completion.matcher is not None and completion.matcher.is_stopped()
        if is_end_token or detokenizer.stopped or is_complete:
            self._finish(completion, "stop")
        elif completion.num_generated >= completion.request.max_tokens:
            self._finish(completion, "length")
        else:
            if completion.num_generated == completion.request.num_reserved:  # longer than its reserved blocks
                reserved = {"reserved": 2 * completion.num_generated}
                completion.request = completion.request.model_copy(update=reserved)
                completion.block_need = completion.batch.admission.need(completion.request)
            return True
        if completion.batch.prefixes is not None:
            with self._lock:
                completion.batch.prefixes.recent_keys.append(completion.key())
        return False

    # ---- preemption

    def _preempt(self, batch: Batch, error: PoolFullError, freed: bool = False) -> None:
        """Free the blocks of the newest completion and queue it first. Its tokens are read again later.

        A step that failed halfway leaves the whole cache invalid: then all completions of the batch are preempted. A
        completion that has the pool to itself ends, unless another one has just ``freed`` its blocks and made room.
        """
        oldest_first = sorted(self._running, key=lambda completion: completion.submitted_at)
        newest, job = oldest_first[-1], self._prefill_job
        if job is not None and job.completions[0].submitted_at >= newest.submitted_at:
            self._requeue_prompt(job, error)
            if not batch.cache.state.pass_open:
                return
        broken = batch.cache.state.pass_open
        preempted = [completion for completion in oldest_first if completion.batch is batch] if broken else [newest]
        is_alone = len(oldest_first) == 1 and job is None and not freed
        if self._end_if_nonfinite(batch):
            return
        self._remove(preempted)
        if is_alone:
            unlimited = newest.request.reserved is not None
            self._finish(newest, "length" if unlimited else None, None if unlimited else error)
            return
        self.counts.preempted += len(preempted)
        for completion in reversed(preempted):
            self._queue_first([completion])

    def _requeue_prompt(self, job: PrefillJob, error: PoolFullError) -> None:
        """Free the blocks of a prompt and queue it first. It fails if no running completion can free blocks."""
        self._prefill_job = None
        if not self._running:
            self._fail(job.completions, job.cache, error)
            return
        job.cache.reset()
        self._queue_first(job.completions)

    def _queue_first(self, completions: list[Completion]) -> None:
        """Put completions first in the queue, and admit nothing until a completion leaves the batch."""
        self._hold_admissions = True
        with self._lock:
            self._waiting.appendleft(completions)

    # ---- ends

    def _end_cancelled(self) -> None:
        """End cancelled and late completions; after :meth:`stop` with a reason, end all completions."""
        with self._lock:
            for completions in self._waiting:
                completions[:] = [each for each in completions if not self._end_if_cancelled(each, waiting=True)]
            self._waiting = deque(completions for completions in self._waiting if completions)
        if (job := self._prefill_job) is not None:
            job.completions = [each for each in job.completions if not self._end_if_cancelled(each)]
            if not job.completions:
                job.cache.reset()
                self._prefill_job = None
        self._remove([completion for completion in self._running if self._end_if_cancelled(completion)])

    def _end_if_cancelled(self, completion: Completion, waiting: bool = False) -> bool:
        """End a completion if it was cancelled or is late. Returns whether it ended."""
        request, seconds = completion.request, self._clock() - completion.submitted_at
        reason: Reason | None = "timeout"
        error: UserError | None = None
        if self._stop_error is not None:
            if self.failed or not completion.num_generated:
                reason, error = None, self._stop_error
        elif completion.stream.cancelled:
            reason = "cancelled"
        elif (
            waiting
            and not completion.num_generated
            and completion.submitted_at <= self._last_step_at  # a step could have admitted it
            and seconds > request.wait_seconds
        ):
            error = QueueTimeoutError(f"no token came within {request.wait_seconds} seconds: ask again later.")
        elif seconds <= request.answer_seconds:
            return False
        self._finish(completion, reason, error)
        return True

    def _finish(self, completion: Completion, reason: Reason | None, error: Exception | None = None) -> None:
        self.counts.num_ended[reason or "error"] += 1
        completion.stream.reason = reason
        completion.stream.put(error)

    def _remove(self, completions: list[Completion]) -> None:
        """Remove completions from their batches."""
        for batch in {completion.batch for completion in completions}:
            removed_indices = [index for index, each in enumerate(batch.running) if each in completions]
            batch.running = [completion for completion in batch.running if completion not in completions]
            if not self._end_if_nonfinite(batch):
                batch.cache.remove(removed_indices)
            self._hold_admissions = False

    def _end_if_nonfinite(self, batch: Batch) -> bool:
        """End a batch's completions if scores since its last check were not finite. Returns whether they ended.

        A cache whose sequences change checks its scores too, and would raise.
        """
        try:
            batch.cache.state.check_scores()
        except NonFiniteScoreError as error:
            self._fail(batch.running, batch.cache, error)
            return True
        return False

    def _fail(self, completions: list[Completion], cache: EvictionCache, error: Exception) -> None:
        """End completions with an error of the model or the policy. Queued requests go on."""
        cache.reset()
        traceback.clear_frames(error.__traceback__)  # the streams hold the error, whose frames hold the cache's blocks
        for completion in completions:
            self._finish(completion, None, error)
        completions.clear()
