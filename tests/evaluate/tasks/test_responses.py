"""Scores of responses after eviction, against ``by_hand`` forward passes, and the rows that a run has."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ag
from ag import data
from ag.config import Config, DataConfig, ModelConfig
from ag.config.recipes import dump, load_config
from ag.data.collate import Answer, Row
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.responses import Response
from tests.support import by_hand
from tests.support.blocks import slots
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

TOKEN = 2 * 16 * 4  # bytes of a key and a value of one head, float32
VARIANTS = {
    "causal": {},
    "prompt-recent": {"scope": "prompt", "recent_tokens": 4, "sink_tokens": 1},
    "dense": {"prefill": "dense", "recent_tokens": 2},
}


def own(outcome):
    """The tags that the task itself gives."""
    assert outcome.tags["kl"] >= 0 and 0 <= outcome.tags["same_top1"] <= 1
    return {name: tag for name, tag in outcome.tags.items() if name not in ("kl", "same_top1")}


def responses(rows, seed):
    """Samples of (tokens of the prompt, tokens of each answer, the right one)."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(number):
        return torch.randint(3, 128, (number,), generator=generator).tolist()

    return [
        Response(f"{i}", tokens(prompt), [tokens(answer) for answer in answers], target)
        for i, (prompt, answers, target) in enumerate(rows)
    ]


PLAIN = responses([(24, [6], 0), (9, [11], 0), (17, [1], 0), (12, [1], 0), (5, [4], 0)], 1)
QUESTIONS = responses([(14, [3, 7], 1), (6, [3, 1, 5], 0), (4, [2, 2], 0), (11, [4, 4, 2, 3], 2)], 4)


def score(model, samples, policy, tokenizer=None):
    return [outcome for _, outcome in make("responses").run(model, tokenizer, [ag.policy(policy)], samples)]


def losses_by_hand(model, gates, sample):
    """The losses of each answer's tokens, and how many tokens each head of each layer held after the prompt."""
    prompt, losses = len(sample.prompt), []
    for answer in sample.answers:
        tokens = torch.tensor(sample.prompt + answer)
        logits, flags = by_hand.forward(model, gates, tokens, prompt)
        losses.append(-logits[prompt - 1 : -1].log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0])
    held = [len(head) for layer in flags.values() for head in by_hand.kept(gates, layer, prompt, prompt)]
    return losses, held


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_responses_are_scored_after_eviction(tiny_llama, variant):
    model = tiny_llama()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    outcomes = score(model, PLAIN, "gates")
    assert [own(outcome) for outcome in outcomes] == [{"tokens": number} for number in (6, 11, 1, 1, 4)]
    for outcome, sample in zip(outcomes, PLAIN, strict=True):
        [losses], held = losses_by_hand(model, gates, sample)
        hold(outcome.score, losses.mean(), of_nats(model))
        assert outcome.tokens == len(sample.prompt)
        assert outcome.kept == pytest.approx(sum(held) / (3 * 2 * len(sample.prompt)))
        taken = sum(slots(len(sample.prompt), tokens) for tokens in held)
        assert outcome.kv_bytes == taken * (TOKEN + 4 + 1)  # with ranks and flags
    assert 0.2 < min(outcome.kept for outcome in outcomes) < 0.95


def test_question_after_the_prompt(tiny_llama):
    """It is read when the prompt was evicted, nothing of it is evicted, and it does not count."""
    model = tiny_llama()
    gates = gates_for(model)
    ag.attach(model, gates)
    rows = [
        Row(np.arange(5, 25) + choice, 12, Answer(0, choice, 1), np.arange(20) >= 17 - choice) for choice in range(2)
    ]
    sample = Response.of("0", rows)
    assert sample.prompt == [*range(6, 18)] and sample.question == [*range(18, 22)]
    assert sample.answers == [[22, 23, 24], [22, 23, 24, 25]] and sample.target == 1
    [outcome] = score(model, [sample], "gates")
    followed = Response("0", sample.prompt, [sample.question + answer for answer in sample.answers])
    both, _ = losses_by_hand(model, gates, followed)
    sums = [float(losses[4:].sum()) for losses in both]
    hold(outcome.score, sums[1] / 4, of_nats(model))
    assert own(outcome) == {"tokens": 4, "accuracy": float(sums[1] < sums[0])}
    assert outcome.tokens == 12 and outcome.kept < 0.95


@pytest.mark.parametrize("policy", ["full", "gates"])
def test_multiple_choice(tiny_llama, policy):
    """The right answer's loss counts; all answers compete."""
    model = tiny_llama()
    gates = gates_for(model, bias=1000.0 if policy == "full" else 0.0)
    ag.attach(model, gates)
    right = []
    for outcome, sample in zip(score(model, QUESTIONS, policy), QUESTIONS, strict=True):
        losses, _ = losses_by_hand(model, gates, sample)
        hold(outcome.score, losses[sample.target].mean(), of_nats(model))
        best = min(range(len(losses)), key=lambda i: float(losses[i].sum()))
        right.append(float(best == sample.target))
        assert own(outcome) == {"tokens": len(losses[sample.target]), "accuracy": right[-1]}
    assert 0 < sum(right) < len(right)


def test_windowed_model(tiny_mistral):
    model = tiny_mistral(sliding_window=6)
    gates = gates_for(model)
    ag.attach(model, gates)
    for outcome, sample in zip(score(model, PLAIN, "gates"), PLAIN, strict=True):
        hold(outcome.score, losses_by_hand(model, gates, sample)[0][0].mean(), of_nats(model))


