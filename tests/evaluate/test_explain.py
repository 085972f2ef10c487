"""The pictures of `python -m ag.explain`."""

import json

import pytest
import torch
from matplotlib.image import imread

from ag.errors import UserError
from ag.evaluate import explain
from ag.explain import ExplainConfig, main
from ag.files import file_names
from ag.gates import export
from tests.support.batches import read
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

PPL = ["task_options.prompt=40", "task_options.continuation=8", "samples=1"]


@pytest.fixture
def words(tiny_folder, tmp_path):
    folders = [f"model={tiny_folder}", f"root={tiny_folder}", f"output={tmp_path / 'out'}"]
    return [*folders, "tokens=40", "continuation=8", "samples=2"]


@pytest.fixture
def gates(tiny_llama, tmp_path):
    """`gates(**changes)`: the words that name an export of such gates."""

    def made(**changes):
        export.save(tmp_path / "gates", gates_for(tiny_llama(), **changes), base_model="tiny")
        return [f"gates={tmp_path / 'gates'}"]

    return made


@pytest.mark.slow
def test_all_pictures(words, gates, tmp_path, capsys):
    more = ["policies=[mine=h2o+caote]", "task=needle_single", "task_options.lengths=[300]", "tokens=200", "samples=1"]
    assert main([*words, *more, *gates()]) == 0
    paths = sorted((tmp_path / "out").iterdir())
    assert [path.stem for path in paths] == ["attention-0", "errors", "keep-gates-0", "keep-mine-0"]
    assert sorted(capsys.readouterr().out.splitlines()) == list(map(str, paths))
    for path in paths:
        image = imread(path)
        assert image.shape[0] > 200 and image[..., :3].min() < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policies=[h2]", "did you mean h2o?"),
        ("tokens=4000", "no prompt has tokens=4000"),
        ("pictures=[kep]", "did you mean keep?"),
        ("continuation=40", "expected fewer than tokens=40"),
        ("gates=nowhere", "no such folder"),
    ],
)
def test_mistakes(words, change, message, capsys):
    try:
        code = main([*words, "policies=[h2o]", "task_options.prompt=40", change])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err


def test_gates_without_attention_leave_out_one_picture(words, gates, tmp_path, capsys):
    linear = gates(kind="linear")
    assert main([*words, *PPL, "policies=[h2o]", *linear]) == 0
    printed = capsys.readouterr().out.splitlines()
    [told] = [line for line in printed if line.startswith("attention: ")]
    printed.remove(told)
    assert "kind linear" in told
    drawn = {path.stem for path in (tmp_path / "out").iterdir()}
    assert drawn == {"keep-h2o-0", "keep-gates-0", "errors"} and len(printed) == len(drawn)
    assert main([*words, *PPL, "policies=[h2o]", "pictures=[attention]", *linear]) == 2
    names(capsys.readouterr().err, "pictures=['attention']: nothing to draw")
    assert main([*words, *PPL, "policies=[h2o]", "pictures=[attention]", "layers=[0]", *gates(first_layer=1)]) == 2
    names(capsys.readouterr().err, "layer 0 has no gate; expected some of [1, 2]")


def test_protected_tokens_are_kept(tiny_folder, monkeypatch):
    """As a comparison keeps them: the system prompt of the instructions, of which the text is cut."""
    drawn = []
    monkeypatch.setattr(explain, "keep_pattern", lambda kept, texts: drawn.append(kept))
    options = {"haystack": "noise", "lengths": [480], "rules": 2}
    given = {"model": str(tiny_folder), "task": "instructions_4_protected", "task_options": options, "samples": 1}
    [_] = explain.explain(ExplainConfig(**given, policies=["random"], tokens=400, pictures=["keep"]))
    [kept] = drawn
    assert kept[..., :80].all() and kept.mean() < 0.5


def test_policies_have_pictures_of_their_own(words, tmp_path, monkeypatch):
    """Labels differ in a dot alone, or are what a path becomes in the name of a file."""
    monkeypatch.setattr(explain, "RecordedPass", lambda *_: pytest.fail("a pass was recorded that no picture needs"))
    assert main([*words, *PPL, "policies=[a.b=h2o,a_b=tova]", "pictures=[keep]"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"keep-a.b-0.png", "keep-a_b-0.png"}
    assert file_names(["flags_a_b", "flags:a/b", "flags:…/a/b"]) == [f"flags_a_b{n}" for n in ("", "_2", "_3")]


def test_each_curve_says_what_was_kept(words, gates, tiny_folder, tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    """Gates rank under the budget as the others do, and flags hold what a cache of their own holds."""
    figures, original = [], explain.errors_by_layer
    monkeypatch.setattr(explain, "errors_by_layer", lambda *given: figures.append(original(*given)) or figures[-1])
    assert main([*words, *PPL, "policies=[h2o,flags]", *gates(), "pictures=[errors]", "budget=0.25"]) == 0
    text = json.loads((tiny_folder / "corpus" / "test.jsonl").read_text().splitlines()[0])["text"]
    cache = read(tiny_llama(), torch.tensor(tiny_tokenizer(text)["input_ids"][:32]), f"flags:{tmp_path / 'gates'}")
    assert abs(cache.kept_share() - 0.25) > 0.1
    legend = [line.get_text().partition(":")[0] for line in figures[0].axes[0].get_legend().get_texts()]
    assert legend == ["h2o (25%)", f"flags ({cache.kept_share():.0%})", "gates (25%)"]


def test_without_a_budget_gates_are_their_flags(gates, tmp_path):
    gates()
    config = ExplainConfig(policies=["flags", "mine=gates"], gates=str(tmp_path / "gates"), budget=None)
    found = [(name, one.spec.path, one.budget) for name, one in explain._policies(config).items()]
    assert found == [(name, str(tmp_path / "gates"), None) for name in ("flags", "mine", "gates")]
    with refuses(UserError, "'flags'", "gates=EXPORT", "flags:EXPORT"):
        explain._policies(ExplainConfig(policies=["flags"]))
