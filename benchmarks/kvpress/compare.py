"""Compare this engine with kvpress, each in its own environment: ``bash scripts/bench_kvpress.sh``.

Two processes of side.py hold the same model and take turns with the same prompts and budgets. Each
measurement reads a document's first tokens, evicts at their end, and feeds the tokens that follow one by one: time to
read the prompt, time per token, bytes, and the loss of the continuation. Writes ``kvpress.json``, with every
measurement, and ``kvpress.md`` into ``output``.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ag.config import key
from ag.config.command_line import command, parse
from ag.errors import UserError, first_line

PROGRAM = "bench_kvpress"
SIDE = Path(__file__).resolve().with_name("side.py")
METHODS = ("snapkv", "snapkv@heads", "expected_attention", "expected_attention@heads", "knorm")
WINDOW = 64  # last tokens of a prompt that snapkv keeps
FIRST = 3  # tokens that are fed before the clock starts
WARMUP = 256  # tokens of a prompt; what is loaded or compiled at the first use does not depend on their number

Record = dict[str, Any]
Text = tuple[list[int], list[int]]  # token ids of a prompt and of what follows it


@dataclass
class Config:
    """The keys of the comparison."""

    model: str = key("smollm2", "folder, hub id or alias of a model that both sides load")
    root: str | None = key(None, "folder of the documents, as the task ppl reads them; null: random tokens")
    documents: int = key(4, "documents, the same for every contestant", ge=1)
    prompt: int = key(4096, "tokens of a prompt", ge=WINDOW + 2)
    continuation: int = key(64, "tokens that follow it, fed one by one", ge=FIRST + 2)
    keep: list[float] = key([0.5, 0.25], "shares of the prompt that policies keep")
    rounds: int = key(1, "times that every document is measured", ge=1)
    threads: int | None = key(None, "CPU threads of each side; null: torch's default", ge=1)
    environment: str = key("build/kvpress", "folder of kvpress' virtual environment")
    output: str = key("runs/bench", "folder for kvpress.json and kvpress.md")


def contestants(config: Config) -> dict[str, tuple[str, int | None]]:
    """Return the full cache, and each policy with each share: its method and the tokens that each KV head keeps.

    Raises:
        UserError: for a share that cannot be.
    """
    found: dict[str, tuple[str, int | None]] = {"full": ("full", None)}
    for share in config.keep:
        tokens = math.floor(share * config.prompt + 1e-9)  # a share is rarely an exact float, and 0.29 of 100 is 29
        if not WINDOW < tokens < config.prompt:
            raise UserError(
                f"keep={share:g} of prompt={config.prompt}: expected a share below 1 of more than {WINDOW} tokens, "
                "which the window of snapkv takes; give a larger keep or prompt."
            )
        found |= {f"{method} {share:g}": (method, tokens) for method in METHODS}
    return found


def texts(config: Config, model: str) -> list[Text]:
    """Return the documents.

    Raises:
        UserError: the model or the documents cannot be read, or too few documents are long enough.
    """
    from transformers import AutoConfig, AutoTokenizer

    from ag.evaluate.tasks.perplexity import Continuation

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        geometry = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={config.model}: {first_line(error)} Give a folder that save_pretrained wrote."
        ) from error
    length, context = config.prompt + config.continuation, geometry.max_position_embeddings
    if length > context:
        raise UserError(f"prompt + continuation = {length}: expected at most {context}, the model's context.")
    if config.root is None:
        draw = random.Random(0)
        drawn = [draw.choices(range(geometry.vocab_size), k=length) for _ in range(config.documents)]
        return [(ids[: config.prompt], ids[config.prompt :]) for ids in drawn]
    task = Continuation("ppl", config.root, prompt=config.prompt, continuation=config.continuation)
    loaded = task.load(tokenizer, config.documents, context)
    if len(loaded.samples) < config.documents:
        raise UserError(
            f"documents={config.documents}: root={config.root} has {len(loaded.samples)} of {length} tokens or more; "
            "give fewer documents, or a shorter prompt."
        )
    return [(document.prompt, document.target_tokens) for document in loaded.samples]


class Process:
    """One side, in its own process.

    Args:
        name: ``ag`` or ``kvpress``.
        python: interpreter of its environment.
        log: file for what it prints.
        setup: the first request.
    """

    def __init__(self, name: str, python: str, log: Path, setup: Record) -> None:
        self.name, self.log = name, log
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            command = [python, str(SIDE), name]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        try:
            self.versions = self.ask(setup)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Record) -> Record:
        """Send a request and wait for its answer.

        Raises:
            UserError: the process has failed; with the last line that it wrote.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            said = (self.log.read_text().strip().splitlines() or [f"exit code {code}"])[-1]
            raise UserError(f"{self.name}: its process failed: {said} ({self.log} has all that it printed).")
        answer: Record = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def measure(config: Config, documents: list[Text], sides: dict[str, Process]) -> Iterator[Record]:
    """Let the sides take turns, contestant by contestant, and yield each measurement; the first side alternates."""
    plan = contestants(config)

    def job(method: str, tokens: int | None, prompt: list[int], following: list[int]) -> Record:
        return {"method": method, "tokens": tokens, "prompt": prompt, "following": following}

    for method in ("full", *METHODS):
        for side in sides.values():
            prompt, following = documents[0][0][:WARMUP], documents[0][1][: FIRST + 2]
            side.ask(job(method, None if method == "full" else WINDOW + 1, prompt, following))
    for turn in range(config.rounds * len(documents)):
        place = {"round": turn // len(documents), "document": turn % len(documents)}
        for name, (method, tokens) in plan.items():
            asked = job(method, tokens, *documents[place["document"]])
            for side_name in [*sides] if turn % 2 == 0 else [*sides][::-1]:
                yield {"contestant": name, "side": side_name, **place, **sides[side_name].ask(asked)}
        print(f"{turn + 1} of {config.rounds * len(documents)} documents", file=sys.stderr, flush=True)


def table(records: list[Record]) -> list[Record]:
    """Return a row for each contestant and side.

    Seconds are medians over the measurements, those per token of each one's mean; ``over kvpress`` is the median
    quotient of measurements of the same document and round. Bytes are means over documents, right after the prompt;
    ``all bytes`` adds to keys and values what is remembered beside them. Nats are means over documents.
    """
    from ag.bench.measure import median_ratio  # loads torch, which no help needs

    full = {side: _figures(records, "full", side) for side in ("ag", "kvpress")}
    rows = []
    for name in dict.fromkeys(record["contestant"] for record in records):
        theirs = _figures(records, name, "kvpress")
        for side in full:
            mine = _figures(records, name, side)
            rows.append(
                {
                    "contestant": f"{name}, {side}",
                    "kept": fmean(mine["kept"]),
                    "prefill s": median(mine["prefill"]),
                    "prefill over kvpress": median_ratio(mine["prefill"], theirs["prefill"]),
                    "ms/token": 1000 * median(mine["token"]),
                    "ms/token over kvpress": median_ratio(mine["token"], theirs["token"]),
                    "KV bytes": round(fmean(mine["kv_bytes"])),
                    "all bytes": round(fmean(mine["all_bytes"])),
                    "all bytes over kvpress": median_ratio(mine["all_bytes"], theirs["all_bytes"]),
                    "nats": fmean(mine["nats"]),
                    "nats over full": fmean(mine["nats"]) - fmean(full[side]["nats"]),
                }
            )
    return rows


def _figures(records: list[Record], name: str, side: str) -> dict[str, list[float]]:
    """Return the figures of each measurement of a contestant on one side, by round and document."""
    mine = [record for record in records if (record["contestant"], record["side"]) == (name, side)]
    mine.sort(key=lambda record: (record["round"], record["document"]))
    figures = {key: [float(record[key]) for record in mine] for key in ("kept", "prefill", "kv_bytes", "all_bytes")}
    figures["token"] = [fmean(record["decode"][FIRST:]) for record in mine]
    figures["nats"] = [fmean(record["nats"]) for record in mine]
    return figures


def compare(config: Config, words: str, model: str, documents: list[Text]) -> Record:
    """Measure, and return the rows with all that they come from.

    Raises:
        UserError: there is no environment of kvpress, it has another torch, or a side fails.
    """
    import torch

    from ag.bench.measure import machine

    theirs = Path(config.environment) / "bin" / "python"
    if not theirs.is_file():
        raise UserError(
            f"environment={config.environment}: there is no bin/python; bash scripts/bench_kvpress.sh "
            f"{config.environment} makes it."
        )
    described = machine(torch.device("cpu"))  # with the load before this begins
    folder, sides = Path(config.output), dict[str, Process]()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, python in {"ag": sys.executable, "kvpress": str(theirs)}.items():
            setup = {"model": model, "threads": config.threads}
            sides[name] = Process(name, python, folder / f"kvpress-{name}.log", setup)
            stack.callback(sides[name].close)
        mine, other = (side.versions for side in sides.values())
        if mine["torch"] != other["torch"]:
            torches = f"has torch {other['torch']}, and this one {mine['torch']}"
            raise UserError(f"environment={config.environment} {torches}: make it anew.")
        records = [*measure(config, documents, sides)]
    described["threads"] = mine["threads"]
    described["kvpress"] = f"{other['kvpress']} (transformers {other['transformers']})"
    results = {"command": words, "date": date.today().isoformat(), "machine": described, "config": asdict(config)}
    return results | {"rows": table(records), "skipped": [], "records": records}


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    invocation = parse(argv, Config, PROGRAM)
    from ag.model.base import resolve  # loads torch, which no help needs

    config = invocation.config
    plan, model = contestants(config), resolve(config.model)
    documents = texts(config, model)
    if invocation.dry_run:
        print(*plan, sep="\n")
        return 0
    results = compare(config, shlex.join(["bash", "scripts/bench_kvpress.sh", *argv]), model, documents)
    from ag.bench.run import markdown

    folder = Path(config.output)
    (folder / "kvpress.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "kvpress.md").write_text(markdown(results))
    print(markdown(results))
    print("written:", folder / "kvpress.json", folder / "kvpress.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
