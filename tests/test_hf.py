"""Trainers of other libraries train gates, with the numbers of Lightning's path."""

import copy
import json
import os
import re
import subprocess
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import ag
import ag.data
import ag.hf
from ag.config import Config, ExportConfig, LossConfig, OptimConfig, WarmupConfig
from ag.config.data import SftConfig
from ag.data.collate import Collator
from ag.data.rows import Row
from ag.errors import UserError
from ag.gates import export
from ag.gates.attach import attached_gates
from ag.gates.export import ExportError
from ag.training.losses import token_nll
from ag.training.module import GatedLM, make_loss
from ag.training.validation import Validation
from tests.support import ROOT, hf_ranks
from tests.support.bounds import hold, of_nats
from tests.support.command import free_port
from tests.support.exports import MODEL
from tests.support.refused import refuses
from tests.support.warm import started

EPS = torch.finfo(torch.float32).eps
TARGETS = ["q_proj", "v_proj"]
ROWS = [{"prompt": f"{'old ' * n}bridge {n}: ", "completion": f"the river {'is high ' * (n % 3)}"} for n in range(1, 9)]
GATE = {"num_heads": 2, "head_dim": 8, "bias": 0.0, "sink_tokens": 1}

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # names that transformers 5.23 replaced in its own code


class Gated(ag.hf.GatedTrainer, Trainer):
    pass


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def batch(seed=0, documents=False):
    """Rows of a prompt and a response, padded; or two packed rows of documents."""
    draw = np.random.default_rng(seed)
    if documents:
        texts = [[*draw.integers(3, 128, n - 1), 2] for n in (9, 14, 7, 16)]
        rows = [Row(np.array([*one, *two], dtype=np.int32)) for one, two in zip(texts[::2], texts[1::2], strict=True)]
        return Collator(0, end=2)(rows)
    rows = [Row(draw.integers(3, 128, n).astype(np.int32), prompt) for prompt, n in ((12, 18), (7, 16), (20, 26))]
    return Collator(0)(rows)


def configured(**parts):
    gate = ag.GateConfig(**GATE | parts.pop("gate", {}))
    loss, optim = parts.pop("loss", {}), {"gate_lr": 1e-2} | parts.pop("optim", {})
    loss = loss if "share_high" in loss else {"beta": 0.4} | loss
    return Config(train="gates", gate=gate, loss=LossConfig(**loss), optim=OptimConfig(**optim), **parts)


@pytest.fixture
def make(tiny_llama, tmp_path):
    """`make(config, lora=False, kind=Gated, **arguments)`: a Trainer on a tiny model."""

    def trainer(config=None, lora=False, kind=Gated, data=(), callbacks=None, **arguments):
        names = ("optimizers", "compute_loss_func", "compute_metrics", "model_init")
        more = {name: arguments.pop(name) for name in names if name in arguments}
        model = None if "model_init" in more else tiny_llama()
        if lora:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        arguments = {"output_dir": str(tmp_path / "out"), "report_to": [], "use_cpu": True, "disable_tqdm": True} | (
            arguments
        )
        if callbacks is None:
            callbacks = [ag.hf.GateCallback(config or configured(), tmp_path / "export", "tiny")]
        rows = datasets.Dataset.from_list(list(data) or [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}])
        args = TrainingArguments(**arguments)
        return kind(model, args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks, **more)

    return trainer


def lightning(trainer, config):
    """The module of Lightning's path with the same weights, without the Trainer."""
    gates = attached_gates(trainer.model)
    trained = ag.AttentionGates(gates.fingerprint, gates.config)
    trained.load_state_dict(gates.state_dict())
    model = trainer.model
    ag.detach(model)
    module = GatedLM(config, model, trained)
    module.log = lambda *_, **__: None
    module._trainer = SimpleNamespace(global_step=trainer.state.global_step, _results=None)
    return module.train()


