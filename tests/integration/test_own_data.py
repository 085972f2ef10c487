"""Chats of one's own, from a folder to an export and its evaluation."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ag import fit
from ag.evaluate.__main__ import main as evaluate
from ag.gates import export
from tests.support.command import train
from tests.support.refused import names

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def test_prompts_that_are_cut_are_told_before_the_first_step_and_in_a_dry_run(recipe, tmp_path, capsys):
    """Sixty rows of a hundred tokens, of which fifty stay."""
    (tmp_path / "train.jsonl").write_text(62 * (json.dumps({"prompt": "a" * 98, "response": "b"}) + "\n"))
    given = [f"recipe={recipe}", "data.name=own", f"data.root={tmp_path}", "data.val_samples=2", "data.max_length=50"]
    given += ["trainer.max_steps=1", f"output={tmp_path / 'out'}"]
    for more, last in (["--dry-run"], "ready: "), ([], "run folder: "):
        assert fit.main([*given, *more]) == 0
        out, err = capsys.readouterr()
        names(
            err.splitlines()[0],
            "ag.fit: warning",
            "60 of 60 training rows lost 50 % of their tokens",
            "data.max_length=50",
        )
        lines = out.splitlines()
        assert lines[1:3] == ["training: 60 rows", "validation: 2 rows"] and lines[-1].startswith(last)
        assert more or any(line.startswith("step 1/1") for line in lines[3:])


@pytest.mark.slow
def test_train_on_chats_and_evaluate(recipe, tiny_base, tmp_path, capsys):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    turns = [("user", "abc def {i}?" * 3), ("assistant", "yes {i}"), ("user", "more?"), ("assistant", "no")]
    rows = [{"messages": [{"role": who, "content": what.format(i=i)} for who, what in turns]} for i in range(6)]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.json").write_text(json.dumps(rows))
    run = train(
        recipe,
        tmp_path / "out",
        f"model.name={base}",
        f"data.name={tmp_path / 'chats'}",
        "data.root=null",
        "data.val_samples=2",
        "train=gates+lora",
        "lora.targets=all-linear",
        "trainer.max_steps=2",
        "gate.covers=all",
        "gate.scope=causal",
    )
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{tmp_path / 'chats'}: messages")]
    assert len(told) == 1 and "assistant" in told[0]
    adapted = export.load_adapter(AutoModelForCausalLM.from_pretrained(base), run / "export")
    assert len(adapted.peft_config["default"].target_modules) == 2 * 7
    assert evaluate([f"run={run}"]) == 0
    found = json.loads((run / "evaluation.json").read_text())
    assert found["flags"]["tokens"] == [len(f"yes {i}\n") for i in range(2)]
    assert all(torch.isfinite(torch.tensor(one["losses"])).all() for one in found.values())
