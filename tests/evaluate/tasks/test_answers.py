"""Values of mathematical answers: made answers, with the verdicts of a public grader."""

import gzip
import json

import pytest

from ag.evaluate.tasks.answers import final_answer, is_equal
from tests.support import datasets

MADE = [  # an answer of a model, the right answer, and whether they are equal
    ("60 miles/hour", "60", True),
    ("3 million dollars", "3,000,000", True),
    ("1.45 thousand", "1450", True),
    ("3 million", "3", False),
    ("negative 5", "-5", True),
    ("minus 5", "5", False),
    ("twice 5", "5", False),
    (r"\$25/hour", "25", True),
    (r"\text{40 cents / lb}", "40", True),
    ("5/hour", "6", False),
    ("3/4 cup", "3/4", True),
    (r"42", r"42", True),
    (r"42.0", r"42", True),
    (r"42.", r"42", True),
    (r"-7", r"7", False),
    (r"1,250", r"1250", True),
    (r"\$1,250", r"1250", True),
    (r"$1250.00", r"1250", True),
    (r"12,\!500", r"12500", True),
    (r"12{,}500", r"12500", True),
    (r"3,141", r"3,142", False),
    (r".75", r"\frac{3}{4}", True),
    (r"\frac34", r"\frac{3}{4}", True),
    (r"3/4", r"\dfrac{3}{4}", True),
    (r"\frac{6}{8}", r"\frac34", True),
    (r"0.33", r"\frac{1}{3}", False),
    (r"-\frac{2}{5}", r"\frac{-2}{5}", True),
    (r"2\frac{1}{4}", r"\frac{9}{4}", True),
    (r"2\frac{1}{4}", r"\frac{2}{4}", False),
    (r"50\%", r"50", True),
    (r"50\%", r"0.5", True),
    (r"50\%", r"5", False),
    (r"1.2 \times 10^{-3}", r".0012", True),
    (r"2^{10}", r"1024", True),
    (r"5!", r"120", True),
    (r"18 \text{ dollars}", r"18", True),
    (r"18 dollars per day", r"18", True),
    (r"26 \mbox{ inches}^2", r"26", True),
    (r"26\text{ cm}^3", r"26 \text{ cm}^3", True),
    (r"25 cm^2", r"24", False),
    (r"30^\circ", r"30", True),
    (r"30 degrees", r"30^{\circ}", True),
    (r"\text{Maria}", r"Maria", True),
    (r"maria", r"\text{Maria}", True),
    (r"\text{odd}", r"\text{even}", False),
    (r"B", r"\text{(B)}", True),
    (r"\textbf{(C)}", r"\text{(B)}", False),
    (r"132_5", r"132_{5}", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"4\sqrt{3}", r"\sqrt{48}", True),
    (r"\sqrt[3]{8}", r"2", True),
    (r"3\sqrt2", r"3\sqrt{3}", False),
    (r"2\pi + 6", r"6+2\pi", True),
    (r"\frac{3\pi}{4}", r"\frac{3}{4}\pi", True),
    (r"6.28", r"2\pi", False),
    (r"(x+2)(x-3)", r"x^2-x-6", True),
    (r"x^2 - x + 6", r"x^2-x-6", False),
    (r"\frac{x+1}{2}", r"\frac{1}{2}x + \frac12", True),
    (r"3 - 2i", r"-2i+3", True),
    (r"\tan x", r"\frac{\sin x}{\cos x}", True),
    (r"|{-4}|", r"4", True),
    (r"x = 5", r"5", True),
    (r"y = 2x - 1", r"y=2x+1", False),
    (r"2x - y + 3 = 0", r"y = 2x + 3", True),
    (r"(1, -2)", r"\left(1,-2\right)", True),
    (r"(-2, 1)", r"(1,-2)", False),
    (r"(0.5, \frac{\pi}{3})", r"\left( \frac{1}{2}, \pi/3 \right)", True),
    (r"-2, 1", r"1,-2", True),
    (r"x = 1 \text{ or } x = -2", r"-2,1", True),
    (r"\{3, 1, 2\}", r"\{1,2,3\}", True),
    (r"1, 2", r"1,2,3", False),
    (r"2 \pm \sqrt{3}", r"2+\sqrt{3}, 2-\sqrt{3}", True),
    (r"(2, 3]", r"(2,3]", True),
    (r"[2, 3]", r"(2,3]", False),
    (r"(-\infty, 1) \cup (4, \infty)", r"(-\infty,1)\cup(4,\infty)", True),
    (r"x \in [-1, 4]", r"[-1,4]", True),
    (r"\begin{pmatrix} 0.5 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ -2 \end{pmatrix}", True),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}", False),
    (r"", r"3", False),
    (r"x \geq 3", r"x \ge 3", True),
    (r"x < 3", r"x > 3", False),
    (r"2 1/4", r"\frac94", True),
    (r"10 am", r"10 pm", False),
    (r"7 pm", r"7", True),
    (r"20 30", r"2030", False),
    (r"2^10", r"1024", True),
    (r"\sqrt{-4}", r"2i", True),
    (r"((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((", r"3", False),
]
#: Answers of MADE that math-verify 0.9.0 grades in the other way.
UNLIKE_MATH_VERIFY = ["42.", "18 dollars per day", "2 1/4", r"\sqrt{-4}"]


