"""The lines of every part, most valuable first: adding one is adding an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ag.bench.card import ROOT
from ag.bench.card.line import Goal, Line, Result, Shape

MODEL_GIB = {"random:llama-8b": 15.0, "random:llama-1b": 2.3}  # weights in 16 bits
TOKEN_KIB = {"random:llama-8b": 128, "random:llama-1b": 32}  # keys and values of a token
SMALL_RUN = "trainer.max_steps=2 warmup.regress_steps=1 optim.warmup_steps=0 data.prompt_min=20 data.prompt_max=40 "
SMALL_RUN += "data.continuation=8 data.val_samples=2 data.batch_size=1 data.val_batch_size=1 gate.recent_tokens=4"
KERNELS = ("gated_attention", "gated_prefill", "column_sums", "column_max", "ragged_decode")
ROUNDS = {"more": "rounds=3 steps=32"}
TINY = {"model": "random:tiny", "dtype": "float32", "batch": "1", "more": "rounds=1 warmup=0 steps=1"}
#: Files of tests in the order of their worth; others come after them.
FIRST = (
    "gated_attention",
    "ragged_decode",
    "engine",
    "gated_prefill",
    "column_sums",
    "training",
    "compile",
    "quantised",
)


def lines(part: str) -> list[Line]:
    """Return the lines of a part."""
    return {"check": check, "speed": speed, "train": train}[part]()


# --- check: what a test shows


def check() -> list[Line]:
    """Return a line for each file of tests that need a card, and one for each kernel under compute-sanitizer."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    files.sort(key=lambda file: [word not in file.stem for word in FIRST])
    smallest = "tests/gpu/test_smallest.py"
    tests = [tested(file.stem.removeprefix("test_"), str(file.relative_to(ROOT))) for file in files]
    guarded = [
        tested(
            f"sanitizer_{kernel}",
            smallest,
            "-k",
            kernel,
            prefix=("compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"),
            files=(str(ROOT / smallest),),
        )
        for kernel in KERNELS
    ]
    return tests + guarded


