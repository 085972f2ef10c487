"""Questions about a text that was read once, and exports that load with all that they need."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

import ag
from ag.errors import UserError
from ag.gates import export
from ag.gates.attach import same_gates
from ag.loading import Loaded
from tests.support.gates_for import gates_for
from tests.support.http_server import byte_tokenizer, saved
from tests.support.refused import refuses

CONTEXT, QUESTIONS = "The ferry leaves at nine, and the dog is called Biscuit. " * 3, ["When?", "Who is called so?"]


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(vocab_size=300, max_position_embeddings=1024)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("policy", [("full", None), ("h2o", 0.3)])
def test_each_answer_is_that_of_its_question_alone(model, template, policy):
    tokenizer = byte_tokenizer()
    if not template:
        tokenizer.chat_template = None
    answers = ag.ask(model, tokenizer, CONTEXT, QUESTIONS, *policy, max_new_tokens=6)
    for question, answer in zip(QUESTIONS, answers.texts, strict=True):
        text = f"<s>{CONTEXT}\n\nQuestion: {question}\nAnswer:"
        if template:
            message = {"role": "user", "content": f"{CONTEXT}\n\n{question}"}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        length = ids.shape[1] - len(text.rpartition(CONTEXT)[2].encode())
        cache = ag.EvictionCache(model, *policy)
        with torch.no_grad():
            model(ids[:, :length], past_key_values=cache)
        assert answers.nbytes == cache.nbytes and answers.kept_share == cache.kept_share()
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6, do_sample=False
        )[0, ids.shape[1] :]
        alone = tokenizer.decode(new, skip_special_tokens=True).strip()
        assert answer == (alone if template else alone.partition("\n")[0])
    assert (answers.kept_share < 0.31) == (policy[0] == "h2o") and answers.nbytes > 0
    assert str(answers).splitlines()[-1].startswith(f"[{answers.kept_share:.1%} of the context kept")


def test_settings_of_the_model_do_not_change_answers_and_are_left_as_they_are(model, monkeypatch):
    tokenizer = byte_tokenizer()
    plain = ag.ask(model, tokenizer, CONTEXT, QUESTIONS, "full", max_new_tokens=6)
    settings = GenerationConfig(repetition_penalty=1.5, no_repeat_ngram_size=1)
    monkeypatch.setattr(model, "generation_config", settings)
    assert ag.ask(model, tokenizer, CONTEXT, QUESTIONS, "full", max_new_tokens=6).texts == plain.texts
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert ag.ask(adapted, tokenizer, CONTEXT, QUESTIONS, "full", max_new_tokens=6).texts == plain.texts
    inner = adapted.get_base_model()
    assert model.generation_config is settings and inner.generation_config.repetition_penalty == 1.5


def test_questions_that_cannot_be_asked(model):
    tokenizer = byte_tokenizer()
    for context, questions in ((" ", QUESTIONS), (CONTEXT, []), (CONTEXT, "When?")):
        with refuses(UserError, "expected a text, and a list with at least one question"):
            ag.ask(model, tokenizer, context, questions, "full")
    for blank in ("", " "):
        with refuses(UserError, f"question {blank!r}", "expected words"):
            ag.ask(model, tokenizer, CONTEXT, ["When?", blank], "full")
    for more in ({"budget": 0.5}, {"schedule": "every"}, {"sinks": 2}):
        with refuses(UserError, "h2o", "budget, schedule and options", "ag.policy"):
            ag.ask(model, tokenizer, CONTEXT, QUESTIONS, ag.policy("h2o", 0.3), **more)
    changing = copy.deepcopy(tokenizer)
    changing.chat_template = "{{ messages[0].content | upper }}"
    with refuses(UserError, "the chat template changes the question 'When?'"):
        ag.ask(model, changing, CONTEXT, QUESTIONS, "full")


def test_an_export_loads_with_all_that_it_needs(model, tmp_path):
    base = saved(model, tmp_path / "base")
    export.save(tmp_path / "gates", gates_for(model), base_model=str(base))
    loaded = ag.load(str(tmp_path / "gates"))
    assert loaded.tokenizer("x")["input_ids"] == byte_tokenizer()("x")["input_ids"]
    ids = torch.arange(3, 43)[None]
    cache, own = loaded.cache(0.5), ag.EvictionCache(loaded.model, f"gates:{tmp_path / 'gates'}", 0.5)
    with torch.no_grad():
        logits = [loaded.model(ids, past_key_values=each).logits for each in (cache, own)]
    assert torch.equal(*logits) and cache.kept_share() == own.kept_share() == 0.5


def test_the_name_of_an_export_may_end_like_a_policy(model, tmp_path):
    """Its sibling without the ending is another export."""
    for seed, name in enumerate(("run", "run@heads", "run+vatp")):
        gates, folder = gates_for(model, seed), tmp_path / name
        export.save(folder, gates)
        assert same_gates(Loaded(model, byte_tokenizer(), str(folder)).cache(0.5).gates, gates)
