"""Checkpoints of TRIM-KV, of random weights: scores and kept entries are those of its formula, written out here.

The formula is written from the paper and from what the authors' code computes, in float64.
"""

import json
import shutil

import pytest
import torch

import ag
from ag.config.schema import Config
from ag.errors import UserError
from ag.gates import export, folder
from ag.gates.export import ExportError
from ag.gates.gating import Open
from ag.run import fit, make_gates
from tests.support import by_hand
from tests.support.bounds import hold, of_logits
from tests.support.refused import refuses

WIDTH, HEADS, LAYERS, HIDDEN = 64, 2, 3, 24  # of the tiny models
MEMORY, BUFFER, NEW = 24, 8, 30
CLOSE = 1e-5  # as far as float32 may be from float64 here: sums of 64 products of normal numbers
EXACT = torch.float64


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def trimkv(path, dtype=torch.float32, extra=None, **changes):
    """Write what its authors publish: the configuration of their model, and a state dict of the gates alone."""
    path.mkdir(parents=True)
    make, state = torch.Generator().manual_seed(0), {}
    for layer in range(LAYERS):
        gate = f"model.layers.{layer}.self_attn.retention_gate."
        for name, shape in (("linear1.weight", (HIDDEN, WIDTH)), ("linear1.bias", (HIDDEN,))):
            state[gate + name] = torch.randn(*shape, generator=make) / 4
        state[gate + "linear2.weight"] = torch.randn(HEADS, HIDDEN, generator=make)
        state[gate + "bias"] = torch.randn(HEADS, generator=make) + 3
    config = {"architectures": ["TrimKVLlamaForCausalLM"], "model_type": "llama", "retention_gate": "rg"}
    config |= {"retention_gate_intermediate_size": HIDDEN, "hidden_size": WIDTH, "num_key_value_heads": HEADS}
    config |= {"num_hidden_layers": LAYERS, "hidden_act": "silu", "base_model": "org/base", "memory_size": 512}
    (path / "config.json").write_text(json.dumps(config | {"trainable_params": "retention_gate"} | changes))
    torch.save({name: x.to(dtype) for name, x in (state | (extra or {})).items()}, path / "trimkv_weights.pth")
    return {name: x.to(dtype).to(EXACT) for name, x in state.items()}


def log_retention(state, layer, x):
    """Return ``[Hkv, T]``, the log of what is left after each token, of inputs of attention ``[T, d]``."""
    gate = {name.split("retention_gate.")[1]: y for name, y in state.items() if f"layers.{layer}." in name}
    inner = x @ gate["linear1.weight"].T + gate["linear1.bias"]
    logits = (inner / (1 + (-inner).exp())) @ gate["linear2.weight"].T + gate["bias"]
    return -(1 + (-logits).exp()).log().T


