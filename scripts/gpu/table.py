"""The lines of every part, most valuable first: adding one is adding an entry here."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec

from scripts.gpu import ROOT
from scripts.gpu.goals import attended, doubling, longest, of, over_transformers, prefilled, reached
from scripts.gpu.line import Goal, Line, Shape

MODEL_GIB = {"random:llama-8b": 15.0, "random:llama-1b": 2.3}  # weights in 16 bits
TOKEN_KIB = {"random:llama-8b": 128, "random:llama-1b": 32}  # keys and values of a token
SMALL_RUN = "trainer.max_steps=2 warmup.regress_steps=1 optim.warmup_steps=0 data.prompt_min=20 data.prompt_max=40 "
SMALL_RUN += "data.continuation=8 data.val_samples=2 data.batch_size=1 data.val_batch_size=1 gate.recent_tokens=4"
ROUNDS = {"more": "rounds=3 steps=32"}
KEYED = ("ag.bench", "scripts.gpu.fit", "ag.evaluate")  # commands that read keys and recipes
TINY = {"model": "random:tiny", "dtype": "float32", "batch": "1", "more": "rounds=1 warmup=0 steps=1"}
#: Seconds of a file of tests, and of a kernel's smallest case under compute-sanitizer: in the order of their worth.
TESTS = {
    "gated_attention": 90,
    "paged_attention": 50,
    "kv_append": 30,
    "kv_compact": 30,
    "engine": 60,
    "gated_prefill": 60,
    "attention_stats": 60,
    "training": 50,
    "compile": 60,
}
OTHERS, GUARDED = 40, 22


def _place(name: str) -> int:
    """Return the place of a kernel or a file of tests among the others."""
    return [*TESTS, name].index(name)


KERNELS = sorted((file.parent.name for file in ROOT.glob("kernels/*/triton.py")), key=_place)
ROOFLINE = 0.85  # of a step that is one CUDA graph
#: What each kernel is to reach of what a copy or a matrix product reaches: 0.6 is the level of flash-attention 3.
REACHED = {
    "gated_attention forward": 0.4,
    "gated_attention forward + backward": 0.25,
    "gated_prefill": 0.4,
    "attention_stats sum": 0.4,
    "attention_stats max": 0.4,
    "paged_attention": 0.6,
}


def lines(part: str) -> list[Line]:
    """Return the lines of a part."""
    found: list[Line] = {"check": check, "speed": speed, "train": train}[part]()
    return [replace(line, modules=("omegaconf",)) if line.command[0] in KEYED else line for line in found]


# --- check: what a test shows


def check() -> list[Line]:
    """Return lines for the smallest case of each kernel, the same under compute-sanitizer, and each file of tests."""
    smallest = "tests/gpu/test_smallest.py"
    memcheck = ("compute-sanitizer", "--tool=memcheck", "--error-exitcode=9")
    guarded = [
        replace(
            tested(f"sanitizer_{kernel}", GUARDED, smallest, "-k", kernel),
            prefix=memcheck,
            # within torch's own blocks of memory no access is out of bounds
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for kernel in KERNELS
    ]
    files = [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text()]
    names = {file.stem.removeprefix("test_"): str(file.relative_to(ROOT)) for file in files}
    del names["smallest"]
    return [
        parallel(tested("smallest", OTHERS, smallest), len(KERNELS)),
        *guarded,
        *(parallel(tested(name, TESTS.get(name, OTHERS), names[name])) for name in sorted(names, key=_place)),
    ]


def tested(name: str, seconds: int, *words: str) -> Line:
    """Return a line that runs tests marked gpu; in a rehearsal they are collected, and skip."""
    command = ("pytest", *words, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--junitxml={out}/junit.xml")
    return Line(name=name, command=command, seconds=seconds)


def parallel(line: Line, most: int = 12) -> Line:
    """Run a line's tests in several processes where pytest-xdist is: compiling kernels takes most of their time."""
    workers = f"-n {min(most, os.cpu_count() or 1)}" if find_spec("xdist") else ""
    shapes, rehearsal = (Shape(1, {"more": workers}),), {"more": ""}
    return replace(line, command=(*line.command, "{more}"), shapes=shapes, rehearsal=rehearsal)


# --- speed: what a clock shows


def bench(mode: str, *words: str) -> tuple[str, ...]:
    """Return the words of a line of ``ag.bench``."""
    given = ("model={model}", "dtype={dtype}", "context=[{context}]", "batch=[{batch}]", "device={device}")
    return ("ag.bench", mode, *given, *words, "{more}", "output={out}")


def sized(model: str, context: str, batch: int, extra: float, caches: int = 1) -> Shape:
    """Return a shape of ``ag.bench``, with the memory for weights, full caches and ``extra`` GiB beside them."""
    longest = max(int(tokens) for tokens in context.split(","))
    cache = caches * 1.12 * longest * batch * TOKEN_KIB[model] / (1 << 20)
    values = {"model": model, "dtype": "bfloat16", "context": context, "batch": str(batch), **ROUNDS}
    return Shape(round(MODEL_GIB[model] + cache + extra, 1), values)


