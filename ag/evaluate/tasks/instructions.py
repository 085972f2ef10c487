"""Instructions in a system prompt before a long text. Answers should follow them after eviction.

After The Pitfalls of KV Cache Compression (https://arxiv.org/abs/2510.00231), where a compressed cache follows some
instructions and silently drops others. The instructions are our own; a small model can follow them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.rules import prompted
from ag.data.tokens import tokenize_after, tokenize_prompt
from ag.engine import EvictionCache
from ag.evaluate.tasks.base import Sample, Tags, by_part
from ag.evaluate.tasks.follow import score
from ag.evaluate.tasks.questions import TextSample
from ag.evaluate.tasks.ruler import Haystack, Variant, join, sample_sentences

ROLE = "You answer questions about texts. Follow these rules in each answer:"
TASK = "What is the text above about? Answer by the rules."
FILLER_LEAD = "The text tells of people."


class Choice(NamedTuple):
    """One possible demand of an instruction."""

    rule_text: str  # text in the instruction
    answer_text: str  # text in an answer that follows the instruction


class RuleKind(NamedTuple):
    """A kind of instruction. Answers that follow different choices are equal up to the end of ``lead``."""

    text: str  # the instruction, with the choice as ``{}``
    lead: str  # beginning of an answer, up to the text of the choice
    choices: Sequence[Choice]


def _rule(text: str, lead: str, words: str, space: str = " ") -> RuleKind:
    """Return a kind whose answers name the demanded words, which are separated by commas, after a space."""
    return RuleKind(text, lead, [Choice(word, space + word) for word in words.split(", ")])


#: The kinds that SmolLM2-135M-Instruct follows with a full cache.
RULE_KINDS: dict[str, RuleKind] = {
    "signature": _rule(
        "Sign with the name {}.",
        f"{FILLER_LEAD}\n\nSigned:",
        "Captain Walnut, Doctor Harbour, Lady Lantern, Uncle Marble, Sister Falcon",
    ),
    "place": _rule("Head the answer with the place {}.", "Place:", "Lisbon, Oslo, Cairo, Lima, Delhi"),
    "date": _rule("Date the answer {}.", "Date:", "Monday, Tuesday, Thursday, Saturday"),
    "grade": _rule("Give the text the grade {}.", "Grade:", "A, B, C, D, E"),
    "closing": _rule(
        'Close with the words "{}".',
        f"{FILLER_LEAD}\n\n",
        "Stay curious, Good luck, See you soon, All the best, Keep reading",
        space="",
    ),
    "address": _rule("Call the reader {}.", "Listen, dear", "Professor, Captain, Madam, Friend, Colleague"),
    "language": RuleKind(
        "Answer in {}.",
        "",
        [
            Choice("Spanish", "El texto habla de"),
            Choice("French", "Le texte parle de"),
            Choice("German", "Der Text handelt von"),
            Choice("Italian", "Il testo parla di"),
        ],
    ),
    "format": RuleKind('Begin each line with "{}".', "", [Choice(mark, f"{mark} The text") for mark in "-*+#>"]),
}


class Demand(NamedTuple):
    """An instruction of a sample."""

    kind: str
    chosen: Choice  # the demand
    alternative: Choice  # the demand of another instruction of this kind
    lead: int = 0  # tokens of both answers before the compared tokens

    @property
    def rule(self) -> RuleKind:
        """The kind of instruction."""
        return RULE_KINDS[self.kind]


@dataclass(frozen=True)
class Instructions(Haystack):
    """A system prompt with instructions, then a long text; the score is the share of the instructions followed.

    Each instruction demands one of several choices (a name to sign with, a language, ...), drawn for each sample. It is
    followed if its choice is likelier, per token, than another choice of its kind in its place; by chance this is half.
    ``nats`` is the mean over the demanded choices. There are tags by ``rule`` (kind of instruction) and by ``place`` in
    the list. The parts of a sample are its demands. Each has two answers: the first follows it, the second does not.
    """

    question: Literal["after"] = "after"
    generate: None = None
    haystack: Literal["text", "noise"] = "text"
    rules: Annotated[int, Field(ge=1, le=len(RULE_KINDS))] = 4  # number of instructions
    protect: bool = False  # whether the system prompt is exempt from eviction; its tokens count in the budget

    metric: ClassVar[str] = "share followed"
    unit: ClassVar[str] = "system prompts"
    generates: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    chance: ClassVar[float | None] = 0.5

    @property
    def series(self) -> str:
        """Name of the samples, which do not depend on ``protect``."""
        return f"instructions/{self.rules}"

    def material(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Any]:
        """Return the tokenizer, which has the chat template, and the texts."""
        return tokenizer, super().material(tokenizer)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw the instructions, then the text."""
        tokenizer, texts = material
        demands = []
        for kind in rng.sample(list(RULE_KINDS), self.rules):
            chosen, alternative = rng.sample(list(RULE_KINDS[kind].choices), 2)
            demands.append(Demand(kind, chosen, alternative))
        rules = [demand.rule.text.format(demand.chosen.rule_text) for demand in demands]
        system = "\n".join([ROLE, *(f"{i}. {rule}" for i, rule in enumerate(rules, 1))])
        text = join(sample_sentences(rng, texts, size))
        before_text, _, after_text = prompted(tokenizer, system, f"{text}\n\n{TASK}").partition(text)
        right = [demand.rule.lead + demand.chosen.answer_text for demand in demands]
        return TextSample(before_text + text, after_text, [system], right, demands)

    def sample_fields(self, tokenizer: Tokenizer, text_sample: TextSample, context: list[int]) -> dict[str, Any]:
        """Return the answers as tokens, and the protected span: the prompt up to the end of the system prompt."""
        leads = tokenize_after(tokenizer, [demand.rule.lead for demand in text_sample.parts])
        choices = [choice for demand in text_sample.parts for choice in (demand.chosen, demand.alternative)]
        texts = tokenize_after(tokenizer, [choice.answer_text for choice in choices])
        [system] = text_sample.references
        above = text_sample.context[: text_sample.context.find(system) + len(system)]
        end = len(tokenize_prompt(tokenizer, above))
        return {
            "answers": [leads[i // 2] + text for i, text in enumerate(texts)],
            "protect": [(0, end)] if self.protect else [],
            "parts": [demand._replace(lead=len(lead)) for demand, lead in zip(text_sample.parts, leads, strict=True)],
        }

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Compare the answers to each instruction."""
        scored = score(model, cache, last_hidden, sample.answers)
        nats, followed = list[float](), list[float]()
        for demand, (chosen, _), (alternative, _) in zip(sample.parts, scored[::2], scored[1::2], strict=True):
            nats.append(-float(chosen[demand.lead :].mean()))
            followed.append(float(chosen[demand.lead :].mean() > alternative[demand.lead :].mean()))
        tags: dict[str, Any] = {**sample.tags, "nats": sum(nats) / len(nats)}
        tags |= by_part("rule", zip([demand.kind for demand in sample.parts], followed, nats, strict=True))
        tags |= by_part("place", zip(range(1, len(nats) + 1), followed, nats, strict=True))
        return sum(followed) / len(followed), tags
