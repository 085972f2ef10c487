"""The pages of docs/extending, run: what each example adds does what its page says."""

import json
import re
from dataclasses import dataclass

import pytest
import torch

import ag
from ag import data
from ag.config import DataConfig
from ag.data import build, templates
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS, Needs, Scorer
from ag.engine.scorers.base import grouped
from ag.engine.wrappers import WRAPPERS
from ag.evaluate.tasks import TASKS, make
from ag.gates.gate import KINDS
from ag.kernels.pages import read
from ag.training.objectives import OBJECTIVES, objective
from tests.support import ROOT
from tests.support.bounds import conditioned, hold, of_nats
from tests.support.gates_for import gates_for

FOLDER = ROOT / "docs" / "extending"
REGISTRIES = (SCORERS, WRAPPERS, ALLOCATORS, TASKS, KINDS, data.KINDS, OBJECTIVES, templates.TASKS)

BATCH = ("input_ids", "attention_mask", "labels", "prompt_length")


@pytest.fixture
def example():
    """``example(page)``: run the code of a page (its one block, or that at a place) and return its names.

    What it registers is forgotten afterwards.
    """
    known = [dict(registry) for registry in REGISTRIES]

    def run(page, place=0, of=1):
        path = FOLDER / f"{page}.md"
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
        assert len(blocks) == of
        block = blocks[place]
        assert len(block.splitlines()) <= 40
        names = {"__name__": "page"}
        exec(compile(block, str(path), "exec"), names)
        return names

    yield run
    for registry, before in zip(REGISTRIES, known, strict=True):
        registry.clear()
        registry.update(before)


def test_every_page_is_run():
    tested = {name.removeprefix("test_").removesuffix("_page") for name in globals() if name.endswith("_page")}
    assert {path.stem for path in FOLDER.glob("*.md")} == tested


def held(model, policy, length=40):
    """A cache that evicted from a random prompt, and by layer keys and values ``[Hkv, N, D]`` of one that did not."""
    ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(0))
    full, cache = ag.EvictionCache(model, "full"), ag.EvictionCache(model, policy)
    with torch.no_grad():
        model(ids, past_key_values=full)
        model(ids, past_key_values=cache)
    return cache, [
        read(full.state.stores[0].pages(layer), full.state.stores[0].ledger(layer)[0][0]) for layer in range(3)
    ]


def test_scorer_page(example, tiny_llama):
    example("scorer")
    model = tiny_llama()
    policy = ag.policy("value_norm", budget=10, power=2.0)
    assert repr(policy) == "ag.policy('value_norm', budget=10, power=2.0)"
    cache, stored = held(model, policy)
    for head in range(2):
        best = stored[0][1][head].norm(dim=-1).topk(10).indices.sort().values
        assert cache.kept_positions(0)[0][head].tolist() == best.tolist()
    under_wrapper, _ = held(model, ag.policy("value_norm+caote@heads", budget=10))
    assert sum(len(head) for head in under_wrapper.kept_positions(0)[0]) == 20


def test_what_the_scorer_page_records(tiny_llama, monkeypatch):
    """Its sum of attention keeps what h2o keeps without recents, through many evictions."""
    (block,) = re.findall(r"```text\n(.*?)```", (FOLDER / "scorer.md").read_text(), re.DOTALL)
    body = {}
    exec(block, {"Needs": Needs, "grouped": grouped}, body)
    monkeypatch.setitem(SCORERS, "heavy", dataclass(frozen=True, kw_only=True)(type("Heavy", (Scorer,), body)))
    model = tiny_llama()
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    kept = []
    for name, options in (("heavy", {}), ("h2o", {"recent": 0})):
        cache = ag.EvictionCache(model, ag.policy(name, 10, "steps:3", **options))
        with torch.no_grad():
            for part in (ids[:, :24], *ids[:, 24:].split(1, 1)):
                model(part, past_key_values=cache)
        kept.append([head.tolist() for layer in range(3) for row in cache.kept_positions(layer) for head in row])
    assert kept[0] == kept[1]


def test_wrapper_page(example, tiny_llama):
    example("wrapper")
    cache, stored = held(tiny_llama(), ag.policy("knorm+unusual", budget=10, power=2.0))
    for head in range(2):
        k, v = (x[head].double() for x in stored[0])
        score = -k.norm(dim=-1) * (v - v.mean(0)).norm(dim=-1) ** 2
        assert cache.kept_positions(0)[0][head].tolist() == score.topk(10).indices.sort().values.tolist()


@pytest.mark.parametrize(
    ("policy", "length", "counts"),
    [
        ("knorm@geometric", 40, [17, 9, 4]),  # 30 tokens as 4 : 2 : 1
        ("knorm@geometric", 16, [16, 9, 5]),  # the first layer holds no more; 14 tokens as 2 : 1
        ("h2o@geometric", 40, [14, 9, 7]),  # 5 protected tokens in each layer, and 15 as 4 : 2 : 1
    ],
)
def test_allocator_page(example, tiny_llama, policy, length, counts):
    example("allocator")
    cache, _ = held(tiny_llama(), ag.policy(policy, budget=10, ratio=0.5), length)
    assert [[len(head) for head in cache.kept_positions(layer)[0]] for layer in range(3)] == [[n, n] for n in counts]