def decode(name: str, batch: int, uneven: bool, seconds: int, static: tuple[str, ...] = ()) -> Line:
    """Return a line that decodes at 32k and 128k with 20 % kept; where full caches do not fit, shorter or smaller.

    With backends for a static cache it decodes at the longest context alone: compiling for each takes a minute or two.
    """
    contexts = ("131072", "65536", "32768") if static else ("32768,131072", "32768,65536", "32768", "16384")
    shapes = [sized(model, text, batch, 6, 1 + len(static)) for model in MODEL_GIB for text in contexts]
    roofline = Goal(
        "of roofline over full", "at least", ROOFLINE, lambda r: min(of(r, "decode", "random 0.2", "of roofline"))
    )
    rivals = "full over transformers, static" if static else "full over transformers"
    beside = Goal(rivals, "at least", 1.0, lambda r: over_transformers(r, static=bool(static)))
    words = ("keep=[0.2]", f"uneven={str(uneven).lower()}", f"static=[{','.join(static)}]")
    return Line(
        name=name,
        command=bench("decode", *words),
        seconds=seconds,
        shapes=tuple(shapes),
        rehearsal=TINY | {"context": "32" if static else "32,48"},
        goals=(beside,) if static else (roofline, beside),
    )


def served(context: int, seconds: int) -> Line:
    """Return a line that decodes batches with 20 % kept; a cache that finds no room is skipped, and the table says so.

    Its columns are tokens a second, and how many sequences 60 GiB hold.
    """
    shapes = []
    for model in MODEL_GIB:
        for batches in ("1,8,32,128", "1,8,32", "1,8"):
            one, largest = sized(model, str(context), 1, 6), int(batches.rpartition(",")[2])
            kept = 0.23 * largest * context * TOKEN_KIB[model] / (1 << 20)
            values = {**one.values, "batch": batches, "more": "rounds=2 steps=16"}
            shapes.append(Shape(round(one.gib + kept, 1), values))
    return Line(
        name=f"decode_batches_{context // 1024}k",
        command=bench("decode", "keep=[0.2]", "uneven=true"),
        seconds=seconds,
        shapes=tuple(shapes),
        rehearsal=TINY | {"context": "32", "batch": "1,2"},
    )


def thinking(seconds: int) -> Line:
    """Return a line that writes long answers, of which policies evict every 128 tokens."""
    shapes = (sized(model, "4096", 8, 6) for model in MODEL_GIB)
    return Line(
        name="decode_reasoning",
        command=bench("decode", "keep=[0.25]", "policy=[rkv,h2o]", "schedule=steps:128"),
        seconds=seconds,
        shapes=tuple(Shape(x.gib, {**x.values, "more": "rounds=1 warmup=0 steps=512"}) for x in shapes),
        rehearsal=TINY | {"context": "32"},
    )


def speed() -> list[Line]:
    """Return the lines of time and memory."""
    tiny = "dtype=float32 train=40 prompt=48 decode=48 heads=2 kv_heads=1 dim=16 copy=65536 square=64 rounds=1"
    kernels = Line(
        name="kernels",
        command=("scripts.gpu.kernels", "{more}", "device={device}", "output={out}/kernels.json"),
        seconds=80,
        shapes=(Shape(14, {"more": ""}),),
        rehearsal={"more": tiny},
        goals=(
            *(
                Goal(f"{kernel}, of what the card gives it", "at least", bar, reached(kernel))
                for kernel, bar in REACHED.items()
            ),
            Goal("fastest dense attention over gated_prefill", "at least", 2.0, attended),
        ),
    )
    return [
        kernels,
        decode("decode_uneven", 1, True, 40),
        Line(
            name="prefill_gates",
            command=bench("prefill", "policy=[flags]", "keep=[0.25]", "sdpa=[flash,cudnn]"),
            seconds=130,
            shapes=(
                sized("random:llama-8b", "32768,100000", 1, 14),
                sized("random:llama-8b", "32768", 1, 6),
                sized("random:llama-1b", "32768,100000", 1, 10),
                sized("random:llama-1b", "32768", 1, 4),
            ),
            rehearsal=TINY | {"context": "48,64"},
            goals=(
                Goal("fastest dense prefill over gates, longest prompt", "at least", 1.4, prefilled),
                Goal("kept by the gates there", "at most", 0.3, lambda r: longest(r)[True][0]["kept"]),
            ),
        ),
        decode("decode_static", 1, True, 200, static=("cudnn", "math")),
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
                Goal("memory beside what is held, doubled row over row", "at most", 2.1, doubling),
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
        Line(  # keys asked for afterwards: the prompt is read twice
            name="prefill_kvzip",
            command=bench("prefill", "policy=[kvzip]", "keep=[0.2]"),
            seconds=60,
            shapes=(sized("random:llama-8b", "32768", 1, 8), sized("random:llama-1b", "32768", 1, 6)),
            rehearsal=TINY | {"context": "160"},
        ),
        thinking(80),
        decode("decode_even_batch_8", 8, False, 45),
        served(8192, 50),
        served(32768, 80),
    ]


# --- train: what a training run shows


def fitted(*words: str) -> tuple[str, ...]:
    """Return the words of a line that trains a recipe; ``job.*`` say what is done with it (scripts.gpu.fit)."""
    common = ("output={work}/runs", "trainer.progress=false", "trainer.devices=1", "trainer.accelerator={device}")
    return ("scripts.gpu.fit", "{out}/fit.json", *words, *common)


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
            rehearsal={"more": SMALL_RUN, "model": "random:docs/models/tiny.json"},
            goals=(Goal("losses and gradients finite", "at least", 1, lambda r: r["fit"]["finite"]),),
            files=("{data}", "{model}"),
        ),
        Line(
            name="evaluate",
            command=("ag.evaluate", "run={work}/smollm2_corpus", "device={torch_device}", "output={out}/scores.json"),
            seconds=40,
            files=("{work}/smollm2_corpus/export",),
        ),
    ]
