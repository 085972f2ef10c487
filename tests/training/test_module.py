"""GatedLM against sums written out from ``by_hand`` forward passes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

import ag
from ag.config import Config, DataConfig, LoraConfig, LossConfig, OptimConfig, TrainerConfig, WarmupConfig
from ag.config.keys import ConfigError
from ag.data.collate import Collator
from ag.data.module import DataModule
from ag.data.rows import Row
from ag.data.splits import Splits
from ag.errors import UserError
from ag.model import base as models
from ag.training.loggers import MetricsFile
from ag.training.losses import sample_labels
from ag.training.module import GatedLM
from tests.support import by_hand
from tests.support.bounds import PASSES, ROUNDINGS, hold, of_logits, of_nats
from tests.support.command import logged
from tests.support.common import factory
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

EPS = torch.finfo(torch.float32).eps
ROWS = [(12, 18), (7, 16), (9, 11), (5, 18)]  # prompt, length
DOCUMENTS = [(7, 1, 12, 6), (20, 4)]  # lengths, in two packed rows


def batch(rows=ROWS, seed=0, **more):
    longest = max(length for _, length in rows)
    ids = torch.randint(3, 128, (len(rows), longest), generator=torch.Generator().manual_seed(seed))
    columns, lengths = torch.arange(longest), torch.tensor([length for _, length in rows])[:, None]
    prompts = torch.tensor([prompt for prompt, _ in rows])
    valid = columns < lengths
    labels = ids.masked_fill(~(valid & (columns >= prompts[:, None])), -100)
    out = {"input_ids": ids.masked_fill(~valid, 0), "attention_mask": valid, "labels": labels, "prompt_length": prompts}
    return out | {name: torch.tensor(value) for name, value in more.items()}


def build(make, train="gates", gate=None, lora_noise=0.0, **parts):
    """A module on a tiny model; its log goes to ``module.logged``."""
    base = make().requires_grad_(False)
    gates = None if train == "lora" else gates_for(base, **(gate or {}))
    model = base if train == "gates" else models.add_lora(base, LoraConfig(rank=2))
    for name, parameter in model.named_parameters():
        if lora_noise and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=lora_noise)
    module = GatedLM(Config(train=train, **parts), model, gates)
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.update({name: float(value)})
    return module


def rows_of(data):
    for i, length in enumerate(data["attention_mask"].sum(1).tolist()):
        yield data["input_ids"][i, :length], int(data["prompt_length"][i])


def plain(module):
    return module.model.get_base_model() if hasattr(module.model, "get_base_model") else module.model


def nll_of(logits, tokens, prompt):
    return -logits[prompt - 1 : -1].log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0]


def measure(module, data, probabilities=None):
    """Losses of the response tokens of each row, and the flags of its prompt ``[L, Hkv, prompt]``.

    Adds the gates' probabilities to the list ``probabilities``.
    """
    losses, flags = [], []
    for tokens, prompt in rows_of(data):
        logits, said = by_hand.forward(plain(module), module.gates, tokens, prompt, probabilities)
        losses.append(nll_of(logits, tokens, prompt))
        flags.append(torch.stack(list(said.values())))
    return losses, flags


def in_both(module, values):
    """What a module gives in float64 and in float32."""
    return [(module.to(kind), values())[1] for kind in (torch.float64, torch.float32)]


def of_probabilities(module, data):
    """Bound the gates' probabilities as ``of_pass`` bounds logits."""

    def probabilities():
        said = []
        measure(module, data, said)
        return torch.cat(said)

    exact, single = in_both(module, probabilities)
    return PASSES * float((exact - single).abs().max())


