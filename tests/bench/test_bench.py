"""The bench on a tiny random model: files, columns, and the ratios that do not depend on time."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import ag
from ag.bench import contestants, measure, memory, models, worker, write
from ag.bench.__main__ import main
from ag.bench.arena import Arena, kv_bytes
from ag.bench.contestants import Contestant
from ag.bench.run import bench
from ag.commands.bench import MODES, BenchConfig
from ag.config.command_line import parse
from ag.engine import EvictionCache
from ag.engine.block_pool import BLOCK
from ag.errors import UserError
from ag.model import random_base
from ag.model.base import load_base
from tests.support.bounds import hold, of_logits
from tests.support.refused import names, refuses

SMALL = {"model": "random:tiny", "context": [192], "rounds": 1, "warmup": 0, "steps": 3, "keep": [0.25]}
TIMES = {"quartile 1", "quartile 3"}
COLUMNS = {
    "decode": {"kept", "ms/token", "tokens/s", "x full", "x transformers", "roofline", "of roofline", "last/first"}
    | {"KV bytes", "held in 60 GiB"}
    | TIMES,
    "stream": {"held", "ms/token", "over full", "last/first", "last/first over full", "KV bytes", "KV bytes at the end"}
    | TIMES,
    "prefill": {"kept", "seconds", "over full", "over transformers"} | TIMES,
    "train": {"trained of base", "seconds", "time over lora", "peak bytes", "peak over lora", "peak over held"} | TIMES,
    "memory": {"kept", "KV bytes", "KV of full", "peak over model", "peak of full"},
}


def rows_of(mode, **changes):
    rows = bench(BenchConfig(mode=mode, **SMALL | changes), "a command")["rows"]
    assert all(row.keys() == {"context", "batch", "contestant"} | COLUMNS[mode] for row in rows)
    return rows


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_run_writes_its_files_and_columns(mode, tmp_path, capsys):
    words = [f"{name}={json.dumps(value)}" if name != "model" else f"model={value}" for name, value in SMALL.items()]
    assert main([mode, *words, "context=[64,128]", f"output={tmp_path}"]) == 0
    results = json.loads((tmp_path / f"{mode}.json").read_text())
    assert results["command"].startswith(f"python -m ag.bench {mode} model=random:tiny")
    assert {"cpu", "cores", "threads", "load", "torch", "transformers"} <= set(results["machine"])
    names = [(row["context"], row["contestant"]) for row in results["rows"]]
    assert names == [(n, one) for n in (64, 128) for one in ("transformers", "full", "random 0.25")]
    for row in results["rows"]:
        assert {"context", "batch", "contestant"} | COLUMNS[mode] == set(row)
        assert all(math.isfinite(x) and x > 0 for x in row.values() if not isinstance(x, str))
        assert row["quartile 1"] <= row["quartile 3"]
    table = (tmp_path / f"{mode}.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n| ") == 1 + len(names)
    assert (tmp_path / f"{mode}.png").read_bytes()[:4] == b"\x89PNG"


def test_prefill_of_gates_and_policies_keeps_what_was_asked():
    rows = {row["contestant"]: row for row in rows_of("prefill", policy=["snapkv", "flags"], keep=[0.5, 0.25])}
    assert rows["full"]["kept"] == rows["transformers"]["kept"] == rows["full"]["over full"] == 1
    for share in (0.5, 0.25):
        assert rows[f"snapkv {share}"]["kept"] == share
        # of 192 tokens in 2 layers of 2 heads, as if drawn: five deviations
        assert abs(rows[f"flags {share}"]["kept"] - share) <= 5 * (share * (1 - share) / (192 * 4)) ** 0.5


def test_decode_counts_bytes_and_the_roofline():
    full, few = rows_of("decode", batch=[2])[1:]
    model = load_base("random:tiny", "cpu")[0]
    entry, weights = 2 * 2 * 2 * 16 * 4, sum(p.nbytes for p in model.parameters()) - 512 * 64 * 4
    assert (models.token_bytes(model), models.weight_bytes(model)) == (entry, weights)
    assert few["kept"] == 0.25
    everything, left = (weights + 2 * 192 * entry * share for share in (1, 0.25))
    assert few["roofline"] == pytest.approx(everything / left)
    assert few["of roofline"] == pytest.approx(few["x full"] / few["roofline"])
    assert full["roofline"] == 1
    assert 2 * 192 * entry <= full["KV bytes"] <= 1.3 * 2 * 192 * entry
    assert few["tokens/s"] == pytest.approx(2000 / few["ms/token"])
    assert few["held in 60 GiB"] == 60 * 2**30 * 2 // few["KV bytes"] > 3 * full["held in 60 GiB"]


def test_codes_are_rows_of_their_own():
    rows = {row["contestant"]: row for row in rows_of("decode", kv_dtypes=["float", "int8"])}
    assert [*rows] == ["transformers", "full", "random 0.25"] + [f"{name} int8" for name in ("full", "random 0.25")]
    plain, coded = rows["full"], rows["full int8"]
    assert coded["KV bytes"] < plain["KV bytes"] and coded["kept"] == 1
    model = load_base("random:tiny", "cpu")[0]
    weights, everything = models.weight_bytes(model), 192 * models.token_bytes(model)
    assert coded["roofline"] == pytest.approx((weights + everything) / (weights + coded["KV bytes"]))


def test_a_full_cache_without_room_is_skipped(monkeypatch):
    fill = Arena.fill

    def filled(arena, cache, batch, length):
        if isinstance(cache, DynamicCache) or cache.policy.scorer is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
        fill(arena, cache, batch, length)

    monkeypatch.setattr(Arena, "fill", filled)
    found = bench(BenchConfig(mode="decode", **SMALL), "a command")
    assert [row["contestant"] for row in found["rows"]] == ["random 0.25"]
    assert found["rows"][0]["x full"] is None is found["rows"][0]["of roofline"]
    assert [row["contestant"] for row in found["skipped"]] == ["transformers", "full"]
    assert "Skipped: full, 192 tokens: CUDA out of memory." in write.markdown(found)
    write.plot(found["rows"], "x full")


def test_contestants_take_turns_token_by_token(monkeypatch):
    order, decode = [], Arena.decode

    def told(arena, cache, *given):
        for step in decode(arena, cache, *given):
            order.append(id(cache))
            yield step

    monkeypatch.setattr(Arena, "decode", told)
    rows = rows_of("decode", interleaved=True, rounds=1, warmup=0, steps=4)
    timed = order[-4 * len(rows) :]
    assert len(set(timed[:3])) == len(rows) == 3 and timed == timed[:3] * 4


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
    arena, ids = Arena(model, BenchConfig(**SMALL)), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        for backend in ("flash", "math", None):
            one = Contestant("transformers", backend=backend)
            cache = arena.cache(one)
            arena.read(cache, ids, one)
            next(arena.decode(cache, ids[:, :1], one))
    assert seen == [[True, False, False]] * 4 + [[False, True, False]] * 4 + [[True, True, True]] * 4  # 2 layers, twice


def test_what_cannot_run_is_skipped_with_the_reason():
    found = bench(BenchConfig(mode="prefill", **SMALL | {"sdpa": ["flash", "math", "cudnn"]}), "a command")
    names = [row["contestant"] for row in found["rows"]]
    assert names == ["transformers", "full", "transformers, math", "random 0.25"]
    (row,) = found["skipped"]
    assert (row["contestant"], row["context"], row["batch"]) == ("transformers, cudnn", 192, 1)
    assert "backend" in row["skipped"]
    assert f"\n\nSkipped: transformers, cudnn, 192 tokens: {row['skipped']}\n" in write.markdown(found)


@pytest.mark.slow
def test_a_static_cache_gives_the_same_tokens_and_is_compiled_once(model, monkeypatch):
    compiled, real = [], torch.compile

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda step, mode, **options: real(step, backend=counting, **options) if mode else None
    )
    arena = Arena(model, BenchConfig(**SMALL))
    forms = [Contestant(f"static, {name}", backend=name, static=True) for name in ("flash", "math")]
    with torch.no_grad():
        for batch, context in ((1, 40), (1, 40), (2, 30)):
            tokens = {}
            for one in (contestants.PLAIN, contestants.FULL, *forms):
                cache = arena.cache(one, batch, context + 5)
                arena.fill(cache, batch, context)
                steps = arena.decode(cache, torch.full((batch, 1), 7), one)
                tokens[one.name] = [next(steps).flatten().tolist() for _ in range(5)]
            assert len(set(map(str, tokens.values()))) == 1
            assert len({tuple(found) for found in tokens["transformers"]}) > 1  # else every token would do
            assert kv_bytes(cache) == 2 * 2 * 2 * 16 * 4 * batch * (context + 5)
    assert len(compiled) == 4  # two forms, two sizes


def test_a_call_is_timed_by_replaying_a_graph_or_as_it_is_launched(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    waited, calls = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(measure, "seconds_of", lambda device, step, rounds: [3.0, 1.0, 2.0])
    monkeypatch.setattr(testing, "do_bench_cudagraph", lambda step, return_mode: 4.0 if return_mode == "median" else 0)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert measure.call_seconds(cuda, lambda: calls.append(1), 3) == (0.004, "graph")
    assert len(calls) == 2 and not waited  # it was called before it is captured

    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(testing, "do_bench_cudagraph", refused)
    assert measure.call_seconds(cuda, lambda: None, 3) == (2.0, "launches") and waited == [cuda]
    assert measure.call_seconds(cpu, lambda: None, 3) == (2.0, "launches")


@pytest.fixture
def one_process(monkeypatch):
    """Peaks are then those of the test's process; what else a worker returns is the same."""
    monkeypatch.setattr(worker, "call", lambda measure, *job: measure(*job))