def tokens(length, seed=0):
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores(model, tmp_path, dtype):
    state, ids = trimkv(tmp_path / "trim", dtype), tokens(60)
    gates, seen = ag.AttentionGates.from_pretrained(tmp_path / "trim", model.config), {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: seen.update({index: kwargs["hidden_states"][0].to(EXACT)}),
            with_kwargs=True,
        )
        for index, layer in enumerate(model.model.layers)
    ]
    ag.attach(model, gates)
    gating = Open(gates, torch.ones_like(ids), torch.tensor([60]))
    with torch.no_grad():
        model(ids, gating=gating, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer in range(LAYERS):
        found, expected = gates.stored(gating.logits[layer][0]), log_retention(state, layer, seen[layer])
        assert expected.std() > 0.1
        torch.testing.assert_close(found.to(EXACT), expected, rtol=CLOSE, atol=CLOSE)


def simulated(model, state, ids, prompt):
    """Return the logits ``[T, V]``, and by layer what each head holds after the prompt and after each token.

    As the authors' cache does: at the end of a pass, ``MEMORY + BUFFER`` held tokens shrink to the ``MEMORY`` with the
    highest ``(seen + 1 - position) log b``.
    """
    length, history = ids.shape[1], {}

    def visible(layer, hidden):
        scores = log_retention(state, layer, hidden.to(EXACT))
        mask = torch.zeros(HEADS, length, length, dtype=torch.bool)
        history[layer] = []
        held = [[] for _ in range(HEADS)]
        for seen in range(prompt, length + 1):
            new = range(prompt) if seen == prompt else range(seen - 1, seen)
            for head, row in enumerate(held):
                for query in new:
                    mask[head, query, [*row, *(t for t in new if t <= query)]] = True
                row += new
                if len(row) >= MEMORY + BUFFER:
                    score = torch.tensor([(seen + 1 - t) * scores[head, t] for t in row])
                    best = score.sort(descending=True).values
                    assert best[MEMORY - 1] - best[MEMORY] > 1e-6  # rounding decides nothing
                    row[:] = [row[i] for i in sorted(score.topk(MEMORY).indices.tolist())]
            history[layer].append([[*row] for row in held])
        return mask

    return by_hand.masked(model, ids[0], visible), history


@pytest.mark.parametrize("prompt", [50, MEMORY + BUFFER, MEMORY + 3, 10], ids=["long", "full", "between", "short"])
def test_what_stays(model, tmp_path, prompt):
    state, ids = trimkv(tmp_path / "trim"), tokens(prompt + NEW)
    expected, history = simulated(model, state, ids, prompt)
    cache = ag.EvictionCache(model, f"gates:{tmp_path / 'trim'}@uniform", MEMORY, f"buffer:{BUFFER}")
    for step, seen in enumerate(range(prompt, prompt + NEW + 1)):
        with torch.no_grad():
            out = model(ids[:, :prompt] if seen == prompt else ids[:, seen - 1 : seen], past_key_values=cache)
        hold(out.logits[0, -1], expected[seen - 1], of_logits(model, ids[0]))
        for layer, steps in history.items():
            found = [sorted(kept.tolist()) for kept in cache.kept_positions(layer)[0]]
            assert found == steps[step], (seen, layer)
    assert len(steps[-1][0]) < prompt + NEW  # something went


def test_sequences_of_a_batch_fill_their_buffers_apart(model, tmp_path):
    trimkv(tmp_path / "trim")
    rows = [tokens(length + NEW, seed=length) for length in (40, 14)]
    policy = ag.policy(f"gates:{tmp_path / 'trim'}@uniform", MEMORY, f"buffer:{BUFFER}")
    both = ag.EvictionCache(model, policy)
    width = rows[0].shape[1] - NEW
    padding = width - (rows[1].shape[1] - NEW)
    ids = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (padding, 0))])
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    alone = [ag.EvictionCache(model, policy) for _ in rows]
    for seen in range(width, width + NEW + 1):
        new = slice(0, width) if seen == width else slice(seen - 1, seen)
        with torch.no_grad():
            model(ids[:, new], attention_mask=mask[:, :seen], past_key_values=both)
            for row, cache, skip in zip(rows, alone, (0, padding), strict=True):
                model(row[:, max(0, new.start - skip) : new.stop - skip], past_key_values=cache)
        for layer in range(LAYERS):
            for index, (cache, skip) in enumerate(zip(alone, (0, padding), strict=True)):
                mine = [sorted((kept - skip).tolist()) for kept in both.kept_positions(layer)[index]]
                assert mine == [sorted(kept.tolist()) for kept in cache.kept_positions(layer)[0]], (seen, layer, index)


@pytest.mark.parametrize("allocator", ["global", "heads"])
def test_what_stays_of_a_prompt_under_budgets_of_several_heads(model, tmp_path, allocator):
    """One top-k over all layers and heads, or over the heads of each layer, as the authors' other cache has it."""
    state, ids, hidden = trimkv(tmp_path / "trim"), tokens(60), {}
    dense = torch.ones(HEADS, 60, 60, dtype=torch.bool).tril()
    by_hand.masked(model, ids[0], lambda layer, x: hidden.setdefault(layer, x) is x and dense)
    options = {} if allocator == "global" else {"floor": 0.0}
    cache = ag.EvictionCache(
        model, f"gates:{tmp_path / 'trim'}@{allocator}", MEMORY, schedule=f"buffer:{BUFFER}", **options
    )
    with torch.no_grad():
        model(ids, past_key_values=cache)
    age = 61 - torch.arange(60)
    scores = torch.stack([age * log_retention(state, layer, hidden[layer].to(EXACT)) for layer in range(LAYERS)])
    parts, count = (scores[None], LAYERS) if allocator == "global" else (scores, 1)
    best = [part.flatten().topk(MEMORY * HEADS * count).indices for part in parts]
    none = torch.zeros(parts[0].numel(), dtype=torch.bool)
    keep = torch.stack([none.index_fill(0, index, True) for index in best]).view_as(scores)
    for layer in range(LAYERS):
        found = [sorted(kept.tolist()) for kept in cache.kept_positions(layer)[0]]
        assert found == [row.nonzero().flatten().tolist() for row in keep[layer]]
    assert len({len(row) for row in found}) > 1


