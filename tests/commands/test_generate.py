"""``ag.generate``: texts and numbers against forward passes under masks and against transformers."""

import copy
import io
import json
import os
import re
import shutil

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

import ag
from ag.config import LoraConfig
from ag.continuation import Generation, generate, table
from ag.engine.report import Report
from ag.errors import UserError
from ag.gates import export
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.generate import GenerateConfig, main
from ag.model import base as models
from ag.wheels import SMOLLM2
from tests.support.gates_for import gates_for
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS
from tests.support.refused import names, refuses

PROMPT = "Rosa the potter has a ticket to Rome. It rained on the pier. Where does Rosa go?"
NEW = 12
KVZIP = "ag.policy('kvzip@heads', budget=0.4, chunk=30)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A base model with its tokenizer, and an export of gates for it."""
    folder = tmp_path_factory.mktemp("generate")
    model = tiny_llama()
    model.save_pretrained(folder / "base")
    tiny_tokenizer.save_pretrained(folder / "base")
    gates = gates_for(model, scope="prompt", sink_tokens=2)
    export.save(folder / "export", gates, base_model=str(folder / "base"))
    export.save(folder / "nameless", gates)
    return folder


def config(folder, **values):
    return GenerateConfig(**{"gates": str(folder / "export"), "prompt": PROMPT, "max_new_tokens": NEW} | values)


def greedy_under_masks(model, gates, ids):
    """Continue with one masked forward pass over everything for each token; returns the text's ids and the share."""
    tokens, length = list(ids), torch.tensor([len(ids)])
    for _ in range(NEW):
        row = torch.tensor([tokens])
        gating = Gating(gates, torch.ones_like(row), length, hard=True)
        tokens.append(int(model(input_ids=row, gating=gating, use_cache=False).logits[0, -1].argmax()))
    kept = torch.stack([gates.flags(logits) for logits in gating.logits.values()])
    kept[..., : gates.config.sink_tokens] = True
    return tokens[len(ids) :], 1 - float(kept.float().mean())


