"""The pictures of `python -m ag.explain`."""

import json

import pytest
import torch
from matplotlib.image import imread

from ag.errors import UserError
from ag.evaluate import explain, inside_plots
from ag.explain import ExplainConfig, main
from ag.gates import export
from tests.support.batches import read
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

PPL = ["task_options.prompt=40", "task_options.continuation=8"]


@pytest.fixture
def words(tiny_folder, tmp_path):
    return [
        f"model={tiny_folder}",
        f"root={tiny_folder}",
        "tokens=40",
        "continuation=8",
        "samples=2",
        f"output={tmp_path / 'out'}",
    ]


@pytest.mark.slow
def test_all_pictures(words, tiny_llama, tmp_path, capsys):
    export.save(tmp_path / "gates", gates_for(tiny_llama()), base_model="tiny")
    more = [
        "policies=[mine=h2o+caote]",
        "samples=1",
        "task=needle_single",
        "task_options.lengths=[300]",
        f"gates={tmp_path / 'gates'}",
    ]
    assert main([*words, *more, "tokens=200"]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = {f"keep-{policy}-{i}" for policy in ("mine", "gates") for i in range(1)}
    assert {path.stem for path in (tmp_path / "out").iterdir()} == names | {"attention-0", "cake", "errors"}
    assert sorted(printed) == sorted(map(str, (tmp_path / "out").iterdir()))
    for path in (tmp_path / "out").iterdir():
        image = imread(path)
        assert image.shape[0] > 200 and image[..., :3].min() < 0.5


def test_a_window_beyond_the_budget_is_told_in_one_line(words, capsys):
    """0.25 of the 32 tokens of a prompt are 8; snapkv protects its window of 32."""
    assert main([*words, "policies=[snapkv]", "pictures=[keep]", "samples=1", *PPL]) == 0
    printed = capsys.readouterr()
    [told] = printed.err.splitlines()
    assert told.startswith("ag.explain: warning: ag.policy('snapkv', budget=0.25) protects 32 tokens per KV head")
    assert len(printed.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policies=[h2]", "did you mean h2o?"),
        ("task=pplx", "did you mean ppl?"),
        ("tokens=4000", "no prompt has tokens=4000"),
        ("task_options.promt=3", "did you mean prompt?"),
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
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gate", "change", "message"),
    [
        ({"kind": "linear"}, "samples=1", "pictures=['attention']: nothing to draw"),
        ({"first_layer": 1}, "layers=[0]", "layer 0 has no gate; expected some of [1, 2]"),
    ],
)
def test_gates_without_a_map(words, tiny_llama, tmp_path, capsys, gate, change, message):
    export.save(tmp_path / "gates", gates_for(tiny_llama(), **gate), base_model="tiny")
    more = [
        "policies=[h2o]",
        "task=needle_single",
        "task_options.lengths=[300]",
        "tokens=200",
        f"gates={tmp_path / 'gates'}",
        "pictures=[attention]",
    ]
    assert main([*words, *more, change]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_gates_without_attention_leave_out_one_picture(words, tiny_llama, tmp_path, capsys, kind):
    export.save(tmp_path / "gates", gates_for(tiny_llama(), kind=kind), base_model="tiny")
    more = ["policies=[h2o]", "task_options.prompt=40", "task_options.continuation=8", "samples=1"]
    assert main([*words, *more, f"gates={tmp_path / 'gates'}"]) == 0
    told, *printed = capsys.readouterr().out.splitlines()
    names(told, "attention", f"kind {kind}")
    drawn = {path.stem for path in (tmp_path / "out").iterdir()}
    assert drawn == {"keep-h2o-0", "keep-gates-0", "cake", "errors"} and len(printed) == len(drawn)


def test_each_curve_says_what_was_kept(words, tiny_folder, tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    """Gates rank under the budget as the others do, and flags hold what a cache of their own holds."""
    export.save(tmp_path / "gates", gates_for(tiny_llama()), base_model="tiny")
    figures, original = [], inside_plots.errors_by_layer
    monkeypatch.setattr(inside_plots, "errors_by_layer", lambda *given: figures.append(original(*given)) or figures[-1])
    more = ["policies=[h2o,flags]", "task_options.prompt=40", "task_options.continuation=8", "samples=1"]
    assert main([*words, *more, f"gates={tmp_path / 'gates'}", "pictures=[errors]", "budget=0.25"]) == 0
    text = json.loads((tiny_folder / "corpus" / "test.jsonl").read_text().splitlines()[0])["text"]
    cache = read(tiny_llama(), torch.tensor(tiny_tokenizer(text)["input_ids"][:32]), f"flags:{tmp_path / 'gates'}")
    assert abs(cache.kept_share() - 0.25) > 0.1
    legend = [line.get_text().partition(":")[0] for line in figures[0].axes[0].get_legend().get_texts()]
    assert legend == ["h2o (25 %)", f"flags ({100 * cache.kept_share():.0f} %)", "gates (25 %)"]


def test_without_a_budget_gates_are_their_flags(tmp_path, tiny_llama):
    export.save(tmp_path / "gates", gates_for(tiny_llama()), base_model="tiny")
    plan = explain._policies(
        ExplainConfig(policies=["flags", "mine=gates"], gates=str(tmp_path / "gates"), budget=None)
    )
    assert [(name, one.spec.path, one.budget) for name, one in plan.items()] == [
        (name, str(tmp_path / "gates"), None) for name in ("flags", "mine", "gates")
    ]
    with refuses(UserError, "'flags'", "gates=EXPORT", "flags:EXPORT"):
        explain._policies(ExplainConfig(policies=["flags"]))
