"""Tokenizers as Llama 2, Mistral and Gemma have them, whose unknown characters are bytes, and what their tokens say."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<end>"]
#: Pieces of text. Two are spelled as bytes are, and one is what stands for bytes that are no character.
PIECES = ["▁", "▁the", "the", "▁a", "a", "A", "!", "▁中", "\ufffd"]


def fallback_tokenizer(strips: bool = True) -> PreTrainedTokenizerFast:
    """Return one as of Llama 2, which drops the space that a text begins with; as of Gemma, it does not."""
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    ids = {token: number for number, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def bytes_of(token: int) -> bytes:
    """Return what a token says, in UTF-8; special tokens say nothing."""
    place = token - len(SPECIAL)
    if place < 0:
        return b""
    return bytes([place]) if place < 256 else PIECES[place - 256].replace("▁", " ").encode()


def bytes_as_tokens(text: bytes) -> list[int]:
    """Return the tokens of single bytes."""
    return [len(SPECIAL) + byte for byte in text]
