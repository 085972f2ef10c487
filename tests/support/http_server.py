"""The server in another process, with a random model and a tokenizer of bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.warm import started

VOCABULARY = 260  # three special tokens, the 256 bytes, and one that the model may say and the tokenizer lacks
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters of a random model are halves; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def said(tokens: Sequence[int]) -> str:
    """Text of an answer: what is no character is U+FFFD, also half of one at the end."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    pieces = byte_tokenizer().convert_ids_to_tokens([*tokens])
    spelled = bytes(letters[piece] for piece in pieces if piece in letters)
    return spelled.decode("utf-8", "replace")


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model and the tokenizer into a folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def server(folder: Path, *keys: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start ``ag.serve`` on a free port, in the warm Python.

    Gives its address and its process, whose errors are in ``folder/stderr``.
    """
    command = [started(), "-m", "ag.serve", f"model={folder}", "port=0", *keys]
    with open(folder / "stderr", "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://" in line, line + (folder / "stderr").read_text()
        yield line.rpartition(" ")[2].strip(), process
    finally:
        process.kill()
        process.wait()
