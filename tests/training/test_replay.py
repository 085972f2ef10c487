"""Replay: its attention against gated attention, and its loss against evicted passes of the engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import ag
from ag.config import Config, LossConfig, WarmupConfig
from ag.engine.policy import policy
from ag.errors import UserError
from ag.kernels.gated_attention import gated_attention
from ag.training import losses
from ag.training.losses import token_kl
from ag.training.module import GatedLM
from ag.training.replay import VALIDATION_SHARES, PromptStore, topk_flags
from ag.training.replay_attention import replay_attention
from tests.engine.test_kvzip import in_float64
from tests.support.bounds import hold
from tests.support.full_disk import full_disk
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

EPS, EPS32 = (torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))
CONTEXT, RESPONSE = 40, 7


def replay(model, folder=None, **gate):
    gates = gates_for(model, **{"kind": "mlp", "hidden": 8, "recent_tokens": 6, "sink_tokens": 2, **gate}).double()
    loss = LossConfig(objective="kl", replay=True, share_low=0.1, share_high=0.7, contexts=folder)
    return GatedLM(Config(train="gates", loss=loss), model.requires_grad_(False), gates)


def batch(rows=1, seed=0):
    ids = torch.randint(3, 128, (rows, CONTEXT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :CONTEXT] = -100
    lengths = torch.full((rows,), CONTEXT)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "prompt_length": lengths}


@pytest.mark.parametrize("window", [None, 9], ids=["whole", "window"])
def test_attention_is_gated_attention_of_the_last_queries(window):
    torch.manual_seed(0)
    sets, kv_heads, group, size, length = 2, 2, 3, 8, CONTEXT + RESPONSE
    q = torch.randn(sets, kv_heads * group, length, size, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, length, size, dtype=torch.float64).repeat(sets, 1, 1, 1) for _ in "kv")
    k.requires_grad_(), v.requires_grad_()
    keep = (torch.rand(sets, kv_heads, CONTEXT) > 0.5).double().requires_grad_()
    wanted = gated_attention(
        q, k, v, torch.cat([keep, torch.ones(sets, kv_heads, RESPONSE)], 2), scaling=0.4, window=window,
        dense_until=torch.full((sets,), CONTEXT),
    )[:, :, CONTEXT:]  # fmt: skip
    context = (x[0, :, :CONTEXT].detach() for x in (k, v))
    found = replay_attention(*(x[:, :, CONTEXT:] for x in (q, k, v)), *context, keep, 0.4, window)
    logit = 0.4 * float((q.norm(dim=-1).max() * k.norm(dim=-1).max()).detach())
    terms = (length + size * logit) * EPS  # of a sum over keys, whose weights have the roundings of their logits
    hold(found, wanted, terms * float(v.detach().abs().max()))
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (q, k, v, keep)) for x in (found, wanted))
    largest = float((weights.abs().sum() * v.abs().amax() * (1 + k.abs().amax() + q.abs().amax())).detach())
    for mine, other in zip(ours, theirs, strict=True):
        part = mine if mine.shape[2] == CONTEXT else mine[:, :, CONTEXT:]
        hold(part, other[:, :, : part.shape[2]] if part is mine else other[:, :, CONTEXT:], terms * largest)


def test_autocast_runs_attention_in_its_type():
    torch.manual_seed(0)
    q = torch.randn(2, 4, RESPONSE, 8, requires_grad=True)
    k, v = torch.randn(2, 2, RESPONSE, 8), torch.randn(2, 2, RESPONSE, 8, dtype=torch.bfloat16)
    far, keep = torch.randn(2, 2, CONTEXT, 8), (torch.rand(2, 2, CONTEXT) > 0.5).float().requires_grad_()
    given = [x.detach().bfloat16() for x in (q, k, v, *far)]
    wanted = replay_attention(*given, keep, 0.4)
    with torch.autocast("cpu", torch.bfloat16):
        found = replay_attention(q, k, v, *far, keep, 0.4)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert q.grad.dtype == keep.grad.dtype == torch.float32 and bool(keep.grad.any())


def test_products_that_float16_cannot_hold():
    q, k = torch.full((1, 1, 1, 64), 100.0), torch.full((1, 1, 1, 64), 90.0)
    v, far = torch.ones(1, 1, 1, 64), torch.full((1, 2, 64), 80.0)
    q, k, v, far = (x.half() for x in (q, k, v, far))  # the products have 576,000 and 512,000
    found = replay_attention(q, k, v, far, 2 * torch.ones_like(far), None, 64**-2)
    wanted = replay_attention(*(x.double() for x in (q, k, v, far, 2 * torch.ones_like(far))), None, 64**-2)
    hold(found.double(), wanted, 2 * torch.finfo(torch.float16).eps * (64 + 140.7))


@pytest.mark.parametrize(
    "gate",
    [
        {},
        {"kind": "attention", "scope": "causal", "covers": "all"},
        {"kind": "attention", "scope": "prompt", "window": 0},
        {"kind": "affine", "granularity": "query_head"},
        {"kind": "fast_kvzip"},
        {"first_layer": 1},
    ],
    ids=["mlp", "attention", "prompt", "affine", "fast_kvzip", "some layers"],
)
@pytest.mark.filterwarnings("ignore::ag.BudgetWarning")
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_divergence_is_that_of_evicted_passes_of_the_engine(tiny_llama, gate, share):
    model = tiny_llama().double()
    module = replay(model, **gate)
    data = batch()
    ids, start = data["input_ids"], CONTEXT
    result = module.gated_loss.replay_row(data, 0, [share])

    def states(evicted):
        cache = ag.EvictionCache(model, policy("gates" if evicted else "full", share if evicted else None))
        model(ids[:, :start], past_key_values=cache)
        return model.model(ids[:, start:], past_key_values=cache).last_hidden_state

    ag.attach(model, module.gates)
    with torch.no_grad():
        whole, evicted = states(False), states(True)
        hold(result.hidden, evicted, 1e-9)
        wanted = token_kl(model, evicted, whole, data["labels"][:, start:])[0].mean()
    assert float((evicted - whole).abs().max()) > 1e-3
    log = float(model.lm_head(whole).log_softmax(-1).abs().max() + model.lm_head(evicted).log_softmax(-1).abs().max())
    hold(float(result.divergence), float(wanted), 4 * EPS32 * log)  # logits, sums and logarithms are in float32
    kept = int(share * CONTEXT) / CONTEXT
    hold(float(result.kept.mean()), kept, 2**-20)


def test_each_share_counts_by_its_square(tiny_llama):
    module, data = replay(tiny_llama().double()), batch(rows=2)
    torch.manual_seed(3)
    loss = module.gated_loss.loss(data, 0).loss
    torch.manual_seed(3)
    low, high = (0.1 * 7 ** ((place + float(draw)) / 2) for place, draw in enumerate(torch.rand(2)))
    each = [module.gated_loss.replay_row(data, row, [low, high]).divergence for row in range(2)]
    wanted = sum(low**2 * float(x[0]) + high**2 * float(x[1]) for x in each) / 4
    hold(float(loss), wanted, 8 * EPS32 * wanted)


def test_the_mean_over_draws_of_tokens_is_the_loss_of_all(tiny_llama, monkeypatch):
    """Also where a response is one token, which precedes eviction, so that its row does not count."""
    module, data = replay(tiny_llama().double()), batch(rows=3)
    data["labels"][1, CONTEXT + 1 :] = -100
    data["labels"][2, -2:] = -100  # rows of 6 and 4 tokens count the same

    def loss(data):
        torch.manual_seed(3)  # of the shares
        return float(module.gated_loss.loss(data, 0).loss)

    whole = loss(data)
    hold(whole, loss({name: x[[0, 2]] for name, x in data.items()}), 4 * EPS32 * whole)
    module.gated_loss.config.loss.sampled_tokens, each = 1, 2 * RESPONSE - 4
    drawn = []
    for place in range(each):
        monkeypatch.setattr(torch, "randperm", lambda count, place=place: torch.tensor([place]))
        drawn.append(loss(data))
    hold(sum(drawn) / each, whole, 4 * each * EPS32 * max(drawn))


def test_a_step_trains_gates_towards_what_responses_need(tiny_llama):
    module = replay(tiny_llama().double())
    optimiser = torch.optim.Adam(module.gates.parameters(), 0.02)
    data, divergences = batch(), []
    for _ in range(30):
        result = module.gated_loss.replay_row(data, 0, [0.2])
        divergences.append(float(result.divergence))
        optimiser.zero_grad()
        result.divergence.sum().backward()
        optimiser.step()
    assert sum(divergences[-5:]) < 0.8 * sum(divergences[:5])


def test_flags_do_not_depend_on_the_level_of_the_logits(tiny_llama):
    gates = replay(tiny_llama()).gates
    logits = torch.randn(4, 2, CONTEXT, generator=torch.Generator().manual_seed(1)).requires_grad_()
    flags = topk_flags(logits, 0.3, gates)
    assert set(flags.detach().unique().tolist()) == {0.0, 1.0}
    (gradient,) = torch.autograd.grad((flags * torch.rand_like(flags)).sum(), logits)
    hold(float(gradient.sum()), 0.0, float(gradient.abs().sum()) * logits.numel() * EPS32)
    assert torch.equal(topk_flags(logits + 8, 0.3, gates).detach(), flags.detach())


def test_a_prompt_is_read_once(tiny_llama, tmp_path, monkeypatch):
    module, data = replay(tiny_llama(), str(tmp_path)), batch()
    first = module.gated_loss.replay_row(data, 0, [0.4]).divergence
    monkeypatch.setattr(PromptStore, "_write", lambda *_: pytest.fail("the prompt was read again"))
    other = replay(module.model, str(tmp_path)).gated_loss.replay_row(data, 0, [0.4]).divergence
    assert torch.equal(first, other)


def test_a_response_inside_of_a_context_is_that_of_its_prompt_alone(tiny_llama, tmp_path, monkeypatch):
    module, data, prompt = replay(tiny_llama().double(), str(tmp_path)), batch(), CONTEXT // 2
    alone = {name: x[:, : prompt + RESPONSE] for name, x in data.items() if name != "prompt_length"}
    alone |= {"prompt_length": torch.tensor([prompt]), "labels": alone["input_ids"].clone()}
    alone["labels"][:, :prompt] = -100
    labels = torch.full_like(data["labels"], -100)
    labels[:, : prompt + RESPONSE] = alone["labels"]
    inside = data | {"prompt_length": alone["prompt_length"], "context_length": data["prompt_length"], "labels": labels}
    expected = module.gated_loss.replay_row(alone, 0, [0.4])
    module.gated_loss.replay_row(data, 0, [0.4])
    monkeypatch.setattr(PromptStore, "_write", lambda *_: pytest.fail("the context was read again"))
    result = module.gated_loss.replay_row(inside, 0, [0.4])
    assert torch.equal(result.kept, expected.kept)
    hold(result.hidden, expected.hidden, 1e-9)


@pytest.mark.parametrize("with_targets", [False, True])
def test_a_prompt_from_the_folder_has_its_layers_in_order(tiny_llama, tmp_path, with_targets):
    """And the strides of the tensors of the first reading: a product rounds by them."""
    module, tokens = replay(tiny_llama(num_hidden_layers=11), str(tmp_path)), batch()["input_ids"][0]
    store = PromptStore(module.model, module.gates, str(tmp_path), with_targets)
    layers = list(range(11))
    for prompt in (store.read(tokens), store.read(tokens)):
        assert [list(x) for x in vars(prompt).values()] == [layers, layers, layers, layers if with_targets else []]
        assert all(x.is_contiguous() for by_layer in vars(prompt).values() for x in by_layer.values())


def test_targets_leave_the_cached_prompt_unchanged(tiny_llama, tmp_path):
    module, data = replay(tiny_llama().double()), batch()
    model, gates, tokens = module.model, module.gates, data["input_ids"][0]
    plain, with_targets = (
        PromptStore(model, gates, str(tmp_path), with_targets).read(tokens) for with_targets in (False, True)
    )
    for name in ("keys", "values", "hidden"):
        pairs = zip(getattr(plain, name).values(), getattr(with_targets, name).values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_targets_are_the_scores_of_a_repetition(tiny_llama, tmp_path):
    """KVzip's scores, written out in float64; sinks have none, and gates begin at the second layer."""
    module, tokens = replay(tiny_llama(), first_layer=1), batch()["input_ids"][0, :16]
    prompt = PromptStore(module.model, module.gates.float(), str(tmp_path), with_targets=True).read(tokens)
    assert sorted(prompt.targets) == [1, 2]
    wanted, bound = in_float64(module.model, tokens.tolist(), sinks=2, chunk=2000)
    for layer, target in prompt.targets.items():
        hold(target.exp()[:, 2:], wanted[layer][:, 2:], bound)


