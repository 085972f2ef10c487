"""The pictures of `python -m ag.explain`."""

import pytest
from gates_for import gates_for
from matplotlib.image import imread

from ag.explain import main
from ag.gates import export


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
    assert {path.stem for path in (tmp_path / "out").iterdir()} == names | {
        "attention-0",
        "cake",
        "errors",
    }
    assert sorted(printed) == sorted(map(str, (tmp_path / "out").iterdir()))
    for path in (tmp_path / "out").iterdir():
        image = imread(path)
        assert image.shape[0] > 200 and image[..., :3].min() < 0.5


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
        ({"kind": "linear"}, "samples=1", "gates of kind linear have no attention"),
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
