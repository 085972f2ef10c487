"""The plan of a run against the bytes and counts of real, small models."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig

import ag
from ag import plan as command
from ag.commands.plan import PlanConfig
from ag.commands.serve import ServeConfig
from ag.config import Config, DataConfig, LoraConfig, LossConfig, ModelConfig, TrainerConfig
from ag.config.command_line import parse
from ag.config.gate import GateConfig
from ag.config.recipes import resolve
from ag.data.lengths import RowSample, sample_rows
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.hardware import Card
from ag.model import base as models
from ag.model.structure import decoder_of
from ag.plan import serving_text
from ag.serve import Scheduler
from ag.serve.admission import Admission
from ag.training.memory_plan import plan, report
from ag.training.module import GatedLM
from tests.model.test_architectures import tiny
from tests.support.refused import names, refuses

LAYERS, LENGTH = 6, 160


def config_of(folder, train="gates+lora", strategy="auto", devices=1, precision="32-true", **model):
    return Config(
        train=train,
        model=ModelConfig(name=str(folder), **model),
        lora=LoraConfig(rank=4),
        gate=GateConfig(num_heads=2, head_dim=8),
        data=DataConfig(kind="text", name="words", packing="packed", max_length=LENGTH, batch_size=2),
        trainer=TrainerConfig(accelerator="cpu", strategy=strategy, devices=devices, precision=precision),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    path = tmp_path_factory.mktemp("planned")
    tiny_llama(num_hidden_layers=LAYERS).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def real(config):
    base, _ = models.load_base(config.model)
    gates = None if config.train == "lora" else AttentionGates(base.config, config.gate)
    module = GatedLM(config, base if config.train == "gates" else models.add_lora(base, config.lora), gates)
    return module.train()


def saved_bytes(module):
    """Bytes that the forward pass of the decoder and the gates keeps for the backward pass, and its output.

    Under regression, those that the loss keeps.
    """
    storages, regresses = {}, module.config.loss.objective == "regress"

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    owned = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    ids = torch.randint(3, 128, (2, LENGTH))
    mask = torch.ones_like(ids, dtype=torch.bool)
    gating = None if module.gates is None or regresses else Gating(module.gates, mask)
    precision = module.config.trainer.precision
    with (
        saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        states = module.gated_loss.loss(batch, 0).loss if regresses else module.gated_loss.run_decoder(batch, gating)
        means = [] if gating is None else [logits.sigmoid().mean() for logits in gating.logits.values()]
    note(states)
    assert states.requires_grad
    assert len(means) == (0 if gating is None else len(module.gates.layers))
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in owned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "precision", "gate"),
    [
        ("gates", "32-true", {"window": 32, "shortcut": True, "covers": "all"}),
        ("gates+lora", "bf16-mixed", {}),
        ("lora", "32-true", {}),
    ],
    ids=["gates", "both-bf16", "lora"],
)
def test_parameters_are_exact_and_activations_those_that_the_step_saves(folder, train, precision, gate):
    config = config_of(folder, train, precision=precision)
    config.gate = GateConfig(num_heads=2, head_dim=8, **gate)
    module, found = real(config), plan(config)
    trained = {name: sum(p.numel() for p in group) for name, group in module.trainable().items()}
    base = sum(p.numel() for p in module.model.parameters() if not p.requires_grad)
    assert found.parameters == {"base": base, "gates": trained["gates"], "LoRA": trained["lora"]}
    assert found.memory["base weights"] == 4 * base
    assert found.memory["gates"] + found.memory["LoRA"] == found.memory["gradients"] == 4 * sum(trained.values())
    plain, kept = found.activations
    assert saved_bytes(module) == pytest.approx(plain, rel=0.1)
    config.model.gradient_checkpointing = True
    assert saved_bytes(real(config)) == pytest.approx(kept, rel=0.1)
    assert kept < plain / 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_regression_has_a_graph_of_the_gates_alone(folder, precision):
    """Its work is that of the forward pass, and four operations for each weight of a gate: no head, no model."""
    config = config_of(folder, "gates", precision=precision)
    config.gate, config.loss = GateConfig(kind="linear"), LossConfig(objective="regress")
    found, module = plan(config), real(config)
    assert found.activations[0] == found.activations[1] == pytest.approx(saved_bytes(module), rel=0.1)
    weights = sum(w.numel() for name, w in module.named_parameters() if w.ndim == 2 and "layers" in name)
    gates = sum(w.numel() for w in module.gates.parameters())
    attention = LAYERS * 2 * LENGTH * LENGTH / 2 * 64 * 2 * 2
    assert found.flops == 2 * LENGTH * (2 * weights + 4 * gates) + attention
    assert found.memory["logits or temporary"] <= plan(replace(config, loss=LossConfig())).memory["logits or temporary"]
    config.model.gradient_checkpointing = True
    assert plan(config) == found


def test_operations_of_a_step(folder):
    """With LoRA alone: each weight forward and backward, LoRA's twice backward, causal attention, and the head.

    Checkpointing repeats the forward pass of the layers, but for the last matrix of each, whose output is not kept.
    """
    config = config_of(folder, "lora")
    module = real(config)
    linear = [m.weight for m in decoder_of(module.model).modules() if isinstance(m, torch.nn.Linear)]
    trained = sum(w.numel() for w in linear if w.requires_grad)
    tokens, head = 2 * LENGTH, 128 * 64
    attention = LAYERS * tokens * LENGTH / 2 * 64 * 2 * (2 + 5)  # two products forward, five backward
    work = tokens * (4 * sum(w.numel() for w in linear) + 2 * trained + 4 * head) + attention
    assert plan(config).flops == work
    config.model.gradient_checkpointing = True
    again = tokens * 2 * (sum(w.numel() for w in linear) - LAYERS * 128 * 64) + attention * 2 / 7
    assert plan(config).flops == pytest.approx(work + again, rel=1e-12)


@pytest.mark.parametrize("objective", ["lm", "kl"])
@pytest.mark.parametrize("chunk", [16, 1024])
def test_operations_of_the_head(folder, objective, chunk):
    """Forward and backward, for a teacher forward alone; the size of a chunk does not matter."""
    loss = LossConfig(objective=objective, chunk_tokens=chunk)
    config = replace(config_of(folder, "gates"), loss=loss)
    module, tokens = real(config), 2 * LENGTH
    hidden, teacher = torch.randn(2, LENGTH + 1, 64, requires_grad=True), torch.randn(2, LENGTH + 1, 64)
    labels = torch.randint(3, 128, (2, LENGTH + 1))
    with FlopCounterMode(display=False) as counted:
        module.gated_loss.objective.tokens(module.model, hidden, teacher, labels, chunk)[0].sum().backward()
    one_token = replace(config, loss=replace(loss, sampled_tokens=1))
    assert plan(config).flops - plan(one_token).flops == counted.get_total_flops() / tokens * (tokens - 1)


def test_a_drawn_share_with_adapters_and_a_teacher_takes_two_dense_passes(folder):
    """With the adapters for the boundary, and without them for the teacher."""

    def work(objective, share_high):
        loss = LossConfig(objective=objective, share_high=share_high)
        return plan(replace(config_of(folder, "gates+lora"), loss=loss)).flops

    one_pass = work("lm", 0.7) - work("lm", 0.0)
    assert one_pass > 0 and work("kl", 0.7) - work("kl", 0.0) == one_pass
    gates_alone = replace(config_of(folder, "gates"), loss=LossConfig(objective="kl"))
    drawn = replace(gates_alone, loss=LossConfig(objective="kl", share_high=0.7))
    assert plan(drawn).flops == plan(gates_alone).flops


def test_experts_that_a_token_goes_to_count(tmp_path):
    """Two of eight, and all in the weights."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    one, eight = (
        MixtralConfig(**shape, intermediate_size=96, vocab_size=128, num_local_experts=count, num_experts_per_tok=2)
        for count in (2, 8)
    )
    plans = []
    for name, geometry in (("one", one), ("eight", eight)):
        geometry.save_pretrained(tmp_path / name)
        plans.append(plan(config_of(tmp_path / name)))
    small, large = plans
    assert large.parameters["base"] - small.parameters["base"] == 2 * 6 * (3 * 64 * 96 + 64)  # with the router's rows
    assert large.activations == small.activations
    assert large.flops == small.flops


