"""Which tokens of a chat the assistant says, under the templates that trl ships and under some of common models.

Each word of a message has the message's number in it, so that the words show whose tokens carry loss.
"""

import importlib.util
import random
import re
from pathlib import Path

import pytest

from ag.errors import UserError
from ag.model.chat import Chat, assistant_tokens, is_marked, runs
from tests.data.conftest import byte_level
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS, TURNS, UNMARKED, call
from tests.support.refused import names, refuses

_TRL = importlib.util.find_spec("trl")
NO_TRL = pytest.param("", marks=pytest.mark.skip("needs trl: pip install -c constraints.txt trl"))
SHIPPED = sorted(Path(_TRL.submodule_search_locations[0]).glob("chat_templates/*.jinja")) if _TRL else []

TURN = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
ANSWER = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}{% set said = said.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ said.lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
MISTRAL = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}{{ '<s>' }}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '[INST]' }}{% if loop.index0 >= rest | length - 2 and "
    "messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
#: Of some templates what is written, at an earlier turn and at the last one, of a turn that says {}.
COMMON = {
    "phi-3": (TURN.replace("|>'", "|>\n'") + ANSWER.replace("|>", "|>\n"), "{}<|end|>\n", "{}<|end|>\n</s>"),
    "phi-4-mini": (TURN + ANSWER, "{}<|end|>", "{}<|end|></s>"),
    "qwen3-thinking": (THINKING, "{}<|im_end|>\n", "\n</think>\n\n{}<|im_end|>\n"),
    "mistral": (MISTRAL, " {}</s>", " {}</s>"),
}
TEMPLATES = {path.stem: path.read_text() for path in SHIPPED} | {name: one[0] for name, one in COMMON.items()}
PARTS = ("idefics3", "llava_next", "smolvlm")  # read the content as parts
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
BY_DAY = [pytest.param(path.stem, marks=[] if i % 5 == 0 else NIGHTLY) for i, path in enumerate(SHIPPED)]
TAG = re.compile(r"<[^\s<>'\"]+>|\[/?[A-Z_]+\]")
MARKERS = [
    "<|im_end|>\n<|im_start|>user\n",
    "<|user|>",
    "</s>[INST]",
    "[/INST] ",
    "<|eot_id|>",
    "\nassistant\n",
    "<think>",
]
KINDS = ("plain", "system", "spaces", "thoughts", "reasoning", "empty", "markers", "calls", "letters")


@pytest.fixture(scope="module")
def tokenizer():
    """The tags of all templates are tokens, as in the tokenizers of the models."""
    made = byte_level()
    made.add_special_tokens(
        {"additional_special_tokens": sorted({t for s in TEMPLATES.values() for t in TAG.findall(s)})}
    )
    return made


def words(rng, turn, letter="w"):
    """Words of a turn; thoughts have another letter."""
    return " ".join(f"{letter}{turn}n{i}x" for i in range(rng.randint(1, 3)))


def draw(rng, kind):
    """A chat of a kind."""
    roles = ["user", "assistant"] * rng.randint(1, 3)
    if kind == "system":
        roles = ["system", *roles]
    if kind == "calls":
        roles = ["user", "assistant", "tool", "assistant", *roles]
    chat = []
    for turn, role in enumerate(roles):
        said = words(rng, turn)
        if kind == "spaces":
            said = (
                rng.choice(["", " ", "\n", "\n\n ", "\t"]) + said.replace(" ", "  \n") + rng.choice(["", " ", "\n\n"])
            )
        if kind == "markers":
            said = (
                rng.choice(["", *MARKERS]) + said.replace(" ", rng.choice([" ", *MARKERS])) + rng.choice(["", *MARKERS])
            )
        if kind == "letters":
            said = '\u00e9\U0001f600"\\' + said + rng.choice(['"', "\U0001f600", "\u4e2d.", "!"])
        if kind == "empty" and role == "user" and rng.random() < 0.7:
            said = rng.choice(["", " "])
        if kind == "thoughts" and role == "assistant" and rng.random() < 0.7:
            said = (
                rng.choice(["<think>", "<think>\n", ""])
                + words(rng, turn, "t")
                + rng.choice(["</think>", "\n</think>\n\n"])
                + said
            )
        message = {"role": role, "content": said}
        if kind == "reasoning" and role == "assistant" and rng.random() < 0.7:
            message["reasoning_content"] = words(rng, turn, "t")
        if role == "tool":
            message |= {"name": "look", "tool_call_id": "123456789"}
        if kind == "calls" and turn == 1:
            told = rng.choice([{}, {"town": words(rng, turn)}, {"n": 3, "towns": [words(rng, turn) + '"\n\u00e9']}])
            call = {"id": "123456789", "type": "function", "function": {"name": "look", "arguments": told}}
            message = {"role": role, "tool_calls": [call]} | rng.choice([{}, {"content": ""}, {"content": said}])
        chat.append(message)
    return chat


def as_parts(chat):
    return [m | {"content": [{"type": "text", "text": m["content"]}]} if "content" in m else m for m in chat]


def parted(tokenizer, ids, own, text):
    """For each letter of a text whether its tokens carry loss."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    carries = [set() for _ in text]
    for (begin, end), loss in zip(offsets, own.tolist(), strict=True):
        for at in range(begin, end):
            carries[at].add(loss)
    return carries


def check(tokenizer, chat, taught):
    """Require loss on each word of the turns that are taught, and on no other; thoughts need not be written."""
    ids, own = assistant_tokens(tokenizer, Chat(chat), taught)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    carries, found = parted(tokenizer, ids, own, text), set()
    for match in re.finditer(r"([wt])(\d+)n\d+x", text):
        assert set.union(*carries[slice(*match.span())]) == {int(match[2]) in taught}, (match[0], text)
        found.add(match[0])
    for turn in taught:
        said = str(chat[turn].get("content", "")).rpartition("</think>")[2] + str(chat[turn].get("tool_calls"))
        assert set(re.findall(r"w\d+n\d+x", said)) <= found
    return ids, own


def said(tokenizer, chat, turns=None, **variables):
    """The text of a chat, and its parts that carry loss."""
    turns = turns or [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    ids, own = assistant_tokens(tokenizer, Chat(chat, variables), turns)
    return tokenizer.decode(ids), [tokenizer.decode(ids[first:behind]) for first, behind in runs(own)]


@pytest.mark.parametrize("name", [*COMMON, *(BY_DAY if SHIPPED else [NO_TRL])])
def test_the_loss_is_on_what_the_assistant_says(tokenizer, monkeypatch, name):
    """All of it and nothing that others say; or the chat is refused, which says of which turn."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    for kind in KINDS:
        chat = draw(rng := random.Random(f"{name}/{kind}"), kind)
        chat = as_parts(chat) if name.startswith(PARTS) else chat
        given = rng.choice([0, 0, len(chat) - 1])
        taught = [i for i, message in enumerate(chat) if message["role"] == "assistant" and i >= given]
        try:
            ids, own = check(tokenizer, chat, taught)
        except UserError as error:
            names(str(error), "chat template")
            assert kind == "calls" or kind == "system" and "System role not supported" in str(error), error
            assert not name.startswith(("qwen3_", "nemotron")) or "_vl" in name, error
            continue
        if not is_marked(tokenizer) and kind == "plain":
            before = tokenizer.apply_chat_template(chat[: taught[0]], tokenize=False, add_generation_prompt=True)
            assert before.startswith(tokenizer.decode(ids[: own.argmax()]))
            assert len(runs(own)) == len(taught)


@pytest.mark.parametrize("name", COMMON)
def test_a_turn_is_what_is_written_of_it(tokenizer, monkeypatch, name):
    """From what opens an answer to what closes it, letter by letter; words that repeat are told apart."""
    template, earlier, last = COMMON[name]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for words in (["a", "b", "c"], ["ok"] * 3, ["user", "assistant", "end"], ["a <|user|> b", "</s>a", "[INST] a"]):
        for system in ([], [{"role": "system", "content": words[0]}]):
            chat = [*system]
            for one in words:
                chat += [{"role": "user", "content": one}, {"role": "assistant", "content": one}]
            expected = [earlier.format(words[0]), earlier.format(words[1]), last.format(words[2])]
            assert said(tokenizer, chat)[1] == expected


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("{{ m.content[:4] }}", 2),  # cuts what is said
        ("{{ m.content }}{{ m.content }}", 2),  # says it twice
        ("{{ m.content if loop.last else '...' }}", 2),
        ("{{ m.content }}{% if 'says' in m.content %}!{% endif %}", 1),  # writes by what is said
        ("{% generation %}{{ m.content[:4] }}{% endgeneration %}{{ m.content[4:] }}", 2),
        ("{% generation %}{{ m.content }}{% endgeneration %}", 1),  # marks all
        ("{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}", 2),
        ("{{ m.content }}{% if loop.last and add_generation_prompt %}?{% else %}!{% endif %}", 2),  # opens otherwise
    ],
)
def test_turns_that_cannot_be_told_are_named(tokenizer, monkeypatch, template, turn):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}" + template + " {% endfor %}")
    chat = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant") * 2]
    with refuses(UserError, f"turn {turn}", "generation"):
        said(tokenizer, chat)


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_thoughts_and_calls(tokenizer, monkeypatch, template):
    """Thoughts before the last message of the user are not written, and carry none; those between calls are."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    text, loss = said(tokenizer, CHAT, tools=TOOLS)
    assert text == (
        "tool: rain\nsystem: Be brief.\nuser: Does it rain?\nbot:\n"
        + TURNS[0][1]
        + "\ntool: 3 mm\nbot:\nYes.</s>\nuser: And snow?\nbot:\n<think>Too warm.</think>No.</s>\n"
    )
    ends = "" if template == TEMPLATE else "\n"  # what closes a turn belongs to it where nothing is marked
    assert loss == [TURNS[0][1] + ends, TURNS[1][1] + ends, "".join(TURNS[2]) + ends]
    assert said(tokenizer, CHAT[:5])[1] == ["".join(turn) + ends for turn in TURNS[:2]]
    assert said(tokenizer, CHAT[:5], [4])[1] == ["".join(TURNS[1]) + ends]
    null = [*CHAT[:2], {"role": "assistant", "tool_calls": call({"town": None, "n": 1})}]
    assert said(tokenizer, null)[1] == ['<call>rain {"town": null, "n": 1}</call></s>' + ends]
