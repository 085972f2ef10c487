"""Models and tokenizers from GGUF files, as transformers holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


def read_model(gguf: Path, **settings: Any) -> PreTrainedModel:
    """Return a GGUF's model with its exact values, in float32, and settings that the GGUF does not hold exactly."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    known = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        known.pop(key, None)
    # save_pretrained refuses the one that was read from GGUF
    model: PreTrainedModel = type(loaded)(type(loaded.config)(**known | settings))
    model.load_state_dict(loaded.state_dict())
    return model


class _Vocabulary:
    """The tokens of a GGUF, with their kinds, and what else its tokenizer's fields hold."""

    def __init__(self, gguf: Path) -> None:
        from gguf import GGUFReader, Keys, TokenType  # read once a machine, and not where the model is there

        fields = GGUFReader(gguf).fields
        self.kind = TokenType
        self.tokens: list[str] = fields[Keys.Tokenizer.LIST].contents()
        self.kinds: list[int] = fields[Keys.Tokenizer.TOKEN_TYPE].contents()
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.fields, self.keys = fields, Keys.Tokenizer

    def of_kind(self, kind: int) -> list[AddedToken]:
        """Return the tokens of a kind, to be found before anything is merged."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return [AddedToken(token, normalized=False) for token, own in pairs if own == kind]


def smollm2_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build SmolLM2's tokenizer; digits are split off before anything else.

    transformers' own reader ignores the GGUF's ``pre: smollm`` (a blank line and a 1 are two tokens, not three), and
    that of 5.17 has another eos token whatever it is told.
    """
    vocabulary = _Vocabulary(gguf)
    merges = [tuple(pair.split(" ")) for pair in vocabulary.fields[vocabulary.keys.MERGES].contents()]
    backend = Tokenizer(models.BPE(vocabulary.ids, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token.content for token in vocabulary.of_kind(vocabulary.kind.CONTROL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=vocabulary.fields[vocabulary.keys.CHAT_TEMPLATE].contents(),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def gemma3_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build Gemma's tokenizer; it gives the tokens that sentencepiece gives.

    Only two or more U+2581, its sign for a space, in the text itself are one token there. transformers' own reader has
    the same tokens (5.23), and needs minutes.
    """
    vocabulary = _Vocabulary(gguf)
    kind = vocabulary.kind
    scored = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.fields[vocabulary.keys.SCORES].contents(), strict=True)
    rank = {token: -score for token, own, score in scored if own == kind.NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(rank, key=rank.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(vocabulary.of_kind(kind.CONTROL))
    backend.add_tokens(vocabulary.of_kind(kind.USER_DEFINED))  # blank lines, indentation and HTML tags
    bos = ("<bos>", vocabulary.ids["<bos>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
        padding_side="left",
    )
