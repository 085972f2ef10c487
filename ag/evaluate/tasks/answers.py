r"""Answers to mathematical problems: the last box of a solution, and whether two answers have one value.

Answers are LaTeX or plain text. Collections are compared item by item, equations up to a factor, and expressions by
their values where each variable has a random value. Nothing of an answer is executed.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Callable

#: Ranges of the random values of a variable: at these points two expressions must have equal values,
POINTS = [(1, 2)] * 3
#: and at these if both have one, with real roots and logarithms: many problems are about positive numbers.
FURTHER_POINTS = [(-10, 10)] * 4 + [(-100, 100)] * 4
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "exp", "log")},
    **{f"arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": cmath.log,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
}
CONSTANTS: dict[str, complex] = {"\\pi": math.pi, "e": math.e, "i": 1j, "\\infty": math.inf}
GREEK = ["alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "rho", "sigma", "phi", "omega"]
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
#: Ways of writing, and the one that replaces them.
REWRITTEN = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(,\\[!,]\s*|\{,\})(?=\d)", ","),  # between thousands
        # spaces between thousands, not those of mixed numbers
        (r"(?<![\d.])\d{1,3}((?:\\[!,;:\s]|~|\s)+\d{3})+(?!\d|\s*/)", lambda number: re.sub(r"\D", "", number[0])),
        (r"\\(left|right|displaystyle|[bB]igg?[lr]?|q?quad)(?![a-zA-Z])|(?<!\\)\\[!,;:\s]|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(mbox|mathrm|textbf|textrm)(?![a-zA-Z])", r"\\text"),
        (r"\\(mathbf|mathit|mathsf|boldsymbol|bm|bf|underline)(?![a-zA-Z])", ""),
        (r"^\s*\{([^{}]*)\}\s*$|^\s*\\text\s*\{([^{}]*\d[^{}]*)\}\s*$", r"\1\2"),
        (r"^\s*=", ""),
        (r"\\([lg])e(?![a-zA-Z])", r"\\\1eq"),
        (r"\\(cdot|times)(?![a-zA-Z])|[×·]", "*"),
        (r"\\div(?![a-zA-Z])|÷", "/"),
        (r"[−–]|(?<![a-zA-Z])(minus|negative)(?=\s+[\d.\\($])", "-"),
        (
            rf"((?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?)\s*({'|'.join(SCALES)})(?![a-zA-Z])",
            lambda number: f"({number[1].replace(',', '')}*{SCALES[number[2]]})",
        ),
        (r"\^\s*\{?\s*\\circ\s*\}?|°|\\?\$|[€£¥]", " "),
        (r"\\%", "%"),
        (r"\\text\s*\{\s*(and|or)\s*\}|(?<![a-zA-Z])(and|or)(?![a-zA-Z])", ","),
        (rf"(?<![\\a-zA-Z])(pi|infty|sqrt|{'|'.join(FUNCTIONS)})(?![a-zA-Z])", r"\\\1"),
        (r"(\d)\s*_\s*(\{\d+\}|\d+)", r"\1"),  # the base of a number
        (r"(?<![\d.}])(\d+)\s*(\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))", r"(\1+\2)"),  # mixed numbers
        (r"(?<![\d.])(\d+)\s+(\d+/\d+)", r"(\1+\2)"),
    )
]
BETWEEN_WORDS = re.compile(r"(?<!\d)\s|\s(?!\s*\d)|[()]")  # not a blank between digits: "20 30" is not 2030
HALF_OF_DAY = re.compile(r"\d\s*(?:\\text\s*\{\s*)?([ap])\.?m(?![a-zA-Z])")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}(\s*\^\s*\{?\d\}?)?")
#: Words and units, also ``/hour``. Letters of a to d, and letters without a vowel, are products of variables, and
#: words that multiply are no units.
UNIT = re.compile(
    r"(?:/\s*)?(?<![\\a-zA-Z])((?!([a-d]+|[b-df-hj-np-tv-z]+|twice|double|triple)(?![a-zA-Z]))[a-zA-Z]{3,}"
    r"|cm|mm|km|kg|ft|mi|hrs?|lbs?|oz|am|pm|[mk]ph|yds|pts)(?![a-zA-Z])(\s*\^\s*\{?\d\}?)?"
)
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
NAMED = re.compile(r"[a-zA-Z](?:\([a-z]\))?\s*(?:=|\\in(?![a-zA-Z]))(.*)", re.DOTALL)  # "x = 5"
MATRIX = re.compile(r"\\begin\{[pbv]matrix\}(.*?)(?:\\\\)?\s*\\end\{[pbv]matrix\}", re.DOTALL)
TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\S")


def final_answer(text: str) -> str:
    r"""Return the content of the last ``\boxed{...}`` of a solution; empty if it has none, or if it does not end."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for end, letter in enumerate(rest if box else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:end].strip()
    return ""