@pytest.mark.parametrize(
    ("gate", "mean"),
    [
        ({"first_layer": 1, "sink_tokens": 2, "scope": "prompt"}, "soft"),
        ({"covers": "all", "prefill": "dense", "recent_tokens": 3}, "hard"),
    ],
    ids=["sinks", "all-dense"],
)
def test_the_loss_of_a_training_step(tiny_llama, gate, mean):
    module = build(tiny_llama, gate=gate, loss=LossConfig(alpha=3.0, beta=0.2, mean=mean))
    data = batch()
    loss = module.training_step(data, 0)
    losses, flags = measure(module, data)
    lm = sum(float(x.mean()) for x in losses) / len(losses)
    kept = sum(float(f.sum()) for f in flags) / sum(f.numel() for f in flags)
    nats = of_nats(plain(module))
    hold(module.logged["train/lm_loss"], lm, nats)
    hold(module.logged["train/gate_mean_hard"], kept, 2 * EPS)
    gate_mean = module.logged[f"train/gate_mean_{mean}"]
    hold(module.logged["train/eviction_loss"], abs(gate_mean - 0.2), 2 * EPS)
    hold(float(loss), lm + 3 * abs(gate_mean - 0.2), nats + 4 * EPS * float(loss))
    assert module.logged["train/loss"] == float(loss)
    gone = sum(float((~f[..., gate.get("sink_tokens", 0) :]).sum()) for f in flags)
    gated = sum(f.numel() for f in flags) * 3 / len(module.gates.layers)
    hold(module.logged["train/evicted"], gone / gated, 2 * EPS)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in module.gates.parameters())
    assert all(p.grad is None for p in module.model.parameters())


def test_gates_that_evict_all_but_the_sinks_are_seen(tiny_llama):
    """The collapse guard reads a share of what can go; the logged one is of all tokens."""
    module = build(tiny_llama, gate={"sink_tokens": 2})
    module.gates.config = replace(module.gates.config, bias=-1e3)
    data = batch()
    module.training_step(data, 0)
    assert module.evicted_in_batch.tolist() == [1.0] * len(module.gates.layers)
    prompts = data["prompt_length"]
    hold(module.logged["train/evicted"], float((prompts - 2).sum() / prompts.sum()), 2 * EPS)


def trainer(tmp_path, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **quiet | options)


def loader(*batches):
    return torch.utils.data.DataLoader(batches, batch_size=None)


def validate(module, tmp_path, *batches):
    del module.log
    out = trainer(tmp_path).validate(module, loader(*batches), verbose=False)[0]
    return out


def questions():
    """Two batches of questions of two answers each; the second one ends with a row that is only padding."""
    first = batch(
        [(9, 12), (9, 15), (4, 8), (4, 6)], 1, question=[0, 0, 1, 1], choice=[0, 1, 0, 1], target=[0, 0, 1, 1]
    )
    second = batch([(11, 13), (11, 16), (1, 1)], 2, question=[2, 2, -1], choice=[0, 1, 0], target=[1, 1, -1])
    return first, second