def test_text_and_numbers_are_those_of_masked_forward_passes(folder, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    gates = AttentionGates.from_pretrained(folder / "export")
    ag.attach(model, gates)
    ids = tiny_tokenizer(PROMPT)["input_ids"]
    expected, evicted = greedy_under_masks(model, gates, ids)
    assert 0.2 < evicted < 0.8
    [(name, found)] = generate(config(folder)).items()
    assert (name, found.text, found.new_tokens) == (
        "gates",
        tiny_tokenizer.decode(expected, skip_special_tokens=True),
        NEW,
    )
    assert (found.prompt_tokens, found.evicted) == (len(ids), pytest.approx(evicted))
    seen, token = len(ids) + NEW - 1, 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head size, bytes
    held = seen * token - evicted * len(ids) * token
    assert held <= found.kv_bytes < held + 32 * token  # and some spare slots to append to


def test_settings_of_the_model_do_not_change_greedy_text(folder, tmp_path, tiny_llama, tiny_tokenizer):
    """Its penalties are not taken; the text ends where the server ends it: at the end token of the tokenizer too."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    [plain] = generate(config(folder, gates=None, model=str(base))).values()
    GenerationConfig(repetition_penalty=1.5, no_repeat_ngram_size=1, num_beams=2).save_pretrained(base)
    [settings] = generate(config(folder, gates=None, model=str(base))).values()
    assert settings.text == plain.text and plain.new_tokens == NEW
    ids = tiny_tokenizer(PROMPT, return_tensors="pt")
    new = tiny_llama().generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    ending = copy.deepcopy(tiny_tokenizer)
    ending.eos_token = tiny_tokenizer.convert_ids_to_tokens(new[2])
    ending.save_pretrained(base)
    [ended] = generate(config(folder, gates=None, model=str(base))).values()
    assert ended.new_tokens == new.index(new[2]) + 1


def test_compare_adds_the_text_of_transformers_own_cache(folder, tiny_llama, tiny_tokenizer):
    ids = tiny_tokenizer(PROMPT, return_tensors="pt")
    expected = tiny_llama().generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
    both = generate(config(folder, compare=True))
    assert list(both) == ["gates", "full cache"]
    assert both["gates"] != both["full cache"]
    assert (both["full cache"].text, both["full cache"].evicted) == (
        tiny_tokenizer.decode(expected, skip_special_tokens=True),
        0,
    )
    assert both["full cache"].kv_bytes > both["gates"].kv_bytes
    seen = both["gates"].prompt_tokens + NEW - 1
    assert both["full cache"].kept_share == 1
    assert both["gates"].kept_share == pytest.approx(1 - both["gates"].evicted * both["gates"].prompt_tokens / seen)
    out = Console(width=150, file=io.StringIO())
    out.print(table(both))
    full = next(line for line in out.file.getvalue().splitlines() if "full cache" in line)
    assert re.split(r"\s{2,}", full.strip())[4] == "100.0%"
    [(name, alone)] = generate(config(folder, gates=None, model=str(folder / "base"))).items()
    assert (name, alone.text) == ("full cache", both["full cache"].text)


def test_a_full_cache_has_its_options(folder):
    given = {"gates": None, "model": str(folder / "base"), "policy": "full"}
    coded = generate(config(folder, **given, kv_dtype="int8", compare=True))
    assert [one.report.policy for one in coded.values()] == ["ag.policy('full', kv_dtype='int8')", "ag.policy('full')"]
    assert [*coded] == ["full", "full cache"] and coded["full"].kv_bytes < 0.5 * coded["full cache"].kv_bytes
    [slots] = generate(config(folder, **given, options={"positions": "slot"})).values()
    assert slots.report.policy == "ag.policy('full', positions='slot')"


@pytest.mark.slow
def test_adapter_of_the_export_takes_part(folder, tiny_llama, tiny_tokenizer, tmp_path):
    adapted = models.add_lora(tiny_llama(), LoraConfig())
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    gates = AttentionGates.from_pretrained(folder / "export")
    export.save(tmp_path / "export", gates, base_model=str(folder / "base"), adapter=adapted)
    ag.attach(adapted, gates)
    expected, _ = greedy_under_masks(adapted.eval(), gates, tiny_tokenizer(PROMPT)["input_ids"])
    found = generate(config(tmp_path))["gates"].text
    assert found == tiny_tokenizer.decode(expected, skip_special_tokens=True)
    assert found != generate(config(folder))["gates"].text


@pytest.mark.parametrize("key", ["file", "messages"])
def test_a_pipe_is_read_once(key):
    reading, writing = os.pipe()
    os.write(writing, PROMPT.encode() if key == "file" else json.dumps(CHAT).encode())
    os.close(writing)
    given = GenerateConfig(policy="full", model="x", **{key: f"/dev/fd/{reading}"})
    given.check()
    os.close(reading)
    assert given.prompt_or_chat == PROMPT if key == "file" else len(given.prompt_or_chat.messages) == len(CHAT)


def test_samples_follow_the_seed_and_prompts_come_from_files(folder, tmp_path):
    def text(**values):
        return generate(config(folder, **values))["gates"].text

    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert text(prompt=None, file=str(tmp_path / "prompt.txt")) == text()

    assert text(temperature=1.5, seed=1) == text(temperature=1.5, seed=1) != text(temperature=1.5, seed=2)
    assert text(temperature=1.5, seed=1, top_p=1e-6) == text(temperature=1e-4, seed=2) == text()
    assert text(temperature=1e-300) == text()


def test_chat_template(folder, tiny_llama, tiny_tokenizer, tmp_path):
    template = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}{{ '\\n>' }}"
    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = generate(config(folder, model=str(tmp_path), chat=True))["gates"]
    by_hand = generate(config(folder, prompt=f"[user] {PROMPT}\n>"))["gates"]
    assert (chat.text, chat.prompt_tokens) == (by_hand.text, by_hand.prompt_tokens)
    gone = [
        generate(config(folder, model=str(tmp_path), chat=True, protect=protect))["gates"].evicted
        for protect in ([], ["template"], ["0-7", f"{7 + len(PROMPT)}-{9 + len(PROMPT)}"], ["0-400"])
    ]
    assert gone[0] > gone[1] == gone[2] > gone[3] == 0


def test_a_chat_with_tools_and_thoughts(folder, tiny_llama, tiny_tokenizer, tmp_path):
    """From a file in the form of training data."""
    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": CHAT[:4], "tools": json.dumps(TOOLS)}))
    text = (
        "tool: rain\nsystem: Be brief.\nuser: Does it rain?\n"
        'bot:\n<think>I have to look.</think><call>rain {"town": "Oslo"}</call></s>\ntool: 3 mm\nbot:\n'
    )
    fields = {"prompt": None, "messages": str(file), "model": str(tmp_path)}
    for variables, more in (({}, ""), ({"enable_thinking": False}, "<think></think>")):
        found = generate(config(folder, **fields, template=variables))["gates"]
        by_hand = generate(config(folder, prompt=text + more))["gates"]
        assert (found.text, found.prompt_tokens) == (by_hand.text, by_hand.prompt_tokens)
    protected = generate(config(folder, **fields, protect=["system"]))["gates"]
    first = text.index("Be brief.")
    by_hand = generate(config(folder, prompt=text, protect=[f"{first}-{first + 9}"]))["gates"]
    assert protected.evicted == by_hand.evicted < generate(config(folder, **fields))["gates"].evicted


@pytest.mark.parametrize(
    ("recorded", "asked"), [("abc123", "abc123"), (SMOLLM2.requirement, None)], ids=["commit", "wheel"]
)
def test_base_model_has_the_revision_of_the_export(folder, tmp_path, monkeypatch, recorded, asked):
    gates = AttentionGates.from_pretrained(folder / "export")
    export.save(tmp_path / "export", gates, base_model="someone/model", base_revision=recorded)
    seen = []

    def load_base(model, device):
        seen.append((model.name, model.revision, model.dtype, device))
        raise models.ModelError("enough")

    monkeypatch.setattr(models, "load_base", load_base)
    with pytest.raises(models.ModelError, match="enough"):
        generate(config(tmp_path, dtype="bfloat16"))
    assert seen == [("someone/model", asked, "bfloat16", "cpu")]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("prompt=TEXT", "file=PATH")),
        (["file=FOLDER/export/gates.safetensors"], ("file=FOLDER/export/gates.safetensors", "UTF-8")),
        (["prompt=abc", "max_new_tokens=510"], ("3 tokens", "1 to 2", "max_new_tokens=510")),
        (["prompt=abc", "max_new_tokens=512"], ("max_new_tokens=512", "less than 512")),
        (["prompt=a\udcffb"], (r"'a\udcffb'", "UTF-8")),  # a byte of the command line
        (["prompt=abc", f"budget={10**400}"], ("at most 1099511627776 tokens",)),
        (["prompt=abc", "budget=8", f"schedule=blocks:{10**20}"], ("blocks:m",)),
        (["prompt=abc", "chat=true"], ("chat template", "instruct")),
        (["messages=FOLDER/base/config.json"], ("FOLDER/base/config.json", "role and content")),
        (["prompt=abc", "template.enable_thinking=false"], ("template.enable_thinking", "chat=true")),
        (["messages=FOLDER/base/config.json", "chat=true"], ("chat=true", "messages=FILE")),
        (["prompt=abc", "gates=FOLDER/nameless"], ("model=NAME", "gates=EXPORT")),
        (["prompt=abc", "device=nonsense"], ("device=nonsense",)),
        (["prompt=abc", "policy=h20", "budget=8"], ("'h20'", "h2o")),
        (["prompt=abc", "protect=['template']"], ("protect=template", "0-40")),
    ],
)
def test_bad_input_is_one_line(folder, capsys, words, parts):
    given = [word.replace("FOLDER", str(folder)) for word in words]
    if not any(word.startswith("gates=") for word in given):
        given.append(f"gates={folder / 'export'}")
    assert main(given) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ag.generate: error: ")
    names(error, *(part.replace("FOLDER", str(folder)) for part in parts))


def test_command_prints_texts_a_table_and_what_was_saved(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = [f"gates={folder / 'export'}", f"prompt={PROMPT}", f"max_new_tokens={NEW}", "policy=tova", "budget=8"]
    assert main([*words, "compare=true", "layers=true"]) == 0
    out = capsys.readouterr().out
    both = generate(config(folder, policy="tova", budget=8, compare=True))
    assert out.startswith(f"--- tova ---\n{both['tova'].text}\n\n--- full cache ---\n{both['full cache'].text}\n")
    assert f"{len(PROMPT)} prompt tokens" in out and "ag.policy('tova', budget=8): " in out and "scoring s" in out
    for generation in both.values():
        assert f"{generation.evicted:.1%}" in out and f"{generation.kv_bytes:,}" in out
    tokens = len(PROMPT) + NEW - 1  # the last one is never read
    plain, used = (
        tokens * 3 * 2 * 2 * 16 * 4,
        both["tova"].kv_bytes,
    )  # layers, keys and values, KV heads, head size, bytes
    assert (
        f"transformers' own {plain / 2**20:.2f} MiB: {1 - used / plain:.0%} saved. {both['tova'].evicted:.0%} " in out
    )
    assert main([f"gates={folder / 'export'}", "policy=tova", "budget=8", "prompt=Rosa", "max_new_tokens=2"]) == 0
    out = capsys.readouterr().out
    assert "Nothing was evicted: 4 prompt tokens are too few" in out and "scoring s" not in out
    assert main([f"gates={folder / 'export'}", "policy=full", "prompt=Rosa", "max_new_tokens=2"]) == 0
    out = capsys.readouterr().out
    assert "The cache takes " in out and "Nothing was evicted" not in out


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        (
            {"policy": "snapkv+caote@heads", "budget": 0.5, "schedule": "blocks:8+every", "options": {"window": 3}},
            "ag.policy('snapkv+caote@heads', budget=0.5, schedule='blocks:8+every', window=3)",
        ),
        ({"policy": "gates@heads", "budget": 0.25}, "ag.policy('gates:EXPORT@heads', budget=0.25)"),
        ({"policy": "kvzip@heads", "budget": 0.4, "options": {"chunk": 30}}, KVZIP),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_any_policy(folder, tiny_llama, tiny_tokenizer, given, spec):
    """Text and report equal those of the same policy in transformers' generate."""
    spec = spec.replace("EXPORT", str(folder / "export"))
    (row,) = generate(config(folder, **given)).values()
    model = tiny_llama()
    cache = ag.EvictionCache(model, eval(spec).with_tokenizer(tiny_tokenizer))
    ids = tiny_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    text = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    assert row.text == tiny_tokenizer.decode(text, skip_special_tokens=True)
    assert (row.report.policy, row.report.kept) == (spec, cache.report().kept)


def test_a_window_beyond_the_budget_is_one_warning(folder, capsys):
    words = [f"gates={folder / 'export'}", "policy=snapkv", "budget=0.1", f"prompt={PROMPT}", f"max_new_tokens={NEW}"]
    assert main(words) == 0
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("ag.generate: warning: ag.policy('snapkv', budget=0.1) protects 32 tokens per KV head")


def test_an_export_with_a_relative_path_of_its_base(folder, tmp_path, monkeypatch, tiny_llama):
    """It is found in the folder of the run; elsewhere the error asks for model=."""
    moved, size = tmp_path / "moved", tiny_llama().config.hidden_size
    export.save(moved, gates_for(tiny_llama()), base_model="./base")
    monkeypatch.chdir(folder)
    assert ag.load(str(moved)).model.config.hidden_size == size
    monkeypatch.chdir(tmp_path)
    with refuses(UserError, f"gates={moved}", "./base", "relative to where that run was", "model="):
        ag.load(str(moved))
    assert ag.load(str(moved), str(folder / "base")).model.config.hidden_size == size


def test_labels_and_bytes_are_whole_in_80_columns():
    label = "snapkv+caote@preference 0.25"
    row = Generation("", 1812, 64, 0.7, 123_456_789, 0.31, 1.2, 3.4, Report("", 0, [], [], []), True)
    out = Console(width=80, file=io.StringIO())
    out.print(table({label: row}))
    lines = out.file.getvalue().splitlines()
    cells = [line[:22].strip() for line in lines]
    assert any("123,456,789" in line for line in lines) and not any("…" in line for line in lines)
    first = next(index for index, line in enumerate(lines) if "123,456,789" in line)
    assert "".join(cells[first : first + 2]).replace(" ", "") == label.replace(" ", "")
