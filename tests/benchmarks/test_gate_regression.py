"""What gates learn of KVzip's scores is measured as it says."""

import itertools
import json

import pytest
import torch

from ag.gates.gate import AttentionGates
from benchmarks import gate_regression
from benchmarks.gate_regression import SINKS, Ahead8, Decaying, Found, Lines, Regressed, Row, lined, made, read, table
from tests.support.bounds import in_float64
from tests.support.http_server import VOCABULARY, byte_tokenizer, saved
from tests.support.refused import refuses

IDS = torch.arange(3, 35)
ROUNDED = {"rtol": torch.finfo(torch.float32).eps, "atol": torch.finfo(torch.float32).eps}  # once, from float64


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY)


def gate(cls, hidden_size=6, heads=2):
    """A gate of one layer with drawn parameters, in float64."""
    torch.manual_seed(0)
    made_of = cls(hidden_size, heads, heads, gate_regression.GATE).double()
    for parameter in made_of.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made_of


def test_a_gate_that_looks_ahead():
    """It sees the mean of the tokens that follow, fewer at the end."""
    one, hidden = gate(Ahead8), torch.randn(1, 12, 6, dtype=torch.float64)
    found = one(hidden)[0]
    for place in range(12):
        behind = hidden[0, place + 1 : place + 9]
        mean = behind.mean(0) if len(behind) else torch.zeros(6, dtype=torch.float64)
        inner = torch.nn.functional.gelu(one.inner(torch.cat([hidden[0, place], mean])))
        torch.testing.assert_close(found[:, place], one.outer(inner).float(), **ROUNDED)


def test_a_line_for_each_head():
    """It maps the logits, alone or within the second layer."""
    one, hidden = gate(Lines), torch.randn(1, 12, 6, dtype=torch.float64)
    plain = one.outer(torch.nn.functional.gelu(one.inner(hidden)))
    want = (one.slope.exp() * plain + one.shift)[0].T.float().detach()
    torch.testing.assert_close(one(hidden)[0], want, **ROUNDED)
    torch.testing.assert_close(one.folded()(hidden)[0], want, **ROUNDED)


def test_only_the_lines_are_trained(tiny):
    """They begin with the logits of the gates that were there, which have to be of two layers."""
    gates, hidden = made("mlp", tiny.config, None), torch.randn(1, 12, 64)
    want = [layer(hidden) for layer in gates.layers.values()]
    assert all(torch.equal(layer(hidden), was) for layer, was in zip(lined(gates).layers.values(), want, strict=True))
    trained = {name.rpartition(".")[2] for name, x in gates.named_parameters() if x.requires_grad}
    assert trained == {"slope", "shift"}
    with refuses(gate_regression.UserError, "kinds=[lines]", "linear"):
        lined(made("linear", tiny.config, None))
    with refuses(gate_regression.UserError, "kinds=[lines]", "init="):
        made("lines", tiny.config, None)


def test_a_worth_that_decays():
    """The last token has age 0."""
    one, hidden = gate(Decaying), torch.randn(1, 5, 6, dtype=torch.float64)
    found = one(hidden)[0]
    for place in range(5):
        logit = one.outer(torch.nn.functional.silu(one.inner(hidden[0, place])))
        left = one.scale.exp() * (4 - place + 2) * torch.log(logit.sigmoid()) + one.shift
        torch.testing.assert_close(found[:, place], left.float(), **ROUNDED)


def test_what_layers_share_is_trained_once(tiny):
    gates = made("shared", tiny.config, None)
    assert len({id(layer.outer) for layer in gates.layers.values()}) == 1
    assert len({id(layer.inner) for layer in gates.layers.values()}) == len(gates.layers)
    with refuses(gate_regression.UserError, "kinds=[lineal]", "linear"):
        made("lineal", tiny.config, None)


def test_how_much_of_what_scores_keep_is_kept(tiny):
    """All of it by the scores themselves, the half that both halves share, nothing upside down."""
    gates, scores = made("linear", tiny.config, None), torch.rand(3, 2, 20)
    row = Regressed(gates, Row(torch.zeros(3, 20, 64), scores))
    for sign, kept in ((1, 1.0), (-1, 0.0)):
        row.logits = {layer: sign * one[None] for layer, one in enumerate(scores)}
        assert row.kept(0.5) == kept
    row.logits = {layer: torch.zeros(1, 2, 20) for layer in range(3)}
    best = torch.cat([x[..., SINKS:].flatten() for x in scores]).argsort(descending=True)
    flat = torch.zeros(3 * 2 * 16)
    flat[best[:12]] = 1.0  # of the 24 best
    flat[best[-36:]] = 0.5
    row.logits = {
        layer: torch.cat([torch.zeros(2, SINKS), part.view(2, 16)], 1)[None]
        for layer, part in enumerate(flat.split(32))
    }
    assert row.kept(0.25) == 0.5


