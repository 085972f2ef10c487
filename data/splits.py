"""The rows of a run's two splits with counts of their texts, and the base class of the kinds of data that make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ag.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

VALIDATION_ROWS = 200  # of generated data, if data.val_samples does not say it
WARNED_SHARE = 0.1  # a larger share of a split's tokens that are in no row is a warning


@dataclass
class SplitCounts:
    """Counts of a split: texts that were read, and tokens that are in no row.

    A text is a row of the dataset, or a document that rows are cut from.
    """

    read: int = 0  # texts
    tokens: int = 0  # in all texts
    longest: int = 0  # tokens of the longest text
    skipped: int = 0  # texts that are left out: too short or too long
    skipped_tokens: int = 0  # in texts that are left out
    cut: int = 0  # texts that lost a part
    cut_tokens: int = 0  # in these texts before the cut
    lost_tokens: int = 0  # tokens that these texts lost

    def add(self, tokens: int) -> None:
        """Count a text of this many tokens."""
        self.read += 1
        self.tokens += tokens
        self.longest = max(self.longest, tokens)

    def keep(self, kept: int, tokens: int) -> None:
        """Count how many of a text's ``tokens`` are kept; with 0 it is left out. Call it after :meth:`add`."""
        if not kept:
            self.skipped += 1
            self.skipped_tokens += tokens
        elif kept < tokens:
            self.cut += 1
            self.cut_tokens += tokens
            self.lost_tokens += tokens - kept

    @property
    def lost_share(self) -> float:
        """The share of all tokens that is in no row."""
        return (self.skipped_tokens + self.lost_tokens) / max(self.tokens, 1)


@dataclass
class Counts:
    """The counts of both splits, and sentences about the tokens that are in no row."""

    train: SplitCounts = field(default_factory=SplitCounts)
    validation: SplitCounts = field(default_factory=SplitCounts)
    unit: str = "rows"  # "rows" of the dataset, or "documents" that rows are cut from
    remedy: str = ""  # why texts are left out, and the keys that let more in
    cut_remedy: str = ""  # the part that cut texts lose, and the keys by which they lose less
    held_out: int = 0  # training rows that are used for validation

    def of(self, validates: bool) -> SplitCounts:
        """Return the counts of the validation split, or of the training split."""
        return self.validation if validates else self.train


@dataclass(frozen=True)
class Splits:
    """The rows of a run: what a kind of data makes, and what the data module makes batches of.

    Attributes:
        train: training rows.
        validation: groups of validation rows; a group is never divided over batches.
        counts: counts of texts that were read, left out or cut.
        end: the token that ends a document, if tokens see only their own document. None: they see their whole row.
        loss_on_prompt: whether prompts carry loss too.
        description: the form of the rows, in a line for the user; empty if the configuration says it.
    """

    train: Sequence[Row]
    validation: Sequence[Sequence[Row]]
    counts: Counts = field(default_factory=Counts)
    end: int | None = None
    loss_on_prompt: bool = False
    description: str = ""

    def report(self) -> tuple[list[str], list[str]]:
        """Return lines about the rows of both splits, and about texts that were left out or cut.

        Returns:
            Lines to print, and lines to print as warnings, if a split lost more than a tenth of its tokens.
        """
        lines: list[str] = [self.description] if self.description else []
        warnings: list[str] = []
        unit = self.counts.unit
        for name, rows in (("training", self.train), ("validation", self.validation)):
            counts = self.counts.of(name == "validation")
            source = f" of {counts.read} {unit}" if unit != "rows" else ""
            lines.append(f"{name}: {len(rows)} rows{source}")
            of_all = f"of {counts.read} {name} {unit}"
            lost = [f"left out: {counts.skipped} {of_all}, {self.counts.remedy}"] if counts.skipped else []
            if counts.cut:
                share = 100 * counts.lost_tokens / counts.cut_tokens
                part = f"{self.counts.cut_remedy} (the longest has {counts.longest} tokens)"
                lost.append(f"{counts.cut} {of_all} lost {share:.0f} % of their tokens, {part}")
            (warnings if counts.lost_share > WARNED_SHARE else lines).extend(lost)
        return lines, warnings


class DataKind(ABC):
    """A kind of data, chosen by ``data.kind=NAME``."""

    def check(self, data: DataConfig) -> None:  # noqa: B027  # most kinds support all settings of the schema
        """Refuse settings that the kind does not support, before anything is loaded.

        Raises:
            DataError: naming the key, what was expected and the fix.
        """

    @abstractmethod
    def read(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
        """Read or make the rows and tokenise them.

        Args:
            data: the keys ``data.*`` of the run.
            seed: seed of rows that are generated or cut by chance.
            tokenizer: the model's tokenizer.
            context: the model's longest input in tokens.

        Raises:
            DataError: the data cannot be used; the message names the file and row, and the fix.
        """
