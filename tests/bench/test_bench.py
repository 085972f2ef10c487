"""The bench on a tiny random model: files, and the ratios that do not depend on time."""

import ctypes
import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ag.bench import arena as arenas
from ag.bench import cases, contestants, measure
from ag.bench.__main__ import main
from ag.bench.arena import Arena, kv_bytes, token_bytes, weight_bytes
from ag.bench.contestants import Contestant
from ag.bench.run import bench, markdown
from ag.commands.bench import BenchConfig
from ag.config.command_line import parse
from ag.engine.block_pool import BLOCK
from ag.errors import UserError
from ag.model import random_base
from ag.model.base import load_base
from tests.support.refused import names, refuses

SMALL = {"model": "random:tiny", "context": [192], "rounds": 1, "warmup": 0, "steps": 3, "keep": [0.25]}


@pytest.fixture(scope="module")
def model():
    return load_base("random:tiny", "cpu")[0]


@pytest.fixture
def threads(monkeypatch):
    """Workers are threads: peaks are those of this process, and all else is the same."""
    monkeypatch.setattr(cases, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers))


def rows_of(mode, **changes):
    return bench(BenchConfig(mode=mode, **SMALL | changes), "a command")["rows"]


def test_a_run_writes_its_files(tmp_path, capsys):
    words = [f"{name}={json.dumps(value)}" if name != "model" else f"model={value}" for name, value in SMALL.items()]
    assert main(["decode", *words, "context=[64,128]", f"output={tmp_path}"]) == 0
    results = json.loads((tmp_path / "decode.json").read_text())
    assert results["command"].startswith("python -m ag.bench decode model=random:tiny")
    assert {"cpu", "cores", "threads", "load", "torch", "transformers"} <= set(results["machine"])
    found = [(row["context"], row["contestant"]) for row in results["rows"]]
    assert found == [(n, one) for n in (64, 128) for one in ("transformers", "full", "random 0.25")]
    for row in results["rows"]:
        assert all(math.isfinite(x) and x > 0 for x in row.values() if not isinstance(x, str))
        assert row["quartile 1"] <= row["ms/token"] <= row["quartile 3"]
    table = (tmp_path / "decode.md").read_text()
    assert table in capsys.readouterr().out and table.count("\n| ") == 1 + len(found)


def test_a_card_is_timed_in_its_own_stream(monkeypatch):
    """Whichever device is the current one."""
    streams = []
    event = SimpleNamespace(record=lambda stream=None: streams.append(stream), elapsed_time=lambda later: 2000.0)
    stubs = {"Event": lambda enable_timing: event, "synchronize": lambda device: None}
    for name, stub in (stubs | {"current_stream": lambda device: f"of {device}"}).items():
        monkeypatch.setattr(torch.cuda, name, stub)
    assert measure.seconds_of(torch.device("cuda", 1), lambda: None, 2) == [2.0, 2.0]
    assert streams == ["of cuda:1"] * 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_loses_no_context_that_was_measured(error, tmp_path, monkeypatch):
    read = Arena.read

    def failing(arena, cache, ids, contestant):
        if ids.shape[1] == 128:
            raise error("no more")
        read(arena, cache, ids, contestant)

    monkeypatch.setattr(Arena, "read", failing)
    words = ["prefill", "model=random:tiny", "context=[64,128]", "rounds=1", "warmup=0", f"output={tmp_path}"]
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        raise SystemExit(main(words))
    rows = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    assert [(row["context"], row["contestant"]) for row in rows] == [
        (64, name) for name in ("transformers", "full", "random 0.2")
    ]
    assert "| 64 |" in (tmp_path / "prefill.md").read_text()


