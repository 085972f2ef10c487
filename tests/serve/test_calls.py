"""Calls of tools in answers: found in what the model writes, and forced."""

import json
from types import SimpleNamespace

import pytest

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

from transformers import AddedToken  # noqa: E402

import ag  # noqa: E402
from ag.serve import Scheduler, Token, scheduler  # noqa: E402
from ag.serve.protocol import Tool  # noqa: E402
from ag.serve.stream import Vocabulary  # noqa: E402
from ag.serve.structured import Grammars  # noqa: E402
from ag.serve.tools import OutputParser, tool_call_format  # noqa: E402
from tests.support.asked import asked  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer  # noqa: E402

#: How families of chat templates write a call ``c``.
FAMILIES = {
    "hermes": '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
    "mistral before 11": '[TOOL_CALLS][{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}]',
    "llama": """{{ '{"name": "' + c.name + '", ' }}{{ '"parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}""",
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% set c = call.function %}CALL{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOWN = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Łódź"]}}, "required": ["town"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": TOWN | {"additionalProperties": False}}}
    for name in ("rain", "snow")
]
QUESTION = [{"role": "user", "content": "Does it rain?"}]
#: A random model would write blanks between the parts of JSON.
FEW_BLANKS = {str(blank): -100 for blank in byte_tokenizer()(" \t\r\n")["input_ids"]}
FIELDS = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 300, "temperature": 0}
FIELDS |= {"logit_bias": FEW_BLANKS}
NAMED = {"type": "function", "function": {"name": "snow"}}
FIRST = str(byte_tokenizer()("<")["input_ids"][0])  # of a call
CALL = {"name": "rain", "arguments": {"town": "Łódź"}}


def tokenizer_of(family):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    tokenizer.chat_template = TEMPLATE.replace("CALL", FAMILIES.get(family, "{{ c | tojson }}"))
    return tokenizer


@pytest.fixture
def served(tiny_llama):
    """`served(family)`: a scheduler with a random model."""

    def served(family):
        model = tiny_llama(vocab_size=VOCABULARY + 2, eos_token_id=2, num_hidden_layers=1, max_position_embeddings=1024)
        return Scheduler(model, tokenizer_of(family), "full", ag.Pool(model, 2**23))

    return served


def saying(monkeypatch, tokenizer, text):
    """Let models say a text, and end."""
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def sampler(request, number, ends=()):
        said = iter(tokens)
        return lambda text, logits, allowed: Token(next(said))

    monkeypatch.setattr(scheduler, "Sampler", sampler)


