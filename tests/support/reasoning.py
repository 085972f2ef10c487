"""A made-up chat template of a reasoning model that calls tools, and a chat through several turns."""

from __future__ import annotations

from typing import Any

#: Thoughts are written from the last message of the user on, and left out of what comes before.
TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for t in tools or [] %}{{ 'tool: ' + t.function.name + '\n' }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}
{{ m.role + ': ' + m.content + '\n' }}
{%- else -%}
{{ 'bot:\n' }}{% generation %}
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name + ' ' + c.function.arguments | tojson }}</call>{% endfor -%}
{{ '</s>' }}{% endgeneration %}{{ '\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'bot:\n' }}{% if enable_thinking is defined and not enable_thinking -%}
{{ '<think></think>' }}{% endif %}{% endif -%}
"""
#: The same without marks of what the assistant says.
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]


def call(arguments: Any) -> list[dict[str, Any]]:
    """A call of the tool."""
    return [{"id": "call-1", "type": "function", "function": {"name": "rain", "arguments": arguments}}]


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Does it rain?"},
    {"role": "assistant", "reasoning_content": "I have to look.", "tool_calls": call({"town": "Oslo"})},
    {"role": "tool", "content": "3 mm", "tool_call_id": "call-1"},
    {"role": "assistant", "reasoning_content": "So it does.", "content": "Yes."},
    {"role": "user", "content": "And snow?"},
    {"role": "assistant", "reasoning_content": "Too warm.", "content": "No."},
]
#: What is written of each turn of the assistant, with its thoughts and without.
TURNS = [
    ("<think>I have to look.</think>", '<call>rain {"town": "Oslo"}</call></s>'),
    ("<think>So it does.</think>", "Yes.</s>"),
    ("<think>Too warm.</think>", "No.</s>"),
]