def test_a_row_has_what_enters_the_layers_and_the_scores(tiny):
    """The states are those of the first reading; a sink has no score, all others have one of at most 1."""
    model = in_float64(tiny)
    found = read(model, byte_tokenizer(), IDS.tolist())
    with torch.no_grad():
        states = model.model(IDS[None], output_hidden_states=True).hidden_states
    assert [*found] == [0, 1, 2]
    for layer, (hidden, scores) in found.items():
        norm = model.model.layers[layer].input_layernorm
        torch.testing.assert_close(hidden, norm(states[layer])[0].detach(), **ROUNDED)  # float64 throughout
        assert scores.shape == (2, 32) and bool((scores[:, :SINKS] == 0).all())
        assert bool((scores[:, SINKS:] > 0).all()) and float(scores.max()) <= 1


def test_rows_are_parts_of_joined_documents():
    """Each has the length that was asked for; the same seed draws the same ones."""
    documents, config = ["one", "two and three", "four"], gate_regression.Config(length=64, seed=3)
    first, again = (
        list(itertools.islice(gate_regression.drawn(documents, byte_tokenizer(), config), 5)) for _ in range(2)
    )
    assert first == again and all(len(ids) == 64 for ids in first)
    texts = {part for ids in first for part in byte_tokenizer().decode(ids).split("</s>")[1:-1]}
    assert texts == set(documents)


def test_a_row_that_the_model_ends(tiny):
    """Its beginning stays, the same seed writes the same end."""
    ids = IDS.tolist()
    first, again, other = (gate_regression.written(tiny, ids, 8, seed) for seed in (1, 1, 2))
    assert first == again != other and {len(row) for row in (first, other)} == {len(ids)}
    with refuses(gate_regression.UserError, "written=64", "length="):
        next(gate_regression.measure(gate_regression.Config(length=64, written=64)))
    assert first[:-8] == other[:-8] == ids[:-8] and gate_regression.written(tiny, ids, 0, 1) == ids


def test_differences_are_to_the_first_kind():
    kinds = [Found("a", 10, kept=[[0.5, 0.5, 0.5]] * 3), Found("b", 10, kept=[[0.6, 0.7, 0.9]] * 3)]
    assert table(kinds).splitlines()[-1] == "| b | 10 | 0.0000 | 0.600 | 0.700 | 0.900 | +0.200 [+0.200, +0.200] |"


@pytest.mark.slow
def test_the_command(tiny, tmp_path):
    """It goes on with the rows that are there, trains, and its gates can be used."""
    data, output = tmp_path / "data/corpus", tmp_path / "out"
    data.mkdir(parents=True)
    for split in ("train", "validation"):
        text = " ".join(f"{split} {number}" for number in range(60))
        (data / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    model = saved(tiny, tmp_path / "model")
    told = [f"root={data.parent}", f"model={model}", "dtype=float32", "length=64", "rows=4", "held=2", "lr=0.01"]
    assert gate_regression.main([*told, "epochs=1", "kinds=[mlp]", f"output={output}"]) == 0
    begun = {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()}
    assert gate_regression.main([*told, "epochs=20", "kinds=[mlp,decaying]", f"output={output}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()} == begun
    found = json.loads((output / "gates.json").read_text())["found"]
    assert [one["kind"] for one in found] == ["mlp", "decaying"] and all(one["seconds"] > 0 for one in found)
    assert sum(kept[1] for kept in found[0]["kept"]) / 2 > 0.3  # gates that know nothing keep 0.2 of it
    assert AttentionGates.from_pretrained(str(output / "gates/mlp")).config.kind == "mlp"
    assert not (output / "gates/decaying").exists()
    assert gate_regression.main([*told, "kinds=[mlp,lineal]", f"output={tmp_path}/new"]) == 2
    assert not (tmp_path / "new").exists()  # it was refused before a row was read
    parts = {}
    for mix in (0, 0.25, 1):
        again = [*told, "epochs=1", "kinds=[init]", f"init={output}/gates/mlp", f"mix={mix}", f"output={output}"]
        assert gate_regression.main(again) == 0
        parts[mix] = [*AttentionGates.from_pretrained(str(output / "gates/init")).parameters()]
    before = AttentionGates.from_pretrained(str(output / "gates/mlp")).parameters()
    for old, *mixed in zip(before, *parts.values(), strict=True):
        assert torch.equal(mixed[0], old) and torch.equal(mixed[1], old.lerp(mixed[2], 0.25))
    assert not torch.equal(parts[0][0], parts[1][0])
    assert (
        gate_regression.main([*told, "epochs=1", "kinds=[lines]", f"init={output}/gates/mlp", f"output={output}"]) == 0
    )
    drawn = AttentionGates.from_pretrained(str(output / "gates/lines")).layers["0"]
    assert torch.equal(drawn.inner.weight, parts[0][0]) and drawn.config.kind == "mlp"