def test_memory_falls_with_what_is_kept(one_process):
    plain, full, few = rows_of("memory", context=[1024])
    assert plain["KV bytes"] == 2 * 2 * 2 * 16 * 4 * 1024
    assert full["KV of full"] == 1
    assert 0.25 <= few["KV of full"] <= 0.3


@pytest.mark.slow
def test_a_worker_is_a_process_of_its_own():
    config = BenchConfig(mode="memory", **SMALL)
    row = worker.call(memory.measure_one, config, 64, 1, contestants.PLAIN)
    assert row["KV bytes"] == 2 * 2 * 2 * 16 * 4 * 64
    assert row["peak over model"] > 0
    with refuses(UserError, "memory", "context=64", "random:huge"):
        worker.call(memory.measure_one, replace(config, model="random:huge"), 64, 1, contestants.PLAIN)


def test_training_compares_gates_with_lora(one_process):
    lora, gates, both = rows_of("train", context=[32])
    assert [row["contestant"] for row in (lora, gates, both)] == ["lora", "gates", "gates+lora"]
    assert lora["time over lora"] == lora["peak over lora"] == 1
    assert both["trained of base"] == pytest.approx(lora["trained of base"] + gates["trained of base"])


@pytest.fixture(scope="module")
def model():
    return load_base("random:tiny", "cpu")[0]