def is_equal(answer: str, reference: str) -> bool:
    r"""Return whether an answer has the value of a right answer.

    Units, currencies, degrees and the base of a number (``52_8``) do not count, because problems name them. A
    percentage equals its number and its share. The order of items counts in tuples, intervals and matrices, and not in
    sets and lists.
    """
    texts = [_rewrite(answer), _rewrite(reference)]
    if len({match[1] for text in texts if (match := HALF_OF_DAY.search(text.casefold()))}) > 1:
        return False
    numbers = [text.rstrip("% ") for text in texts]
    if _same(*numbers):
        return True
    if [text.endswith("%") for text in texts].count(True) != 1:
        return False
    return _same(*(x if x == text else f"({x})/100" for x, text in zip(numbers, texts, strict=True)))


def _rewrite(text: str) -> str:
    for pattern, new in REWRITTEN:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".,").strip()


def _same(first: str, second: str) -> bool:
    """Return whether two rewritten answers, or items of them, are equal."""
    first, second = first.strip(), second.strip()
    if first == second:
        return bool(first)
    if not ("=" in first and "=" in second):
        first, second = (match[1].strip() if (match := NAMED.fullmatch(text)) else text for text in (first, second))
    (kind, items), (second_kind, second_items) = _items(first), _items(second)
    if not (kind or second_kind):
        return _same_value(first, second)
    if kind != second_kind or len(items) != len(second_items):
        return False
    if kind != "set":
        return all(map(_same, items, second_items))
    for item in items:
        match_index = next((index for index, right in enumerate(second_items) if _same(item, right)), None)
        if match_index is None:
            return False
        del second_items[match_index]
    return True


def _items(text: str) -> tuple[str, list[str]]:
    """Return the kind of a collection and its items. An empty kind means that the text is not a collection."""
    if len(parts := _split(text, "\\cup")) > 1:
        return "union", parts
    if not THOUSANDS.fullmatch(_without_words(text)) and len(parts := _split(text, ",")) > 1:
        return "set", parts
    if len(parts := text.split("\\pm")) == 2:
        return "set", ["+".join(parts), "-".join(parts)]
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", _split(text[2:-2], ",")
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(parts := _split(text[1:-1], ",")) > 1:
        return text[0] + text[-1], parts
    if match := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in match[1].split("\\\\")]
        return f"matrix of {len(rows)} rows", [item for row in rows for item in row]
    return "", [text]


def _split(text: str, separator: str) -> list[str]:
    """Split a text at a separator outside of brackets."""
    parts, depth, start = list[str](), 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(separator, index):
            parts.append(text[start:index])
            start = index + len(separator)
    return [*parts, text[start:]]


def _without_words(text: str) -> str:
    return UNIT.sub(" ", TEXT.sub(" ", text)).strip()


def _same_value(first: str, second: str) -> bool:
    """Return whether two expressions or equations have equal values, or two texts equal words."""
    try:
        left, right = _values(_without_words(first)), _values(_without_words(second))
    except (ValueError, ArithmeticError, RecursionError):  # words, or an answer that cannot be read
        words = [BETWEEN_WORDS.sub("", TEXT.sub(r"\1", text)).casefold() for text in (first, second)]
        return words[0] == words[1] != ""
    if ("=" in first) != ("=" in second):
        return False
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if "=" in first:  # one equation may be a multiple of the other
        a0, b0 = pairs[0]
        return all(_close(a * b0, b * a0) for a, b in pairs) and any(a for a, _ in pairs) == any(b for _, b in pairs)
    return all(_close(a, b) for a, b in pairs)


def _close(first: complex, second: complex) -> bool:
    """Return whether two values are equal up to rounding. Integers, their sums and products are not rounded."""
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    return cmath.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)


