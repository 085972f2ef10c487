"""LongBench's metrics (https://arxiv.org/abs/2308.14508, table 1): one answer against one reference, in 0..1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the words, in small letters, without punctuation and articles."""
    words, wanted = _words(answer), _words(reference)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F value of ROUGE-L as the package ``rouge`` computes it; 0 where a text has no sentence."""
    if not any(answer.split(".")) or not any(reference.split(".")):
        return 0.0
    from rouge import Rouge  # like thefuzz, only where a task asks for it

    try:
        return float(Rouge(["rouge-l"]).get_scores(answer, reference)[0]["rouge-l"]["f"])
    except RecursionError:  # a sentence of some 1,000 words: the benchmark's own code counts 0 as well
        return 0.0


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return 1 / (classes that the answer names) where the right one is among them; parts of its name do not count."""
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the reference's paragraph, which it calls "Paragraph N"."""
    found = re.search(r"Paragraph (\d+)", reference)
    return count(answer, found[1]) if found else 0.0


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the edit similarity of the answer's first line that is neither a comment nor a fence."""
    from thefuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(fuzz.ratio(line, reference)) / 100


def _words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()
