"""What a kind of data has to say: how its rows are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig
    from ag.data.module import DataModule


class DataKind(ABC):
    """A kind of data, which ``data.kind=NAME`` takes."""

    def check(self, data: DataConfig) -> None:  # noqa: B027  # most kinds take whatever the schema allows
        """Refuse what the kind cannot follow, before anything is loaded.

        Raises:
            DataError: naming the key, what was expected and the fix.
        """

    @abstractmethod
    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
        """Read or make the rows, tokenise them and say how they are batched.

        Args:
            config: the run; ``data`` and ``seed`` are read.
            tokenizer: the model's tokenizer.
            context: the model's longest input in tokens.

        Raises:
            DataError: the data cannot be used; the message names the place and the fix.
        """
