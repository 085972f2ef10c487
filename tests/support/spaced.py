"""Tokenizers that put a space before a text, as SentencePiece does, and one that does not."""

from __future__ import annotations

import io
import string
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ALPHABET = sorted({*string.printable.strip(), "\n", "\t", "\u2581", "\u00e9"})
SPECIAL = ["<unk>", "<s>", "</s>"]
KINDS = ["bytes", "always", "first", "prepended", "unigram"]


@cache
def spaced(kind: str, text: str) -> PreTrainedTokenizerFast:
    """A tokenizer that was trained on a text.

    Its kind is ``bytes`` (like GPT-2's), or how it gets spaces before texts: ``always`` and ``first`` are schemes of
    the Metaspace pre-tokenizer, ``prepended`` is Llama 2's normaliser; ``unigram`` has the model of T5.
    """
    made = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    options: dict[str, Any] = {"special_tokens": SPECIAL, "initial_alphabet": ALPHABET, "show_progress": False}
    options["vocab_size"] = 500
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "prepended":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.pre_tokenizer = pre_tokenizers.Split(Regex("(?=\u2581)"), "isolated")  # for training: words
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        scheme = "always" if kind == "unigram" else kind
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer: Any = trainers.BpeTrainer(**options)
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def of_sentencepiece(folder: Path, text: str) -> Any:
    """Llama's tokenizer around a model that SentencePiece itself has trained."""
    import sentencepiece
    from transformers import LlamaTokenizer

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=written,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return LlamaTokenizer.from_pretrained(folder)