@pytest.mark.parametrize(("answer", "reference", "equal"), MADE)
def test_made_answers(answer, reference, equal):
    assert is_equal(answer, reference) == equal
    assert is_equal(reference, answer) == equal
    assert is_equal(reference, reference)


def test_made_answers_under_a_public_grader():
    """The list of differences is complete, so that it says how far the two graders agree."""
    public = pytest.importorskip("math_verify", reason="pip install 'math-verify[antlr4_13_2]'")
    unlike = []
    for answer, reference, equal in MADE:
        right, given = (public.parse(rf"The answer is $\boxed{{{text}}}$.") for text in (reference, answer))
        if public.verify(right, given) != equal:
            unlike.append(answer)
    assert unlike == UNLIKE_MATH_VERIFY


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"\sin 2x", r"2 \sin x \cos x", True),
        (r"\sin 2x", r"x \sin 2", False),
        (r"(2, 4)", r"(2, \infty)", False),
        ("(" * 500, "3", False),
        (r"9^{9^{9^{9}}}", "3", False),
        (r"\frac{1}{0}", "0", False),
        (r"\frac{1}{", "1", False),
        (r"3 \leq x", r"x \leq 3", False),
        ("y = y", "y = 2x", False),
        ("f(x) = 2x + 1", "1 + 2x", True),
        (r"2\theta + \alpha", r"\alpha + 2\theta", True),
        ("5000%", "50%", False),
        ("0.5", r"50\%", True),
        ("", "", False),
        (r"70\,000", "70000", True),
        (r"1\ 250\ 000.5", "1250000.5", True),
        ("70\u2009000", "70000", True),
        ("-5 000", "-5000", True),
        ("1 000, 2 000", "2000, 1000", True),
        ("5 000", "0", False),
        ("1 050", "50", False),
        ("3 050", "150", False),
        ("2 3", "6", False),
        ("1 125/1000", "1.125", True),
        (r"\text{18 dollars}", "18", True),
        (r"\text{18 dollars}", "19", False),
        (r"18\text{ per 2 days}", "18", True),
        (r"\mathbf{1,018}", "1018", True),
        (r"\underline{18} + 2", "20", True),
        (r"{\bf 18}", "18", True),
        ("€18", "18", True),
        ("£1,018", "1018", True),
        ("= 18", "18", True),
        ("|x|", "x", False),
        ("|x-5|", "5-x", False),
        ("|a-b|", "b-a", False),
        (r"\sqrt{(x-5)^2}", "|5-x|", True),
        (r"\sqrt{x^3}\sqrt{x}", "x^2", True),  # where the roots are real
        (r"\ln x^2", r"2\ln x", True),
        (r"\frac{e^{9x^2}}{e^{x^2}}", "e^{8x^2}", True),  # too large for a float at some values
        ("6xyz", "6", False),
        ("abc", "cba", True),
        ("3abcd", "3bcd", False),
        ("18 mph", "18", True),
        ("123456789012", "123456789013", False),
        ("123,456,789,012.0", "123456789013", False),
        ("123456789012 + 1", "123456789013", True),
        (r"10^{12}", "1000000000000", True),
        ("()", "", False),
    ],
)
def test_answers_that_are_hard_to_read(answer, reference, equal):
    assert is_equal(answer, reference) == equal
    assert is_equal(reference, answer) == equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}, then $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\frac{1}{2}", ""),
        ("The answer is 7.", ""),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_is_the_answer(text, answer):
    assert final_answer(text) == answer


@datasets.needed
def test_boxes_of_the_right_solutions_are_the_right_answers():
    with gzip.open(datasets.ROOT / "math500" / "test.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 500
    assert [row["answer"] for row in rows if not is_equal(final_answer(row["solution"]), row["answer"])] == []