@pytest.mark.parametrize("scale", ["head", "global"])
def test_regression_of_prompts_of_several_lengths_equals_that_of_rows(tiny_llama, scale):
    """Every gate has a gradient."""
    module, data = replay(tiny_llama()), batch(2)
    warmup = WarmupConfig(regress_steps=1, target="reread", scale=scale)
    module = GatedLM(replace(module.config, warmup=warmup), module.model, module.gates)
    data["prompt_length"] = torch.tensor([CONTEXT, CONTEXT - 9])
    measured = module.warm_start.loss(data, 0)
    prompts = [module.gated_loss.split_row(data, row)[0] for row in range(2)]
    rows = [[torch.stack([x[layer] for layer in range(3)]) for x in (y.hidden, y.targets)] for y in prompts]
    logits, targets = (torch.zeros(3, 2, 2, CONTEXT, dtype=torch.float64) for _ in range(2))
    for row, (hidden, target) in enumerate(rows):
        length = hidden.shape[1]
        targets[:, row, :, :length] = target
        for layer in range(3):
            logits[layer, row, :, :length] = module.gates.layers[str(layer)](hidden[None, layer])[0]
    columns = torch.arange(CONTEXT)
    mask = (columns < data["prompt_length"][:, None]) & (columns >= 2)  # sinks have no target
    wanted = losses.regression_loss(module.gates, logits, targets, mask, 0.5, scale)
    hold(float(measured.loss.detach()), float(wanted.detach()), EPS32 * CONTEXT)
    measured.loss.backward()
    assert all(bool(x.grad.any()) for x in module.gates.parameters())


