"""The losses against explicit sums, their gradients against autograd in float64."""

import itertools
import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

import ag
from ag.gates.gating import TargetPass
from ag.training import losses
from tests.support.bounds import ROUNDINGS, conditioned, hold, of_logits, of_pass
from tests.support.gates_for import gates_for

EPS = torch.finfo(torch.float32).eps
LABELS = torch.full((3, 9), -100)
LABELS[0, 5:] = torch.tensor([7, 8, 9, 10])
LABELS[1, 1:4] = torch.tensor([3, 4, 5])
LABELS[2, 0] = 3  # nothing comes before the first token: it carries no loss


def head(model):
    return model.double().requires_grad_(False)


def of_gradient(function):
    """Return the gradient of a scalar function as a function."""

    def slope(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0]

    return slope


def states(seed, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 9, 64, generator=generator, dtype=torch.double).requires_grad_(requires_grad)


def capped(cap):
    """A model whose logits have a soft cap, with the head's size of the tiny Llama."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Gemma2Config(**sizes, num_hidden_layers=1, intermediate_size=64, final_logit_softcapping=cap)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("cap", "chunk", "trained"), [(None, 3, False), (None, 3, True), (3.0, 1024, False)])
def test_token_nll_and_its_gradients(tiny_llama, cap, chunk, trained):
    """Of the states, and of the head where it is trained."""
    model, hidden = head(tiny_llama() if cap is None else capped(cap)), states(1)
    model.lm_head.requires_grad_(trained)
    nll, rows = losses.token_nll(model, hidden, LABELS, chunk)
    assert rows.tolist() == [0, 0, 0, 0, 1, 1, 1]
    carries, weight = LABELS[:, 1:] != -100, torch.arange(1.0, 8.0)
    operands = [hidden, model.lm_head.weight][: 1 + trained]

    def wanted(hidden, head):
        logits = hidden @ head.T
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return -logits[:, :-1].log_softmax(-1)[(*carries.nonzero(as_tuple=True), LABELS[:, 1:][carries])]

    both = hidden.detach(), model.lm_head.weight.detach()
    assert nll.dtype == torch.float32
    hold(nll, wanted(*both), conditioned(wanted, *both))
    got = torch.autograd.grad((nll * weight).sum(), operands)
    for place, one in enumerate(got):

        def slope(hidden, head, place=place):
            leaves = [x.detach().requires_grad_() for x in (hidden, head)]
            return torch.autograd.grad((wanted(*leaves) * weight).sum(), leaves)[place]

        assert one.abs().sum() > 0
        hold(one, slope(*both), conditioned(slope, *both))


def test_token_kl_and_its_gradient(tiny_llama):
    model, hidden, teacher, chunk = head(tiny_llama()), states(1), states(2), 3
    kl, rows = losses.token_kl(model, hidden, teacher, LABELS, chunk)
    assert rows.tolist() == [0, 0, 0, 0, 1, 1, 1]
    carries = LABELS[:, 1:] != -100
    head_weight = model.lm_head.weight.detach()

    def divergence(teacher, student):
        p, q = ((x @ head_weight.T).log_softmax(-1)[:, :-1][carries] for x in (teacher, student))
        return (p.exp() * (p - q)).sum(-1)

    slope = of_gradient(lambda hidden: divergence(teacher.detach(), hidden).sum())
    hold(kl, divergence(teacher, hidden), conditioned(divergence, teacher, hidden))
    got = torch.autograd.grad(kl.sum(), hidden, retain_graph=True)[0]
    hold(got, slope(hidden), conditioned(slope, hidden))
    assert torch.autograd.grad(kl.sum(), teacher, allow_unused=True)[0] is None
    same, _ = losses.token_kl(model, hidden, hidden, LABELS, chunk)
    hold(same, torch.zeros(7), conditioned(divergence, hidden, hidden))


def test_no_label_at_all(tiny_llama):
    nll, rows = losses.token_nll(head(tiny_llama()), states(1), torch.full((3, 9), -100))
    assert (len(nll), len(rows)) == (0, 0)
    assert losses.sample_mean(nll, rows, torch.full((3, 9), -100)) == 0


def test_logits_of_one_chunk_exist_at_once(tiny_llama):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        """The most rows of any [N, 128] that is not the head's own [64, 128]."""

        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == 128 and len(out) != 64:
                self.rows = max(self.rows, len(out))
            return out

    model = tiny_llama().requires_grad_(False)
    hidden, labels = torch.randn(2, 40, 64, requires_grad=True), torch.randint(3, 128, (2, 40))
    with Largest() as largest:
        losses.token_nll(model, hidden, labels, chunk=5)[0].sum().backward()
    assert largest.rows == 5


