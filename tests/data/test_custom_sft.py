"""Supervised rows of your own, by the names of their columns; the examples are those of docs/training.md."""

import json
import re

import datasets
import pyarrow
import pytest
from pyarrow import parquet

import ag.data
from ag.config import DataConfig
from ag.data.custom_sft import detect_form
from ag.data.sources import DataError
from ag.data.templates import is_own
from ag.evaluate.tasks.responses import of_rows
from tests.support import ROOT
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS, call
from tests.support.refused import names, refuses

PAGE = (ROOT / "docs" / "training.md").read_text()
EXAMPLES = [[json.loads(line) for line in block.splitlines()] for block in re.findall(r"```json\n(.*?)```", PAGE, re.S)]
[TABLE] = re.findall(r"```csv\n(.*?)```", PAGE, re.S)
SHAREGPT = {"human": "user", "gpt": "assistant"}
ROWS = [{"prompt": f"Word {i}:", "response": f" the old bridge {i}"} for i in range(4)]
OPEN = "{% for m in messages %}[{{ m.role }}]\n"
CLOSE = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
PLAIN = OPEN + "{{ m.content }}</s>" + CLOSE
MARKED = OPEN + (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}" + CLOSE
)
#: it opens a turn with more than it leaves there, as templates do that write empty thoughts
THOUGHTS = PLAIN.replace("[assistant]\n{% endif", "[assistant]\n<think></think>{% endif")
#: it rewrites earlier turns
FORGETFUL = OPEN + "{{ m.content if loop.last or m.role != 'assistant' else '...' }}</s>" + CLOSE
TEMPLATES = pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])


def example(*columns):
    """The rows of the page with these columns, the one of texts first."""
    return next(rows for rows in EXAMPLES if tuple(rows[0]) == columns)


def rendered(*turns):
    """What the templates of these tests write of turns (role, content), and of the opening of an answer."""
    return "".join(f"[{role}]\n{content}</s>\n" for role, content in turns) + "[assistant]\n"


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def answered(module, tokenizer):
    """Of each training row the text of its prompt, and the text that carries loss."""
    found = []
    for row in module.train_rows:
        batch = module.collator([row])
        labels = batch["labels"][0]
        prompt = tokenizer.decode(batch["input_ids"][0, : batch["prompt_length"][0]])
        found.append((prompt, tokenizer.decode(labels[labels != -100])))
    return found


@pytest.mark.parametrize(("eos", "end"), [(None, "</s>"), (False, "")])
def test_prompt_and_response_are_joined_as_they_are(module, tokenizer, eos, end):
    made = module(ROWS, eos=eos)
    assert answered(made, tokenizer) == [(row["prompt"], row["response"] + end) for row in ROWS[1:]]
    ids = made.val_rows[0][0].tokens.tolist()
    assert ids == tokenizer(ROWS[0]["prompt"] + ROWS[0]["response"] + end)["input_ids"]
    again = [{"prompt": "a", "completion": "the bridge</s>"}] * 2  # no second end
    made = module(again, eos=eos)
    assert answered(made, tokenizer) == [("a", "the bridge</s>")]
    names(made.splits.description, "prompt", "completion", "loss on completion")


def test_examples_of_the_page(module, make_config, tokenizer, tmp_path):
    rows = example("prompt", "completion")
    assert answered(module(rows), tokenizer) == [(row["prompt"], row["completion"] + "</s>") for row in rows[1:]]
    (tmp_path / "train.csv").write_text(TABLE)
    config = make_config(kind="sft", name=str(tmp_path), val_samples=1)
    made = ag.data.build(config.data, config.seed, tokenizer, 10_000)
    assert answered(made, tokenizer) == [
        ("Translate: la pluie >", "the rain</s>"),
        ("Translate: oui, le bateau >", "yes, the boat</s>"),
    ]
    sizes = {"prompt_min": 4, "prompt_max": 8, "continuation": 4, "max_length": 20}
    made = module(example("text"), **sizes)  # is cut as data.kind=text cuts it
    config = make_config(kind="text", name=str(tmp_path / "mine"), val_samples=1, **sizes)
    expected = ag.data.build(config.data, config.seed, tokenizer, 10_000)
    assert [(row.tokens.tolist(), row.prompt_length) for row in made.train_rows] == [
        (row.tokens.tolist(), row.prompt_length) for row in expected.train_rows
    ]
    names(made.splits.description, "text", "continuation", "data.kind=text", "data.packing=packed")


