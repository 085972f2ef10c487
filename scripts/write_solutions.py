"""Write a model's own solutions to the training problems of GSM8K, and rows to train gates on.

For example::

    python scripts/write_solutions.py MODEL own --root DATA

MODEL is a hub id, a folder or an alias. DATA is a folder with ``gsm8k/train.jsonl``; without it the problems come from
the hub. The model decodes the likeliest tokens with its full cache, from the prompts of the task ``gsm8k``.
``own/solutions.jsonl`` has the solutions, and a call with the same MODEL and folder goes on after the last one.

The rows of ``own/train.jsonl`` are for ``recipe=reason``. A row's ``prompt`` is a problem and its solution up to
a random token, and ``response`` is what the model wrote next, 96 tokens. Training reads the prompt once, evicts it to
a random share, and compares the response with that of the full cache. Gates of kind mlp score a token once, when it is
created, so that evicting a prompt at once keeps about the tokens that evicting while decoding would keep.
"""

import argparse
import json
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ag.config.sections import ModelConfig
from ag.data.rules import prompted
from ag.data.sources import Source, local_folder
from ag.data.tokens import start_tokens, tokenize
from ag.engine import policy, read_prompt
from ag.evaluate.tasks.follow import continue_batch, padded
from ag.evaluate.tasks.reasoning import DATASETS, INSTRUCTION
from ag.model.base import load_base
from ag.model.structure import end_tokens

MAX_NEW_TOKENS = 512  # a longer solution is cut there
BATCH = 64  # problems that are solved together
RESPONSE = 96  # tokens after a cut
CUTS = 2  # rows of a solution
FIRST_CUT = 32  # tokens of a solution before the first possible cut


@torch.inference_mode()
def write_solutions(model_name: str, file: Path, root: str | None, samples: int) -> PreTrainedTokenizerBase:
    """Append solutions to a file until it has those of the first ``samples`` problems; return the tokenizer.

    Raises:
        SystemExit: when the file has solutions of another model.
    """
    written = read(file) if file.exists() else []
    for row in written:
        if row.get("model", model_name) != model_name:
            raise SystemExit(f"{file}: has solutions of {row['model']}, not of {model_name}: give another folder.")
    model, tokenizer = load_base(ModelConfig(name=model_name, dtype="bfloat16"))
    hub, subset, field = DATASETS["gsm8k"]
    rows = Source(hub, subset, None, local_folder(root, "gsm8k") if root else None).read("train")
    prompts = [prompted(tokenizer, INSTRUCTION, row[field]) for row in islice(rows, samples)]
    stop = end_tokens(model, tokenizer.eos_token_id)
    for start in range(len(written), len(prompts), BATCH):
        begin, texts = time.perf_counter(), prompts[start : start + BATCH]
        tokens = [start_tokens(tokenizer) + ids for ids in tokenize(tokenizer, texts)]
        [(cache, last_hidden)] = read_prompt(model, [policy("full")], *padded(tokens, torch.device("cpu")))
        limits = [MAX_NEW_TOKENS] * len(texts)
        solutions = {x.text_index: x.tokens for x in continue_batch(model, cache, last_hidden, limits, stop)}
        with file.open("a") as output:
            for index, prompt in enumerate(texts):
                row = {"model": model_name, "prompt": prompt, "solution": tokenizer.decode(solutions[index])}
                output.write(json.dumps(row) + "\n")
        speed = sum(map(len, solutions.values())) / (time.perf_counter() - begin)
        print(f"{start + len(texts)} problems, {speed:.0f} tokens/s", flush=True)
    return tokenizer


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines. A last line that was not written to its end is cut off."""
    with file.open("rb+") as lines:
        lines.truncate(lines.read().rfind(b"\n") + 1)
    return [json.loads(line) for line in file.read_text().splitlines()]


def cut(solutions: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Cut each solution at random tokens; the rows of a solution follow each other.

    The first rows are held out for validation, and training shuffles the others: no solution is in both.
    """
    generator, rows = random.Random(0), []
    for row in solutions:
        [tokens] = tokenize(tokenizer, [row["solution"]])
        for _ in range(CUTS if len(tokens) > FIRST_CUT + RESPONSE else 0):
            end = generator.randint(FIRST_CUT, len(tokens) - RESPONSE)
            before, after = tokenizer.decode(tokens[:end]), tokenizer.decode(tokens[end : end + RESPONSE])
            rows.append({"prompt": row["prompt"] + before, "response": after})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", help="folder with gsm8k/train.jsonl; left out: the hub")
    parser.add_argument("--samples", type=int, default=160, help="problems, the first of the training rows")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "solutions.jsonl"
    tokenizer = write_solutions(options.model, file, options.root, options.samples)
    lines = [json.dumps(row) for row in cut(read(file)[: options.samples], tokenizer)]
    (options.folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{options.folder / 'train.jsonl'}: {len(lines)} rows")
