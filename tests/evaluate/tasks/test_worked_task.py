"""Worked problems: batches against one text at a time, what is held at the end, and answers that a model has learnt."""

import io
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console

import ag
from ag.compare import CompareConfig
from ag.config import Config, DataConfig
from ag.config.recipes import dump
from ag.data.problems import encode, generate
from ag.errors import BudgetWarning, UserError
from ag.evaluate.comparison.compare import compare
from ag.evaluate.tasks import make
from ag.gates import export
from tests.support.blocks import slots
from tests.support.gates_for import gates_for

SIZES = {"solution_min": 20, "solution_max": 70}
SHORT = {"solution_min": 20, "solution_max": 40}


def load(tokenizer, limit=5, max_tokens=512, **options):
    task = make("worked", **SIZES | options)
    return task, task.load(tokenizer, limit, max_tokens)


def alone(model, policy, sample):
    """The text that ``model.generate`` gives of one prompt, and its cache."""
    cache = ag.EvictionCache(model, policy)
    tokens = model.generate(
        torch.tensor([sample.prompt]), past_key_values=cache, max_new_tokens=sample.most, do_sample=False
    )
    text = tokens[0, len(sample.prompt) :].tolist()
    return text[: text.index(2)] if 2 in text else text, cache


def test_problems_are_of_the_test_split(tiny_tokenizer):
    _, loaded = load(tiny_tokenizer, limit=12)
    assert {sample.problem.kind for sample in loaded.samples} == {"addition", "sorting", "variables"}
    for i, sample in enumerate(loaded.samples):
        problem = generate(0, "test", i, 20, 70)
        assert sample.id == f"{problem.kind}-{i}" and sample.problem == problem and problem.answer != ""
        assert tiny_tokenizer.decode(sample.prompt) == problem.prompt
        assert sample.most == len(problem.solution) + 2 + 16  # a space before it, its end, and 16 to spare
    assert load(tiny_tokenizer, limit=12)[1] == loaded
    assert load(tiny_tokenizer, limit=12, seed=1)[1] != loaded
    assert {sample.problem.kind for sample in load(tiny_tokenizer, kind="sorting")[1].samples} == {"sorting"}
    sizes = [len(sample.prompt) + sample.most for sample in loaded.samples]
    middle = sorted(sizes)[5]
    left = load(tiny_tokenizer, limit=None, max_tokens=middle, problems=12)[1]
    fitting = sum(size <= middle for size in sizes)
    assert (len(left.samples), left.too_long) == (fitting, 12 - fitting) and fitting < 12