def test_as_published(model, tmp_path):
    trimkv(tmp_path / "trim")
    gates = ag.AttentionGates.from_pretrained(tmp_path / "trim", model.config)
    assert (gates.config.kind, gates.config.hidden, gates.config.covers) == ("retention", HIDDEN, "all")
    assert (gates.config.sink_tokens, gates.config.recent_tokens, gates.config.prefill) == (0, 1, "dense")
    assert export.read_info(tmp_path / "trim")["base_model"]["name"] == "org/base"
    gates.save_pretrained(tmp_path / "export")
    again = ag.AttentionGates.from_pretrained(tmp_path / "export", model.config)
    assert again.config == gates.config and again.decays
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in gates.state_dict().items())


def test_nearly_all_is_left_of_a_token(model):
    """A share that float32 rounds to 1 has the log that it has: 1 - 1e-9 after each token."""
    config = ag.GateConfig(kind="retention", hidden=4, bias=0.0)
    gates = ag.AttentionGates(model.config, config)
    logits = torch.tensor([20.0, 12.0, 0.0])
    expected = -(1 + (-logits.double()).exp()).log()
    torch.testing.assert_close(gates.stored(logits).double(), expected, rtol=1e-6, atol=0.0)


def test_there_are_no_flags(model, tmp_path):
    """Without a budget nothing says when a token goes, and there is nothing to train under."""
    trimkv(tmp_path / "trim")
    for spec in ("gates", "flags"):
        with refuses(UserError, "gate.kind=retention", "budget"):
            ag.policy(f"{spec}:{tmp_path / 'trim'}")
    gates = ag.AttentionGates.from_pretrained(tmp_path / "trim", model.config)
    ag.attach(model, gates)
    with refuses(UserError, "gate.kind=retention", "budget"):
        ag.EvictionCache(model, "gates")
    ids = tokens(20)
    with refuses(UserError, "gate.kind=retention", "budget"):
        model(ids, gating=ag.Gating(gates, torch.ones_like(ids), torch.tensor([20])), use_cache=False)
    with pytest.raises(UserError):
        gates.flags(torch.zeros(1))
    config = Config()
    config.gate.kind = "retention"
    for train in (lambda: fit(config), lambda: make_gates(model, config)):
        with refuses(UserError, "gate.kind=retention", "gate.kind=mlp"):
            train()


def test_from_the_hub(tmp_path, monkeypatch):
    """Its weights are fetched once its configuration says what they are."""
    trimkv(tmp_path / "hub")
    asked = []

    def download(repository, *, revision, allow_patterns):
        asked.append("trimkv_weights.pth" in allow_patterns)
        home = tmp_path / repository.replace("/", "--")
        shutil.copytree(tmp_path / "hub", home, dirs_exist_ok=True)
        return str(home)

    folder.download.cache_clear()
    monkeypatch.setattr(folder, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert ag.policy("gates:ngocbh/TrimKV-tiny@uniform", budget=512).gates.config.kind == "retention"
    assert asked == [False, True]
    folder.download.cache_clear()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"retention_gate": "rg2"}, "config.json retention_gate='rg2' rg"),
        ({"hidden_act": "gelu"}, "config.json hidden_act='gelu' silu"),
        ({"compress_strategy": "alpha_threshold"}, "config.json compress_strategy='alpha_threshold' alpha"),
        ({"hidden_size": "64"}, "config.json hidden_size='64'"),
        ({"num_hidden_layers": 1 << 40}, "config.json num_hidden_layers"),
        ({"hidden_size": 32}, "trimkv_weights.pth inner.weight (24, 64) (24, 32)"),
        ({"num_hidden_layers": 2}, "trimkv_weights.pth layers.2"),
        ({"extra": {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}}, "trimkv_weights.pth q_proj.weight"),
    ],
)
def test_damaged_checkpoints(tmp_path, changes, parts):
    trimkv(tmp_path / "trim", **changes)
    with refuses(ExportError, *parts.split()):
        ag.AttentionGates.from_pretrained(tmp_path / "trim")


def test_damaged_files(model, tmp_path):
    trimkv(tmp_path / "trim")
    other = model.config
    other.num_hidden_layers = 5
    with refuses(ExportError, "num_layers", "3", "5"):
        ag.AttentionGates.from_pretrained(tmp_path / "trim", other)
    file = tmp_path / "trim" / "trimkv_weights.pth"
    for content in ([torch.ones(2)], {"a": 1}):
        torch.save(content, file)
        with refuses(ExportError, file.name, "TRIM-KV"):
            ag.AttentionGates.from_pretrained(tmp_path / "trim")
    file.write_bytes(b"none")
    with refuses(ExportError, file.name, "tensors"):
        ag.AttentionGates.from_pretrained(tmp_path / "trim")
    file.unlink()
    with refuses(ExportError, file.name):
        ag.AttentionGates.from_pretrained(tmp_path / "trim")