@pytest.mark.parametrize(
    "gate", [{"first_layer": 1, "sink_tokens": 2}, {"covers": "all", "sink_tokens": 1}], ids=["sinks", "all"]
)
def test_validation_metrics_by_hand(tiny_llama, tmp_path, gate):
    module = build(tiny_llama, gate=gate, loss=LossConfig(alpha=2.0, beta=0.9))
    batches, log = questions(), module.log
    got = validate(module, tmp_path, *batches)
    module.log = log
    assert validate(module, tmp_path, *batches) == got  # it begins anew
    tokens, correct, correct_norm, flags, probabilities = [], 0, 0, [], []
    for data in batches:
        losses, said = measure(module, data, probabilities)
        real = int((data["question"] >= 0).sum())  # a filler row counts for nothing
        flags += said[:real]
        probabilities[:] = probabilities[: sum(len(f) for f in flags)]
        for q in {int(x) for x in data["question"] if x >= 0}:
            mine = (data["question"] == q).nonzero().flatten().tolist()
            target = int(data["target"][mine[0]])
            tokens.append(losses[mine[target]])
            sums, means = ([float(f(losses[i])) for i in mine] for f in (torch.sum, torch.mean))
            correct += sums.index(min(sums)) == target
            correct_norm += means.index(min(means)) == target
    nats = of_nats(plain(module))
    lm_loss = float(torch.stack([x.mean() for x in tokens]).mean())  # each sample weighs the same, as in training
    hold(got["val/lm_loss"], lm_loss, nats)
    nll = float(torch.cat(tokens).mean())
    hold(got["val/perplexity"], math.exp(nll), (nats + 10 * EPS) * math.exp(nll))  # of exp, 10 roundings
    hold(got["val/accuracy"], correct / 3, 2 * EPS)
    hold(got["val/accuracy_norm"], correct_norm / 3, 2 * EPS)
    sinks = gate.get("sink_tokens", 0)
    total = sum(f.shape[-1] for f in flags)
    kept = sum(f.sum() for f in flags) / sum(f.numel() for f in flags)
    share = sum((~f[..., sinks:]).sum(-1) for f in flags) / total
    hold(got["val/gate_mean_hard"], float(kept), 2 * EPS)
    hold(module.validation.evicted, share, 2 * EPS)
    hold(got["val/evicted"], float(share.double().mean()) * len(module.gates.layers) / 3, 4 * EPS)
    bound = max(of_probabilities(module, data) for data in batches)
    hold(got["val/gate_mean_soft"], float(torch.cat(probabilities).mean()), bound)
    loss = lm_loss + 2 * abs(got["val/gate_mean_soft"] - 0.9)
    hold(got["val/loss"], loss, nats + 4 * EPS * loss)


@pytest.mark.slow
def test_regression_steps_train_the_gates_without_a_backward_pass_of_the_model(tiny_llama, tmp_path):
    module = build(
        tiny_llama, train="gates+lora", warmup=WarmupConfig(regress_steps=3, lr=0.01), optim=OptimConfig(lora_lr=1)
    )
    del module.log
    seen = []
    for layer in plain(module).model.layers:
        layer.register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(tmp_path, max_steps=3)
    run.fit(module, loader(*[batch(seed=i) for i in range(5)]))
    assert seen == [False] * 3 * 3
    for name, parameter in module.named_parameters():
        changed = not torch.equal(parameter, before[name])
        assert changed == name.startswith("gates."), name
    assert "train/regress_loss" in run.callback_metrics
    run = trainer(tmp_path, max_steps=5, logger=MetricsFile(tmp_path), log_every_n_steps=1)
    run.fit(module, loader(*[batch(seed=i) for i in range(5)]))
    assert seen[9:] == [False] * 9 + [True] * 2 * 3
    assert any(not torch.equal(p, before[name]) for name, p in module.named_parameters() if "lora_B" in name)
    steps = {float(run.optimizers[0].state[p]["step"]) for p in module.trainable()["lora"]}
    assert steps == {2}  # Adam corrects the adapters' moments as in a run without a warm start
    measured = [[name in line for name in ("train/regress_loss", "train/lm_loss")] for line in logged(tmp_path)]
    assert measured == [[True, False]] * 3 + [[False, True]] * 2


@pytest.mark.parametrize(("steps", "kept"), [(2, False), (3, False), (4, True)])
def test_states_of_adapters_that_a_warm_start_did_not_make_are_dropped(tiny_llama, steps, kept):
    """Loading a checkpoint under FSDP2 steps each parameter without a state once."""
    module = build(tiny_llama, train="gates+lora", warmup=WarmupConfig(regress_steps=3))
    optimizer = torch.optim.AdamW([p for parameters in module.trainable().values() for p in parameters])
    for parameters in module.trainable().values():
        for parameter in parameters:
            optimizer.state[parameter]["step"] = torch.tensor(1.0)
    module._trainer = SimpleNamespace(optimizers=[optimizer], max_steps=9, lr_scheduler_configs=[], global_step=steps)
    module.on_train_start()
    for name, parameters in module.trainable().items():
        assert {p in optimizer.state for p in parameters} == {kept or name == "gates"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"warmup": WarmupConfig(regress_steps=4)}, "warmup.regress_steps=4 with trainer.max_epochs=3: the main"),
        ({"loss": LossConfig(anneal_steps=4)}, "loss.anneal_steps=4 with warmup.regress_steps=0, trainer.max_epochs=3"),
        ({"optim": OptimConfig(warmup_steps=4)}, "optim.warmup_steps=4 with trainer.max_epochs=3: the learning rate"),
    ],
)
def test_schedules_longer_than_the_epochs_are_refused(tiny_llama, tmp_path, given, said):
    """As those that are longer than trainer.max_steps, once the number of rows is known."""
    settings = {"trainer": TrainerConfig(max_epochs=3)}
    module = build(tiny_llama, **settings | given)
    with refuses(ConfigError, said, "in 3 steps"):
        trainer(tmp_path, max_epochs=3).fit(module, loader(batch()))