def test_uneven_heads_hold_exactly_the_share(model):
    arena = Arena(model, BenchConfig(**SMALL, uneven=True))
    with torch.no_grad():
        counts = []
        for _ in range(2):
            cache = arena.cache(Contestant("random 0.25", "random", 0.25))
            arena.fill(cache, 1, 192)
            counts.append([[len(head) for head in cache.kept_positions(layer)[0]] for layer in range(2)])
        assert counts[0] == counts[1]
        assert all(sum(heads) == 2 * 48 and heads[0] != heads[1] for heads in counts[0])
        assert next(arena.decode(cache, torch.tensor([[3]]))).shape == (1, 1)


def test_filled_caches_hold_the_same(model):
    arena = Arena(model, BenchConfig(**SMALL))
    with torch.no_grad():
        ours, theirs = (arena.cache(one) for one in (contestants.FULL, contestants.PLAIN))
        assert isinstance(ours, EvictionCache) and isinstance(theirs, DynamicCache)
        arena.fill(theirs, 1, 40)
        ours = arena.cache(contestants.FULL)
        arena.fill(ours, 1, 40)
        ids = torch.tensor([[7]])
        mine = model(input_ids=ids, past_key_values=ours).logits
        ag.detach(model)
        hold(mine, model(input_ids=ids, past_key_values=theirs).logits, of_logits(model))


