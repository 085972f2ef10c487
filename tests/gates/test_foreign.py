"""Checkpoints of KVzap and Fast KVzip, of random weights: scores and kept entries are those of their formulas.

The formulas are written out here from the papers and from what the authors' code computes, in float64.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ag
from ag import run
from ag.config import Config, GateConfig
from ag.errors import UserError
from ag.gates import export
from ag.gates.export import ExportError
from tests.support import by_hand
from tests.support.batches import columns, read
from tests.support.bounds import hold, of_logits
from tests.support.foreign import (
    CLOSE,
    EXACT,
    GROUP,
    HEADS,
    LAYERS,
    fast_kvzip,
    inputs,
    kvzap,
    on_hub,
    tokens,
    trimkv,
)
from tests.support.refused import refuses


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def kvzap_scores(state, layer, x):
    """Return ``[T, Hkv]`` of inputs of attention ``[T, d]``."""
    if f"layers.{layer}.weight" in state:
        return x @ state[f"layers.{layer}.weight"].T + state[f"layers.{layer}.bias"]
    inner = x @ state[f"layers.{layer}.0.weight"].T + state[f"layers.{layer}.0.bias"]
    inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    return inner @ state[f"layers.{layer}.2.weight"].T + state[f"layers.{layer}.2.bias"]


def fast_kvzip_scores(state, x):
    """Return ``[T, Hkv]``: the mean over a group of 1 / (1 + the sum over learned keys of exp(theirs - its own))."""
    dim = len(state["q_norm.weight"])

    def normed(y, weight):
        return weight * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    queries = normed((x @ state["q_proj.weight"].T + state["q_proj.bias"]).view(len(x), HEADS, GROUP, dim), 1.0)
    queries = queries * state["q_norm.weight"]
    keys = normed((x @ state["k_proj.weight"].T).view(len(x), HEADS, dim), state["k_norm.weight"])
    scores = torch.zeros(len(x), HEADS, dtype=EXACT)
    for head in range(HEADS):
        for member in range(GROUP):
            query = queries[:, head, member]
            own = (query * keys[:, head]).sum(-1) / math.sqrt(dim) + state["b"][head, 0, member]
            others = query @ state["k_base"][head, 0].T / math.sqrt(dim)
            scores[:, head] += 1 / (1 + (others - own[:, None]).exp().sum(-1)) / GROUP
    return scores


def logits(model, gates, ids):
    """Gate logits by layer, ``[T, Hkv]``, of a pass in which nothing is evicted."""
    ag.attach(model, gates)
    gating = ag.Gating(gates, torch.ones_like(ids), torch.tensor([ids.shape[1]]))
    with torch.no_grad():
        model(ids, gating=gating, use_cache=False)
    ag.detach(model)
    return [gating.logits[layer][0].T for layer in range(LAYERS)]


@pytest.mark.parametrize(("hidden", "dtype"), [(None, torch.bfloat16), (48, torch.float32)], ids=["linear", "mlp"])
def test_scores_of_kvzap(model, tmp_path, hidden, dtype):
    state, ids = kvzap(tmp_path / "zap", hidden, dtype), tokens(60)
    gates = ag.AttentionGates.from_pretrained(tmp_path / "zap", model.config)
    seen = inputs(model, ids)
    for layer, found in enumerate(logits(model, gates, ids)):
        expected = kvzap_scores(state, layer, seen[layer])
        assert expected.std() > 0.5
        torch.testing.assert_close(found.to(EXACT), expected, rtol=CLOSE, atol=CLOSE)


def test_training_from_kvzap_with_other_sizes_is_refused_in_words(model, tmp_path):
    kvzap(tmp_path / "zap", 48)
    config = Config(train="gates", gate=GateConfig(kind="mlp", hidden=64), init=str(tmp_path / "zap"))
    with refuses(UserError, f"init={tmp_path / 'zap'}", "gate.hidden=48, here gate.hidden=64", "same kind and sizes"):
        run.make_gates(model, config)


def test_what_kvzap_keeps(model, tmp_path):
    """What left the window of the newest 128 with a score below the threshold is seen by no later token, and gone.

    The engine evicts what the window leaves when the next token comes, which does not see it.
    """
    state, ids, prompt = kvzap(tmp_path / "zap", 48), tokens(178), 170
    tau, scores = math.log(0.3 / 0.7), {}  # at -4 none of these random scores would go

    def visible(layer, hidden):
        scores[layer] = kvzap_scores(state, layer, hidden.to(EXACT)).T  # [Hkv, T]
        later, token = torch.arange(178)[:, None], torch.arange(178)
        in_window = (token >= later - 128) | (later < prompt)  # the prompt is read densely
        return (in_window | (scores[layer] >= tau)[:, None]) & (token <= later)

    expected = by_hand.masked(model, ids[0], visible)
    cache = ag.EvictionCache(model, f"flags:{tmp_path / 'zap'}", threshold=0.3)
    went = {"prompt": 0, "later": 0}
    for seen in range(prompt, 179):
        with torch.no_grad():
            out = model(ids[:, :prompt] if seen == prompt else ids[:, seen - 1 : seen], past_key_values=cache)
        hold(out.logits[0, -1], expected[seen - 1], of_logits(model, ids[0]))
        last = seen if seen == prompt else seen - 1
        for layer, rows in scores.items():
            for head, row in enumerate(rows):
                kept = [t for t in range(seen) if t >= last - 128 or row[t] >= tau]
                assert cache.kept_positions(layer)[0][head].tolist() == kept, (seen, layer, head)
                went["prompt" if seen == prompt else "later"] += seen - len(kept)
    assert 0 < went["prompt"] < went["later"] / 8


def test_scores_of_fast_kvzip(model, tmp_path):
    states, ids = fast_kvzip(tmp_path / "fast"), tokens(60)
    gates = ag.AttentionGates.from_pretrained(tmp_path / "fast", model.config)
    seen = inputs(model, ids)
    for layer, found in enumerate(logits(model, gates, ids)):
        expected = fast_kvzip_scores(states[layer], seen[layer])
        assert expected.std() > 0.01
        torch.testing.assert_close(gates.probability(found).to(EXACT), expected, rtol=CLOSE, atol=CLOSE)


def test_what_fast_kvzip_keeps(model, tmp_path):
    """The highest scores of all layers and heads within the budget, the first 4 tokens and the given window."""
    states, ids = fast_kvzip(tmp_path / "fast"), tokens(100)
    cache = read(model, ids, f"gates:{tmp_path / 'fast'}", budget=0.4, recent=2)
    scores = torch.stack([fast_kvzip_scores(states[n], x).T for n, x in enumerate(inputs(model, ids))])  # [L, Hkv, T]
    scores[..., :4] = scores[..., -2:] = 2.0
    count = int(0.4 * 100) * LAYERS * HEADS
    chosen = scores.flatten().topk(count).indices
    margin = scores.flatten().sort(descending=True).values
    assert float(margin[count - 1] - margin[count]) > 1e-6  # rounding decides nothing
    expected = torch.zeros_like(scores, dtype=torch.bool).flatten().index_fill(0, chosen, True).view_as(scores)
    for layer, [heads] in enumerate(columns(cache)):
        assert heads == [flags.nonzero().flatten().tolist() for flags in expected[layer]]


def test_checkpoints_are_exported_with_the_settings_of_their_authors(model, tmp_path):
    """A checkpoint is saved as an export of its kind, which decides alike."""
    for write, kind, settings in (
        (kvzap, "affine", (0, 129, "dense")),
        (fast_kvzip, "fast_kvzip", (4, 4097, "dense")),
        (trimkv, "retention", (0, 1, "dense")),
    ):
        write(tmp_path / kind)
        gates = ag.AttentionGates.from_pretrained(tmp_path / kind, model.config)
        assert (gates.config.kind, gates.config.covers) == (kind, "all")
        assert (gates.config.sink_tokens, gates.config.recent_tokens, gates.config.prefill) == settings
        gates.save_pretrained(tmp_path / f"{kind}-export")
        again = ag.AttentionGates.from_pretrained(tmp_path / f"{kind}-export", model.config)
        assert again.config == gates.config and again.decays == gates.decays == (kind == "retention")
        assert all(torch.equal(x, again.state_dict()[key]) for key, x in gates.state_dict().items())
        assert export.adapter_path(tmp_path / kind) is None
    assert ag.AttentionGates.from_pretrained(tmp_path / "affine").config.boundary == pytest.approx(-4.0)
    assert export.read_info(tmp_path / "retention")["base_model"]["name"] == "org/base"
    kvzap(tmp_path / "other", 32)
    assert export.read_info(tmp_path / "affine")["checksum"] != export.read_info(tmp_path / "other")["checksum"]


def test_from_the_hub(tmp_path, monkeypatch):
    """Weights are fetched after their configuration tells the kind; those of a language model are not."""
    kvzap(tmp_path / "hub")
    name = "nvidia/KVzap-linear-tiny"
    shutil.copytree(tmp_path / "hub", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    asked = on_hub(monkeypatch, ZAP, {name: tmp_path / "hub", "org/model": tmp_path / "other"})
    monkeypatch.chdir(tmp_path)
    assert ag.policy(f"gates:{name}@uniform", budget=512).gates.config.kind == "affine"
    assert asked == [False, True]
    with pytest.raises(ExportError):
        ag.policy("gates:org/model", budget=0.5)
    assert asked == [False, True, False]


ZAP, FAST, TRIM = "model.safetensors", "q2_dim16_sink16.pt", "trimkv_weights.pth"


@pytest.mark.parametrize(
    ("write", "changes", "parts"),
    [
        (kvzap, {"output_dim": 1 << 40}, "config.json output_dim"),
        (kvzap, {"input_dim": 32}, f"{ZAP} linear.weight (2, 64) (2, 32)"),
        (kvzap, {"n_modules": 2}, f"{ZAP} layers.2.linear.bias"),
        (trimkv, {"retention_gate": "rg2"}, "config.json retention_gate='rg2' rg"),
        (trimkv, {"extra": {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}}, f"{TRIM} q_proj.weight"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path, write, changes, parts):
    write(tmp_path / "export", **changes)
    with refuses(ExportError, *parts.split()):
        ag.AttentionGates.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize(
    ("write", "file", "content"),
    [
        (kvzap, ZAP, b"none"),
        (fast_kvzip, FAST, {"module": [{"k_proj.weight": "text"}]}),
        (fast_kvzip, FAST, {"module": [Path("a")]}),  # a pickle that would run code
        (trimkv, TRIM, None),
        (trimkv, TRIM, b"none"),
        (trimkv, TRIM, {0: torch.ones(2)}),
    ],
)
def test_files_that_are_no_gates(tmp_path, write, file, content):
    write(tmp_path / "export")
    path = tmp_path / "export" / file
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    with refuses(ExportError, file) as refused:
        ag.AttentionGates.from_pretrained(tmp_path / "export")
    assert "\n" not in str(refused.value)


def test_gates_without_a_model_are_not_exported(tmp_path):
    """A checkpoint has a part of the geometry of its model, and an export has all of it."""
    kvzap(tmp_path / "zap")
    gates = ag.AttentionGates.from_pretrained(tmp_path / "zap")
    with refuses(ExportError, "head_dim, model_type, num_heads", "from_pretrained(PATH, model.config)"):
        gates.save_pretrained(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_model_of_more_layers(tiny_llama, tmp_path):
    kvzap(tmp_path / "export")
    with refuses(ExportError, "num_layers", "3", "5"):
        ag.AttentionGates.from_pretrained(tmp_path / "export", tiny_llama(num_hidden_layers=5).config)