def test_ddp_copies_and_fsdp2_divides(folder):
    one, ddp, fsdp = (
        plan(config_of(folder, strategy=strategy, devices=devices, dtype="bfloat16"))
        for strategy, devices in (("auto", 1), ("ddp", 4), ("fsdp2", 4))
    )
    for name in ("base weights", "gates", "optimiser"):
        assert ddp.memory[name] == one.memory[name]
    assert ddp.memory["all-reduce buckets"] == one.memory["gradients"]
    for name in ("gates", "LoRA", "gradients", "optimiser"):
        assert fsdp.memory[name] == one.memory[name] / 4
    head = 2 * (2 * 128 * 64 + 64)
    assert fsdp.memory["base weights"] == head + (one.memory["base weights"] - head) / 4
    assert ddp.tokens == 4 * one.tokens and ddp.flops == one.flops


def test_nf4_bytes(tmp_path, tiny_llama, tiny_tokenizer):
    pytest.importorskip("bitsandbytes")
    tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=2).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    config = config_of(tmp_path, "gates", dtype="float16", precision="32-true", quantization="nf4")
    model, _ = models.load_base(config.model, device="cpu")
    measured = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        measured += 0 if state is None else state.absmax.nbytes + state.state2.absmax.nbytes
    found = plan(config)
    assert found.memory["base weights"] == pytest.approx(measured, rel=0.002)
    assert found.parameters["base"] == plan(replace(config, model=ModelConfig(name=str(tmp_path)))).parameters["base"]