def test_decode_counts_bytes_and_the_roofline(model):
    rows = {row["contestant"]: row for row in rows_of("decode", batch=[2], kv_dtypes=["float", "int8"])}
    assert [*rows] == ["transformers", "full", "random 0.25", "full int8", "random 0.25 int8"]
    full, few, coded = (rows[name] for name in ("full", "random 0.25", "full int8"))
    entry, weights = 2 * 2 * 2 * 16 * 4, sum(p.nbytes for p in model.parameters()) - 512 * 64 * 4
    assert (token_bytes(model), weight_bytes(model)) == (entry, weights)
    assert (few["kept"], coded["kept"], full["roofline"]) == (0.25, 1, 1)
    everything, left = (weights + 2 * 192 * entry * share for share in (1, 0.25))
    assert few["roofline"] == pytest.approx(everything / left)
    assert few["of roofline"] == pytest.approx(few["x full"] / few["roofline"])
    assert coded["roofline"] == pytest.approx(everything / (weights + coded["KV bytes"]))
    assert 2 * 192 * entry <= full["KV bytes"] <= 1.3 * 2 * 192 * entry
    assert few["tokens/s"] == pytest.approx(2000 / few["ms/token"])
    assert few["held in 60 GiB"] == 60 * 2**30 * 2 // few["KV bytes"] > 3 * full["held in 60 GiB"]


def test_the_first_full_cache_is_the_one_compared_with():
    full, few = rows_of("decode", kv_dtypes=["int8"])[1:]
    assert (full["contestant"], full["x full"], full["roofline"]) == ("full int8", 1, 1)
    assert few["of roofline"] == pytest.approx(few["x full"] / few["roofline"])


def test_prefill_of_gates_and_policies_keeps_what_was_asked():
    rows = {row["contestant"]: row for row in rows_of("prefill", policy=["snapkv", "flags"], keep=[0.5, 0.25])}
    assert rows["full"]["kept"] == rows["transformers"]["kept"] == rows["full"]["over full"] == 1
    for share in (0.5, 0.25):
        assert rows[f"snapkv {share}"]["kept"] == share
        # of 192 tokens in 2 layers of 2 heads, as if drawn: five deviations
        assert abs(rows[f"flags {share}"]["kept"] - share) <= 5 * (share * (1 - share) / (192 * 4)) ** 0.5


@pytest.mark.slow
def test_a_stream_holds_its_size_beside_a_full_cache_that_is_cropped_to_it():
    rows = rows_of("stream", kinds=["attention", "mlp"], recent=32, steps=40)
    assert [row["contestant"] for row in rows] == ["full", "gates, attention", "gates, mlp"]
    for row in rows:
        assert row["held"] == 192
        pages = row["KV bytes"] * BLOCK / row["held"]  # a page of each row; one more may be taken ahead
        assert abs(row["KV bytes at the end"] - row["KV bytes"]) <= 2 * pages
    assert rows[0]["over full"] == rows[0]["last/first over full"] == 1


def test_memory_falls_with_what_is_kept(threads):
    plain, full, few = rows_of("memory", context=[1024])
    assert plain["KV bytes"] == 2 * 2 * 2 * 16 * 4 * 1024
    assert full["KV of full"] == 1
    assert 0.25 <= few["KV of full"] <= 0.3


def test_memory_is_compared_with_the_full_cache_that_runs(threads):
    """A variant of transformers that cannot run is named, and the others are measured."""
    found = bench(
        BenchConfig(mode="memory", **SMALL | {"sdpa": ["flash", "cudnn"], "kv_dtypes": ["int8"]}), "a command"
    )
    plain, full, few = found["rows"]
    assert (full["contestant"], few["contestant"]) == ("full int8", "random 0.25 int8")
    assert full["KV of full"] == 1 and plain["KV of full"] == plain["KV bytes"] / full["KV bytes"]
    (row,) = found["skipped"]
    assert row["contestant"] == "transformers, cudnn" and "backend" in row["skipped"]


def test_training_compares_gates_with_lora(threads):
    lora, gates, both = rows_of("train", context=[32])
    assert [row["contestant"] for row in (lora, gates, both)] == ["lora", "gates", "gates+lora"]
    assert lora["time over lora"] == lora["peak over lora"] == 1
    assert both["trained of base"] == pytest.approx(lora["trained of base"] + gates["trained of base"])


def test_a_worker_that_fails_is_named(threads):
    config = BenchConfig(**SMALL | {"mode": "memory", "model": "random:huge"})
    with refuses(UserError, "memory", "context=64", "random:huge"):
        cases.measure_alone(cases.generated, config, 64, 1, contestants.PLAIN)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_worker_is_a_process_of_its_own():
    row = cases.measure_alone(cases.generated, BenchConfig(mode="memory", **SMALL), 64, 1, contestants.PLAIN)
    assert row["KV bytes"] == 2 * 2 * 2 * 16 * 4 * 64
    assert row["peak over model"] > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives no freed memory back")
