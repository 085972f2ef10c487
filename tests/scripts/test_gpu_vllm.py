"""scripts/gpu_vllm.py: a row that fails shows in the exit code."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from scripts import gpu_vllm
from tests.support.refused import refuses


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("free", 1)])
def test_the_exit_code_says_whether_a_row_failed(monkeypatch, tmp_path, failing, code):
    def run(words, **options):
        return SimpleNamespace(returncode=int(words[-1] == failing), stdout="{}\n", stderr="")

    monkeypatch.setattr(gpu_vllm.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_vllm.py", str(tmp_path)])
    assert gpu_vllm.main() == code
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [*gpu_vllm.ROWS]
    assert [line["row"] for line in lines if "failed" in line] == ([failing] if failing else [])


def test_blocks_that_stay_behind_are_a_failure(monkeypatch, tmp_path):
    llm = MagicMock()
    llm.pool.num_gpu_blocks = 9  # vLLM keeps one for padding
    monkeypatch.setattr(gpu_vllm, "engine", lambda folder, **options: llm)
    monkeypatch.setattr(gpu_vllm, "answers", lambda *given: [])
    llm.pool.get_num_free_blocks.return_value = 8
    assert set(gpu_vllm.free(tmp_path).values()) == {8}
    llm.pool.get_num_free_blocks.return_value = 7
    with refuses(RuntimeError, "7 blocks", "8"):
        gpu_vllm.free(tmp_path)