@pytest.mark.slow
def test_batches_are_what_each_text_is_alone(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    gates_for(model, recent_tokens=4).save_pretrained(tmp_path / "export")
    policies = [
        ag.policy("full"),
        ag.policy("streaming_llm", 24, "every"),
        ag.policy("h2o", 20, "steps:3"),
        ag.policy(f"gates:{tmp_path / 'export'}"),
    ]
    task, loaded = load(tiny_tokenizer, limit=3, batch=2, **SHORT)
    outcomes = list(task.run(model, tiny_tokenizer, policies, loaded.samples))
    for index, policy in enumerate(policies):
        mine = [outcome for at, outcome in outcomes if at == index]
        assert [outcome.sample for outcome in mine] == [sample.id for sample in loaded.samples]
        for outcome, sample in zip(mine, loaded.samples, strict=True):
            text, cache = alone(model, policy, sample)
            assert outcome.tags["generated"] == len(text)
            assert outcome.tokens == cache.seen_tokens
            assert outcome.kept == pytest.approx(cache.kept_share())
            assert outcome.score == 0.0
    full, streaming = ([o for at, o in outcomes if at == i] for i in (0, 1))
    assert all(outcome.kept == 1.0 for outcome in full)
    for outcome in streaming:
        assert outcome.kept == pytest.approx(24 / outcome.tokens)
        slot = 3 * 2 * (16 * 2 * 4 + 4)  # layers, KV heads; dimensions, keys and values, bytes; a rank
        assert 24 * slot <= outcome.kv_bytes <= slots(outcome.tokens, 24) * slot


def test_each_text_of_a_batch_says_whether_more_is_protected_than_its_budget(tiny_llama, tiny_tokenizer):
    """Half of the shorter prompts is less than the window, half of the longer ones is not; texts end one by one."""
    task, loaded = load(tiny_tokenizer, limit=4, batch=4, **SHORT)
    halves = [len(sample.prompt) // 2 for sample in loaded.samples]
    window = sorted(halves)[2]
    assert min(halves) < window
    samples = [replace(sample, most=number + 1) for number, sample in enumerate(loaded.samples)]
    with pytest.warns(BudgetWarning):
        outcomes = task.run(tiny_llama(), tiny_tokenizer, [ag.policy("snapkv", 0.5, window=window)], samples)
        assert [outcome.over_budget for _, outcome in outcomes] == [half < window for half in halves]


@pytest.fixture(scope="module")
def learnt(tiny_llama, tiny_tokenizer):
    """A model that knows the first three problems by heart."""
    model = tiny_llama(attn_implementation="eager")
    rows = encode(tiny_tokenizer, [generate(0, "test", i, 20, 70) for i in range(3)], 512)
    longest = max(len(row.tokens) for row in rows)
    ids, labels = torch.zeros(3, longest, dtype=torch.long), torch.full((3, longest), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        labels[i, row.prompt_length : len(row.tokens)] = torch.tensor(row.tokens[row.prompt_length :])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(300):
        loss = model(ids, attention_mask=labels.ne(-100) | ids.ne(0), labels=labels, use_cache=False).loss
        if float(loss.detach()) < 2e-2:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_right_answers_count(learnt, tiny_tokenizer):
    task, loaded = load(tiny_tokenizer, limit=3)
    policies = [ag.policy("full"), ag.policy("streaming_llm", 6, "every")]
    outcomes = list(task.run(learnt, tiny_tokenizer, policies, loaded.samples))
    full, few = ([outcome for at, outcome in outcomes if at == index] for index in (0, 1))
    assert [outcome.score for outcome in full] == [1.0] * 3
    assert [outcome.tags["answer"] for outcome in full] == [sample.problem.answer for sample in loaded.samples]
    assert [outcome.tags["generated"] for outcome in full] == [sample.most - 17 for sample in loaded.samples]
    assert [outcome.score for outcome in few] == [0.0] * 3
    assert {outcome.tags["kind"] for outcome in full} == {sample.problem.kind for sample in loaded.samples}


@pytest.mark.slow
def test_every_policy_runs_with_the_adapter_of_the_gates(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    gates = gates_for(model)
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora).eval()
    export.save(tmp_path / "export", gates, adapter=adapted)
    config = CompareConfig(
        model=str(tmp_path / "base"),
        adapter=str(tmp_path / "export"),
        policies=["full", f"flags:{tmp_path / 'export'}", "tova"],
        budgets=[16],
        schedule="every",
        tasks=["worked"],
        samples=2,
        task_options={"worked": SHORT},
        output=str(tmp_path / "out"),
    )
    comparison = compare(config, Console(file=io.StringIO()))
    _, loaded = load(tiny_tokenizer, limit=2, **SHORT)
    for result, policy in zip(comparison.results, ("full", f"flags:{tmp_path / 'export'}", None), strict=True):
        assert result.summary.problem is None and result.summary.n == 2
        policy = policy or ag.policy("tova", 16, "every")
        for outcome, sample in zip(result.outcomes, loaded.samples, strict=True):
            text, cache = alone(adapted, policy, sample)
            assert (outcome.tags["generated"], outcome.tokens) == (len(text), cache.seen_tokens)
            assert outcome.kept == pytest.approx(cache.kept_share())
    kept = [result.summary.kept for result in comparison.results]
    assert kept[0] == 1.0 and all(0 < share < 1 for share in kept[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "division"}, "kind='division': expected one of worked, reasoning, addition, "),
        ({"batch": 0}, "batch=0: expected a whole number, at least 1"),
        ({"problems": 1.5}, "problems=1.5: expected a whole number"),
        ({"solution_min": 5}, "solution_min=5: expected a whole number, at least 20"),
        ({"solution_min": 300, "solution_max": 200}, "solution_max=200: expected at least solution_min"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        make("worked", **options)


def test_a_run_on_worked_problems_is_evaluated_on_its_responses(tiny_tokenizer, tmp_path):
    data = DataConfig(kind="worked", name="sorting", solution_min=30, solution_max=60, val_samples=3, max_length=400)
    (tmp_path / "config.yaml").write_text(dump(Config(data=data)))
    loaded = make("responses", run_folder=str(tmp_path)).load(tiny_tokenizer, None, 512)
    for i, sample in enumerate(loaded.samples):
        problem = generate(0, "validation", i, 30, 60, "sorting")
        assert tiny_tokenizer.decode(sample.prompt) == problem.prompt
        assert [tiny_tokenizer.decode(answer) for answer in sample.answers] == [f" {problem.solution}</s>"]
    assert len(loaded.samples) == 3
