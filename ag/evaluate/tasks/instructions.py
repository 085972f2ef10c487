"""A system prompt with instructions before a long text, which an answer is to follow after that text was evicted.

After The Pitfalls of KV Cache Compression (https://arxiv.org/abs/2510.00231), where a compressed cache follows some
instructions and silently drops others. The instructions are our own, made so that a small model can be asked, too.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize, tokenize_after
from ag.engine import EvictionCache
from ag.errors import require
from ag.evaluate.tasks.base import Tags, by_part
from ag.evaluate.tasks.follow import greedy, score
from ag.evaluate.tasks.generated import Haystack, Variant, join, stretch
from ag.evaluate.tasks.questions import Asked, Puzzle

ROLE = "You answer questions about texts. Follow these rules in each answer:"
TASK = "What is the text above about? Answer by the rules."


class Choice(NamedTuple):
    """One of the things that an instruction may demand."""

    said: str  # what the instruction calls it
    written: str  # what stands in an answer that follows


class Kind(NamedTuple):
    """A kind of instruction.

    An answer that follows differs from one that follows another choice in what comes behind ``lead``.
    """

    text: str  # the instruction, with the choice as ``{}``
    lead: str  # how an answer begins, up to where it shows what is followed
    choices: Sequence[Choice]
    check: Callable[[str, Choice], bool]  # whether an answer that was written follows


def _same(*words: str, lead: str = " ") -> list[Choice]:
    return [Choice(word, lead + word) for word in words]


def _says(text: str, choice: Choice) -> bool:
    return re.search(rf"\b{re.escape(choice.said)}\b", text) is not None


def _headed(name: str) -> Callable[[str, Choice], bool]:
    """Return what tells whether a line ``NAME: CHOICE`` is there."""
    return lambda text, choice: re.search(rf"^{name}:\s*{re.escape(choice.said)}\b", text, re.M) is not None


def _closed(text: str, choice: Choice) -> bool:
    return text.rstrip(' .!"\n').endswith(choice.said)


def _spoken(text: str, choice: Choice) -> bool:
    """Tell whether a fifth of the words are among the commonest of a language, and more than of any other."""
    words = re.findall(r"\w+", text.lower())
    share = {
        name: sum(word in common.split() for word in words) / max(len(words), 1) for name, common in COMMON.items()
    }
    return share[choice.said] >= 0.2 and share[choice.said] == max(share.values())


def _marked(text: str, choice: Choice) -> bool:
    """Tell whether each line, and there is one, begins with a mark."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) > 0 and all(line.startswith(f"{choice.said} ") for line in lines)


COMMON = {
    "Spanish": "el los las del que y es se por con para su al lo como una habla sobre",
    "French": "le les des du que et est dans pour par sur avec il elle qui une au ce",
    "German": "der die das den dem des und ist ein eine zu von mit es auf im nicht sich",
    "Italian": "il gli di del della dei che è per con si da non una sono nel questo testo",
}
TELLS = "The text tells of people."
#: Those that SmolLM2-135M-Instruct follows with a full cache.
KINDS: dict[str, Kind] = {
    "signature": Kind(
        "Sign with the name {}.",
        f"{TELLS}\n\nSigned:",
        _same("Captain Walnut", "Doctor Harbour", "Lady Lantern", "Uncle Marble", "Sister Falcon"),
        _closed,
    ),
    "place": Kind(
        "Head the answer with the place {}.",
        "Place:",
        _same("Lisbon", "Oslo", "Cairo", "Lima", "Delhi"),
        _headed("Place"),
    ),
    "date": Kind("Date the answer {}.", "Date:", _same("Monday", "Tuesday", "Thursday", "Saturday"), _headed("Date")),
    "grade": Kind("Give the text the grade {}.", "Grade:", _same("A", "B", "C", "D", "E"), _headed("Grade")),
    "closing": Kind(
        'Close with the words "{}".',
        f"{TELLS}\n\n",
        _same("Stay curious", "Good luck", "See you soon", "All the best", "Keep reading", lead=""),
        _closed,
    ),
    "address": Kind(
        "Call the reader {}.", "Listen, dear", _same("Professor", "Captain", "Madam", "Friend", "Colleague"), _says
    ),
    "language": Kind(
        "Answer in {}.",
        "",
        [
            Choice("Spanish", "El texto habla de"),
            Choice("French", "Le texte parle de"),
            Choice("German", "Der Text handelt von"),
            Choice("Italian", "Il testo parla di"),
        ],
        _spoken,
    ),
    "format": Kind(
        'Begin each line with "{}".',
        "",
        [Choice(mark, f"{mark} The text") for mark in ("-", "*", "+", "#", ">")],
        _marked,
    ),
}


class Demand(NamedTuple):
    """An instruction of a sample."""

    kind: str
    said: Choice  # what is demanded
    instead: Choice  # what another instruction of this kind would demand


@dataclass(frozen=True)
class Instructed(Asked):
    """A prompt with instructions, and for each of them the answers that follow it and another one of its kind."""

    demands: list[Demand]
    leads: list[int]  # tokens of each answer before what is compared
    answers: list[tuple[list[int], list[int]]]  # that follows, and that does not, with their lead


