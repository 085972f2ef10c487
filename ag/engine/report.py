"""What a cache holds and what its decisions took, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """A cache in numbers; its text is a table.

    Attributes:
        policy: repr of the policy.
        tokens: tokens that went by, those behind the prompt too, summed over sequences, padding not counted.
        kept: by layer and KV head, tokens still held, summed over sequences.
        nbytes: by layer, bytes allocated for keys and values.
        seconds: by layer, time spent on scores and decisions.
        over_budget: sequences that hold more than the budget, because more is protected than it allows.
        plain_nbytes: bytes of keys and values that transformers' own cache would hold for the same columns.
        state_nbytes: bytes of the states of layers that do not attend (linear attention, convolutions), beside these.
        kinds: shares of some kinds of tokens that are still held, by name.
    """

    policy: str
    tokens: int
    kept: list[list[int]]
    nbytes: list[int]
    seconds: list[float]
    over_budget: int = 0
    plain_nbytes: int = 0
    state_nbytes: int = 0
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept_share(self) -> float:
        """Share of the (token, layer, KV head) entries of all tokens that went by that is still held."""
        counts = [count for heads in self.kept for count in heads]
        return sum(counts) / (self.tokens * len(counts)) if self.tokens and counts else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.policy}: {self.kept_share:.1%} of all {self.tokens:,} tokens held (prompt and what followed)",
            f"{'layer':>5} {'least':>9} {'mean':>11} {'most':>9} {'of all':>7} {'KV bytes':>15} {'scoring s':>10}",
        ]
        for index, (heads, size, time) in enumerate(zip(self.kept, self.nbytes, self.seconds, strict=True)):
            mean = sum(heads) / len(heads) if heads else 0.0
            share = mean / self.tokens if self.tokens else 1.0
            least, most = min(heads, default=0), max(heads, default=0)
            lines.append(f"{index:>5} {least:>9,} {mean:>11,.1f} {most:>9,} {share:>7.1%} {size:>15,} {time:>10.4f}")
        mean = self.tokens * self.kept_share
        total = f"{'all':>5} {'':>9} {mean:>11,.1f} {'':>9} {self.kept_share:>7.1%} {sum(self.nbytes):>15,}"
        lines.append(f"{total} {sum(self.seconds):>10.4f}")
        if self.plain_nbytes:
            share = sum(self.nbytes) / self.plain_nbytes
            lines.append(f"{share:.1%} of the {self.plain_nbytes:,} bytes of transformers' own cache for the same text")
        if self.state_nbytes:
            lines.append(f"{self.state_nbytes:,} bytes more for the states of layers that do not attend")
        lines += [f"{share:.1%} of {name} held" for name, share in self.kinds.items()]
        if self.over_budget:
            lines.append(
                f"over budget in {self.over_budget} {'sequence' if self.over_budget == 1 else 'sequences'}: more is "
                "protected (sinks, recent, window) than the budget allows, and stays"
            )
        return "\n".join(lines)