@TEMPLATES
def test_chats_of_the_page(module, tokenizer, template):
    """Of prompt and completion, messages and ShareGPT's conversations; and a completion of several turns."""
    end = "</s>\n" if template == PLAIN else "</s>"
    for rows in EXAMPLES[1:4]:
        made = module(rows, template)
        turns = [[[*turn.values()] for column in row.values() for turn in column] for row in rows[1:]]
        expected = [(rendered((SHAREGPT.get(who, who), what)), f"{answer}{end}") for [who, what], [_, answer] in turns]
        assert answered(made, tokenizer) == expected
        names(made.splits.description, *rows[0], "assistant", "marks" if template == MARKED else "rendering")
    before = [("user", "q"), ("assistant", "an earlier answer"), ("user", "and then?")]
    asked = [("assistant", "yes"), ("user", "why?"), ("assistant", "it is high")]
    rows = [{"prompt": chat(*before), "completion": chat(*asked)}] * 2
    assert answered(module(rows, template), tokenizer) == [(rendered(*before), f"yes{end}it is high{end}")]


@pytest.mark.parametrize("template", [PLAIN, THOUGHTS, MARKED])
def test_the_assistants_turns_carry_loss(module, tokenizer, template):
    first, second = "yes</s>", "it is high</s>"
    turns = [("system", "Be brief."), ("user", "does it rain?"), ("assistant", "yes"), ("user", "and the river?")]
    rows = [{"messages": chat(*turns, ("assistant", "it is high"))}] * 2
    made = module(rows, template)
    closed = "" if template == MARKED else "\n"  # what closes a turn belongs to it where nothing is marked
    assert answered(made, tokenizer) == [(rendered(*turns[:2]), first + closed + second + closed)]
    assert tokenizer.decode(of_rows("0", [*made.train_rows]).answers[0]) == first + closed
    [(_, loss)] = answered(module(rows, template, eos=True), tokenizer)
    assert loss == first + closed + second + closed + "</s>"
    unanswered = {"messages": chat(*turns)}
    untaught = {"messages": [*chat(*turns), {"role": "assistant", "content": "it is high", "weight": 0}]}
    for row in (unanswered, untaught):  # what ends there is no answer that is taught
        plain, ended = (module([row] * 2, template, eos=eos) for eos in (None, True))
        assert answered(ended, tokenizer) == answered(plain, tokenizer) == [(rendered(*turns[:2]), first + closed)]
        assert ended.train_rows[0].tokens.tolist() == plain.train_rows[0].tokens.tolist()


def test_system_messages_and_roles_of_sharegpt(module, tokenizer, template=PLAIN):
    """A column has the system message once; tables fill turns up with None; other roles stay."""
    told = {"from": "system", "value": "Be brief.", "weight": None}
    turns = [{"from": who, "value": what} for who, what in (("human", "Rain?"), ("observation", "3"), ("gpt", "Yes."))]
    read = chat(("user", "Rain?"), ("tool", "3"), ("assistant", "Yes."))
    expected = rendered(("system", "Be brief."), ("user", "Rain?"), ("tool", "3"))
    for row in (
        {"conversations": turns, "system": "Be brief."},
        {"conversations": [told, *turns], "system": "Be brief."},
        {"conversations": [told, *turns], "system": None},
        {"messages": read, "system": "Be brief."},
        {"prompt": read[:2], "completion": read[2:], "system": "Be brief."},
    ):
        [(prompt, loss)] = answered(module([row] * 2, template), tokenizer)
        assert (prompt, loss.strip()) == (expected, "Yes.</s>")
    for system, parts in (("Be long.", "row 2 system"), (["Be brief."], "row 2 system list")):
        with refuses(DataError, *parts.split()):
            module([{"conversations": [told, *turns], "system": system}] * 2, template)


def test_messages_of_weight_0_carry_no_loss(module, tokenizer, template=PLAIN):
    """As OpenAI has them; the prompt ends where the first answer begins that carries loss."""
    roles = ["user", "assistant"] * 3

    def row(*weights):
        turns = zip(roles, "abcdef", [None, weights[0], None, weights[1], None, weights[2]], strict=True)
        return {"messages": [{"role": role, "content": said, "weight": weight} for role, said, weight in turns]}

    for weights, prompt, loss in (((0, 1, None), "abc", "df"), ((1, 0, 1), "a", "bf"), ((0, 0, 1), "abcde", "f")):
        [(before, carries)] = answered(module([row(*weights)] * 2, template), tokenizer)
        assert before == rendered(*zip(roles, prompt, strict=False))
        assert carries.replace("\n", "") == "".join(f"{one}</s>" for one in loss)
    with refuses(DataError, "row 2", "weight=0.5", "0", "1"):
        module([row(1, 0.5, 1)] * 2, template)