def _values(text: str) -> list[complex | None]:
    """Return the value of an expression, or the difference of an equation's sides, at each point.

    None: it has no value there, which may be so at :data:`FURTHER_POINTS`.

    Raises:
        ValueError: the text is neither.
        ArithmeticError: it has no value.
    """
    left, *right = (text.replace(",", "") if THOUSANDS.fullmatch(text) else text).split("=", 1)
    values: list[complex | None] = []
    for point in range(len(POINTS) + len(FURTHER_POINTS)):
        try:
            value = Expression(left, point).value() - sum(Expression(x, point).value() for x in right)
        except (ValueError, ArithmeticError):
            if point < len(POINTS):
                raise
            value = math.nan
        values.append(value if point < len(POINTS) or cmath.isfinite(value) else None)
    return values


class Expression:
    """An expression that is read from left to right, once; each method reads a part of it and returns its value.

    Raises:
        ValueError: the text is not an expression.
        ArithmeticError: it has no value.
    """

    def __init__(self, text: str, point: int) -> None:
        self.tokens: list[str] = TOKEN.findall(text)
        self.point = point
        self.taken = ""  # the token before ``tokens``

    def value(self) -> complex:
        """Return the value of the complete text."""
        value = self._sum()
        if self.tokens:
            raise ValueError(self.tokens[0])
        return value

    def _next_is(self, *tokens: str) -> bool:
        return self.tokens[:1] in [[token] for token in tokens]

    def _take(self) -> str:
        if not self.tokens:
            raise ValueError("the expression ends too early")
        self.taken = self.tokens.pop(0)
        return self.taken

    def _real(self, value: complex, *arguments: complex) -> complex:
        """Return a value of real arguments, which must be real at :data:`FURTHER_POINTS`."""
        if self.point >= len(POINTS) and value.imag and not any(argument.imag for argument in arguments):
            raise ArithmeticError(value)
        return value

    def _sum(self) -> complex:
        value = self._product()
        while self._next_is("+", "-"):
            value += self._product()  # the sign is its first factor's
        return value

    def _product(self) -> complex:
        value = self._signed()
        while self.tokens and not self._next_is("+", "-", ")", "]", "}", "|"):
            if self._next_is("*", "/"):
                value = value / self._signed() if self._take() == "/" else value * self._signed()
            elif self.taken[-1].isdigit() and self.tokens[0][0].isdigit():
                raise ValueError(f"{self.taken} {self.tokens[0]}")
            else:
                value *= self._power()
        return value

    def _signed(self) -> complex:
        if self._next_is("+", "-"):
            return -self._signed() if self._take() == "-" else self._signed()
        return self._power()

    def _power(self) -> complex:
        value = self._atom()
        if self._next_is("!"):
            self._take()
            value = math.gamma(value.real + 1)
        if self._next_is("^"):
            self._take()
            exponent = self._signed() if self._next_is("-") else self._atom()
            value = self._real(complex(value) ** exponent, value, exponent)
        return value

    def _argument(self) -> complex:
        r"""Read braces, or one digit or letter: ``\frac12`` has two arguments."""
        if self.tokens and self.tokens[0].isdigit():
            self.tokens[:1] = self.tokens[0]
        return self._atom()

    def _atom(self) -> complex:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            whole, _, decimals = token.partition(".")
            return float(token) if decimals.strip("0") or not whole else int(whole)
        if token in CLOSING:
            value = self._sum()
            if self._take() != CLOSING[token]:
                raise ValueError(token)
            return abs(value) if token == "|" else value
        if token == "\\frac":
            return self._argument() / self._argument()
        if token == "\\sqrt":
            degree = self._atom() if self._next_is("[") else 2
            argument = self._argument()
            return self._real(argument ** (1 / degree), argument)
        if token[1:] in FUNCTIONS:
            in_brackets, value = self._next_is(*CLOSING), self._power()
            while self.tokens and not in_brackets and (self.tokens[0].isalnum() or self.tokens[0] in CONSTANTS):
                value *= self._power()  # 2x of "sin 2x"
            return self._real(FUNCTIONS[token[1:]](value), value)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token.isalpha() or token[1:] in GREEK:
            if self._next_is("_"):
                token += self._take() + str(self._atom())
            return random.Random(f"{token} {self.point}").uniform(*[*POINTS, *FURTHER_POINTS][self.point])
        raise ValueError(token)