def test_a_prompt_read_under_autocast_has_its_own_file(tiny_llama, tmp_path):
    store, tokens = replay(tiny_llama(), str(tmp_path)).gated_loss.prompt_store, batch()["input_ids"][0]
    exact = store.read(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = store.read(tokens)
    assert len(list(tmp_path.iterdir())) == 2 and not torch.equal(exact.hidden[1], mixed.hidden[1])


def test_a_damaged_file_and_another_model_are_read_again(tiny_llama, tmp_path):
    model = tiny_llama()
    module, data = replay(model, str(tmp_path)), batch()
    first = module.gated_loss.replay_row(data, 0, [0.4]).divergence
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(module.gated_loss.replay_row(data, 0, [0.4]).divergence, first)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(0.5)
    replay(model, str(tmp_path)).gated_loss.replay_row(data, 0, [0.4])
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_that_need_one_new_prompt_wait_for_one_reading(tiny_llama, tmp_path, monkeypatch):
    store, tokens = replay(tiny_llama(), str(tmp_path)).gated_loss.prompt_store, batch()["input_ids"][0]
    both_miss, missed, written, write = threading.Barrier(2), set(), [], PromptStore._write

    def load(path, device):
        try:
            return load_file(path, device)
        except OSError:
            if threading.get_ident() not in missed:
                missed.add(threading.get_ident())
                both_miss.wait(timeout=60)
            raise

    monkeypatch.setattr("ag.training.replay.load_file", load)
    monkeypatch.setattr(PromptStore, "_write", lambda *call: written.append(call) or write(*call))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(store.read, [tokens, tokens])
    assert len(missed) == 2 and len(written) == 1
    assert all(torch.equal(first.keys[layer], second.keys[layer]) for layer in first.keys)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_a_folder_that_cannot_be_written_is_named(tiny_llama, tmp_path):
    module = replay(tiny_llama(), str(tmp_path))
    with full_disk(room=1000), refuses(UserError, f"loss.contexts={tmp_path}", "File too large"):
        module.gated_loss.replay_row(batch(), 0, [0.4])


def test_validation_measures_each_share(tiny_llama):
    module, data = replay(tiny_llama()), batch(rows=2)
    module.validation.update(data, keep_samples=True)
    values = module.validation.compute()
    each = [module.gated_loss.replay_row(data, row, VALIDATION_SHARES).divergence for row in range(2)]
    for place, share in enumerate(VALIDATION_SHARES):
        total = float(sum(x[place] for x in each))
        hold(float(values[f"kl_at_{share:g}"]), total / 2, EPS32 * total)
    assert module.gates.calibration is not None and len(module.validation.sample_flags) == 2


def test_validation_measures_all_tokens_of_right_answers(tiny_llama):
    module, data = replay(tiny_llama()), batch(rows=3)
    module.gated_loss.config.loss.sampled_tokens = 2
    data["choice"], data["target"] = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])
    data["labels"][2, CONTEXT + 1 :] = -100  # its one token precedes eviction
    module.validation.update(data)
    values = module.validation.compute()
    divergence = module.gated_loss.replay_row(data, 0, VALIDATION_SHARES).divergence
    found = torch.stack([values[f"kl_at_{share:g}"] for share in VALIDATION_SHARES])
    hold(found, divergence.detach(), 2 * EPS32 * float(divergence.max()))
    assert bool(values["lm_loss"].isfinite())


def test_a_prompt_is_read_again_for_another_configuration(tiny_llama, tmp_path):
    model, data = tiny_llama(), batch()
    for theta in (10_000.0, 500.0):
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        replay(model, str(tmp_path)).gated_loss.replay_row(data, 0, [0.4])
    assert len(list(tmp_path.iterdir())) == 2
