"""The harness's model ``ag`` against its own ``hf``, on local tasks."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm_eval: .venv/bin/pip install -e '.[lm_eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from transformers.cache_utils import Cache

import ag
from ag.evaluate.lm_eval import EvictingLM
from ag.evaluate.lm_eval import main as lm_eval_main
from tests.model.test_architectures import tiny
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for

ROWS = [
    {"text": "the cat sat on the mat and then it", "choices": ["slept", "ran away", "ate"], "label": 0},
    {"text": "one two three four five six", "choices": ["seven", "nine", "a dog"], "label": 0},
    {"text": "a red door and a blue", "choices": ["wall", "cup of tea", "sky"], "label": 2},
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_generate": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A model with its tokenizer, and tasks over a local file."""
    folder = tmp_path_factory.mktemp("lm_eval")
    tiny_llama().save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    rows = folder / "rows.json"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: '{rows}'}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    return folder


def evaluate(folder, model, tasks=tuple(TASKS), **args):
    """Return each task's metrics, and the model's answers to each request."""
    found = simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder / "model"), **args},
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    metrics = {task: {k: v for k, v in found["results"][task].items() if isinstance(v, float)} for task in tasks}
    answers = {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks}
    return metrics, answers


def flat(answers):
    return torch.tensor([[response[0][0] for response in sample] for sample in answers])


def of_choices(model):
    """Bound the nats of an answer, of which each letter is a token, and one the blank before it."""
    return max(len(choice) + 1 for row in ROWS for choice in row["choices"]) * of_nats(model)


@pytest.mark.slow
def test_with_a_full_cache_it_is_hf(folder, tiny_llama):
    metrics, answers = evaluate(folder, "ag", policy="full")
    wanted, theirs = evaluate(folder, "hf")
    for task, values in wanted.items():
        assert values
        letters = max(len(row["text"]) / len(row["text"].split()) for row in ROWS)  # a word's, of which each is a token
        for name, value in values.items():  # a perplexity of words, or shares of whole answers
            hold(metrics[task][name], value, letters * of_nats(tiny_llama()) * value, name)
    hold(flat(answers["tiny_choice"]), flat(theirs["tiny_choice"]), of_choices(tiny_llama()))
    assert answers["tiny_generate"] == theirs["tiny_generate"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="hybrid models need transformers 5.23")
def test_a_hybrid_model_scores_as_under_hf(folder, tmp_path, tiny_tokenizer):
    here, model = shutil.copytree(folder, tmp_path / "hybrid"), tiny("qwen3_5_text")
    model.save_pretrained(here / "model")
    _, answers = evaluate(here, "ag", ("tiny_choice",), policy="full")
    _, wanted = evaluate(here, "hf", ("tiny_choice",))
    hold(flat(answers["tiny_choice"]), flat(wanted["tiny_choice"]), of_choices(model))
    _, evicted = evaluate(here, "ag", ("tiny_choice",), policy="h2o", budget=0.4)
    assert not torch.equal(flat(evicted["tiny_choice"]), flat(wanted["tiny_choice"]))


@pytest.mark.slow
def test_something_is_evicted_between_context_and_continuation(folder, tiny_llama, tiny_tokenizer):
    """The scores are those of a cache that read the context alone; a rolling window keeps all."""
    _, answers = evaluate(folder, "ag", policy="snapkv", budget=0.4, window=2, schedule="every")
    _, full = evaluate(folder, "ag", ("tiny_rolling", "tiny_generate"), policy="full")
    assert answers["tiny_rolling"] == full["tiny_rolling"]
    assert answers["tiny_generate"] != full["tiny_generate"]
    model = tiny_llama()
    for row, found in zip(ROWS, flat(answers["tiny_choice"]), strict=True):
        for choice, value in zip(row["choices"], found, strict=True):
            context, answer = (tiny_tokenizer(text, return_tensors="pt")["input_ids"] for text in (row["text"], choice))
            answer = torch.cat([tiny_tokenizer(" ", return_tensors="pt")["input_ids"], answer], 1)
            cache = ag.EvictionCache(model, "snapkv", 0.4, "every", window=2)
            with torch.no_grad():
                logits = [model(context, past_key_values=cache).logits[:, -1:]]
                logits += [model(token[None], past_key_values=cache).logits for token in answer.T[:-1]]
            nats = torch.cat(logits, 1).log_softmax(-1).gather(2, answer[..., None]).sum()
            hold(value, nats, answer.shape[1] * of_nats(model))


def test_a_context_that_is_too_long_loses_its_start_as_with_hf(folder, caplog, tiny_llama):
    args = {"pretrained": str(folder / "model"), "device": "cpu", "max_length": 16}
    request = Instance("loglikelihood", {}, ("".join(ROWS[0]["text"]), " slept"), 0)
    [mine] = EvictingLM(**args).loglikelihood([request], disable_tqdm=True)
    [theirs] = get_model("hf")(**args).loglikelihood([request], disable_tqdm=True)
    hold(mine[0], theirs[0], len(" slept") * of_nats(tiny_llama()))
    assert mine[1] == theirs[1]
    assert "are cut" in caplog.text


def test_continuations_that_eviction_cannot_change_are_told(folder, caplog, tiny_llama):
    """One of two contexts has a continuation of several tokens."""
    requests = [(("", ""), list(range(5, 30)), [7]), (("", ""), list(range(6, 31)), [7, 8])]
    found = {}
    for name, options in {
        "full": {"policy": "full"},
        "random": {"policy": "random", "budget": 4},
        "blocks": {"policy": "random", "budget": 4, "schedule": "blocks:8"},
    }.items():
        caplog.clear()
        lm = EvictingLM(str(folder / "model"), device="cpu", **options)
        found[name] = [nats for nats, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
        assert ("1 of 2 contexts" in caplog.text) == (name == "random")
    bound = of_nats(tiny_llama())
    hold(found["random"][0], found["full"][0], bound)
    assert abs(found["random"][1] - found["full"][1]) > 2 * bound < abs(found["blocks"][0] - found["full"][0])


@pytest.mark.slow
def test_the_command(folder, tmp_path, tiny_llama, monkeypatch):
    gates_for(tiny_llama(), scope="prompt").save_pretrained(tmp_path / "gates")
    # left out is only the index of 13,000 tasks, as above
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    arguments = f"pretrained={folder / 'model'},policy=gates:{tmp_path / 'gates'},budget=0.3"
    words = ["--model", "ag", "--model_args", arguments, "--tasks", "tiny_choice", "--device", "cpu"]
    words += ["--include_path", str(folder), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ag.evaluate.lm_eval", *words])
    assert lm_eval_main([]) == 0
    [file] = (tmp_path / "out").rglob("results_*.json")
    assert "acc,none" in json.loads(file.read_text())["results"]["tiny_choice"]