def written(tokenizer, *calls):
    """What the chat template writes of an answer with some calls."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in calls]}
    before = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return tokenizer.apply_chat_template([*QUESTION, message], tokenize=False)[len(before) :].rstrip("\n")


def both(client, **fields):
    """The only choice of an answer that comes whole and as a stream, where it is the same but for the ids of calls."""
    [whole] = client.chat.completions.create(**FIELDS | fields).choices
    with client.chat.completions.stream(**FIELDS | fields) as stream:
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert [call.function.name for call in streamed.message.tool_calls or []] == [
        call.function.name for call in whole.message.tool_calls or []
    ]
    return whole


def called(choice):
    return [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in choice.message.tool_calls or []
    ]


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_calls_in_answers(served, monkeypatch, family):
    made = served(family)
    saying(monkeypatch, made.tokenizer, written(made.tokenizer, CALL))
    with asked(made, answer_tokens=300) as (client, *_):
        choice = both(client)
        free = client.chat.completions.create(**FIELDS | {"tool_choice": "none"}).choices[0]
    assert (choice.finish_reason, choice.message.content, called(choice)) == ("tool_calls", None, [CALL])
    # without tools the answer is its text, without special tokens
    assert free.finish_reason == "stop" and free.message.tool_calls is None and "town" in free.message.content


def divided(family, text, step, parallel=True, end="</s>"):
    """The parts of an answer that comes in pieces of some letters, and then its end token or the mere end."""
    tokenizer, parts = tokenizer_of(family), {}
    divider = OutputParser(tool_call_format(tokenizer), "user: Hi\nassistant: ", TOOLS, parallel)
    pieces = [text[place : place + step] for place in range(0, len(text), step)] + [end]
    for place, piece in enumerate(pieces, 1):
        for name, new in divider.add(piece, last=place == len(pieces)).items():
            parts[name] = parts[name] + new if name in parts else new
    calls = [json.loads(call["function"].pop("arguments")) for call in parts.get("tool_calls", [])]
    functions = [call["function"] for call in parts.pop("tool_calls", [])]
    return parts, [{**function, "arguments": each} for function, each in zip(functions, calls, strict=True)]


@pytest.mark.parametrize("step", [1, 7, 999])
def test_what_the_template_writes_of_a_call_is_read_as_that_call(step):
    """Alone, and with words and other calls."""
    calls = [CALL, {"name": "snow", "arguments": {}}]
    for family in FAMILIES:
        assert divided(family, written(tokenizer_of(family), CALL), step) == ({}, [CALL])
    for family, before, between in (("hermes", "I look.", "\n"), ("mistral", "I look.", "")):
        text = before + between.join(written(tokenizer_of(family), call) for call in calls)
        assert divided(family, text, step) == ({"content": before}, calls)
        assert divided(family, text, step, parallel=False) == ({"content": before}, calls[:1])
    pair = written(tokenizer_of("mistral before 11"), CALL)[:-1] + ', {"name": "snow", "arguments": {}}]'
    assert divided("mistral before 11", pair, step) == ({}, calls)


@pytest.mark.parametrize("step", [1, 7, 999])
def test_arguments_may_have_the_text_that_ends_a_call(step):
    calls = [
        {"name": "rain", "arguments": {"town": text}} for text in ("</tool_call>", '"</tool_call></tool_call>\\', "")
    ]
    text = "I look." + "\n".join(written(tokenizer_of("hermes"), call) for call in calls)
    assert divided("hermes", text, step) == ({"content": "I look."}, calls)


def test_a_call_without_a_name_is_content_of_an_answer(served, monkeypatch):
    made, text = served("hermes"), '<tool_call>{"name": null, "arguments": {}}</tool_call>'
    saying(monkeypatch, made.tokenizer, text)
    with asked(made, answer_tokens=300) as (client, *_):
        choice = both(client)
    assert (choice.finish_reason, choice.message.content, called(choice)) == ("stop", text, [])


@pytest.mark.parametrize("step", [1, 7, 999])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "No, <b>dry</b>."),
        ("hermes", 'Well: <tool_call>{"name": rain}</tool_call>'),
        ("hermes", 'Well: <tool_call>{"name": "rain"}</tool_call> so'),
        ("hermes", '<tool_call>\n{"name": "rain", "argu'),
        ("hermes", '<tool_call>{"name": "rain</tool_call> so <tool_call>{"name": "rain", "arguments": {}}</tool_call>'),
        *(
            ("hermes", f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>')
            for name in ("null", "5", '["rain"]')
        ),
        ("mistral before 11", '[TOOL_CALLS][{"name": "rain", "arguments": {}}, {"name": null, "arguments": {}}]'),
        ("mistral", "Dry [1]."),
        ("llama", '{"name": "Bob", "age": 3}'),
        ("llama", 'So: {"name": "rain", "parameters": {}}'),
    ],
)
def test_what_is_no_call_is_content(family, text, step):
    assert divided(family, text, step) == ({"content": text}, [])


#: Answers with calls ``@`` and something that is none, by family: text, content, number of calls.
MIXED = [
    ("hermes", 'I look. @\n<tool_call>\n{"name": "ra', 'I look.\n<tool_call>\n{"name": "ra', 1),
    ("hermes", "@\n<tool_call>{rain}</tool_call> so @", "\n<tool_call>{rain}</tool_call> so @", 1),
    ("hermes", '<think>think</think>think <tool_call>{"na', 'think <tool_call>{"na', 0),
    ("hermes", "<think>hm</think>@</s> <b>\n</s> <tool_call>[1]</tool_call>", " <b> <tool_call>[1]</tool_call>", 1),
    ("hermes", "<tool_call>{rain}</tool_call>  </s> so\n</s>", "<tool_call>{rain}</tool_call> so", 0),
    ("mistral", 'I look.@[TOOL_CALLS]snow[ARGS]{"to', 'I look.[TOOL_CALLS]snow[ARGS]{"to', 1),
    ("mistral", "@\n</s>so [TOOL_CALLS] so", "so [TOOL_CALLS] so", 1),
]


@pytest.mark.parametrize(("family", "text", "content", "count"), MIXED)
def test_an_answer_is_divided_alike_in_all_pieces(family, text, content, count):
    """With nothing lost beside what is no call, and nothing twice."""
    call = written(tokenizer_of(family), CALL)
    text, content = text.replace("@", call), content.replace("@", call)
    thoughts = {"reasoning_content": text[7 : text.index("</think>")]} if "</think>" in text else {}
    for step in range(1, len(text) + 1):
        for end in ("</s>", ""):
            assert divided(family, text, step, end=end) == (thoughts | {"content": content}, [CALL] * count), step


@pytest.mark.parametrize("more", ["", "<tool_call>{rain}</tool_call>"])
def test_only_the_special_tokens_of_the_tokenizer_end_an_answer(more):
    special = {7: AddedToken("<|im_end|>", special=True), 8: AddedToken("</s>")}
    tokenizer = SimpleNamespace(chat_template=tokenizer_of("hermes").chat_template, added_tokens_decoder=special)
    divider = OutputParser(tool_call_format(tokenizer), "user: Hi\nassistant: ", TOOLS, parallel=True)
    assert divider.add(f"<s>so </s>{more}\n<|im_end|>", last=True) == {"content": f"<s>so </s>{more}"}


def test_thoughts_are_no_content():
    assert divided("hermes", "<think>Dry?</think>Yes.", 1) == ({"reasoning_content": "Dry?", "content": "Yes."}, [])


def test_a_tokenizer_may_say_itself_how_calls_are_written(served, monkeypatch):
    """By a response template of transformers; such calls cannot be forced."""
    made = served("other")
    made.tokenizer.response_template = {
        "start_anchor": "assistant: ",
        "fields": {
            "tool_calls": {
                "open_pattern": r"(?P<name>\w+)\(",
                "close": ")",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "</s>"},
        },
    }
    saying(monkeypatch, made.tokenizer, 'rain({"town": "Łódź"})')
    with asked(made, answer_tokens=300) as (client, *_):
        assert called(both(client)) == [CALL]
        with pytest.raises(openai.BadRequestError, match="how the chat template writes calls") as refused:
            both(client, tool_choice="required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_of_forced_calls_is_what_the_template_writes(family):
    """For each tool and for no other; with another answer only where a schema allows it."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    tokenizer = tokenizer_of(family)
    grammars, calls = Grammars(tokenizer, VOCABULARY + 2, {2}), tool_call_format(tokenizer)
    tools, special = [Tool(**tool) for tool in TOOLS], Vocabulary(tokenizer).special

    def follows(text, other=None, thinks=False):
        matcher = grammars("lark", calls.grammar(tools, other, special, thinks))
        ids = tokenizer(text)["input_ids"]
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    assert follows(written(tokenizer, CALL)) and follows(written(tokenizer, CALL | {"name": "snow"}))
    for wrong in (CALL | {"name": "hail"}, CALL | {"arguments": {"town": "Rome"}}, CALL | {"arguments": {}}):
        assert not follows(written(tokenizer, wrong))
    assert not follows("[1]") and follows("[1]", '{"type": "array"}')
    assert follows(written(tokenizer, CALL), '{"type": "array"}')
    for blanks in ("", "\n\n"):
        text = f"So <b>\n</thin</think>{blanks}{written(tokenizer, CALL)}"
        assert follows(text, thinks=True) and not follows(text)
        assert follows(f"So</think>{blanks}[1]", '{"type": "array"}', thinks=True)
    assert not follows(written(tokenizer, CALL), thinks=True) and not follows("So</think>so", thinks=True)


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_forced_calls(served, family):
    """Of any tool, and of one."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    with asked(served(family), answer_tokens=300) as (client, *_):
        for choice, names in (("required", ["rain", "snow"]), (NAMED, ["snow"])):
            found = both(client, tool_choice=choice, temperature=1, seed=3)
            [call] = called(found)
            assert call["name"] in names and call["arguments"]["town"] in ("Oslo", "Łódź")
            assert (found.finish_reason, found.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_an_end_token_stays_in_answers_by_a_rule(served, family):
    """In arguments of a forced call, and in an answer by a schema beside tools."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    text = "Os </s>lo"
    town = {"town": {"enum": [text]}}
    tool = {"name": "rain", "parameters": TOWN | {"properties": town, "additionalProperties": False}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [text]}}}
    fields = {"tools": [{"type": "function", "function": tool}]}
    with asked(served(family), answer_tokens=300) as (client, *_):
        forced = both(client, **fields, tool_choice="required")
        bias = FEW_BLANKS | {str(byte_tokenizer().convert_tokens_to_ids('"')): 100}
        free = both(client, **fields, response_format=schema, logit_bias=bias)
    assert called(forced) == [{"name": "rain", "arguments": {"town": text}}]
    assert (free.message.content, called(free)) == (json.dumps(text), [])


