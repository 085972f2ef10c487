"""Clients of other libraries with a schema: OpenAI's, LangChain's and instructor."""

from typing import Literal

import pytest
from pydantic import BaseModel, Field

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")

import ag  # noqa: E402
from ag.serve import Scheduler  # noqa: E402
from tests.serve.test_calls import FAMILIES, FEW_BLANKS, TEMPLATE  # noqa: E402
from tests.support.asked import KEY, asked  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer  # noqa: E402

WHY = "needs pip install 'ag[clients]'"
MESSAGES = [{"role": "user", "content": "Does it rain?"}]
FIELDS = {"model": "tiny", "max_tokens": 200, "temperature": 1, "seed": 4, "logit_bias": FEW_BLANKS}


class Town(BaseModel, extra="forbid"):
    """Where it rains."""

    name: Literal["Oslo", "Łódź"]


class Rain(BaseModel, extra="forbid"):
    """Rain in towns."""

    towns: list[Town] = Field(min_length=1, max_length=1)
    wet: bool


@pytest.fixture(scope="module")
def served(tiny_llama):
    """OpenAI's client and a plain one of a server whose model is random."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("CALL", FAMILIES["hermes"])
    model = tiny_llama(vocab_size=VOCABULARY, eos_token_id=2, max_position_embeddings=4096)
    with asked(Scheduler(model, tokenizer, "full", ag.Pool(model, 2**24)), answer_tokens=200) as (client, http, _):
        yield client, http


@pytest.mark.slow
def test_openai(served):
    """Schemas and tools made of a pydantic model, whole and streamed."""
    chats, fields = served[0].chat.completions, FIELDS | {"messages": MESSAGES}
    assert isinstance(chats.parse(response_format=Rain, **fields).choices[0].message.parsed, Rain)
    with chats.stream(response_format=Rain, **fields) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Rain)
    fields |= {"tools": [openai.pydantic_function_tool(Rain)], "tool_choice": "required"}
    [call] = chats.parse(**fields).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Rain)
    with chats.stream(**fields) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Rain)


@pytest.mark.nightly
def test_langchain(served):
    """Structured outputs by each method, and tools that are bound."""
    langchain = pytest.importorskip("langchain_openai", reason=WHY)
    model = langchain.ChatOpenAI(base_url="http://testserver/v1", api_key=KEY, http_client=served[1], **FIELDS)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Rain, method=method).invoke("Does it rain?"), Rain)
    forced = model.bind_tools([Rain], tool_choice="any")
    whole = forced.invoke("Does it rain?")
    assert [call["name"] for call in whole.tool_calls] == ["Rain"] and Rain(**whole.tool_calls[0]["args"])
    chunks = [*forced.stream("Does it rain?")]
    joined = sum(chunks[1:], chunks[0])
    assert [call["name"] for call in joined.tool_calls] == ["Rain"] and Rain(**joined.tool_calls[0]["args"])


@pytest.mark.nightly
def test_instructor(served):
    instructor = pytest.importorskip("instructor", reason=WHY)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(served[0], mode=mode)
        found = client.chat.completions.create(response_model=Rain, messages=MESSAGES, max_retries=0, **FIELDS)
        assert isinstance(found, Rain)