def gradients(parameters):
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize(
    ("objective", "more", "lora"),
    [("kl", {}, True), ("lm", {"mean": "hard", "anneal_steps": 40}, False), ("regress", {}, False)],
    ids=["kl", "annealed", "regress"],
)
def test_loss_and_gradients_are_those_of_lightnings_path(make, objective, more, lora):
    """To the last bit, as the operations are the same; tests/training checks Lightning's path by hand."""
    config = configured(loss={"objective": objective, **more}, warmup=WarmupConfig(keep=0.3))
    trainer, data = make(config, lora), batch()
    trainer.state.global_step = 17
    given = {name: value for name, value in data.items() if name != "prompt_length"}  # labels say where it ends
    given["attention_mask"] = given["attention_mask"].long()
    trainer.model.train()
    torch.manual_seed(3)
    loss = trainer.compute_loss(trainer.model, given)
    loss.backward()
    gates, adapters = attached_gates(trainer.model).parameters(), []
    found = gradients(list(gates))
    if lora:
        adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
        found += gradients(adapters)
    module = lightning(trainer, config)
    torch.manual_seed(3)
    expected = module.training_step(data, 0)
    expected.backward()
    wanted = gradients(list(module.gates.parameters())) + gradients(adapters)
    assert torch.equal(loss.detach(), expected.detach()) and len(found) == len(wanted) >= 12
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(float(x.abs().max()) > 0 for x in found[: 4 * 3])


def test_packed_documents_are_told_apart_by_their_positions(make):
    """As trl packs them: no mask, positions from 0 in each document, and a label on every token."""
    config = configured()
    trainer, data = make(config), batch(documents=True)
    positions = torch.arange(data["input_ids"].shape[1]) - data["document_start"]
    labels = data["labels"].where(positions > 0, data["input_ids"])
    packed = {"input_ids": data["input_ids"], "labels": labels, "position_ids": positions}
    loss = trainer.compute_loss(trainer.model, packed)
    padded = {name: F.pad(x, (0, 7), value=-100 if name == "labels" else 0) for name, x in packed.items()}
    hold(trainer.compute_loss(trainer.model, padded), loss, of_nats(trainer.model))  # pad_to_multiple_of
    assert torch.equal(loss.detach(), lightning(trainer, config).training_step(data, 0).detach())
    hidden = {**packed, "labels": data["labels"].masked_fill(positions == 1, -100)}
    for config, given in ((configured(), hidden), (configured(loss={"objective": "regress"}), packed)):
        trainer = make(config)
        with refuses(UserError, "packing", "loss.objective", "gate.covers=all"):
            trainer.compute_loss(trainer.model, given)
    trainer = make(configured(gate={"covers": "all"}))
    assert torch.isfinite(trainer.compute_loss(trainer.model, hidden))


def test_left_padding_is_no_part_of_a_prompt(make):
    config = configured(gate={"scope": "prompt"})
    trainer, right = make(config), batch()
    lengths = right["attention_mask"].sum(1).tolist()
    left = {name: x.clone() for name, x in right.items() if name != "prompt_length"}
    for row, length in enumerate(lengths):
        for x in left.values():
            x[row] = x[row].roll(x.shape[1] - length)
    loss = trainer.compute_loss(trainer.model, left)
    hold(loss, lightning(trainer, config).training_step(right, 0), of_nats(trainer.model))


@pytest.mark.parametrize("first", ["labelled", "ignored"])
def test_rows_without_a_prompt_beside_others(make, first):
    """They are all prompt, as they are alone; the label of a first token never counts."""
    trainer, data = make(), batch()
    lengths, prompts = data["attention_mask"].sum(1), data.pop("prompt_length")
    data["labels"][0] = data["input_ids"][0].where(data["attention_mask"][0], -100)
    alone = {name: x[:1] for name, x in data.items()}
    expected = trainer.compute_loss(trainer.model, alone)
    if first == "ignored":
        data["labels"][0, 0] = -100
    assert trainer.compute_loss(trainer.model, {name: x[:1] for name, x in data.items()}) == expected
    given = data | {"prompt_length": torch.stack([lengths[0], *prompts[1:]])}
    assert trainer.compute_loss(trainer.model, data) == trainer.compute_loss(trainer.model, given)
    for gate in ({"scope": "prompt"}, {"prefill": "dense"}):
        trainer = make(configured(gate=gate))
        with refuses(UserError, "1 of 3 rows", "scope=causal", "prefill=sparse"):
            trainer.compute_loss(trainer.model, data)


def labelled(count):
    """``count`` batches of three rows of one length."""
    ids = np.random.default_rng(0).integers(3, 128, (3 * count, 16)).tolist()
    return [{"input_ids": x, "attention_mask": [1] * 16, "labels": [-100] * 7 + x[7:]} for x in ids]


def weights(trainer):
    state = dict(attached_gates(trainer.model).state_dict())
    return state | {n: p.detach() for n, p in trainer.model.named_parameters() if "lora_" in n}


