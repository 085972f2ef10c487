"""Long use leaves nothing behind: memory, hooks, threads and open files stay as they were."""

import gc
import json
import os
import threading
from pathlib import Path

import pytest
import torch

import ag
from ag import fit
from ag.callbacks.steps import Throughput
from ag.model.structure import decoder_of
from tests.support.gates_for import gates_for

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS, GENERATIONS = 1000, 455
POLICIES = ["full", "streaming_llm", "h2o", "tova", "snapkv", "scissorhands", "cake", "knorm", "random", "gates"]
POLICIES += ["h2o+vatp", "snapkv+caote@pyramid", "tova+obcache_joint"]


class Census:
    """What a process holds."""

    def __init__(self, *models):
        gc.collect()
        self.megabytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        self.threads = threading.active_count()
        self.files = len(os.listdir("/proc/self/fd"))
        self.hooks = sum(
            len(hooks)
            for model in models
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        )

    def assert_no_more_than(self, before, megabytes):
        assert self.hooks == before.hooks
        assert self.threads <= before.threads
        assert self.files <= before.files
        assert self.megabytes - before.megabytes < megabytes


def test_training(tmp_path, tiny_llama, tiny_tokenizer, monkeypatch):
    """Every callback is at work; checkpoints and validations come and go."""
    geometry = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
    tiny_llama(**geometry).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    for split in ("train", "validation"):
        file = tmp_path / "data" / "words" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": "abcdefgh" * 3}) + "\n" for _ in range(40)))
    taken = {}

    def on_train_batch_end(self, trainer, module, *arguments):
        if trainer.global_step in (STEPS // 5 * 3, STEPS):  # the first validation has drawn pictures: fonts are open
            taken[trainer.global_step] = Census(module)

    monkeypatch.setattr(Throughput, "on_train_batch_end", on_train_batch_end)
    words = f"model.name={tmp_path / 'base'} data.root={tmp_path / 'data'} data.kind=text data.name=words train=gates"
    words += f" trainer.max_steps={STEPS} trainer.log_every=250 trainer.val_every={STEPS // 5 * 2} data.val_samples=2"
    words += f" checkpoint.every_steps={STEPS // 5} gate.num_heads=1 gate.head_dim=4 trainer.accelerator=cpu"
    words += f" data.prompt_min=8 data.prompt_max=8 data.continuation=4 data.batch_size=1 output={tmp_path / 'runs'}"
    assert fit.main(words.split()) == 0
    taken[STEPS].assert_no_more_than(taken[STEPS // 5 * 3], megabytes=8)


def test_generating(tiny_llama):
    model = tiny_llama(num_hidden_layers=2)
    ag.attach(model, gates_for(model))
    ids = torch.randint(3, 128, (1, 48), generator=torch.Generator().manual_seed(0))
    before = None
    for number in range(GENERATIONS):
        policy = POLICIES[number % len(POLICIES)]
        budget = None if policy in ("full", "gates") else 8
        cache = ag.EvictionCache(model, policy, budget=budget)
        with torch.no_grad():
            model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
        if number == GENERATIONS // 5:
            before = Census(model)
    del cache
    Census(model).assert_no_more_than(before, megabytes=5)
    ag.detach(model)
    assert Census(model).hooks == 0 and not hasattr(decoder_of(model), "_ag_attachment")
