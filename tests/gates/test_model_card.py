"""The model card of an export: what it says of the base model, and that its Python lines run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ag.gates import export
from tests.support.exports import MODEL, make_adapter, make_gates


def test_a_local_base_model_is_no_hub_id_in_the_card(tmp_path: Path) -> None:
    export.save(tmp_path / "e", make_gates(), base_model=str(tmp_path))
    front = (tmp_path / "e" / "README.md").read_text().split("---\n")[1]
    assert "base_model" not in yaml.safe_load(front)


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "plain"])
def test_the_python_lines_of_the_card_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: bool) -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["?", "Once", "upon", "a", "time"])}, "?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    LlamaForCausalLM(MODEL).save_pretrained(tmp_path / "base")
    export.save(tmp_path / "e", make_gates(), adapter=make_adapter() if adapter else None)
    card = (tmp_path / "e" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert ("load_adapter" in code) == adapter
    code = code.replace("PATH", str(tmp_path / "e")).replace("BASE", str(tmp_path / "base"))
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")