def test_a_step_goes_where_the_gradient_points(make):
    """Gates with optim.gate_lr, adapters with the Trainer's rate; accumulated batches are averaged."""
    config = configured(loss={"alpha": 0.0}, optim={"gate_lr": 0.3})
    sizes = {"max_steps": 1, "learning_rate": 0.2, "optim": "sgd", "max_grad_norm": 0.0, "seed": 1}
    trainer = make(config, True, data=labelled(2), per_device_train_batch_size=6, **sizes)
    before = {name: x.clone() for name, x in weights(trainer).items()}
    data = Collator(0)([Row(np.array(row["input_ids"], dtype=np.int32), 7) for row in labelled(2)])
    trainer.model.train()
    trainer.compute_loss(trainer.model, data).backward()
    gates = {id(p) for p in attached_gates(trainer.model).parameters()}
    by_name = dict(attached_gates(trainer.model).named_parameters())
    by_name |= {n: p for n, p in trainer.model.named_parameters() if "lora_" in n}
    expected = {n: before[n] - (0.3 if id(p) in gates else 0.2) * p.grad for n, p in by_name.items()}
    bound = {n: 64 * EPS * (x.abs().max() + expected[n].abs().max()) for n, x in before.items()}
    trainer.model.zero_grad()
    trainer.train()
    for name, value in weights(trainer).items():
        hold(value, expected[name], bound[name], name)
    parts = make(config, True, data=labelled(2), per_device_train_batch_size=3, gradient_accumulation_steps=2, **sizes)
    parts.train()
    for name, value in weights(parts).items():
        hold(value, expected[name], 4 * bound[name], name)
    assert any(not torch.equal(x, before[name]) for name, x in weights(parts).items())


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_resumed_run_is_the_run(make, tmp_path, stored):
    """Whatever type the export has; gates of a checkpoint are never rounded."""
    config = configured(export=ExportConfig(weights=stored))
    options = {"data": labelled(4), "lora": True, "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1}
    whole = make(config, max_steps=4, output_dir=str(tmp_path / "one"), **options)
    whole.train()
    again = make(config, max_steps=4, output_dir=str(tmp_path / "two"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert again.state.global_step == 4
    expected, started = weights(whole), weights(make(**options))
    for name, value in weights(again).items():
        assert torch.equal(value, expected[name]) and not torch.equal(value, started[name]), name
    names = {"lm_loss", "eviction_loss", "gate_mean_soft", "gate_mean_hard", "evicted", "loss"}
    lines = [line for line in whole.state.log_history if "loss" in line]
    assert len(lines) == 4 and all(names <= line.keys() for line in lines)
    assert export.read_info(tmp_path / "export")["weights"] == stored
    found = ag.AttentionGates.from_pretrained(tmp_path / "one" / "checkpoint-4" / "gates")
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def test_evaluation_export_and_detach(make, tiny_llama, tmp_path):
    """Of a plain model: checkpoints hold its own weights only, and ag.detach restores the model."""
    config = configured(export=ExportConfig(weights="int8"))
    rows = labelled(2)
    options = {"eval_strategy": "epoch", "save_steps": 1, "per_device_train_batch_size": 3}
    trainer = make(config, data=rows, max_steps=1, per_device_eval_batch_size=2, **options)
    trainer.train()
    metrics, gates = trainer.evaluate(), attached_gates(trainer.model)

    validation = Validation(make_loss(config, trainer.model, gates))
    values = []
    for start in range(0, len(rows), 2):
        data = Collator(0)([Row(np.array(row["input_ids"], dtype=np.int32), 7) for row in rows[start : start + 2]])
        with torch.no_grad():
            validation.update(data)
            gating = ag.Gating(gates, data["attention_mask"], data["prompt_length"], hard=True)
            hidden = validation.gated_loss.run_decoder(data, gating)
            values.append(token_nll(trainer.model, hidden, data["labels"])[0])
    expected = {f"eval_{name}": float(value) for name, value in validation.compute().items()}
    assert {name: metrics[name] for name in expected} == expected
    hold(torch.tensor(metrics["eval_lm_loss"]), torch.cat(values).mean(), 8 * EPS * torch.cat(values).abs().max())
    assert 0 < metrics["eval_evicted"] < 1

    table = gates.calibration.record()
    predicted = trainer.predict(trainer.train_dataset.select([0])).metrics
    assert predicted["test_lm_loss"] != metrics["eval_lm_loss"]
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)  # writes the export again

    info = export.read_info(tmp_path / "export")
    assert info["base_model"]["name"] == "tiny" and info["gate"]["head_dim"] == 8
    assert info["keep_rate"] == pytest.approx(1 - metrics["eval_evicted"])
    assert info["metrics"]["lm_loss"] == pytest.approx(metrics["eval_lm_loss"])
    assert info["calibration"] == table and info["weights"] == "int8"
    names = set(load_file(tmp_path / "out" / "checkpoint-1" / "model.safetensors"))
    assert names and not any("ag_training" in name for name in names)

    ids = torch.tensor([rows[0]["input_ids"]])
    cache = ag.EvictionCache(trainer.model, "gates")
    with torch.no_grad():
        trainer.model(ids, past_key_values=cache)
    assert cache.kept_share() < 1
    model, plain = trainer.model, tiny_llama()
    ag.detach(model)
    assert torch.equal(model(ids).logits, plain(ids).logits) and "forward" not in vars(model)
    assert set(dict(model.named_modules())) == set(dict(plain.named_modules()))
    assert model._keys_to_ignore_on_save == plain._keys_to_ignore_on_save


def test_a_copy_of_a_model_in_training_stands_on_its_own(make):
    model, ids = make().model.eval(), torch.tensor([[5, 6, 7, 8]])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied(ids).logits, wanted) and bool(wanted.any())
    ag.detach(copied)
    assert "forward" not in vars(copied) and "forward" in vars(model)


@pytest.mark.parametrize(("process", "counted"), [(0, [0, 1]), (1, [2])])
def test_rows_that_fill_the_last_batch_count_in_no_metric(make, process, counted):
    """As the second rank of two gets rows again when three are left for two batches of two."""
    trainer, data = make(), batch()
    given = {name: x[[0, 1] if process == 0 else [2, 0]] for name, x in data.items()}
    state = SimpleNamespace(end_of_dataloader=True, remainder=3)
    found = []
    for inputs, end in ((given, True), ({name: x[counted] for name, x in data.items()}, False)):
        state.end_of_dataloader = end
        trainer.accelerator = SimpleNamespace(gradient_state=state, even_batches=True, process_index=process)
        validation = ag.hf._trained_gates(trainer.model).validation
        validation.reset()
        trainer.prediction_step(trainer.model, inputs)
        found.append(validation.compute())
    for name, value in found[1].items():
        hold(found[0][name], value, 64 * EPS * value.abs(), name)
    assert set(found[0]) == set(found[1])


def test_an_export_of_the_best_weights_states_their_metrics(make, tmp_path):
    config = configured(loss={"alpha": 9.0, "beta": 1.0})  # evicts less and less
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_evicted", "greater_is_better": True}
    trainer = make(config, data=labelled(1), **options, **best)
    trainer.train()
    one, two = (line for line in trainer.state.log_history if "eval_evicted" in line)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1") and one["eval_evicted"] > two["eval_evicted"]
    info = export.read_info(tmp_path / "export")
    assert {name: one[f"eval_{name}"] for name in info["metrics"]} == info["metrics"]
    assert info["keep_rate"] == 1 - one["eval_evicted"]


def test_mixed_precision_sees_the_loss(make):
    """The Trainer's autocast is around the model's forward pass, in which the loss is computed."""
    trainer = make(data=labelled(1), max_steps=1, bf16=True)
    seen = []
    trainer.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *x: seen.append(x[2].dtype))
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"config": configured(warmup=WarmupConfig(regress_steps=3))}, "warmup.regress_steps=3 init=EXPORT"),
        ({"config": configured(loss={"objective": "kl", "share_high": 0.7, "replay": True})}, "loss.replay=false"),
        ({"callbacks": []}, "ag.hf.GateCallback"),
        ({"compute_loss_func": lambda *_, **__: None}, "compute_loss_func Objective"),
        ({"compute_metrics": lambda _: {"mine": 1.0}}, "compute_metrics evaluate()"),
        ({"model_init": lambda: LlamaForCausalLM(MODEL)}, "model_init model="),
    ],
    ids=["warm-start", "replay", "no-callback", "another-loss", "other-metrics", "another-model"],
)
def test_trainers_that_cannot_train_gates(make, arguments, parts):
    with refuses(UserError, *parts.split()):
        make(**arguments)