PIQA = [{"goal": "x" * (4 * i + 4), "sol1": f"yes {i}", "sol2": "no" + "y" * i, "label": i % 2} for i in range(6)]
CORPUS = [{"text": "ab cd " * (8 + i)} for i in range(5)]
KINDS = {
    "sft": DataConfig(kind="sft", name="piqa", max_length=40, prompt_max=20, continuation=9, val_samples=5),
    "text": DataConfig(kind="text", name="corpus", prompt_min=20, prompt_max=44, continuation=6, val_samples=3),
    "facts": DataConfig(prompt_min=20, prompt_max=30, val_samples=4),
}


@pytest.fixture
def run(write, tmp_path):
    """`run(kind)`: the folder of a run on such data."""

    def make_run(kind, **changes):
        for split in ("train", "validation"):
            write(f"data/piqa/{split}", PIQA)
            write(f"data/corpus/{split}", [{"text": "short"}, *CORPUS])
        config = Config(model=ModelConfig(name="none"), data=KINDS[kind], seed=3)
        config.data.root = None if kind == "facts" else str(tmp_path / "data")
        for name, value in changes.items():
            setattr(config.data, name, value)
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(dump(config))
        return str(folder)

    return make_run


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_those_that_the_run_was_validated_on(run, tiny_tokenizer, kind):
    folder = run(kind)
    loaded = make("responses", run_folder=folder).load(tiny_tokenizer, None, 512)
    config = load_config(Path(folder) / "config.yaml", Config)
    groups = data.build(config, tiny_tokenizer, 512).val_rows
    assert len(loaded.samples) == len(groups) == config.data.val_samples
    for sample, group in zip(loaded.samples, groups, strict=True):
        prompt = min((row.tokens[: row.prompt_length].tolist() for row in group), key=len)
        assert sample.prompt == prompt
        assert sample.answers == [row.tokens[row.prompt_length :].tolist() for row in group]
        assert sample.target == (0 if group[0].answer is None else group[0].answer.target)
    assert len(make("responses", run_folder=folder).load(tiny_tokenizer, 2, 512).samples) == 2
    assert (loaded.too_long, loaded.too_short) == (0, kind == "text")


def test_answers_of_a_cut_question_follow_the_same_prompt(run, tiny_tokenizer):
    """Rows of 40 characters: the goals of the last ones lose their left part, more of it before the longer answer."""
    samples = make("responses", run_folder=run("sft")).load(tiny_tokenizer, None, 512).samples
    lengths = [len(sample.prompt) + max(map(len, sample.answers)) for sample in samples]
    whole = [len(f"Goal: {row['goal']}\nSolution:") + len(f" {max(row['sol1'], row['sol2'], key=len)}") for row in PIQA]
    assert lengths == [min(40, length) for length in whole[:5]] and 40 in lengths and lengths[0] < 40


def test_a_run_whose_questions_come_after(run, tiny_tokenizer):
    found = {}
    for when, said in (("after", "after"), ("before", None)):
        task = make("responses", run_folder=run("facts", question=when))
        assert task.question == said
        found[when] = task.load(tiny_tokenizer, None, 512).samples
    old, new = found["before"], found["after"]
    assert [sample.prompt + sample.question for sample in new] == [sample.prompt for sample in old]
    assert all("Question:" in tiny_tokenizer.decode(sample.question) for sample in new)
    assert [sample.answers for sample in new] == [sample.answers for sample in old]


def test_answers_of_one_token_need_a_question_before_them(run):
    task = make("responses", run_folder=run("facts"))
    short, long = [[7], [8]], [[7], [8, 9]]
    found = [task.reads_on(Response("0", [5, 6], *case)) for case in ((short,), (long,))]
    assert found == [False, True] and task.reads_on(Response("0", [5], short, question=[6]))
    assert "data.question=after" in task.instead()


def test_lengths_of_plain_documents_can_be_given(run, tiny_tokenizer, write):
    for where in ({"run_folder": run("text")}, {"root": write("documents/train", CORPUS)}):
        write("documents/validation", CORPUS)
        task = make("responses", **where, prompt=24, continuation=9)
        samples = task.load(tiny_tokenizer, 3, 512).samples
        assert [(len(sample.prompt), len(sample.answers[0])) for sample in samples] == [(24, 9)] * 3


def test_the_identity_is_that_of_the_data(run, tmp_path):
    folder = run("facts")
    before = make("responses", run_folder=folder).identity()
    moved = Path(folder).rename(tmp_path / "moved")
    assert make("responses", run_folder=str(moved)).identity() == before
    assert make("responses", run_folder=str(moved), prompt=31).identity() != before
    assert make("responses", run_folder=run("facts", prompt_max=31)).identity() != before


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"run_folder": "nowhere"}, ("nowhere",)),
        ({"run_folder": 3}, ("run_folder=3",)),
        ({"prompt": 0}, ("prompt=0",)),
        ({"continuation": 0.5}, ("continuation=0.5",)),
    ],
)
def test_mistakes_are_found_when_it_is_made(options, parts):
    with refuses(UserError, *parts):
        make("responses", **options)


def test_what_has_no_prompts_and_nothing_to_read(run, tiny_tokenizer):
    with refuses(UserError, "text", "root=FOLDER"):
        make("responses", run_folder=run("text", packing="packed"))
    with refuses(UserError, "task_options.responses.run_folder=RUN"):
        make("responses").load(tiny_tokenizer, None, 512)
