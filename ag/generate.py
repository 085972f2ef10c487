"""Continue a text under a policy: ``python -m ag.generate policy=h2o budget=0.25 prompt=TEXT``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ag.config.command_line import command, parse
from ag.config.generate import GenerateConfig as GenerateConfig

if TYPE_CHECKING:
    from ag.continuation import Generation


@command("ag.generate")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    config = parse(argv, GenerateConfig, "ag.generate").config
    from ag.continuation import generate  # loads torch and transformers, which no help needs

    generations = generate(config)
    for name, generation in generations.items():
        print(f"--- {name} ---\n{generation.text}\n" if len(generations) > 1 else f"{generation.text}\n")
    Console().print(table(generations))
    if config.policy is not None:
        print(f"\n{next(iter(generations.values())).report}")
    return 0


def table(generations: dict[str, Generation]) -> Table:
    """Return the table that the command prints: tokens a second without what compiles at first use."""
    first = next(iter(generations.values()))
    caption = "after a warm-up; evicted: of the prompt; of full: tokens held, of prompt and new tokens"
    out = Table(title=f"{first.prompt_tokens} prompt tokens", caption=caption)
    for column in ("cache", "evicted", "new tokens", "KV bytes", "of full", "prefill tokens/s", "decoding tokens/s"):
        out.add_column(column, justify="left" if column == "cache" else "right")
    for name, row in generations.items():
        decoding = f"{(row.new_tokens - 1) / row.decode_seconds:.1f}" if row.decode_seconds else ""
        out.add_row(
            name,
            f"{row.evicted:.1%}",
            f"{row.new_tokens}",
            f"{row.kv_bytes:,}",
            f"{row.held:.1%}",
            f"{row.prompt_tokens / row.prefill_seconds:.1f}",
            decoding,
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