def test_of_sampled_labels_some_carry_loss():
    """Each as often as the others: a draw of 3 of 7 has a token with probability 3/7, within five deviations."""
    torch.manual_seed(0)
    assert all(losses.sample_labels(LABELS, count) is LABELS for count in (0, 7, 8))
    draws = 600
    carry = torch.stack([losses.sample_labels(LABELS, 3)[:, 1:] for _ in range(draws)])
    assert torch.equal(carry.where(carry != -100, LABELS[:, 1:]), LABELS[:, 1:].expand_as(carry))
    drawn = carry != -100
    assert set(drawn.sum((1, 2)).tolist()) == {3}
    often = drawn.double().mean(0)[LABELS[:, 1:] != -100]
    assert ((often - 3 / 7).abs() < 5 * math.sqrt(3 / 7 * 4 / 7 / draws)).all()


def test_sample_mean_weighs_rows_alike():
    values = torch.tensor([1.0, 2.0, 6.0, 10.0], requires_grad=True)
    labels = torch.full((4, 5), -100)
    labels[0, 1:4] = labels[2, 4] = 5
    mean = losses.sample_mean(values, torch.tensor([0, 0, 0, 2]), labels)
    assert float(mean) == (3.0 + 10.0) / 2
    mean.backward()
    want = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    hold(values.grad, want, 2 * EPS * want)  # a half of a third