def test_gates_stay_within_their_share():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_base.geometry("random:smollm2-135m"))
    parameters = sum(p.numel() for p in models.gates_for(model).parameters())
    assert 0.015 < parameters / sum(p.numel() for p in model.parameters()) <= 0.03


def test_quartiles_and_pairs():
    assert measure.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (3, 2, 4)
    assert measure.quartiles([2.0]) == (2, 2, 2)
    assert measure.paired([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == 2


def test_the_first_word_names_the_mode():
    read = [parse(words, BenchConfig, "ag.bench", "mode").config for words in (["train", "batch=[2]"], ["batch=[2]"])]
    assert read == [BenchConfig(mode="train", batch=[2]), BenchConfig(mode="decode", batch=[2])]
    assert set(MODES) == set(COLUMNS)


@pytest.mark.parametrize(
    ("words", "parts"),
    {
        "mode": (["decoding"], ("decoding",)),
        "key": (["decode", "contexts=[8]"], ("contexts", "context?")),
        "policy": (["decode", "policy=[snapvk]"], ("'snapvk'", "snapkv?")),
        "share": (["prefill", "keep=[1.5]"], ("keep=1.5",)),
        "length": (["prefill", "context=[0]"], ("context=[0]", "batch=[1]")),
        "geometry": (["prefill", "model=random:huge"], ("random:huge", "random:tiny")),
        "device": (["train", "device=cuda"], ("CUDA",)),
        "kind": (["stream", "kinds=[mpl]"], ("kinds=['mpl']", "attention, linear", "mlp")),
        "room": (["stream", "context=[64]"], ("context=64", "recent=N")),
        "random flags": (["decode", "policy=[flags]"], ("policy=flags", "random")),
        "no gates": (["prefill", "policy=[gates@heads]"], ("policy=gates@heads", "gates:EXPORT", "flags")),
        "flags with a share": (
            ["prefill", "policy=[flags:smollm2]"],
            ("'flags:smollm2'", "budget=0.2", "gates:smollm2"),
        ),
        "static": (["prefill", "static=[flash]"], ("static=[flash]", "decode")),
        "turns": (["decode", "static=[math]", "interleaved=true"], ("static=[math]", "interleaved=false")),
    }.values(),
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input_is_one_line(words, parts, capsys, tmp_path):
    if "CUDA" in parts and torch.cuda.is_available():
        pytest.skip("a CUDA device is there: CUDA_VISIBLE_DEVICES= bash scripts/test.sh")
    try:
        code = main([*words, f"output={tmp_path}"])
    except SystemExit as leaving:
        code = leaving.code
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert len(error.splitlines()) == 1
    assert error.startswith("ag.bench: error: ")
    names(error, *parts)


@pytest.mark.slow
def test_a_stream_holds_its_size_beside_a_full_cache_that_is_cropped_to_it():
    rows = rows_of("stream", kinds=["attention", "mlp"], recent=32, steps=90, rounds=2)
    assert [row["contestant"] for row in rows] == ["full", "gates, attention", "gates, mlp"]
    for row in rows:
        assert row["held"] == 192
        pages = row["KV bytes"] * BLOCK / row["held"]  # a page of each row; one more may be taken ahead
        assert abs(row["KV bytes at the end"] - row["KV bytes"]) <= 2 * pages
    assert rows[0]["over full"] == rows[0]["last/first over full"] == 1


def test_drift_is_last_over_first():
    assert measure.drift([2.0] * 5 + [1.0] * 90 + [3.0] * 5) == 1.5