def test_a_folder_that_is_no_place_for_the_export(make, tmp_path):
    """It is refused before training, and not at its end."""
    write_rows(tmp_path / "export" / "train.jsonl", ROWS)
    with refuses(ExportError, "export", "train.jsonl", "another path"):
        make()
    callbacks = [ag.hf.GateCallback(configured(), tmp_path / "out")]
    with refuses(UserError, "path=", "out", "output_dir", "checkpoints"):
        make(callbacks=callbacks)
    make(callbacks=callbacks, save_strategy="no", data=labelled(1), max_steps=1).train()
    assert export.read_info(tmp_path / "out")["weights"] == "float32"


def test_arguments_that_are_refused_where_they_are_used(make):
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    plain = {"fsdp": None, "gradient_checkpointing": False, "n_gpu": 1, "label_smoothing_factor": 0.0}
    plain |= {"gradient_checkpointing_kwargs": None}
    ag.hf._check_arguments(SimpleNamespace(**plain))
    for arguments, parts in (
        ({"deepspeed": "zero3.json"}, "deepspeed fsdp2"),
        (reentrant, "gradient_checkpointing_kwargs use_reentrant"),
        ({"n_gpu": 2}, "2 torchrun CUDA_VISIBLE_DEVICES"),
        ({"loss_type": "dft"}, "loss_type=dft Objective"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 Objective"),
    ):
        with refuses(UserError, *parts.split()):
            ag.hf._check_arguments(SimpleNamespace(**plain | arguments))
    with refuses(UserError, "GateCallback", "ag.hf.GatedTrainer"):
        make(kind=Trainer, data=labelled(1), max_steps=1).train()
    trainer = make()
    with refuses(UserError, "labels", "tokens"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with refuses(UserError, "optimizers=", "optim.gate_lr"):
        make(optimizers=(other, None), max_steps=1).train()


def adapted(model, objective="lm", path=None, share=None):
    """Give a Trainer a model with adapters."""
    loss = {"objective": objective} | ({} if share is None else {"share_high": share})
    args = TrainingArguments(str(path / "out"), report_to=[], use_cpu=True, disable_tqdm=True)
    rows = datasets.Dataset.from_list(labelled(1))
    return Gated(
        model, args, train_dataset=rows, callbacks=[ag.hf.GateCallback(configured(loss=loss), path / "export", "tiny")]
    )


def train_and_load(model, base, path):
    """Train for a step; the export's adapter makes the trained model of a base."""
    trainer = adapted(model, path=path)
    trainer.args.max_steps = 1
    trainer.train()
    ag.detach(model)
    ids = torch.tensor([labelled(1)[0]["input_ids"]])
    with torch.no_grad():
        again = export.load_adapter(base, path / "export")(ids).logits
        assert torch.equal(model.eval()(ids).logits, again)


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": TARGETS, "init_lora_weights": False} | options)


def with_two(model, trained):
    """Both adapters are active; the second is frozen, or trained too."""
    model = get_peft_model(model, lora())
    model.add_adapter("tone", lora())
    model.base_model.set_adapter(["default", "tone"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default" in name or (trained and ".tone" in name))
    return model


def with_merged(model):
    model = get_peft_model(model, lora())
    model.add_adapter("tone", lora())
    model.base_model.merge_adapter(["tone"])
    return model


def with_disabled(model):
    model = get_peft_model(model, lora())
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda model: with_two(model, trained=False), "'tone' set_adapter"),
        (lambda model: with_two(model, trained=True), "'tone' set_adapter"),
        (with_merged, "'tone' set_adapter"),
        (with_disabled, "'default' enable_adapter_layers"),
        (lambda model: inject_adapter_in_model(lora(), model, "tone"), "'tone' peft.PeftModel"),
    ],
    ids=["frozen", "trained", "merged", "disabled", "unwrapped"],
)
def test_adapters_that_shape_the_model_are_in_the_export_or_refused(tiny_llama, tmp_path, change, parts):
    with refuses(ExportError, *parts.split()):
        adapted(change(tiny_llama()), path=tmp_path)


def test_an_adapter_that_does_not_act_is_no_hindrance(tiny_llama, tmp_path):
    model = get_peft_model(tiny_llama(), lora())
    model.add_adapter("tone", lora())
    train_and_load(model, tiny_llama(), tmp_path)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_changed_the_base_has_no_teacher(tiny_llama, tmp_path, start):
    for loss in ({"objective": "kl"}, {"objective": "kl", "share": 0.7}):
        with refuses(UserError, f"init_lora_weights={start}", "init_lora_weights=True", "loss.objective=lm"):
            adapted(get_peft_model(tiny_llama(), lora(init_lora_weights=start)), path=tmp_path, **loss)
    for model in (get_peft_model(tiny_llama(), lora(init_lora_weights="orthogonal")), tiny_llama()):
        adapted(model, objective="kl", path=tmp_path)


def test_an_adapter_that_changed_the_base_comes_back_or_is_refused(tiny_llama, tmp_path):
    """PEFT makes the base of PiSSA again from its weights; by a random decomposition it gets another one."""
    model = get_peft_model(tiny_llama(), lora(init_lora_weights="pissa"))
    train_and_load(model, tiny_llama(), tmp_path)
    for start in ("pissa_niter_4", "lora_ga"):
        with refuses(ExportError, f"init_lora_weights={start}", "init_lora_weights=True"):
            adapted(get_peft_model(tiny_llama(), lora(init_lora_weights=start)), path=tmp_path)
    model = get_peft_model(tiny_llama(), lora())
    model.add_adapter("tone", lora(init_lora_weights="olora"))
    with refuses(ExportError, "'tone'", "init_lora_weights=olora"):
        adapted(model, path=tmp_path)


def test_trl_collates_what_ag_fit_collates(make_sft, tiny_tokenizer, tmp_path):
    """Prompts and completions through trl's preparation and its collator are the batches of `data.name=FOLDER`."""
    write_rows(tmp_path / "mine" / "train.jsonl", ROWS)
    config = Config()
    config.data = SftConfig(name=str(tmp_path / "mine"), val_samples=1)
    module = ag.data.build(config.data, config.seed, tiny_tokenizer, 512)
    expected = module.collator(module.train_rows)
    trainer = make_sft(configured(), ROWS[1:])
    found = trainer.data_collator(list(trainer.train_dataset))
    assert torch.equal(found["input_ids"], expected["input_ids"]) and torch.equal(found["labels"], expected["labels"])
    loss = trainer.compute_loss(trainer.model, found)
    trained = GatedLM(configured(), trainer.model, attached_gates(trainer.model))
    assert torch.equal(loss.detach(), trained.gated_loss.loss(expected, 0).loss.detach())


@pytest.fixture
def make_sft(tiny_llama, tiny_tokenizer, tmp_path):
    """`make_sft(config, rows, **arguments)`: trl's trainer on a tiny model, with LoRA."""
    trl = pytest.importorskip("trl", reason="needs trl: pip install -c constraints.txt trl")

    class GatedSFT(ag.hf.GatedTrainer, trl.SFTTrainer):
        pass

    def make(config, rows, **arguments):
        arguments = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True} | arguments
        rows = datasets.Dataset.from_list(rows)
        return GatedSFT(
            tiny_llama(),
            trl.SFTConfig(str(tmp_path / "out"), **arguments),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=2, target_modules=TARGETS),
            callbacks=[ag.hf.GateCallback(config, tmp_path / "export", "tiny")],
        )

    return make