def test_sample_mean_weighs_rows_of_all_ranks_alike(monkeypatch):
    """Of two rows with loss on one rank, and one beside a row without loss on the other."""
    monkeypatch.setattr(losses, "world_size", lambda: 2)
    monkeypatch.setattr(losses, "global_sum", lambda local: torch.tensor(3))
    labels = torch.tensor([[-100, 5], [-100, 5], [-100, 5], [-100, -100]])
    first = losses.sample_mean(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), labels[:2])
    second = losses.sample_mean(torch.tensor([6.0]), torch.tensor([0]), labels[2:])
    assert float(first + second) / 2 == (1.0 + 2.0 + 6.0) / 3


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_mean_over_all_draws_is_the_mean_of_samples(count):
    """Of rows of 4, 3 and no tokens: the expectation, since each draw is as likely as another."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=torch.double)
    rows, _ = losses.response_positions(LABELS)
    draws = [list(draw) for draw in itertools.combinations(range(7), count)]
    means = torch.stack([losses.sample_mean(values[draw], rows[draw], LABELS) for draw in draws])
    hold(means.mean(), (15 / 4 + 112 / 3) / 2, 64 * torch.finfo(torch.double).eps * float(means.max()))


def fake_gating(gates, valid, prompts):
    """A gating whose logits are given: leaves that gradients reach."""
    gating = ag.Gating(gates, valid, prompts)
    shape = (len(valid), 2, gating.counted().shape[1])
    generator = torch.Generator().manual_seed(3)
    gating.logits = {layer: torch.randn(shape, generator=generator).requires_grad_() for layer in (0, 2)}
    return gating


@pytest.mark.parametrize(("prompts", "padding"), [(None, "right"), ([4, 6, 2], "left")])
def test_gate_means_and_their_gradients(tiny_llama, prompts, padding):
    gates = gates_for(tiny_llama(), bias=0.7, threshold=0.6)
    valid = torch.arange(9) < torch.tensor([[9], [7], [3]])
    valid = valid if padding == "right" else valid.flip(1)
    gating = fake_gating(gates, valid, None if prompts is None else torch.tensor(prompts))
    means = losses.gate_means(gates, gating)
    gated = torch.zeros(3, 2, gating.counted().shape[1])
    for b in range(3):
        for t in valid[b].nonzero().flatten().tolist()[: None if prompts is None else prompts[b]]:
            gated[b, :, t] = 1
    p, count = (torch.stack([*gating.logits.values()]).detach().double() + 0.7).sigmoid(), 2 * int(gated.sum())
    hold(means["soft"], (p * gated).sum() / count, ROUNDINGS * EPS)  # of numbers up to 1
    hold(means["hard"], float(((p > 0.6) * gated).sum()) / count, EPS)
    assert 0 < float(means["hard"]) < 1
    for mean in means.values():
        grads = torch.autograd.grad(mean, list(gating.logits.values()), retain_graph=True)
        hold(torch.stack(grads), p * (1 - p) * gated / count, ROUNDINGS * EPS / count)


class Seen:
    """A finished observation: what :class:`ag.gates.gating.TargetPass` holds after its forward pass."""

    def __init__(self, targets, logits, mask):
        self.targets, self.logits, self.has_target = targets, logits, lambda: mask


def of_attention(model, ids, valid):
    """Bound the logarithms of attention weights, and of the norms of what comes with them."""

    def logarithms():
        weights = model(ids, attention_mask=valid, output_attentions=True, use_cache=False).attentions
        weights = torch.stack(weights)
        return weights[weights > 0].log()

    return of_pass(model, logarithms)


LENGTHS = [14, 11]


def observe(make, target, prompts, **gate):
    """What gates observe of two rows, the eager attention, the values, and a bound of logarithms."""
    model = make(attn_implementation="eager").requires_grad_(False)
    ids = torch.randint(3, 128, (2, 14), generator=torch.Generator().manual_seed(2))
    valid = (torch.arange(14) < torch.tensor(LENGTHS)[:, None]).long()
    plain = model(ids, attention_mask=valid, output_attentions=True, use_cache=False)
    bounds, values = (of_logits(model), of_attention(model, ids, valid)), {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, index=index: values.update({index: out}))
    gates = gates_for(model, **gate)
    ag.attach(model, gates)
    observed = TargetPass(gates, valid, torch.tensor(prompts), target)
    with torch.no_grad():
        logits = model(ids, gating=observed, use_cache=False).logits
    hold(logits[valid.bool()], plain.logits[valid.bool()], bounds[0])
    return observed, plain.attentions, values, bounds[1]


@pytest.mark.parametrize(
    ("covers", "prefill", "recent", "window"),
    [
        ("prompt", "dense", 3, None),
        ("prompt", "sparse", 2, 6),
        ("all", "sparse", 2, None),
    ],
)
def test_observed_payments(tiny_llama, tiny_mistral, covers, prefill, recent, window):
    """From the attention matrices that the eager model returns, one key at a time."""
    make, prompts = tiny_llama if window is None else partial(tiny_mistral, sliding_window=window), [9, 10]
    gate = {"covers": covers, "prefill": prefill, "recent_tokens": recent}
    observed, attentions, _, bound = observe(make, "attention", prompts, **gate)
    has_target = observed.has_target()
    gated = prompts if covers == "prompt" else LENGTHS
    for layer, b in itertools.product(range(3), range(2)):
        assert not has_target[b, gated[b] :].any()
        first = prompts[b] if prefill == "dense" else 0
        for t in range(gated[b]):
            queries = [j for j in range(first, LENGTHS[b]) if j - t >= recent and (window is None or j - t < window)]
            assert bool(has_target[b, t]) == bool(queries)
            for kv in range(2) if queries else ():
                weights = attentions[layer][b, 2 * kv : 2 * kv + 2, queries, t].double()
                hold(observed.targets[layer][b, kv, t], weights.mean(1).mean().log(), 2 * bound)


@pytest.mark.parametrize(("covers", "prefill", "window"), [("all", "dense", None), ("prompt", "sparse", 6)])
def test_observed_repetition(tiny_llama, tiny_mistral, covers, prefill, window):
    """The largest weight that a response pays to a token of the prompt, from the eager model's attention matrices."""
    make, prompts = tiny_llama if window is None else partial(tiny_mistral, sliding_window=window), [6, 5]
    gate = {"covers": covers, "prefill": prefill, "recent_tokens": 2}
    observed, attentions, values, bound = observe(make, "kvzip", prompts, **gate)
    has_target, found = observed.has_target(), 0
    for layer, b in itertools.product(range(3), range(2)):
        assert not has_target[b, prompts[b] :].any()
        for t in range(prompts[b]):
            near = [j for j in range(prompts[b], LENGTHS[b]) if window is None or j - t < window]
            assert bool(has_target[b, t]) == any(j - t >= 2 for j in near)
            for kv in range(2) if has_target[b, t] else ():
                paid = (
                    attentions[layer][b, 2 * kv : 2 * kv + 2, near, t].max()
                    * values[layer][b, t].view(2, 16)[kv].norm()
                )
                hold(observed.targets[layer][b, kv, t], paid.log(), 2 * bound)  # of a weight and a norm
                found += 1
    assert found > 40