@pytest.mark.slow
def test_replay_has_no_plan(folder):
    with refuses(UserError, "loss.replay=true", "loss.replay=false"):
        loss = LossConfig(objective="kl", share_high=0.7, replay=True)
        plan(replace(config_of(folder), train="gates", loss=loss, data=DataConfig(kind="text", name="words")))


@pytest.mark.parametrize("recipe", ["reason", "remember", "smollm2_remember"])
def test_the_error_about_replay_names_what_gives_a_plan_of_a_shipped_recipe(recipe):
    with pytest.raises(UserError, match="replay") as refused:
        plan(resolve(Config, {"recipe": recipe}))
    fix = dict(re.findall(r"([\w.]+)=(\w+)", str(refused.value).partition("expected")[2]))
    assert plan(resolve(Config, {"recipe": recipe, **fix})).total > 0


def test_report_of_a_json_file_which_is_enough(folder, tmp_path, capsys):
    shutil.copy(folder / "config.json", tmp_path / "other.json")
    config = config_of(tmp_path / "other.json")
    text, found = report(config, 1.0), plan(config)
    assert found == plan(config_of(folder))
    assert f"{found.tokens:,} tokens" in text and f"(given): {found.flops / 1e12:.3g} s a step" in text
    arguments = [f"model.name={folder}", "data.kind=facts", "trainer.accelerator=cpu", "train=gates"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "peak of a step" in out and "all rows are full, because those of data.kind=facts are generated" in out
    names(out, "tflops=NUMBER", "tflops=here")
    assert "s a step" not in out
    assert command.main([*arguments, "tflops=here"]) == 0
    out = capsys.readouterr().out
    assert "measured on matrix products" in out and "steps, about" in out and "at most" not in out
    assert command.main([*arguments, "model.name=./nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "name", "gib", "devices"),
    [
        ("4090x4", "4090", 24, 4),
        ("H100", "h100", 80, 1),
        ("24GiBx2", "24 GiB", 24, 2),
        ("0.001GiB", "0.001 GiB", 0.001, 1),
    ],
)
def test_a_card_has_a_verdict(gpu, name, gib, devices, folder, capsys):
    config = PlanConfig(**vars(config_of(folder)), gpu=gpu)
    assert config.card == (name, gib) and config.trainer.devices == devices
    found = plan(config)
    fits = found.total <= 0.85 * gib * 2**30
    assert fits == (gib > 1)
    *_, training, inference = report(config, 1.0, config.card).splitlines()
    assert training.startswith(f"training fits {name}: {'yes' if fits else 'no'}, {found.total / 2**30:.1f} of ")
    room = 0.85 * gib * 2**30 - found.memory["base weights"]
    assert f" of {max(0, int(room // found.kv_cache)):,} rows" in inference


def test_rows_of_real_lengths_have_fewer_tokens_and_operations(folder, tmp_path, capsys):
    """Rows of 3, 5 and 20 words: a plan of the run, and not of full rows, counts what its batches hold."""
    rows = [{"prompt": "w1 " * number, "response": "w2"} for number in (2, 4, 19, 2)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"model.name={folder}",
        "data.kind=sft",
        "data.name=own",
        f"data.root={tmp_path}",
        "data.val_samples=1",
    ]
    arguments += ["data.batch_size=3", "trainer.accumulate=2", "trainer.devices=2", "train=gates", "tflops=1"]
    config = parse(arguments, PlanConfig, "ag.plan").config
    sample = sample_rows(config, 512)
    assert isinstance(sample, RowSample) and sample.count == 3
    assert command.main(arguments) == 0
    out, found = capsys.readouterr().out, plan(config, (sample.mean_batch_length, sample.with_loss))
    assert found.tokens == 3 * 2 * 2 * sample.mean_batch_length < plan(config).tokens
    assert f"one step: {found.tokens:,} tokens, {found.flops / 1e12:,.3g} tera-operations" in out
    assert f"{plan(config).total / 2**30:.2f}" in out  # the memory is of full rows
    longest = plan(config, (sample.longest, sample.longest))
    assert longest.total < plan(config).total and f"take {longest.total / 2**30:.2f} GiB" in out


def test_the_longest_rows_have_no_more_loss_than_full_rows(folder):
    data = DataConfig(kind="text", name="words", prompt_min=8, prompt_max=LENGTH - 16, continuation=16, batch_size=2)
    config = replace(config_of(folder), data=data)
    assert plan(config, (LENGTH, LENGTH)) == plan(config)


@pytest.mark.parametrize("training", [{"strategy": "fsdp2", "devices": 4}, {"precision": "bf16-mixed"}])
def test_inference_has_the_whole_weights_and_caches_in_the_type_of_the_model(folder, training):
    one, other = (report(config_of(folder, **given), None, Card("small", 0.01)) for given in ({}, training))
    *_, inference = one.splitlines()
    assert other.endswith(f"\n{inference}") and " of 0 rows" not in inference


@pytest.mark.parametrize("training", [{"strategy": "fsdp2", "devices": 4}, {"quantization": "nf4"}])
def test_a_server_has_the_whole_weights_in_the_type_of_the_model(folder, training):
    one, other = (
        serving_text(PlanConfig(**vars(config_of(folder, **given))), Card("small", 0.004), 0.25)
        for given in ({}, training)
    )
    assert other == one and " fits 0 requests" not in one


def test_an_unknown_card_is_refused(folder):
    with refuses(UserError, "gpu=4091", "4090x4", "h100"):
        PlanConfig(**vars(config_of(folder)), gpu="4091")


@pytest.mark.parametrize("share", [1, 0.25])
def test_the_requests_of_a_server_are_those_that_it_tells_at_its_start(folder, tiny_tokenizer, share, capsys):
    config = config_of(folder, train="gates")
    memory = int(0.85 * 0.004 * 2**30 - plan(config).memory["base weights"])
    model, _ = models.load_base(config.model)
    pool, policy = ag.Pool(model, memory), ag.policy("full") if share == 1 else ag.policy("snapkv", share)
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool, batch=10**6)
    arguments = [f"model.name={folder}", "data.kind=facts", "trainer.accelerator=cpu", "train=gates", "tflops=1"]
    assert command.main([*arguments, "gpu=0.004GiB", f"share={share}"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    told = scheduler.admission.capacity_text(pool.capacity, scheduler.context_length, scheduler.batch)
    assert " fits 0 requests" not in told and line.startswith("a server with memory=0.0GiB")
    assert line.endswith(f" that keeps {share} of each prompt: {told}")


def test_requests_of_a_server_with_a_hybrid_model(tmp_path, capsys):
    """Layers of linear attention are not run, though a cache of such a model tries them."""
    model = tiny("qwen3_5_text", vocab_size=300)
    model.config.save_pretrained(tmp_path)
    arguments = [f"model.name=random:{tmp_path}", "data.kind=facts", "trainer.accelerator=cpu", "train=gates"]
    assert command.main([*arguments, "gpu=1GiB", "share=0.5"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    cache, config = ag.EvictionCache(model, "h2o", 0.5), config_of(f"random:{tmp_path}")
    admission = Admission(cache, model.config, ServeConfig.prefill_tokens)
    memory = int(0.85 * 2**30 - plan(config).memory["base weights"])
    told = admission.capacity_text(memory // cache.setup.pool.block_nbytes(), 256)
    assert " fits 0 requests" not in told and line.endswith(f" that keeps 0.5 of each prompt: {told}")


def test_a_share_without_a_card_is_refused(folder):
    with refuses(ValueError, "share=0.5", "gpu="):
        PlanConfig(**vars(config_of(folder)), share=0.5)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_page_shows_what_the_planner_says():
    from benchmarks import plan_tables

    assert plan_tables.table("llama-2-7b") in plan_tables.PAGE.read_text()
