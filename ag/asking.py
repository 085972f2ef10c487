"""Questions about a text that was read once: each answer continues a copy of the evicted cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag.engine import EvictionCache, Policy, policy
from ag.engine.policy import Option
from ag.errors import UserError
from ag.model.generation import own_settings


@dataclass(frozen=True)
class Answers:
    """The answers to some questions about a context, and the memory that the context took.

    Attributes:
        texts: an answer for each question, in their order.
        kept_share: share of the context's keys and values that was held when the questions came.
        nbytes: bytes of the cache after the context was read and evicted.
        plain_nbytes: bytes of transformers' own cache for the context.
    """

    texts: list[str]
    kept_share: float
    nbytes: int
    plain_nbytes: int

    def __str__(self) -> str:
        """Return the answers, a line each, and a line with the memory."""
        memory = f"{self.kept_share:.1%} of the context kept, {self.nbytes / 2**20:.2f} MiB"
        return "\n".join([*self.texts, f"[{memory} of {self.plain_nbytes / 2**20:.2f} MiB]"])


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    questions: Sequence[str],
    spec: str | Policy,
    budget: int | float | None = None,
    schedule: str = "prefill",
    *,
    max_new_tokens: int = 32,
    **options: Option,
) -> Answers:
    """Read a context once, evict, and answer questions that come afterwards.

    With a chat template the context and a question are one message of the user, and the answer is the assistant's.
    Without one the text is ``CONTEXT``, ``Question: ...`` and ``Answer:``, and an answer is its first line.

    Args:
        model: causal language model.
        tokenizer: of the model.
        context: the text to read.
        questions: each is asked about the context alone, without the other questions and answers.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the context.
        schedule: for a text: when tokens are evicted.
        max_new_tokens: longest answer.
        options: for a text: hyper-parameters of its parts.

    Returns:
        The answers, by greedy decoding, and the memory of the context.

    Raises:
        UserError: for an empty context, no question or a blank one, or a policy that cannot be made.
    """
    if not context.strip() or isinstance(questions, str) or not questions:
        raise UserError(
            f"ag.ask: context={context[:40]!r}, questions={questions!r:.80}: expected a text, and a list with at "
            "least one question."
        )
    if blank := [question for question in questions if not question.strip()]:
        raise UserError(f"ag.ask: the question {blank[0]!r}: expected words; where they begin, the context ends.")
    chosen = policy(spec, budget, schedule, **options)
    cache = EvictionCache(model, chosen.with_tokenizer(tokenizer))
    prompts = [_prompt(tokenizer, context, question) for question in questions]
    context_text = prompts[0][0]
    device = next(model.parameters()).device
    context_ids = _ids(tokenizer, context_text, device)
    model(input_ids=context_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    report = cache.report()
    texts = []
    with own_settings(model, tokenizer):
        for _, after in prompts:
            ids = torch.cat([context_ids, _ids(tokenizer, after, device)], 1)
            output = model.generate(  # type: ignore[operator]  # PEFT and transformers declare it differently
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=copy.deepcopy(cache),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            text = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
            texts.append(text if tokenizer.chat_template else text.partition("\n")[0])
    return Answers(texts, report.kept_share, sum(report.nbytes), report.plain_nbytes)


def _prompt(tokenizer: PreTrainedTokenizerBase, context: str, question: str) -> tuple[str, str]:
    """Return the text up to the end of the context, and the question with the beginning of the answer."""
    if not tokenizer.chat_template:
        return (tokenizer.bos_token or "") + context, f"\n\nQuestion: {question}\nAnswer:"
    message = {"role": "user", "content": f"{context}\n\n{question}"}
    text = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    before, separator, after = text.rpartition(f"\n\n{question}")
    if not separator:
        raise UserError(
            f"ag.ask: the chat template changes the question {question!r:.80}: expected it as it is; leave blanks at "
            "its end out."
        )
    return before, separator + after


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, device: torch.device) -> Tensor:
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    return ids.to(device)