def tested(name: str, *words: str, seconds: int = 35, **options: Any) -> Line:
    """Return a line that runs tests marked gpu; in a rehearsal they are collected, and skip.

    Compiling kernels takes most of the time, so that a file runs in four processes where pytest-xdist is installed.
    """
    command = ("pytest", *words, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--junitxml={out}/junit.xml", "{more}")
    workers = "-n 4" if "prefix" not in options and find_spec("xdist") else ""
    shapes, rehearsal = (Shape(1, {"more": workers}),), {"more": ""}
    return Line(name=name, command=command, seconds=seconds, shapes=shapes, rehearsal=rehearsal, **options)


# --- speed: what a clock shows


def bench(mode: str, *words: str) -> tuple[str, ...]:
    """Return the words of a line of ``ag.bench``."""
    given = ("model={model}", "dtype={dtype}", "context=[{context}]", "batch=[{batch}]", "device={device}")
    return ("ag.bench", mode, *given, *words, "{more}", "output={out}")


def sized(model: str, context: str, batch: int, extra: float) -> Shape:
    """Return a shape of ``ag.bench``, with the memory for weights, a full cache and ``extra`` GiB beside them."""
    longest = max(int(tokens) for tokens in context.split(","))
    cache = 1.12 * longest * batch * TOKEN_KIB[model] / (1 << 20)
    values = {"model": model, "dtype": "bfloat16", "context": context, "batch": str(batch), **ROUNDS}
    return Shape(round(MODEL_GIB[model] + cache + extra, 1), values)


def decode(name: str, batch: int, uneven: bool, seconds: int) -> Line:
    """Return a line that decodes at 32k and 128k with 20 % kept; where full caches do not fit, shorter or smaller."""
    contexts = ("32768,131072", "32768,65536", "32768", "16384")
    shapes = [sized(model, context, batch, 4) for model in MODEL_GIB for context in contexts]
    own = "random 0.2"
    goals = (
        Goal("of roofline over full", "at least", 0.85, lambda r: min(of(r, "decode", own, "of roofline"))),
        Goal("full over transformers", "at least", 1.0, lambda r: min(of(r, "decode", "full", "x transformers"))),
        Goal("full over flash-attn, where installed", "at least", 1.0, _over_flash),
    )
    words = ("keep=[0.2]", f"uneven={str(uneven).lower()}")
    return Line(
        name=name,
        command=bench("decode", *words),
        seconds=seconds,
        shapes=tuple(shapes),
        rehearsal=TINY | {"context": "32,48"},
        goals=goals[: 3 if _flash() else 2],
    )


def speed() -> list[Line]:
    """Return the lines of time and memory."""
    large = {"dtype": "bfloat16", "train": "8192", "prompt": "32768", "decode": "131072", "heads": "32", "dim": "128"}
    counts = ("kv_heads={kv_heads}", "copy={copy}", "square={square}", "rounds={rounds}")
    sizes = ("dtype={dtype}", "train={train}", "prompt={prompt}", "decode={decode}", "heads={heads}", "dim={dim}")
    large |= {"kv_heads": "8", "copy": str(1 << 30), "square": "8192", "rounds": "10"}
    tiny = {"dtype": "float32", "train": "40", "prompt": "48", "decode": "48", "heads": "2", "dim": "16"}
    tiny |= {"kv_heads": "1", "copy": "65536", "square": "64", "rounds": "1"}
    return [
        Line(
            name="kernels",
            command=("ag.bench.card.kernels", *sizes, *counts, "device={device}", "output={out}/kernels.json"),
            seconds=70,
            shapes=(Shape(10, large),),
            rehearsal=tiny,
            goals=tuple(
                Goal(f"{kernel}, of what the card gives it", "at least", 0.6, _reached(kernel)) for kernel in KERNELS
            ),
        ),
        decode("decode_uneven", 1, True, 40),
        Line(
            name="prefill_gates",
            command=bench("prefill", "policy=[gates]", "keep=[0.25]"),
            seconds=80,
            shapes=(
                sized("random:llama-8b", "32768,100000", 1, 14),
                sized("random:llama-8b", "32768", 1, 6),
                sized("random:llama-1b", "32768,100000", 1, 10),
                sized("random:llama-1b", "32768", 1, 4),
            ),
            rehearsal=TINY | {"context": "48,64"},
            goals=(
                Goal("dense over gates, longest prompt", "at least", 2.6, lambda r: 1 / _gates(r)["over full"]),
                Goal("kept by the gates there", "at most", 0.3, lambda r: _gates(r)["kept"]),
            ),
        ),
        Line(
            name="memory",
            command=bench("memory", "policy=[random]", "keep=[0.25]", "fill=true"),
            seconds=40,
            shapes=(
                sized("random:llama-8b", "400000", 1, 6),
                sized("random:llama-8b", "200000", 1, 5),
                sized("random:llama-1b", "400000", 1, 4),
                sized("random:llama-1b", "100000", 1, 3),
            ),
            rehearsal=TINY | {"context": "128"},
            goals=(
                Goal(
                    "keys and values of full", "at most", 0.4, lambda r: of(r, "memory", "random 0.25", "KV of full")[0]
                ),
                Goal("peak of full", "at most", 0.4, lambda r: of(r, "memory", "random 0.25", "peak of full")[0]),
            ),
        ),
        Line(
            name="train_step",
            command=bench("train"),
            seconds=80,
            shapes=(
                Shape(130, sized("random:llama-8b", "4096,8192", 1, 0).values),
                Shape(72, sized("random:llama-8b", "2048,4096", 1, 0).values),
                Shape(44, sized("random:llama-1b", "4096,8192", 1, 0).values),
                Shape(20, sized("random:llama-1b", "1024,2048", 1, 0).values),
            ),
            rehearsal=TINY | {"context": "16"},
            goals=(
                Goal(
                    "gates + LoRA over LoRA, longest row",
                    "at most",
                    1.3,
                    lambda r: of(r, "train", "gates+lora", "time over lora")[-1],
                ),
                Goal("memory beside what is held, doubled row over row", "at most", 2.1, _doubling),
            ),
        ),
        decode("decode_even", 1, False, 40),
        decode("decode_uneven_batch_8", 8, True, 45),
        Line(
            name="prefill_policies",
            command=bench("prefill", "policy=[snapkv,h2o,cake]", "keep=[0.25]"),
            seconds=60,
            shapes=(sized("random:llama-8b", "32768", 1, 8), sized("random:llama-1b", "32768", 1, 6)),
            rehearsal=TINY | {"context": "160"},
        ),
        decode("decode_even_batch_8", 8, False, 45),
    ]


def of(result: Result, mode: str, contestant: str, column: str) -> list[float]:
    """Return a column of a contestant's rows, by context."""
    rows = [row for row in result[mode]["rows"] if row["contestant"] == contestant]
    return [row[column] for row in sorted(rows, key=lambda row: row["context"])]


def _gates(result: Result) -> Mapping[str, Any]:
    rows: list[Mapping[str, Any]] = [r for r in result["prefill"]["rows"] if r["contestant"].startswith("gates")]
    return max(rows, key=lambda row: row["context"])


def _doubling(result: Result) -> float:
    shorter, longer = map(float, of(result, "train", "gates+lora", "peak over held"))
    return longer / shorter


def _reached(kernel: str) -> Callable[[Result], float]:
    """Return what takes the least of a kernel's rows."""
    return lambda r: min(float(row["of bound"]) for row in r["kernels"]["rows"] if row["kernel"].split()[0] == kernel)


def _flash() -> bool:
    return Shape(0, {}, ("flash_attn",)).refuses(1) is None


def _over_flash(result: Result) -> float:
    times = (of(result, "decode", name, "ms/token") for name in ("transformers, flash-attn", "full"))
    return min(float(flash / full) for flash, full in zip(*times, strict=True))


# --- train: what a training run shows


def fitted(*words: str) -> tuple[str, ...]:
    """Return the words of a line that trains a recipe; ``job.*`` say what is done with it (ag.bench.card.fit)."""
    common = ("output={work}/runs", "trainer.progress=false", "trainer.devices=1", "trainer.accelerator={device}")
    return ("ag.bench.card.fit", "{out}/fit.json", *words, *common)


def four_cards(recipe: str, geometry: str, seconds: int, *words: str) -> Line:
    """Return the line of a recipe for four cards of 24 GB, on one, with random weights of the real size."""
    full = {
        "base": f"random:docs/models/{geometry}.json",
        "length": "4096",
        "precision": "bf16-mixed",
        "dtype": "bfloat16",
        "head": "128",
        "steps": "10",
        "text": "300",
        "more": "",
    }
    given = ("model.name={base}", "model.quantization={quantization}", "model.dtype={dtype}", "gate.head_dim={head}")
    data = ("data.root={work}/text_{text}", "data.revision=null", "data.val_samples=2", "data.max_length={length}")
    how = ("trainer.strategy=ddp", "trainer.precision={precision}", "checkpoint.every_steps=5")
    job = ("job.gib=24", "job.steps={steps}", "job.text={text}", "job.plan=true")
    tiny = {
        "base": "random:docs/models/tiny.json",
        "length": "16",
        "precision": "32-true",
        "dtype": "float32",
        "head": "8",
    }
    return Line(
        name=recipe,
        command=fitted(f"recipe={recipe}", *given, *data, *how, *job, *words, "{more}"),
        seconds=seconds,
        shapes=(
            Shape(14, full | {"quantization": "nf4"}, ("bitsandbytes",)),
            Shape(23, full | {"quantization": "none"}),
            Shape(9, full | {"quantization": "none", "length": "1024", "base": "random:docs/models/llama-1b.json"}),
        ),
        rehearsal=tiny | {"steps": "2", "text": "4", "quantization": "none", "more": "trainer.accumulate=1"},
        goals=(
            Goal("losses and gradients finite", "at least", 1, lambda r: r["fit"]["finite"]),
            Goal("resumed with the next step", "at least", 1, lambda r: r["fit"]["resumed"]),
            Goal("export loads", "at least", 1, lambda r: r["fit"]["exported"]),
            Goal("peak over plan", "at most", 1.1, lambda r: r["fit"]["peak over plan"]),
            Goal("peak over plan", "at least", 0.9, lambda r: r["fit"]["peak over plan"]),
        ),
    )


def train() -> list[Line]:
    """Return the recipes that are trained."""
    small = ("model.name={model}", "data.root={data}", "job.link={work}/smollm2_corpus")
    return [
        four_cards("redpajama_cpt", "llama-2-7b", 130, "job.samples=4997", "job.lora=3"),
        four_cards("mistral_cpt", "mistral-7b", 90, "job.samples=5000", "trainer.accumulate=1"),
        Line(
            name="smollm2_corpus",
            command=fitted("recipe=smollm2_corpus", *small, "{more}"),
            seconds=180,
            shapes=(Shape(12, {"more": ""}),),
            rehearsal={"more": SMALL_RUN},
            goals=(Goal("losses and gradients finite", "at least", 1, lambda r: r["fit"]["finite"]),),
            files=("{data}",),
        ),
        Line(
            name="evaluate",
            command=("ag.evaluate", "run={work}/smollm2_corpus", "device={torch_device}", "output={out}/scores.json"),
            seconds=40,
            files=("{work}/smollm2_corpus/export",),
        ),
    ]