def test_every_step_has_the_loss_of_its_rows(tiny_llama, tmp_path):
    """13 rows, 2 at a time and 4 times a step: 8 rows, then 4 without a full window; each is one batch."""
    draw = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 128, (10 + i,), generator=draw).numpy() for i in range(13)]
    rows = [Row(text.astype(np.int32), len(text) // 2) for text in texts]
    settings = Config(data=DataConfig(batch_size=2)).data
    source = DataModule(Splits(rows, [[rows[0]]]), 0, settings, seed=0)
    steps = [[]]

    class Watched(GatedLM):
        def training_step(self, data, batch_idx):
            steps[-1].append(data)
            return super().training_step(data, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            steps[-1].append(gradients(self))
            steps.append([])

        def configure_optimizers(self):
            return torch.optim.SGD(self.gates.parameters(), lr=0.0)

    options = {"loss": LossConfig(alpha=0.0), "trainer": TrainerConfig(accumulate=4)}
    made = build(tiny_llama, **options)
    module = Watched(made.config, made.model, made.gates)
    options = {"logger": MetricsFile(tmp_path), "log_every_n_steps": 1, "limit_val_batches": 0}
    options |= {"max_epochs": 2, "accumulate_grad_batches": 4, "use_distributed_sampler": False}
    trainer(tmp_path, **options).fit(module, source)
    assert [len(step) for step in steps] == [5, 3, 5, 3, 0]
    made.config.trainer.accumulate = 1
    for (*parts, got), line in zip(steps, logged(tmp_path), strict=False):
        whole = Collator(0)([Row(tokens.numpy(), prompt) for part in parts for tokens, prompt in rows_of(part)])

        def values(whole=whole):
            made.zero_grad()
            made.training_step(whole, 0).backward()
            return gradients(made)

        right, want = in_both(made, values)
        made.zero_grad()
        hold((got - want).norm(), 0.0, ROUNDINGS * float((want - right).norm()))
        hold(line["train/lm_loss"], made.logged["train/lm_loss"], of_nats(plain(made)))
        hold(line["train/loss"], made.logged["train/loss"], of_nats(plain(made)))


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.gates.parameters()])


def divergences(module, base, data):
    """KL of each row's response tokens from a model without gates and adapter, and a bound.

    A nat of either model's counts as often as the other one's probability is another: dKL is at most the sum over
    tokens of |p - q| |ds| and of p |log p - log q| |dt|.
    """
    found, apart = [], 0.0
    for tokens, prompt in rows_of(data):
        with torch.no_grad():
            teacher = base(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        student = by_hand.forward(plain(module), module.gates, tokens, prompt)[0][prompt - 1 : -1].log_softmax(-1)
        found.append((teacher.exp() * (teacher - student)).sum(-1))
        apart = max(apart, float((teacher.exp() * (teacher - student).abs()).sum(-1).max()))
    return found, of_nats(plain(module)) * (1 + apart)


def test_the_teacher_has_open_gates_and_no_adapter(tiny_llama):
    module = build(tiny_llama, train="gates+lora", gate={"bias": 1000.0}, loss=LossConfig(objective="kl", alpha=0.0))
    data = batch()
    hold(module.training_step(data, 0), 0.0, of_nats(plain(module)))
    assert "train/lm_loss" not in module.logged
    module = build(
        tiny_llama, train="gates+lora", lora_noise=0.2, loss=LossConfig(objective="kl", alpha=0.0, chunk_tokens=5)
    )
    loss = module.training_step(data, 0)
    want, bound = divergences(module, tiny_llama(), data)
    hold(loss, sum(float(x.mean()) for x in want) / len(want), bound)
    assert float(loss) > 0.1
    loss.backward()
    groups = module.trainable()
    assert all(p.grad.abs().sum() > 0 for p in [*groups["gates"], *groups["lora"]])


def test_sample_flags_are_those_of_the_first_prompts(tiny_llama, tmp_path):
    module = build(tiny_llama, gate={"sink_tokens": 1})
    data = batch([*ROWS, (6, 9)])
    validate(module, tmp_path, data, batch(seed=5))
    assert len(module.validation.sample_flags) == 4
    for flags, (_, prompt), said in zip(
        module.validation.sample_flags, rows_of(data), measure(module, data)[1], strict=False
    ):
        assert torch.equal(flags, said | (torch.arange(prompt) < 1))
    first, _ = questions()
    validate(other := build(tiny_llama), tmp_path, first)
    assert [flags.shape[-1] for flags in other.validation.sample_flags] == [9, 4]  # one choice of each question


def test_kl_in_validation(tiny_llama, tmp_path):
    module = build(tiny_llama, loss=LossConfig(objective="kl", alpha=0.0))
    data = batch()
    filler = batch([(1, 1)])
    got = validate(module, tmp_path, data, filler)
    values, bound = divergences(module, tiny_llama(), data)
    assert got["val/kl_loss"] == got["val/loss"]
    hold(got["val/loss"], sum(float(x.mean()) for x in values) / 4, bound)


def test_the_adapter_only_baseline(tiny_llama, tmp_path):
    module = build(tiny_llama, train="lora", lora_noise=0.1)
    data = batch()
    loss = module.training_step(data, 0)
    with torch.no_grad():
        logits = [plain(module)(tokens[None]).logits[0] for tokens, _ in rows_of(data)]
    losses = [nll_of(x, *row) for x, row in zip(logits, rows_of(data), strict=True)]
    mean = sum(float(x.mean()) for x in losses) / 4
    hold(loss, mean, of_nats(plain(module)))
    assert set(module.logged) == {"train/lm_loss", "train/loss"}
    loss.backward()
    assert all(p.grad is not None for p in module.trainable()["lora"])
    assert module.trainable()["gates"] == []
    got = validate(module, tmp_path, data)
    assert set(got) - {"step"} == {"val/lm_loss", "val/perplexity", "val/loss"}
    hold(got["val/loss"], mean, of_nats(plain(module)))


def rates(module, group, total, steps=None):
    module._trainer = SimpleNamespace(estimated_stepping_batches=total)
    return [module.learning_rate(group, step) for step in range(steps or total)]


def test_learning_rates(tiny_llama):
    optim = {"gate_lr": 0.8, "lora_lr": 0.2, "warmup_steps": 4}
    module = build(tiny_llama, optim=OptimConfig(**optim))
    got = rates(module, "gates", 12, 13)
    assert got[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert got[8] == pytest.approx(0.4)
    assert got[6] == pytest.approx(0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert got[12] == pytest.approx(0)
    assert rates(module, "lora", 12) == pytest.approx([x / 4 for x in got[:12]])
    constant = build(tiny_llama, optim=OptimConfig(**optim, schedule="constant"))
    assert rates(constant, "gates", 8) == pytest.approx([0.2, 0.4, 0.6] + [0.8] * 5)
    warm = build(tiny_llama, optim=OptimConfig(**optim), warmup=WarmupConfig(regress_steps=10, lr=3.0))
    cycle = rates(warm, "gates", 22)
    assert cycle[:3] == pytest.approx([1.0, 2.0, 3.0])
    assert cycle[9] == pytest.approx(0)
    assert cycle[3:10] == sorted(cycle[3:10], reverse=True)
    assert cycle[4] == pytest.approx(3 * (1 + math.cos(math.pi * 2 / 7)) / 2)
    assert rates(warm, "lora", 22)[:10] == [0.0] * 10
    assert cycle[10:] == pytest.approx(got[:12])


def test_the_target_of_the_mean_gate_falls(tiny_llama, tmp_path):
    """Two steps of regression, then 1, 0.8, 0.6, 0.4, 0.2 and no lower; the loss of each step is made of its target."""
    loss = LossConfig(alpha=3.0, beta=0.2, anneal_steps=4, mean="hard")
    module = build(tiny_llama, gate={"estimator": "soft"}, loss=loss, warmup=WarmupConfig(regress_steps=2))
    del module.log
    module.train()
    run = trainer(tmp_path, max_steps=8, logger=MetricsFile(tmp_path), log_every_n_steps=1)
    run.fit(module, loader(*[batch(seed=seed) for seed in range(8)]), loader(batch(seed=9)))
    steps = logged(tmp_path)
    assert ["train/beta" in line for line in steps] == [False] * 2 + [True] * 6
    hold(torch.tensor([line["train/beta"] for line in steps[2:]]), torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.2]), EPS)
    for line in steps[2:]:
        distance = abs(line["train/gate_mean_hard"] - line["train/beta"])
        hold(line["train/eviction_loss"], distance, 2 * EPS)
        hold(line["train/loss"], line["train/lm_loss"] + 3 * distance, 4 * EPS * line["train/loss"])
    constant = build(tiny_llama, loss=LossConfig(beta=0.3), warmup=WarmupConfig(regress_steps=2))
    assert [constant.gated_loss.beta(step) for step in (2, 3, 100)] == [0.3] * 3


@pytest.mark.parametrize(("objective", "covers"), [("lm", "prompt"), ("kl", "all")])
def test_a_step_under_a_drawn_share(tiny_llama, objective, covers):
    """The boundary is a quantile of the logits that the model with its adapters gives each token alone, densely."""
    loss = LossConfig(objective=objective, share_low=0.2, share_high=0.9)
    module = build(tiny_llama, train="gates+lora", gate={"covers": covers, "bias": 0.4}, loss=loss, lora_noise=0.1)
    module._trainer = SimpleNamespace(current_epoch=1, global_rank=0, global_step=0, _results=None)
    module.log, log = lambda *given, sync_dist, **more: (averaged.add(sync_dist), log(*given, **more)), module.log
    data, averaged = batch(), set()
    said, shares, home = [], [], module.gates.config
    module.gates.config = replace(home, bias=1e3)  # every gate is open
    for tokens, prompt in rows_of(data):
        gating = ag.Gating(module.gates, torch.ones(1, len(tokens)), torch.tensor([prompt]))
        with torch.no_grad():
            module.model(tokens[None], gating=gating, use_cache=False)
        said += [x.flatten() for x in gating.logits.values()]
    module.gates.config = home
    ranked, bound = torch.cat(said).sort().values, of_probabilities(module, data)
    for place in (3, 4, 3):
        module.gates.config = home
        module.on_train_batch_start(data, place)
        got = float(module.training_step(data, place).detach())
        share = module.logged["train/share"]
        shares.append((share, got))
        boundary = float(ranked[round((1 - share) * len(ranked)) - 1 :][:2].mean())
        module.gates.config = replace(home, bias=-boundary)
        plain_loss = build_like(module, loss)
        hold(got, plain_loss.training_step(data, place), of_nats(tiny_llama()))
        assert {"train/eviction_loss", "train/beta"}.isdisjoint(module.logged)
        assert module.logged["train/loss"] == got
        for name in ("train/gate_mean_hard", "train/gate_mean_soft", "train/evicted"):
            hold(module.logged[name], plain_loss.logged[name], bound, name)
    assert averaged == {True}  # each rank has its own share
    assert shares[0] == shares[2] != shares[1]
    assert all(0.2 <= share <= 0.9 for share, _ in shares)


def test_the_loss_of_sampled_tokens(tiny_llama):
    """Those that are drawn for a step, the same ones whenever that step is taken; each weighs as among all."""
    module = build(tiny_llama, loss=LossConfig(alpha=0.0, sampled_tokens=3))
    module._trainer = SimpleNamespace(current_epoch=1, global_rank=0, global_step=0, _results=None)
    data, found = batch(), []
    for place in (3, 4, 3):
        module.on_train_batch_start(data, place)
        state = torch.get_rng_state()
        found.append(float(module.training_step(data, place).detach()))
        torch.set_rng_state(state)
        drawn = sample_labels(data["labels"], 3)[:, 1:] != -100
        losses, _ = measure(module, data)
        counts = [len(x) for x in losses]
        assert drawn.sum() == 3 < sum(counts)
        rows = zip(drawn, rows_of(data), losses, strict=True)
        mean = sum(float(x[d[p - 1 : len(t) - 1]].sum()) / len(x) for d, (t, p), x in rows) / len(losses)
        weights = sum(counts) / min(counts) / len(counts)  # of the three, at most
        hold(found[-1], mean * sum(counts) / 3, of_nats(plain(module)) * weights)
    assert found[0] == found[2] != found[1]


def build_like(module, loss):
    """The same module with the share of its gates as they are, and no eviction loss."""
    config = replace(module.config, loss=LossConfig(objective=loss.objective, alpha=0.0))
    other = GatedLM(config, module.model, module.gates)
    other.logged = {}
    other.log = lambda name, value, **_: other.logged.update({name: float(value)})
    return other


@pytest.mark.parametrize(
    ("covers", "share_high", "train"), [("all", 0.0, "gates"), ("prompt", 0.7, "gates"), ("prompt", 0.7, "gates+lora")]
)
def test_validation_measures_the_boundaries_of_shares(tiny_llama, tmp_path, covers, share_high, train):
    """From the logits under the flags, or from dense ones where training draws shares; padding rows do not count."""
    loss, noise = LossConfig(share_high=share_high), 0.1 * (train == "gates+lora")
    module = build(tiny_llama, train=train, gate={"covers": covers}, loss=loss, lora_noise=noise)
    data, said = batch([(30, 44), (61, 70), (22, 40)], seed=3), []
    home = module.gates.config
    module.gates.config = replace(home, bias=1e3) if share_high else home
    for tokens, prompt in rows_of(data):
        gating = ag.Gating(module.gates, torch.ones(1, len(tokens)), torch.tensor([prompt]), hard=True)
        with torch.no_grad():
            module.model(tokens[None], gating=gating, use_cache=False)
        said += [x.flatten() for x in gating.logits.values()]
    module.gates.config = home
    assert module.gates.calibration is None
    validate(module, tmp_path, data, batch([(1, 1)], seed=4))
    logits, table = torch.cat(said), module.gates.calibration
    for share, boundary in zip(table.shares, table.boundaries, strict=True):
        above = int((logits > boundary).sum())
        assert abs(above - share * len(logits)) <= 2.5  # a bin of the counts that has two logits, and half of one
    if not share_high:  # asked for what the flags keep, between two rows of the table, it keeps that
        kept = float(module.gates.flags(logits).float().mean())
        found = float((logits > table.boundary(kept)).float().mean())
        between = 0.05 * len(logits)  # two rows, as if drawn: 5 deviations of how many lie above the middle
        assert abs(found - kept) <= 5 * between**0.5 / 2 / len(logits)
    saved = {"state_dict": {}}
    module.on_save_checkpoint(saved)
    assert saved["calibration"] == table.record()


def test_the_optimiser_has_a_group_for_each_part(tiny_llama, tmp_path):
    optim = OptimConfig(gate_lr=0.5, lora_lr=0.25, weight_decay=0.1, beta1=0.8, beta2=0.7, warmup_steps=2)
    for train, names in (("gates+lora", ["gates", "lora"]), ("lora", ["lora"])):
        module = build(tiny_llama, train=train, optim=optim)
        del module.log
        run = trainer(tmp_path, max_steps=1)
        run.fit(module, loader(*[batch()] * 2))
        groups = run.optimizers[0].param_groups
        assert [group["name"] for group in groups] == names
        assert all((group["betas"], group["weight_decay"]) == ((0.8, 0.7), 0.1) for group in groups)
        for group in groups:
            assert group["lr"] == {"gates": 0.5, "lora": 0.25}[group["name"]]  # after the first of two warm-up steps
            assert {id(p) for p in group["params"]} == {id(p) for p in module.trainable()[group["name"]]}
        trained = {id(p) for group in groups for p in group["params"]}
        assert trained == {id(p) for p in module.parameters() if p.requires_grad}


def test_a_checkpoint_holds_what_is_trained(tiny_llama):
    module = build(tiny_llama, train="gates+lora", lora_noise=0.3)
    saved = {"state_dict": dict(module.state_dict())}
    module.on_save_checkpoint(saved)
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == names
    assert all("lora_" in name or name.startswith("gates.layers.") for name in names)
    assert len(names) == 3 * 4 * 2 + 3 * 4
    other = build(tiny_llama, train="gates+lora", gate={"seed": 7})
    other.on_load_checkpoint(saved)
    other.load_state_dict(saved["state_dict"], strict=other.strict_loading)
    data = batch()
    assert float(other.training_step(data, 0)) == float(module.training_step(data, 0))
    for odd in (build(tiny_llama), build(tiny_llama, train="gates+lora", gate={"kind": "linear"})):
        with refuses(UserError, "tensors"):
            odd.on_load_checkpoint(saved)
    with refuses(UserError, "24 tensors", "model.base_model", "lora_A"):
        build(tiny_llama).on_load_checkpoint(saved)


def test_the_loss_of_packed_documents(tiny_llama):
    module = build(tiny_llama, gate={"sink_tokens": 2}, loss=LossConfig(alpha=3.0, beta=0.2))
    draw = torch.Generator().manual_seed(3)
    texts = [[[*torch.randint(3, 128, (n - 1,), generator=draw).tolist(), 2] for n in row] for row in DOCUMENTS]
    together = Collator(0, end=2)([Row(np.array(sum(row, []), dtype=np.int32)) for row in texts])
    probabilities, gone, lm = [], 0, []
    for row in texts:
        losses = []
        for tokens in map(torch.tensor, row):
            logits, flags = by_hand.forward(plain(module), module.gates, tokens, len(tokens), probabilities)
            losses.append(nll_of(logits, tokens, 1))
            gone += sum(int((~f[:, 2:]).sum()) for f in flags.values())
        lm.append(float(torch.cat(losses).mean()))
    mean = torch.cat(probabilities)
    loss = module.training_step(together, 0)
    # a gate's probability moves by a quarter of its logit at most, which moves as the model's do
    bound = of_nats(plain(module)) + 3 * of_logits(plain(module)) / 4
    hold(loss, sum(lm) / 2 + 3 * abs(float(mean.mean()) - 0.2), bound)
    hold(module.logged["train/evicted"], gone / len(mean), 2 * EPS)


@pytest.mark.parametrize("family", ["Phi", "Starcoder2"])
def test_a_frozen_model_computes_the_same_twice_while_it_trains(family):
    """Dropout would be noise in what gates learn from; that of adapters stays."""
    rates = {"resid_pdrop": 0.3, "attention_dropout": 0.3, "embedding_dropout": 0.3, "residual_dropout": 0.3}
    base = factory(family, **rates)().requires_grad_(False)
    adapted = models.add_lora(base, LoraConfig(rank=2, dropout=0.25, targets=["q_proj"]))
    module = GatedLM(Config(), adapted, gates_for(base)).train()
    first, second = (module.gated_loss.teacher(batch()) for _ in range(2))
    assert torch.equal(first, second)
    assert {x.p for name, x in adapted.named_modules() if "lora_dropout.default" in name} == {0.25}