def test_a_special_token_may_end_the_thoughts_before_a_forced_call():
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    tokenizer = tokenizer_of("hermes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    special, tools = Vocabulary(tokenizer).special, [Tool(**tool) for tool in TOOLS]
    grammar = tool_call_format(tokenizer).grammar(tools, None, special, thinks=True)
    matcher = Grammars(tokenizer, len(tokenizer), {2})("lark", grammar)
    ids = tokenizer(f"So <b>\n</think>\n{written(tokenizer, CALL)}")["input_ids"]
    assert special["</think>"] in ids and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_forced_calls_come_behind_thoughts_that_the_prompt_has_opened(served, monkeypatch):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    made = served("hermes")
    call = written(made.tokenizer, CALL)
    opened = "{{ '<|im_start|>assistant\n<think>\n' }}"
    made.tokenizer.chat_template = made.tokenizer.chat_template.replace("assistant: ", opened)
    saying(monkeypatch, made.tokenizer, f"Oslo?\n</think>\n\n{call}")
    with asked(made, answer_tokens=300) as (client, *_):
        choice = both(client, tool_choice="required")
    assert (choice.finish_reason, choice.message.content, called(choice)) == ("tool_calls", None, [CALL])
    assert choice.message.reasoning_content == "Oslo?\n"


def test_a_schema_beside_tools_leaves_the_choice(served):
    """Under a response format the answer is a call, or follows the schema."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    with asked(served("hermes"), answer_tokens=300) as (client, *_):
        found = [
            client.chat.completions.create(
                **FIELDS | {"response_format": schema, "logit_bias": FEW_BLANKS | {FIRST: bias}}
            ).choices[0]
            for bias in (-100, 100)
        ]
    assert found[0].message.content in ("1", "2") and called(found[0]) == []
    assert found[1].message.content is None and len(called(found[1])) == 1