def test_freed_memory_returns_to_the_system():
    """A cache made later would hide in the memory that loading a model has freed."""
    device, size, count = torch.device("cpu"), 2**16, 2000
    tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    held = measure.used_bytes(device)
    del tensors[:-1]  # the last one keeps the heap from shrinking by itself
    measure.trim_memory()
    assert measure.used_bytes(device) < held - size * count / 2


# ---- turns and times


@pytest.mark.parametrize(("turn", "order"), [(None, "aaabbb"), (1, "ababab"), (2, "aabbab")])
def test_contestants_take_turns(turn, order, monkeypatch):
    """One after the other, or all at once and some steps at a time; the first round does not count."""
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))

    def begin(name):
        calls.append(name.upper())
        return lambda: calls.append(name)

    config = BenchConfig(rounds=2, warmup=1)
    times = cases.measure_in_turns(torch.device("cpu"), config, "ab", begin, 3, turn, lambda name: calls.append("."))
    rounds = "".join(calls).replace(".", "")
    begun = "Aaaa" + "Bbbb" if turn is None else "AB" + order
    assert rounds == 3 * begun
    assert times == {"a": [[1, 1, 1]] * 2, "b": [[1, 1, 1]] * 2}
    assert cases.means(times) == {"a": [1, 1], "b": [1, 1]}


def test_quartiles_pairs_and_drift():
    assert measure.spread("ms", [1.0, 2.0, 3.0, 4.0, 5.0], 10) == {"ms": 30, "quartile 1": 20, "quartile 3": 40}
    assert measure.median_ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == 2 and measure.median_ratio([1.0], None) is None
    assert measure.late_over_early([2.0] * 5 + [1.0] * 90 + [3.0] * 5) == 1.5


# ---- contestants


def test_transformers_runs_in_every_form_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(contestants, "is_flash_attn_2_available", lambda: True)
    asked = BenchConfig(device="cuda", dtype="bfloat16", sdpa=["flash", "cudnn"], static=["efficient"])
    plain = [one for one in contestants.contestants(asked) if one.policy is None]
    assert [(one.name, one.backend, one.attention, one.static) for one in plain] == [
        ("transformers", "flash", "sdpa", False),
        ("transformers, cudnn", "cudnn", "sdpa", False),
        ("transformers, flash-attn", None, "flash_attention_2", False),
        ("transformers, static, efficient", "efficient", "sdpa", True),
    ]
    assert [contestants.backends(BenchConfig(device=device)) for device in ("cpu", "cuda")] == [["flash"], [None]]


def test_attention_is_pinned_while_transformers_works(model, monkeypatch):
    seen = []

    def attend(*arguments, **options):
        flags = torch.backends.cuda
        seen.append([flags.flash_sdp_enabled(), flags.math_sdp_enabled(), flags.mem_efficient_sdp_enabled()])
        return attention(*arguments, **options)

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    arena, ids = Arena(BenchConfig(**SMALL), model), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        for backend in ("flash", "math", None):
            one = Contestant("transformers", backend=backend)
            cache = arena.cache(one)
            arena.read(cache, ids, one)
            next(arena.decode(cache, ids[:, :1], one))
    assert seen == [[True, False, False]] * 4 + [[False, True, False]] * 4 + [[True, True, True]] * 4  # 2 layers, twice


