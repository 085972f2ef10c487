"""What a schema costs in a decoding step of the server: ``python -m benchmarks.structured batch=8``.

Steps of answers with and without a schema alternate, so that both see the same machine. The masks alone are also
measured for a vocabulary of random words.
"""

from __future__ import annotations

import random
import string
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ag
from ag.config import key
from ag.config.command_line import command, parse
from ag.serve import Request, Scheduler
from ag.serve.structured import Grammars, Masks, advance

PROGRAM = "structured"
#: Of an array that is long enough for every step.
SCHEMA = (
    '{"type": "array", "minItems": 99, "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": '
    '{"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}}'
)


@dataclass
class Config:
    """The keys of the measurement."""

    model: str = key("smollm2", "folder, hub id or alias of the model")
    batch: int = key(8, "answers at once", ge=1)
    steps: int = key(40, "steps of each kind", ge=1)
    vocabulary: int = key(150_000, "tokens of the masks that are measured alone", ge=300)
    threads: int = key(2, "CPU threads", ge=1)


def step_seconds(config: Config) -> tuple[float, float]:
    """Return the median seconds of a step without and with the schema."""
    model, tokenizer = ag.load_base(config.model)
    matcher = Grammars(tokenizer, model.config.vocab_size, ())("json", SCHEMA)
    schedulers = []
    for grammar in (None, matcher):
        made = Scheduler(model, tokenizer, "full", ag.Pool(model, 2**28))
        made.end_tokens = set()
        ids = tokenizer("People as a JSON array:")["input_ids"]
        for _ in range(config.batch):
            made.submit(Request(tokens=ids, max_tokens=config.steps + 9, temperature=1.0, grammar=grammar))
        made.step()  # reads the prompts
        schedulers.append(made)
    seconds: list[list[float]] = [[], []]
    for _ in range(config.steps):
        for made, times in zip(schedulers, seconds, strict=True):
            began = time.perf_counter()
            made.step()
            times.append(time.perf_counter() - began)
            assert len(made.snapshot().running) == config.batch
    return median(seconds[0]), median(seconds[1])


def mask_seconds(config: Config) -> tuple[float, float]:
    """Return the median seconds of the masks of a step, which a thread computes, and of their use by the sampler."""
    draw, words = random.Random(0), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < config.vocabulary:
        words["".join(draw.choices(string.ascii_letters + "Ġ", k=draw.randrange(2, 9)))] = None
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    matcher = Grammars(PreTrainedTokenizerFast(tokenizer_object=backend), len(words), (0,))("json", SCHEMA)
    masks, matchers = Masks(len(words)), [matcher.deep_copy() for _ in range(config.batch)]
    logits = torch.randn(len(words))
    computed: list[float] = []
    used: list[float] = []
    for token in backend.encode('[{"name": "Ada Lovelace of London", "age": 36}, {"name": "Charles').ids:
        began = time.perf_counter()
        rows = masks.begin([(one, []) for one in matchers]).result()
        computed.append(time.perf_counter() - began)
        for one, row in zip(matchers, rows, strict=True):
            allowed = next(row)
            assert allowed is not None
            logits.masked_fill(~allowed, -torch.inf)
            advance(one, token)
        used.append(time.perf_counter() - began - computed[-1])
    return median(computed), median(used)


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Measure, and print the numbers."""
    config = parse(argv, Config, PROGRAM).config
    torch.set_num_threads(config.threads)
    free, ruled = step_seconds(config)
    print(f"step: {1e3 * free:.1f} ms, with a schema {1e3 * ruled:.1f} ms, {100 * (ruled / free - 1):+.1f} %")
    computed, used = mask_seconds(config)
    print(f"masks of {config.vocabulary} tokens: {1e3 * computed:.2f} ms beside the step, {1e3 * used:.2f} ms in it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