def test_the_example_of_the_page(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl", reason="needs trl: pip install -c constraints.txt trl")
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)
    assert len(block.splitlines()) <= 34
    block = block.replace("max_steps=300", "max_steps=2, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True")
    assert "use_cpu" in block
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", ROWS * 2)
    monkeypatch.setattr(ag, "load_base", lambda name: (tiny_llama(), tiny_tokenizer), raising=False)
    exec(compile(block, "training.md", "exec"), {"__name__": "page"})
    assert re.search(r"^\d+% of the prompts", capsys.readouterr().out, re.M)
    assert export.read_info("runs/trl/export")["base_model"]["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert export.adapter_path("runs/trl/export") is not None


@pytest.mark.slow
@pytest.mark.nightly
def test_two_processes_train_like_one_with_twice_the_rows(tmp_path):
    """DistributedDataParallel averages the gradients of gates and adapters, and no metric counts a row twice."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import hf_ranks; hf_ranks.train"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [started(), "-c", f"{code}({str(tmp_path / 'two')!r}, 2)"],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    hf_ranks.train(str(tmp_path / "one"), 4)
    hf_ranks.train(str(tmp_path / "half"), 2)
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
    for name in ("gates.safetensors", "adapter/adapter_model.safetensors"):
        one, two, half = (load_file(tmp_path / folder / name) for folder in ("one", "two", "half"))
        assert one.keys() == two.keys()
        for key, value in one.items():
            bound = 256 * EPS * value.abs().max()
            hold(two[key], value, bound, key)
            assert (half[key] - value).abs().max() > 4 * bound
    one, two = (export.read_info(tmp_path / folder)["metrics"] for folder in ("one", "two"))
    assert one.keys() == two.keys() and 0 < one["evicted"] < 1
    for key, value in one.items():
        hold(torch.tensor(two[key]), torch.tensor(value), 256 * EPS * abs(value), key)