@dataclass(frozen=True)
class Instructions(Haystack):
    """A system prompt with instructions, then a long text; the score is the share of the instructions followed.

    Each instruction demands one of several choices (a name to sign with, a language, ...), drawn for each sample. It is
    followed where what it demands is likelier, per token, than what another instruction of its kind would demand, at
    the same place of an answer: half are without the instruction. ``nats`` are those of what is demanded. With
    ``generate`` the model writes an answer instead, which a function of each kind checks.

    Tags by ``rule`` (kind of instruction) and by ``place`` in the list: see
    :func:`ag.evaluate.tasks.base.by_part`.

    Attributes:
        rules: how many instructions there are.
        protect: exempt the system prompt from eviction; its tokens count in the budget.
    """

    rules: int = 4
    protect: bool = False

    metric: ClassVar[str] = "share followed"
    unit: ClassVar[str] = "system prompts"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        require(self, "question", self.question == "after", "after: the text is read before its question")
        fits = type(self.rules) is int and 0 < self.rules <= len(KINDS)
        require(self, "rules", fits, f"1 to {len(KINDS)}")
        require(self, "protect", type(self.protect) is bool, "true or false")

    @property
    def series(self) -> str:
        """The same samples with and without protection."""
        return f"instructions/{self.rules}"

    def material(self, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, Any]:
        """Read the texts, where they are the haystack; the tokenizer has the chat template."""
        return tokenizer, super().material(tokenizer)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the instructions, then the text; see :meth:`Generated.build`."""
        tokenizer, texts = material
        demands = []
        for kind in rng.sample(list(KINDS), self.rules):
            demands.append(Demand(kind, *rng.sample(list(KINDS[kind].choices), 2)))
        numbered = [f"{i}. {KINDS[one.kind].text.format(one.said.said)}" for i, one in enumerate(demands, 1)]
        system, text = "\n".join([ROLE, *numbered]), join(stretch(rng, texts, size))
        before, _, behind = _chat(tokenizer, system, f"{text}\n\n{TASK}").partition(text)
        right = [KINDS[one.kind].lead + one.said.written for one in demands]
        return Puzzle(before + text, behind, [system], right, demands)

    def asked(
        self, tokenizer: PreTrainedTokenizerBase, name: str, puzzle: Puzzle, tags: Tags, most: int | None = None
    ) -> Instructed:
        """Tokenise the prompt and the answers; the system prompt, and what is before it, are what is protected."""
        asked = super().asked(tokenizer, name, puzzle, tags, most)
        [system] = puzzle.references
        above = puzzle.context[: puzzle.context.find(system) + len(system)]
        leads = tokenize_after(tokenizer, [KINDS[one.kind].lead for one in puzzle.parts])
        said = tokenize_after(tokenizer, [one.said.written for one in puzzle.parts])
        instead = tokenize_after(tokenizer, [one.instead.written for one in puzzle.parts])
        answers = [(lead + one, lead + other) for lead, one, other in zip(leads, said, instead, strict=True)]
        end = len(start_tokens(tokenizer)) + len(tokenize(tokenizer, [above])[0])
        fields = {**vars(asked), "protect": [(0, end)] if self.protect else []}
        return Instructed(**fields, demands=list(puzzle.parts), leads=list(map(len, leads)), answers=answers)

    def floor(self, samples: Sequence[Any]) -> float | None:
        """Return what is followed without any instruction: half; where answers are written none is known."""
        return 0.5 if self.generate is None else None

    def right(self, sample: Any) -> list[int]:
        """Return the answer that follows the first instruction."""
        followed: list[int] = sample.answers[0][0]
        return followed

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Any
    ) -> tuple[float, Tags]:
        """Compare the answers to each instruction, or check what the model writes."""
        mine = cache if self.generate is None else copy.deepcopy(cache)
        scored = score(model, mine, last, [answer for pair in sample.answers for answer in pair])
        nats, followed = list[float](), list[float]()
        for lead, (said, _), (instead, _) in zip(sample.leads, scored[::2], scored[1::2], strict=True):
            nats.append(-float(said[lead:].mean()))
            followed.append(float(said[lead:].mean() > instead[lead:].mean()))
        tags: dict[str, Any] = {**sample.tags, "nats": sum(nats) / len(nats)}
        if self.generate is not None:
            tokens = greedy(model, cache, last, self.generate, *self.stops(model, tokenizer))
            text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            followed = [float(KINDS[one.kind].check(text, one.said)) for one in sample.demands]
            tags["answer"] = text
        tags |= by_part("rule", zip([one.kind for one in sample.demands], followed, nats, strict=True))
        tags |= by_part("place", zip(range(1, len(nats) + 1), followed, nats, strict=True))
        return sum(followed) / len(followed), tags


def _chat(tokenizer: PreTrainedTokenizerBase, system: str, user: str) -> str:
    """Return system prompt and question as the tokenizer's chat template has them; without one as paragraphs.

    Where a template has no system prompts, it is the beginning of the question.
    """
    both = f"{system}\n\n{user}"
    if tokenizer.chat_template is None:
        return f"{both}\n\n"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError:
        messages = [{"role": "user", "content": both}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # what the tokenizer begins texts with comes by itself
    return str(text).removeprefix(str(tokenizer.bos_token) if start_tokens(tokenizer) else "")