def test_only_what_is_repeated_has_a_target(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, covers="all", recent_tokens=2)
    ag.attach(model, gates)
    ids = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(2))
    prompts, copied = torch.tensor([12, 9]), torch.tensor([[3, 8], [0, 5]])
    whole, part = (TargetPass(gates, torch.ones_like(ids), prompts, "kvzip", chunk) for chunk in (None, copied))
    for observed in (whole, part):
        with torch.no_grad():
            model(ids, gating=observed, use_cache=False)
    columns = torch.arange(whole.has_target().shape[1])
    assert torch.equal(part.has_target(), whole.has_target() & (columns >= copied[:, :1]) & (columns < copied[:, 1:]))
    assert part.has_target().sum(1).tolist() == [5, 5] and whole.has_target().sum(1).tolist() == [12, 9]
    other = {layer: torch.where(part.has_target()[:, None], x, 50.0) for layer, x in part.targets.items()}
    loss = regression_of(gates, part, 0.5, "global")
    part.targets = other
    assert regression_of(gates, part, 0.5, "global") == loss
    assert regression_of(gates, whole, 0.5, "global") != loss


def regression_of(gates, seen, keep, scale):
    """Return the loss of what a pass observed."""
    logits, targets = (
        torch.stack([by_layer[layer] for layer in seen.targets]) for by_layer in (seen.logits, seen.targets)
    )
    return losses.regression_loss(gates, logits, targets, seen.has_target(), keep, scale)


def two_layers(draw):
    """Return targets, logits and mask of two layers, two rows of 9 and 4 tokens, and two heads."""
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    targets = {layer: torch.randn(2, 2, 9, generator=draw) * (1 + layer) - 3 * layer for layer in (0, 2)}
    return targets, {layer: torch.randn(2, 2, 9, generator=draw) for layer in targets}, mask


def of_two_layers(gates, mask, scale, targets, logits):
    """Bound a loss of two layers."""

    def given(*operands):
        seen = Seen(*(dict(zip(targets, x, strict=True)) for x in (operands[:2], operands[2:])), mask)
        return regression_of(gates, seen, 0.25, scale)

    return conditioned(given, *targets.values(), *logits.values())


def cut_of(values):
    """Their quantile at 0.75, between two of them."""
    ranked, place = sorted(values), 0.75 * (len(values) - 1)
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return low + (place % 1) * (high - low)


@pytest.mark.parametrize("scale", ["head", "global"])
def test_regression_by_hand(tiny_llama, scale):
    """A mean, a deviation and a quantile of each head and row, or of all; masked tokens are in none of them."""
    gates = gates_for(tiny_llama(), threshold=0.3, bias=0.5)
    boundary = math.log(0.3 / 0.7) - 0.5
    targets, logits, mask = two_layers(torch.Generator().manual_seed(0))
    heads = [
        [(float(targets[layer][b, h, t]), float(logits[layer][b, h, t])) for t in range(length)]
        for layer in targets
        for b, length in enumerate((9, 4))
        for h in range(2)
    ]
    wanted = []
    for group in heads if scale == "head" else [sum(heads, [])]:
        values = [value for value, _ in group]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        wanted += [((value - cut_of(values)) / deviation + boundary, logit) for value, logit in group]
    distances = [abs(want - logit) for want, logit in wanted]
    want = sum(0.5 * d * d if d < 1 else d - 0.5 for d in distances) / len(distances)
    loss = regression_of(gates, Seen(targets, logits, mask), 0.25, scale)
    hold(loss, want, of_two_layers(gates, mask, scale, targets, logits))
    if scale == "global":
        assert sum(want > boundary for want, _ in wanted) == 13
    other = {layer: torch.where(mask[:, None], x, 1e4) for layer, x in targets.items()}
    assert regression_of(gates, Seen(other, logits, mask), 0.25, scale) == loss
    assert regression_of(gates, Seen(targets, logits, mask & False), 0.25, scale) == 0
