"""scripts/write_solutions.py: solutions of a tiny model go on where they stopped, and rows are pieces of them."""

import json

import pytest

from scripts import write_solutions as script
from tests.support.refused import refuses


@pytest.fixture
def root(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(5)]
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "data")


def test_solutions_go_on_and_rows_are_pieces_of_them(root, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MAX_NEW_TOKENS", 40)
    monkeypatch.setattr(script, "BATCH", 2)
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    tokenizer = script.write_solutions("random:tiny", once, root, 5)
    script.write_solutions("random:tiny", twice, root, 2)
    script.write_solutions("random:tiny", twice, root, 5)
    assert once.read_text() == twice.read_text()
    whole = twice.read_text()
    twice.write_text(whole[:-9])  # ended while it wrote the last line
    script.write_solutions("random:tiny", twice, root, 5)
    assert twice.read_text() == whole
    with refuses(SystemExit, "random:tiny", "random:other", "another folder"):
        script.write_solutions("random:other", twice, root, 5)
    solutions = script.read(once)
    assert [f"What is {n} + {n}?" in row["prompt"] for n, row in enumerate(solutions)] == [True] * 5
    monkeypatch.setattr(script, "FIRST_CUT", 4)
    monkeypatch.setattr(script, "RESPONSE", 6)
    texts = [{"prompt": f"P{n}:", "solution": "one two three four " * (5 * n)} for n in range(3)]
    rows = script.cut(texts, tokenizer)
    assert [row["prompt"][:3] for row in rows] == ["P1:", "P1:", "P2:", "P2:"]  # the empty one has no room
    for row in rows:
        [tokens] = tokenizer([row["response"]], add_special_tokens=False)["input_ids"]
        written = texts[int(row["prompt"][1])]["solution"]
        assert len(tokens) == 6 and (row["prompt"][3:] + row["response"]) in written
        assert written.startswith(row["prompt"][3:]) and len(row["prompt"]) >= 3 + 4