def test_task_page(example, tiny_llama, tiny_tokenizer):
    example("task")
    model, task = tiny_llama(), make("repeat", gap=40)
    assert make("repeat", gap=480).load(tiny_tokenizer, None, 512).too_long == 100
    samples = task.load(tiny_tokenizer, 2, 512).samples
    outcomes = [outcome for _, outcome in task.run(model, tiny_tokenizer, [ag.policy("full")], samples)]
    for number, outcome in enumerate(outcomes, 1000):
        prompt = f"The number is {number}." + " More words." * 3 + " The number is"
        tokens = torch.tensor([tiny_tokenizer(f"{prompt} {number}")["input_ids"]])
        with torch.no_grad():
            logits = model(tokens).logits[0, -6:-1].log_softmax(-1)
        nats = -logits.gather(1, tokens[0, -5:, None]).mean()
        hold(outcome.score, nats, of_nats(model))
        assert outcome.tokens == tokens.shape[1] - 5


def test_kernel_page(example, monkeypatch):
    names = example("kernel")
    torch.manual_seed(0)

    def wanted(q, k):
        hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        return torch.softmax((0.5 * q @ k.mT).masked_fill(hidden, -torch.inf), -1).amax(2)

    for length in (1, 257):
        q, k = torch.randn(2, 1, 2, length, 8).unbind(0)
        for version in ("chunked", "reference"):
            monkeypatch.setenv("AG_KERNELS", version)
            hold(names["column_max"](q, k, 0.5), wanted(q.double(), k.double()), conditioned(wanted, q, k))


def test_dataset_page(example, tiny_tokenizer, tmp_path):
    example("dataset", 0, of=2)
    row = {"question": "what is wet?", "choices": {"label": ["A", "B"], "text": ["sand", "rain"]}, "answerKey": "B"}
    (tmp_path / "commonsense_qa").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "commonsense_qa" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(kind="sft", name="commonsense_qa", root=str(tmp_path), batch_size=1)
    module = build(data, 0, tiny_tokenizer, 512)
    (batch,) = module.train_dataloader()
    ids, prompt = batch["input_ids"][0], int(batch["prompt_length"])
    assert tiny_tokenizer.decode(ids[:prompt]).endswith("Question: what is wet?\nAnswer:")
    assert tiny_tokenizer.decode(ids[prompt:]) == " rain"
    (batch,) = module.val_dataloader()
    assert (batch["choice"].tolist(), batch["target"].tolist()) == ([0, 1], [1, 1])


def test_the_data_kind_of_the_dataset_page_makes_rows(example, tiny_tokenizer):
    example("dataset", 1, of=2)
    module = build(DataConfig(kind="counting", batch_size=90), 0, tiny_tokenizer, 512)
    (batch,) = module.train_dataloader()
    for ids, real, labels, prompt in zip(*map(batch.get, BATCH), strict=True):
        first, *rest = map(int, tiny_tokenizer.decode(ids[real]).split())
        assert first >= 10 and rest == list(range(first + 1, first + 8))
        assert (labels[:prompt] == -100).all() and torch.equal(labels[real][prompt:], ids[real][prompt:])


def test_loss_page(example):
    example("loss")
    loss = objective("hidden")
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 2, 5, 8).unbind(0)
    labels = torch.full((2, 5), -100)
    labels[0, 2], labels[1, 3] = 7, 7  # which the columns before them predict
    values, rows = loss.tokens(torch.nn.Identity(), hidden, teacher, labels, 1024)
    given = [x[[0, 1], [1, 2]] for x in (hidden, teacher)]
    mean = lambda student, teacher: (student - teacher).square().mean(-1)  # noqa: E731
    assert loss.needs_teacher and rows.tolist() == [0, 1]
    hold(values, mean(*(x.double() for x in given)), conditioned(mean, *given))


def test_gate_kind_page(example, tiny_llama, tmp_path):
    example("gate_kind")
    model = tiny_llama()
    gates = gates_for(model, kind="bottleneck")
    hidden = torch.randn(2, 7, 64)
    gate = gates.layers["1"]

    def formula(hidden, down, up):
        return (torch.nn.functional.silu(hidden @ down.T) @ up.T).mT

    given = hidden, gate.down.weight, gate.up.weight
    hold(gate(hidden), formula(*(x.double() for x in given)), conditioned(formula, *given))
    gates.save_pretrained(tmp_path / "export")
    cache, _ = held(model, f"gates:{tmp_path / 'export'}")
    assert 0 < cache.kept_share() < 1