def test_what_cannot_run_is_skipped_with_the_reason(monkeypatch):
    """A backend without this case; and no room for the full cache, to which no ratio is known then."""
    found = bench(BenchConfig(mode="prefill", **SMALL | {"sdpa": ["flash", "math", "cudnn"]}), "a command")
    assert [row["contestant"] for row in found["rows"]] == ["transformers", "full", "transformers, math", "random 0.25"]
    (row,) = found["skipped"]
    assert (row["contestant"], row["context"]) == ("transformers, cudnn", 192) and "backend" in row["skipped"]
    fill = Arena.fill

    def filled(arena, cache, batch, length):
        if isinstance(cache, DynamicCache) or cache.policy.scorer is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
        fill(arena, cache, batch, length)

    monkeypatch.setattr(Arena, "fill", filled)
    found = bench(BenchConfig(mode="decode", **SMALL), "a command")
    (row,) = found["rows"]
    assert (row["contestant"], row["x full"], row["of roofline"]) == ("random 0.25", None, None)
    assert [row["contestant"] for row in found["skipped"]] == ["transformers", "full"]
    assert "\n\nSkipped: full, 192 tokens: CUDA out of memory." in markdown(found)


@pytest.mark.slow
def test_a_static_cache_gives_the_same_tokens_and_is_compiled_once(model, monkeypatch):
    compiled, real = [], torch.compile

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda step, mode, **options: real(step, backend=counting, **options) if mode else None
    )
    arena = Arena(BenchConfig(**SMALL), model)
    forms = [Contestant(f"static, {name}", backend=name, static=True) for name in ("flash", "math")]
    with torch.no_grad():
        for batch, context in ((2, 30), (2, 30)):
            tokens = {}
            for one in (contestants.PLAIN, contestants.FULL, *forms):
                cache = arena.cache(one, batch, context + 5)
                arena.fill(cache, batch, context)
                steps = arena.decode(cache, torch.full((batch, 1), 7), one)
                tokens[one.name] = [next(steps).flatten().tolist() for _ in range(5)]
            assert len(set(map(str, tokens.values()))) == 1
            assert len({tuple(found) for found in tokens["transformers"]}) > 1  # else every token would do
            assert kv_bytes(cache) == 2 * 2 * 2 * 16 * 4 * batch * (context + 5)
    assert len(compiled) == 2  # one for each form


def test_uneven_heads_hold_exactly_the_share(model):
    arena = Arena(BenchConfig(**SMALL, uneven=True), model)
    with torch.no_grad():
        counts = []
        for _ in range(2):
            cache = arena.cache(Contestant("random 0.25", "random", 0.25))
            arena.fill(cache, 1, 192)
            counts.append([[len(head) for head in cache.kept_positions(layer)[0]] for layer in range(2)])
        assert counts[0] == counts[1]
        assert all(sum(heads) == 2 * 48 and heads[0] != heads[1] for heads in counts[0])


def test_gates_stay_within_their_share():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_base.geometry("random:smollm2-135m"))
    parameters = sum(p.numel() for p in arenas.gates_for(model).parameters())
    assert 0.015 < parameters / sum(p.numel() for p in model.parameters()) <= 0.03


# ---- the command line


def test_the_first_word_names_the_mode():
    read = [parse(words, BenchConfig, "ag.bench", "mode").config for words in (["train", "batch=[2]"], ["batch=[2]"])]
    assert read == [BenchConfig(mode="train", batch=[2]), BenchConfig(mode="decode", batch=[2])]
    assert set(get_args(get_type_hints(BenchConfig)["mode"])) == set(cases.CASES)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("decoding", ("decoding",)),
        ("decode policy=[snapvk]", ("'snapvk'", "snapkv?")),
        ("prefill keep=[1.5]", ("keep=1.5",)),
        ("prefill context=[0]", ("context=[0]", "batch=[1]")),
        ("train device=cuda", ("CUDA",)),
        ("stream kinds=[mpl]", ("kinds=['mpl']", "attention, linear", "mlp")),
        ("stream context=[256,64]", ("context=64", "recent=N")),
        ("decode policy=[flags]", ("policy=flags", "random")),
        ("prefill policy=[gates@heads]", ("policy=gates@heads", "gates:EXPORT", "flags")),
        ("decode static=[math] interleaved=true", ("static=[math]", "interleaved=false")),
    ],
)
def test_bad_input_is_one_line(words, parts, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Arena, "model", property(lambda arena: pytest.fail("a model is loaded")))
    try:
        code = main([*words.split(), f"output={tmp_path}"])
    except SystemExit as leaving:
        code = leaving.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and len(error.splitlines()) == 1 and error.startswith("ag.bench: error: ")
    names(error, *parts)
