"""Rules of a system prompt before a text, and how an answer follows each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from ag.data.tokens import apply_template, start_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rule(NamedTuple):
    """A rule: its sentence, the beginning of an answer, the words that must follow, and possible demands."""

    text: str
    lead: str
    followed: str
    demands: tuple[str, ...]


# fmt: off
PEOPLE = (
    "Marie Curie", "Isaac Newton", "Ada Byron", "Paul Klee", "Niels Bohr", "Jane Goodall", "Carl Gauss", "Emmy Noether",
)
WORDS = (
    "amber", "birch", "cobalt", "dune", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lotus", "maple",
    "nectar", "onyx", "pearl",
)
FORMS = ("waltz", "sonnet", "ballad", "memo", "riddle", "postcard", "recipe", "sermon", "fable", "hymn")
GREETINGS = ("Good evening", "Well met", "Warm greetings", "Hello there", "Welcome back", "Dear all")
NUMBERS = tuple(str(number) for number in range(103, 9973, 97))
# fmt: on
RULES = (
    Rule("Put the reference {what} at the top.", "Reference:", " {what}", NUMBERS),
    Rule("Use the code word {what}.", "Code word:", " {what}", WORDS),
    Rule("Quote {what} once.", "As", " {what} said", PEOPLE),
    Rule("Write it as a {what}.", "Form: a", " {what}", FORMS),
    Rule("Open with {what}.", "", "{what}", GREETINGS),
    Rule("State the fee of {what} crowns.", "The fee is", " {what}", NUMBERS),
    Rule("Thank {what} for the text.", "Thanks to", " {what}", PEOPLE),
    Rule("Name the file {what}.txt.", "File:", " {what}.txt", WORDS),
    Rule("Mark new paragraphs with {what}.", "", "{what}", ("~~", "%%", "§", "==", "::", "//")),
)
ROLES = (
    "You are a careful reader. Keep to these points when you reply:",
    "House style:",
    "Reply as the desk asks:",
    "You help an editor. Always:",
)
REQUESTS = ("Sum up the passage.", "Reply to this.", "What happens in the passage?", "Say in short what this is.")
MARKS = ("{}. ", "- ", "* ")  # before each rule of a list


def prompted(tokenizer: PreTrainedTokenizerBase, system: str, user: str) -> str:
    """Return a system prompt and a message in the tokenizer's chat template, or as paragraphs without a template.

    If the template allows no system prompt, the message begins with it.
    """
    message = f"{system}\n\n{user}"
    if tokenizer.chat_template is None:
        return f"{message}\n\n"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        text = apply_template(tokenizer, messages)
    except TemplateError:
        text = apply_template(tokenizer, [{"role": "user", "content": message}])
    # the tokenizer adds its start token by itself
    return text.removeprefix(str(tokenizer.bos_token) if start_tokens(tokenizer) else "")