def test_tables_fill_up_what_other_rows_have(make_config, tokenizer, tmp_path, monkeypatch):
    """Of calls, of their arguments and of tools; as of JSON lines. Arguments and tools may be JSON."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    other = [*CHAT[:2], {"role": "assistant", "tool_calls": call({"country": "Norway"})}]
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": other, "tools": [{"name": "x", **TOOLS[0]}]}] * 2
    as_json = [
        {"messages": [*row["messages"][:2], row["messages"][2] | {"tool_calls": call(arguments)}, *row["messages"][3:]]}
        | {"tools": json.dumps(row["tools"])}
        for row, arguments in zip(rows, ['{"town": "Oslo"}', '{"country": "Norway"}'] * 2, strict=True)
    ]
    for name, written in (("lines", rows), ("json", as_json), ("table", rows)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (tmp_path / "table" / "train.jsonl").unlink()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table" / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    made = [
        answered(
            ag.data.build(make_config(kind="sft", name=str(tmp_path / name), val_samples=1).data, 0, tokenizer, 10_000),
            tokenizer,
        )
        for name in ("lines", "json", "table", "saved")
    ]
    assert made[0] == made[1] == made[2] == made[3]
    assert made[0][0][1].startswith('<call>rain {"country": "Norway"}</call></s>')


def test_tools_and_options_of_the_template(module, tokenizer):
    template = "{{ tools[0].name }}{{ mood }}|" + PLAIN
    row = example("messages")[0] | {"tools": [{"name": "rain"}], "chat_template_kwargs": {"mood": "!"}}
    [(prompt, _)] = answered(module([row] * 2, template), tokenizer)
    assert prompt.startswith("rain!|[user]")
    tools = [{"name": "rain", "unit": None}]
    for written, told in ((tools, '[{"name": "rain"}]'), (json.dumps(tools), json.dumps(tools))):
        [(prompt, _)] = answered(module([row | {"tools": written}] * 2, "{{ tools | tojson }}|" + PLAIN), tokenizer)
        assert prompt.startswith(f"{told}|[user]")
    with refuses(DataError, "row 2", "tools", "chat_template_kwargs"):
        module([row, row | {"tools": "{rain"}], template)


@pytest.mark.parametrize("messages", [False, True])
def test_rows_that_do_not_fit(module, bos_tokenizer, messages):
    """A prompt loses what follows its first token; a row whose response does not fit is left out."""
    long, short = "a small boat waits near the old bridge " * 3, "yes"
    pairs = [("ok", "ok"), (long, short), (short, long)]
    rows = [{"prompt": a, "response": b} for a, b in pairs]
    template = "<s>" + PLAIN if messages else None
    if messages:
        rows = [{"messages": chat(("user", a), ("assistant", b))} for a, b in pairs]
    made = module(rows, template, bos_tokenizer, max_length=30)
    [row] = made.train_rows
    whole = len(module(rows, template, bos_tokenizer).train_rows[0].tokens)
    assert (len(row.tokens), row.tokens[0]) == (30, bos_tokenizer.bos_token_id)
    counts = made.splits.counts.train
    assert (counts.read, counts.cut, counts.cut_tokens, counts.lost_tokens) == (2, 1, whole, whole - 30)
    lines, warned = made.splits.report()
    assert lines == [made.splits.description, "training: 1 rows", "validation: 1 rows"]
    left_out, lost = warned
    names(left_out, "left out: 1 of 2 training rows", "data.max_length=30")
    names(lost, f"1 of 2 training rows lost {100 * (whole - 30) / whole:.0f} % of their tokens", "data.max_length=30")
    names(lost, f"the longest has {counts.longest} tokens")
    assert answered(made, bos_tokenizer)[0][1] == ("yes</s>\n" if messages else "yes</s>")


def test_more_than_a_tenth_of_the_tokens_is_a_warning(module):
    """Of rows of 19 tokens, the prompts lose one or two."""
    rows = [{"prompt": "~" * 17, "response": "!"}] * 3  # the tokenizer merges none of them
    assert module(rows).splits.report()[1] == [] and len(module(rows).train_rows[0].tokens) == 19
    read = ["training: 2 rows", "validation: 1 rows"]
    for lost, share in ((1, 5), (2, 11)):
        lines, warned = module(rows, max_length=19 - lost).splits.report()
        told = warned if lost == 2 else [lines.pop(2), lines.pop(3)]
        assert lines[1:] == read and warned == (told if lost == 2 else [])
        for line, of in zip(told, ("2 of 2 training", "1 of 1 validation"), strict=True):
            names(line, f"{of} rows lost {share} % of their tokens", f"data.max_length={19 - lost}", "19 tokens")
    names(module(rows, context=18).splits.report()[0][2], "a model with a longer context")


ALL = {"messages": [], "conversations": [], "prompt": "a", "response": "b", "completion": "c", "text": "d", "q": "e"}


@pytest.mark.parametrize(
    ("lacking", "keys", "found"),
    [
        ("", {}, ["messages"]),
        ("messages", {}, ["conversations"]),
        ("messages conversations response", {}, ["prompt", "completion"]),
        ("messages conversations prompt", {}, ["text"]),
        ("response", {"prompt_field": "q"}, ["q", "completion"]),
        ("", {"messages_field": "conversations"}, ["conversations"]),
        ("", {"text_field": "q"}, ["q"]),
    ],
)
def test_which_columns_count(make_config, lacking, keys, found):
    row = {name: value for name, value in ALL.items() if name not in lacking.split()}
    form = detect_form(row, make_config(kind="sft", name="a/b", **keys).data, "here")
    assert form.columns == found and form.chat == isinstance(ALL[found[-1]], list)


def test_rows_that_are_not_recognised(make_config):
    for row, keys, parts in (
        (None, {}, "here no rows"),
        ({"q": "a", "a": "b"}, {}, "here q a prompt response completion messages conversations text"),
        ({"messages": []}, {"prompt_field": "q"}, "here messages q data.prompt_field=NAME data.messages_field=NAME"),
    ):
        with refuses(DataError, *parts.split()):
            detect_form(row, make_config(kind="sft", name="a/b", **keys).data, "here")


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("key", ["data.prompt_min=300", "data.prompt_max=300", "data.continuation=9"])
def test_only_documents_are_cut_into_prompts_and_continuations(module, key, messages):
    rows, columns = ([{"messages": TURNS}] * 2, "messages") if messages else (ROWS, "prompt and response")
    name, value = key.removeprefix("data.").split("=")
    with refuses(DataError, key, "train.jsonl", columns, "leave it out", "documents (text)"):
        module(rows, PLAIN if messages else None, **{name: int(value)})


def test_documents_have_no_response_that_could_end_with_eos(module):
    with refuses(DataError, "data.eos=true", "documents (text)", "leave data.eos out"):
        module([{"text": "abc def"}] * 2, eos=True)


TURNS = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
DEEP = "x"
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("row", "template", "parts"),
    [
        ({"prompt": "a", "response": 3}, None, "row 2 response int str"),
        ({"prompt": "a", "response": TURNS[1:2]}, None, "row 2 response list str"),
        ({"messages": TURNS}, None, "messages chat template prompt response"),
        ({"messages": TURNS[:1]}, PLAIN, "row 2 role=assistant"),
        ({"messages": [*TURNS[:3], TURNS[3] | {"content": ""}]}, PLAIN, "row 2 empty assistant"),
        ({"messages": ["hello"]}, PLAIN, "row 2 role content 'hello'"),
        ({"messages": TURNS}, FORGETFUL, "row 2 turn 2 generation"),
        ({"messages": TURNS}, "{% generation %}{% endgeneration %}" + PLAIN, "row 2 template generation"),
        ({"messages": [*TURNS, {"role": "user", "content": DEEP}]}, PLAIN, "row 2 deep"),
    ],
)
def test_rows_that_cannot_be_used(module, row, template, parts):
    first = {"messages": TURNS} if "messages" in row else ROWS[0]
    with refuses(DataError, *parts.split()):
        module([first, row] if template != FORGETFUL else [row] * 2, template)


def test_where_own_rows_are_found(make_config, tokenizer, write, tmp_path, module, monkeypatch):
    """A folder as data.name, or as data.root whatever the name; a validation split; or the hub."""
    with refuses(DataError, "data.name=./nowhere", "folder"):
        ag.data.build(make_config(kind="sft", name="./nowhere").data, 0, tokenizer, 100)
    assert not is_own(DataConfig(kind="sft", name="boolq")) and is_own(DataConfig(kind="sft", name="a/b"))
    named = module(ROWS)
    for name in ("facts", "own"):
        found = module(ROWS, name=name, root=str(tmp_path / "mine"))
        assert [row.tokens.tolist() for row in found.train_rows] == [row.tokens.tolist() for row in named.train_rows]
    with refuses(DataError, "piqaa", "piqa"):  # of a folder of tasks the name has to be one
        ag.data.check(make_config(kind="sft", name="piqaa", root=str(tmp_path)).data)
    write(tmp_path / "mine", "validation", ROWS[:2])
    made = module(ROWS, val_samples=None, train_samples=3)
    assert (len(made.train_rows), len(made.val_rows)) == (3, 2)

    def load(name, subset, *, split, revision):
        assert (name, subset, revision) == ("org/rows", "short", "v1")
        if split == "validation":
            raise ValueError("Unknown split 'validation'")
        return datasets.Dataset.from_list([{"q": row["prompt"], "a": row["response"]} for row in ROWS])

    monkeypatch.setattr(datasets, "load_dataset", load)
    fields = {"prompt_field": "q", "response_field": "a", "subset": "short", "revision": "v1"}
    config = make_config(kind="sft", name="org/rows", val_samples=1, **fields)
    found = ag.data.build(config.data, config.seed, tokenizer, 10_000)
    assert [row.tokens.tolist() for row in found.train_rows] == [row.tokens.tolist() for row in named.train_rows]
