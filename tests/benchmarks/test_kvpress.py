"""The comparison with kvpress: its table, its turns, our side on a tiny model, and kvpress' side where it is there."""

import json
import os
import statistics
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from ag.errors import UserError
from benchmarks.kvpress import compare, side
from tests.support import ROOT
from tests.support.blocks import slots
from tests.support.bounds import hold, of_nats
from tests.support.refused import refuses

KVPRESS = Path(os.environ.get("AG_KVPRESS") or ROOT / "build" / "kvpress") / "bin" / "python"
LAYERS, KV_HEADS, HEAD_DIM, FLOAT, VOCABULARY = 3, 2, 16, 4, 512  # of the tiny model
ENTRY = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT  # bytes of a token's keys and values
TURNS = ["prompt=160", "continuation=6", "keep=[0.5]", "documents=2", "rounds=2", "threads=1"]


@pytest.fixture(scope="session")
def base(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """The folder of a tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(vocab_size=VOCABULARY).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def job(method, tokens=None, prompt=160, following=6):
    """Tokens that all differ: in the first layer equal ones have keys of equal norm, and any of them may stay."""
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[: prompt + following].tolist()
    return side.Job(method, tokens, ids[:prompt], ids[prompt:])


def record(contestant, name, place, **measured):
    wide = {"kept": 1.0, "kv_bytes": 100, "all_bytes": 120, "prefill": 1.0, "decode": [9.0] * 3 + [0.5], "nats": [2.0]}
    return {"contestant": contestant, "side": name, "round": place[0], "document": place[1]} | wide | measured


def test_table_of_recorded_measurements():
    """Two documents, two rounds; those of kvpress are stored in another order, and pair by document and round."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    full = [record("full", name, place) for name in ("ag", "kvpress") for place in places]
    held = {"kv_bytes": 50, "all_bytes": 60, "kept": 0.5}
    mine = [  # the first three tokens of a continuation are not timed
        record("knorm", "ag", place, prefill=s, decode=[9.0] * 3 + [t, 3 * t], nats=[1.0, 3.0, 2 + 0.75 * place[1]])
        | held
        for place, s, t in zip(places, (4.0, 1.0, 2.0, 3.0), (0.01, 0.02, 0.03, 0.04), strict=True)
    ]
    theirs = [
        record("knorm", "kvpress", place, prefill=seconds, decode=[0.0] * 3 + [0.02], kept=0.5, nats=[2.5])
        for place, seconds in zip(places, (1.0, 2.0, 4.0, 1.0), strict=True)
    ]
    same, _, ours, other = compare.table([*full, *mine, *reversed(theirs)])
    assert [same[name] for name in ("prefill over kvpress", "ms/token over kvpress", "nats over full")] == [1, 1, 0]
    assert (ours["contestant"], other["contestant"]) == ("knorm, ag", "knorm, kvpress")
    assert (ours["kept"], ours["KV bytes"], ours["all bytes"], ours["all bytes over kvpress"]) == (0.5, 50, 60, 0.5)
    assert ours["prefill s"] == statistics.median([4, 1, 2, 3])
    assert ours["prefill over kvpress"] == statistics.median([4 / 1, 1 / 2, 2 / 4, 3 / 1])
    assert [ours["ms/token"], ours["ms/token over kvpress"]] == pytest.approx([50, 50 / 20])
    assert [row["nats over full"] for row in (ours, other)] == pytest.approx([0.125, 0.5])


def test_shares_become_tokens_and_documents_are_long_enough(base, tiny_tokenizer, tmp_path):
    assert tuple(side.OPTIONS) == compare.METHODS
    # 0.57 * 400 is a little less than 228
    assert compare.contestants(compare.Config(prompt=400, keep=[0.57]))["knorm 0.57"] == ("knorm", 228)
    for keep, prompt in ((0.25, 259), (1.0, 400)):
        with refuses(UserError, f"keep={keep:g}", f"prompt={prompt}", "64"):
            compare.contestants(compare.Config(keep=[0.5, keep], prompt=prompt))
    lines = [{"text": letter * length} for letter, length in (("a", 100), ("b", 50), ("c", 90))]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = compare.Config(root=str(tmp_path), documents=2, prompt=80, continuation=10)
    assert [tiny_tokenizer.decode(ids) for _, ids in compare.texts(config, str(base))] == ["a" * 10, "c" * 10]
    config.documents = 3
    with refuses(UserError, "documents=3", str(tmp_path), "2"):
        compare.texts(config, str(base))


@pytest.mark.parametrize("tokens", [None, 40])
def test_our_side_measures_what_plain_transformers_give(base, tiny_llama, tokens):
    """The smallest keys of each head, chosen and left in transformers' cache by hand."""
    asked = job("full" if tokens is None else "knorm", tokens)
    found = side.measure(side.Ours(str(base)), asked)
    model, cache = tiny_llama(vocab_size=VOCABULARY), DynamicCache()
    with torch.no_grad():
        logits = model(torch.tensor([asked.prompt]), past_key_values=cache).logits[:, -1:]
        for layer in cache.layers if tokens else []:
            best = layer.keys.norm(dim=-1).topk(tokens, largest=False).indices.sort(-1).values[..., None]
            layer.keys, layer.values = (x.take_along_dim(best, 2) for x in (layer.keys, layer.values))
        for place, token in enumerate(asked.following[:-1], len(asked.prompt)):
            given = {"position_ids": torch.tensor([[place]]), "past_key_values": cache}
            logits = torch.cat([logits, model(torch.tensor([[token]]), **given).logits], 1)
    nats = F.cross_entropy(logits[0], torch.tensor(asked.following), reduction="none")
    hold(torch.tensor(found["nats"]), nats, of_nats(model))
    taken = slots(160, tokens) * (ENTRY + LAYERS * KV_HEADS * 4)  # with ranks
    assert found["kept"] == (tokens or 160) / 160 and found["kv_bytes"] == taken
    assert found["kv_bytes"] < found["all_bytes"] < 1.2 * found["kv_bytes"]
    assert len(found["decode"]) == 5 and min(found["decode"]) > 0 < found["prefill"]


def test_bytes_are_those_of_whole_storages_and_of_each_once():
    x = torch.zeros(100)
    found = types.SimpleNamespace(
        a=x[:3], b=[{"c": (x.view(10, 10), torch.zeros(5).double())}], d=torch.nn.Linear(9, 9)
    )
    found.found = found
    assert side.storage_bytes(found) == 100 * 4 + 5 * 8


STAND_IN = """\
import json, sys

name, versions = sys.argv[1], {{"torch": "2.13.0", "transformers": "5.2.0", "kvpress": "0.5.5", "threads": 1}}
sys.stdin.readline()
print(json.dumps(versions | {other} if name == "kvpress" else versions), flush=True)
for line in sys.stdin:
    open({log!r}, "a").write(json.dumps([name, json.loads(line)]) + "\\n")
    found = {{"prefill": 2.0, "decode": [0.1] * 5, "kept": 0.5, "kv_bytes": 7, "all_bytes": 8, "nats": [1.5] * 6}}
    print(json.dumps(found), flush=True)
"""


def test_sides_take_turns_over_the_same_tokens(base, tmp_path, monkeypatch, capsys):
    """Both sides are a script that answers anything, and keeps what it was asked."""
    monkeypatch.setattr(compare, "SIDE", tmp_path / "side.py")
    words = [*TURNS, f"model={base}", f"environment={tmp_path}/env", f"output={tmp_path}/out"]
    assert compare.main(words) == 2
    assert f"environment={tmp_path}/env" in capsys.readouterr().err
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    for other, code, said in (
        (None, 2, f"no such model ({tmp_path}/out"),
        ({"torch": "2.0.1"}, 2, "has torch 2.0.1"),
        ({}, 0, "documents"),
    ):
        script = STAND_IN.format(log=str(tmp_path / "asked"), other=other) if other is not None else ""
        (tmp_path / "side.py").write_text(script or "raise SystemExit('no such model')")
        assert compare.main(words) == code and said in capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "kvpress.json").read_text())
    assert results["machine"]["threads"] == 1 and results["machine"]["kvpress"] == "0.5.5 (transformers 5.2.0)"
    plan = ["full", *(f"{method} 0.5" for method in compare.METHODS)]
    turns = [("ag", "kvpress"), ("kvpress", "ag")] * 2
    assert [(x["contestant"], x["side"], x["round"], x["document"]) for x in results["records"]] == [
        (one, name, turn // 2, turn % 2) for turn, order in enumerate(turns) for one in plan for name in order
    ]
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    mine = [told for name, told in asked if name == "ag"]
    assert mine == [told for name, told in asked if name == "kvpress"]
    assert [x["method"] for x in mine] == ["full", *compare.METHODS] * 5  # once to warm up
    assert [x["tokens"] for x in mine] == [None, *[65] * 5] + [None, *[80] * 5] * 4
    documents = compare.texts(compare.Config(prompt=160, continuation=6, documents=2), str(base))
    assert [(x["prompt"], x["following"]) for x in mine[6::6]] == [(p, f) for p, f in documents] * 2


@pytest.mark.slow
@pytest.mark.skipif(not KVPRESS.is_file(), reason="no environment of kvpress: bash scripts/bench_kvpress.sh makes it")
def test_kvpress_has_the_same_losses_shares_and_bytes(base, tmp_path):
    """Under the same hyper-parameters, and Ada-KV frees nothing."""
    theirs = compare.Process("kvpress", str(KVPRESS), tmp_path / "log", {"model": str(base), "threads": 1})
    try:
        assert theirs.versions["kvpress"] == "0.5.5"
        ours = side.Ours(str(base))
        for method, tokens in [("full", None), *((method, 80) for method in compare.METHODS)]:
            asked = job(method, tokens)
            mine, other = side.measure(ours, asked), theirs.ask(vars(asked))
            assert other["nats"] == pytest.approx(mine["nats"], abs=1e-3), method
            assert mine["kept"] == other["kept"] == (tokens or 160) / 160
            freed = tokens is not None and not method.endswith("@heads")
            assert other["kv_bytes"] == ENTRY * (tokens if freed else 160)
            masked = LAYERS * KV_HEADS * 80 * 3 * 8 if method.endswith("@heads") else 0  # three int64 an entry
            assert other["all_bytes"] == other["kv_bytes"] + masked
    finally:
        theirs.close()
