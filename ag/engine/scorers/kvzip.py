"""KVzip: attention while the model repeats the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import Scorer
from ag.errors import UserError, require

ASK = "\n\nRepeat the context above exactly, word for word."
ASK_PART = "\n\nRepeat the part of the context above that begins exactly so: "
MARK = "\x00"  # stands for the user's text while a chat template is cut open


@dataclass(frozen=True, kw_only=True)
class KVzip(Scorer):
    """``max A_ip`` over the queries of a repetition of the context, and over the query heads of the group.

    After the prompt the model repeats the context after the sinks, chunk by chunk under the whole cache: it reads an
    instruction, then the tokens of the chunk. The softmax runs over the sinks, the chunk and its repetition alone, in
    float32. The cache drops each repetition. A prompt is scored once, and the schedule is therefore ``prefill``.

    Source: Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", code
    snu-mllab/KVzip; KVzip+ after NVIDIA/kvpress. Deviations: ``sinks`` is the prefix (system
    prompt) that is kept, and it counts within the budget, as in kvpress; exactly the budget is kept (the paper's code
    misses it by one).

    Attributes:
        sinks: first tokens, which are kept, take part in every softmax and are not repeated.
        chunk: tokens that are repeated at once.
        overlap: last tokens of a chunk with which the instruction for the next chunk ends; the whole chunk if it has
            fewer tokens.
        normalize: KVzip+: multiply weights by ``||W_O v_p|| / ||x_i||`` with ``x_i`` the input of the query's layer.
        ask: token ids, separated by blanks, of the instruction before the first chunk. None: a command takes the ids of
            its tokenizer (:meth:`with_tokenizer`); otherwise there is no instruction.
        ask_part: token ids of the instruction before each later chunk; the overlap follows.
        answer: token ids between instruction and chunk. They end the user's turn and begin the assistant's turn. Some
            chat templates write an empty thinking block before an answer without thoughts; then they include it.
    """

    sinks: int = 4
    chunk: int = 2000
    overlap: int = 8
    normalize: bool = False
    ask: str | None = None
    ask_part: str | None = None
    answer: str | None = None

    default_allocator: ClassVar[str] = "global"
    from_tokenizer: ClassVar[tuple[str, ...]] = ("ask", "ask_part", "answer")

    @cached_property
    def needs(self) -> Needs:
        """The token indices, and under KVzip+ the output projection."""
        return Needs(key_indices=True, output_projection=self.normalize)

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that values are weighed once."""
        return {"normalize": (False, "{wrapper} weighs values")}

    def __post_init__(self) -> None:
        """Refuse values out of range, and token ids that are none."""
        super().__post_init__()
        require(self, "chunk", self.chunk >= 1, "1 or more")
        require(self, "overlap", self.overlap >= 0, "0 or more")
        for name in self.from_tokenizer:
            text = getattr(self, name)
            if text is not None and not all(part.isdecimal() for part in text.split()):
                raise UserError(f"KVzip: {name}={text!r:.60}: expected token ids separated by blanks, such as 17 4 9.")

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the scorer with the instructions that it was not given, in the tokens of a tokenizer."""
        instructions = zip(self.from_tokenizer, (ASK, ASK_PART, answer_of(tokenizer)), strict=True)
        ids: dict[str, Any] = {
            name: " ".join(map(str, tokenizer(text, add_special_tokens=False)["input_ids"]))
            for name, text in instructions
            if getattr(self, name) is None
        }
        return replace(self, **ids)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the largest weight; 0 for tokens that were not repeated."""
        scores = inputs.records.get("repeated")
        return torch.zeros_like(inputs.key_indices, dtype=torch.float32) if scores is None else scores

    def chunks_to_repeat(self, context: list[int]) -> list[tuple[range, list[int]]]:
        """Return the chunks of a prompt's token ids ``context``, each with the ids that repeat it."""
        instructions = self.ask, self.ask_part, self.answer
        ask, ask_part, answer = ([int(x) for x in (text or "").split()] for text in instructions)
        chunks = []
        for start in range(self.sinks, len(context), self.chunk):
            chunk = range(start, min(start + self.chunk, len(context)))
            overlap_tokens = context[start - min(self.overlap, self.chunk) : start] if ask_part else []
            instruction = ask if start == self.sinks else ask_part + overlap_tokens
            chunks.append((chunk, instruction + answer + context[start : chunk.stop]))
        return chunks


def answer_of(tokenizer: Any) -> str:
    """Return what ends a user's turn and begins an answer without thoughts in a chat template; else a line's end."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    turn = [{"role": "user", "content": MARK}]
    # Qwen3's template and those after it close the thoughts then; a template that does not know the name ignores it
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return str(text).partition(MARK)[2]
