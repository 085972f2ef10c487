"""The lines of scripts/gpu.sh: chosen by memory and time, recorded whatever happens, summed up over cards."""

import json
import re
import zipfile

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ag.bench.__main__ import main as bench
from ag.bench.card import PARTS, ROOT, fit, kernels, machine, pack, run, small_model, summary, table
from ag.bench.card import __main__ as command
from ag.bench.card.line import Goal, Line, Shape
from ag.bench.card.machine import Machine
from ag.bench.card.told import told
from ag.config import Config, ModelConfig
from ag.errors import UserError
from ag.model import base as models
from ag.model import random_base
from ag.training import memory_plan as plan
from ag.versions import versions
from tests.support.bounds import hold, of_nats

H200 = Machine("NVIDIA H200", "580.1", 140.0, "abc1234", {"torch": "2.11", "triton": "3.6", "transformers": "5.17"})
BELOW = Goal("share", "at most", 0.5, lambda r: r["found"]["share"])


def python(name, code, **options):
    """A line that runs Python code, where OUT is its folder."""
    options.setdefault("seconds", 5)
    return Line(
        name=name, command=("timeit", "-n1", "-r1", "-s", f"OUT='{{out}}'; S='''{code}'''", "exec(S)"), **options
    )


WRITES = "import json; json.dump(dict(share=0.25), open(OUT + chr(47) + chr(102) + 'ound.json', 'w'))"


@pytest.fixture
def workspace(tmp_path):
    return run.Workspace(tmp_path / "out" / "speed", tmp_path / "work", {"device": "cuda"})


def go(lines, workspace, here=H200, seconds=600, after=lambda: None):
    said = []
    return run.run(lines, workspace, here, seconds, after, said.append), "\n".join(said)


@pytest.mark.slow
def test_a_line_that_fails_and_one_that_hangs_are_recorded_and_the_next_one_runs(workspace):
    lines = [
        python("fails", "print(3 * chr(120)); raise SystemExit(1)"),
        python("hangs", "import time; time.sleep(60)", seconds=-9),  # limit: 3 seconds
        python("works", WRITES, goals=(BELOW,)),
    ]
    rows, said = go(lines, workspace)
    assert [rows[name]["status"] for name in ("fails", "hangs", "works")] == ["failed", "timed out", "ok"]
    assert rows["fails"]["why"] == "exit code 1" and "xxx" in rows["fails"]["tail"]
    assert 3 <= rows["hangs"]["seconds"] < 30
    assert rows["works"]["result"] == {"found": {"share": 0.25}}
    assert rows["works"]["goals"] == [{"goal": "share", "kind": "at most", "bar": 0.5, "measured": 0.25, "met": True}]
    assert {"card", "driver", "commit", "versions", "command"} <= set(rows["works"])
    assert "3/3" in said and "min" in said and "share 0.25 (met)" in said


def test_an_out_that_exists_is_continued_with_what_is_missing(workspace):
    good, bad = python("good", WRITES), python("bad", "raise SystemExit(1)")
    go([good, bad], workspace)
    rows, said = go([good, python("bad", WRITES)], workspace)
    assert rows["bad"]["status"] == "ok" and "1 of 2 lines" in said
    statuses = [json.loads(line)["status"] for line in (workspace.out / run.ROWS).read_text().splitlines()]
    assert statuses == ["ok", "failed", "ok"]
    with pytest.raises(UserError, match="holds rows of NVIDIA H200, this is a 4090"):
        run.missing([good], workspace.out, Machine("a 4090", "", 24.0, "", {}))


def test_what_was_not_tried_comes_before_what_failed(workspace):
    """The valuable lines stand first, and a call that is given again must reach those that had no time."""
    broken = python("broken", "raise SystemExit(1)")
    lines = [python("good", WRITES), broken, python("long", WRITES, seconds=300), python("late", WRITES, seconds=290)]
    go(lines, workspace, seconds=run.RESERVE + 60)
    assert [line.name for line in run.missing(lines, workspace.out, H200)] == ["long", "late", "broken"]


@pytest.mark.slow
def test_lines_whose_tests_all_skip_are_skipped(workspace, tmp_path):
    """A file that skips as a whole makes pytest exit with 5, one whose tests skip with 0."""
    texts = {
        "module": "import pytest\npytest.importorskip('no_such_module', reason='needs \"this\"')\n",
        "each": "import pytest\n@pytest.mark.skip(reason='needs that')\ndef test_a(): pass\n",
        "some": "import pytest\n@pytest.mark.skip(reason='needs that')\ndef test_a(): pass\ndef test_b(): pass\n",
        "none": "",
    }
    lines = []
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
        command = ("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tmp_path}")
        lines.append(Line(name, (*command, str(tmp_path / f"test_{name}.py"), "--junitxml={out}/junit.xml"), 5))
    rows, said = go(lines, workspace)
    assert {name: row["status"] for name, row in rows.items()} == {
        "module": "skipped",
        "each": "skipped",
        "some": "ok",
        "none": "failed",
    }
    assert (rows["module"]["why"], rows["each"]["why"]) == ('needs "this"', "needs that")
    assert "skipped after" in said


def test_a_line_has_its_own_variables(workspace):
    code = WRITES.replace("0.25", "float(__import__(chr(111) + chr(115)).environ.get(str(chr(88)), 0))")
    rows, _ = go([python("a", code, environment={"X": "7"}), python("b", code)], workspace)
    assert [rows[name]["result"]["found"]["share"] for name in "ab"] == [7, 0]
    assert rows["a"]["command"].startswith("X=7 python -m timeit")


def test_rows_cut_short_by_a_kill_do_not_count(workspace):
    go([python("good", WRITES)], workspace)
    with open(workspace.out / run.ROWS, "a") as file:
        file.write('{"line": "bad", "sta')
    assert set(run.read(workspace.out)) == {"good"}
    rows, _ = go([python("good", WRITES), python("bad", WRITES)], workspace)
    assert set(rows) == {"good", "bad"}


def test_a_part_ends_in_time(workspace):
    lines = [python("first", WRITES), python("long", WRITES, seconds=300)]
    rows, _ = go(lines, workspace, seconds=run.RESERVE + 60)
    assert rows["first"]["status"] == "ok"
    assert rows["long"]["status"] == "no time" and "takes about 300 s" in rows["long"]["why"]


def test_a_line_that_the_end_of_the_part_stops_comes_first_again(workspace, monkeypatch):
    """It had less than twice the time that it should take; one that had more hangs."""
    monkeypatch.setattr(run, "_process", lambda *_: (None, ""))  # stopped
    lines = [python("hangs", "", seconds=20), python("cut", "", seconds=40)]
    rows, _ = go(lines, workspace, seconds=run.RESERVE + 60)
    assert [rows[name]["status"] for name in ("hangs", "cut")] == ["timed out", "no time"]
    assert re.fullmatch("stopped after (59|60) s", rows["cut"]["why"])
    assert [line.name for line in run.missing(lines, workspace.out, H200)] == ["cut", "hangs"]


def test_a_summary_that_breaks_does_not_stop_the_part(workspace):
    def broken():
        raise KeyError("x")

    rows, said = go([python("a", WRITES), python("b", WRITES)], workspace, after=broken)
    assert rows["b"]["status"] == "ok" and "no summary: KeyError" in said


def test_a_small_card_gets_a_smaller_shape_and_the_row_says_so(workspace):
    shapes = (Shape(80, {"size": "large"}), Shape(10, {"size": "small"}))
    code = WRITES.replace("0.25", "len(chr(123)) if '{size}' == 'small' else 9")
    line = python("sized", code, shapes=shapes)
    small = Machine("a 4090", "1", 24.0, "c", H200.versions)
    rows, _ = go([line], workspace, small)
    assert rows["sized"]["shape"] == {"size": "small"} and rows["sized"]["result"]["found"]["share"] == 1
    assert rows["sized"]["smaller"] == ["size=large: needs 80 GiB, the card has 24"]
    assert line.shape(140.0) == (shapes[0], [])
    assert line.shape(4.0)[0] is None
    assert Shape(1, {}, ("no_such_module",)).refuses(140) == "no_such_module is not installed"


def test_what_is_not_there_is_skipped_with_the_reason(workspace):
    lines = [
        python("program", WRITES, prefix=("no-such-program",)),
        python("file", WRITES, files=("{work}/run/export",)),
        python("memory", WRITES, shapes=(Shape(500, {}),)),
        python("package", WRITES, modules=("json", "no_such_module")),
    ]
    rows, _ = go(lines, workspace)
    assert rows["package"]["why"] == "no_such_module is not installed"
    assert {row["status"] for row in rows.values()} == {"skipped"}
    assert "no-such-program is not installed" in rows["program"]["why"]
    assert "run/export is not there" in rows["file"]["why"] and "needs 500 GiB" in rows["memory"]["why"]


def test_goals_of_a_rehearsal_are_not_judged(workspace):
    rows, _ = go(
        [python("a", WRITES, goals=(BELOW,))], workspace, Machine("CPU rehearsal", "none", None, "c", H200.versions)
    )
    assert rows["a"]["goals"][0] | {"measured": 0.25, "met": None} == rows["a"]["goals"][0]
    assert BELOW.check({})["why"].startswith("no such number: KeyError")
    assert BELOW.check({"found": {"share": 0.6}})["met"] is False


def test_counts_of_tests_come_from_junit(tmp_path):
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1"><testcase name="a"/>'
        '<testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    tests = run.results(tmp_path)["tests"]
    assert (tests["passed"], tests["names of failures"]) == (2, ["b"])


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ((None, "", "13.0", False), "no CUDA device is there.*--cpu-rehearsal"),
        (("H100", "580", None, False), "built without CUDA"),
        (("H100", "470.1", "13.0", False), "driver 470.1 is too old"),
    ],
)
def test_a_machine_that_cannot_is_told_why(told, says):
    with pytest.raises(UserError, match=says):
        machine.usable(*told)
    machine.usable("H100", "580", "13.0", True)


def test_without_a_card_the_command_names_the_rehearsal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_card", lambda: (None, "", 0.0))
    assert command.main(["check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu.sh: error: no CUDA device") and "--cpu-rehearsal" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("memory", [24.0, 80.0, 140.0, None])
def test_every_line_has_a_size_for_every_card_and_its_words_are_whole(part, memory):
    lines = table.lines(part)
    assert len({line.name for line in lines}) == len(lines)
    values = dict.fromkeys(("out", "work", "data", "model", "device", "torch_device"), "X")
    for line in lines:
        shape, _ = line.shape(memory)
        assert shape is not None, line.name
        assert not any("{" in word for word in line.words(values | dict(shape.values)))
        assert line.seconds < 540
    calls = {"check": 3, "speed": 2, "train": 1}[part]  # of nine minutes
    assert sum(line.seconds for line in lines) <= calls * (540 - run.RESERVE)


def test_small_cases_and_the_sanitizer_come_first():
    lines = table.lines("check")
    kernels = {file.parent.name for file in (ROOT / "kernels").glob("*/triton.py")}
    first, rest = lines[: 1 + len(kernels)], lines[1 + len(kernels) :]
    assert first[0].name == "smallest" and {line.name for line in first[1:]} == {f"sanitizer_{k}" for k in kernels}
    for line in first[1:]:
        assert line.prefix[0] == "compute-sanitizer" and line.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert [line.name for line in rest][:4] == ["gated_attention", "paged_decode", "engine", "gated_prefill"]
    files = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {line.name for line in rest} == files - {"smallest"}
    assert sum(line.seconds for line in [*first, *rest[:4]]) <= 540 - run.RESERVE  # one call


def test_each_kernel_has_a_smallest_case():
    """Which ``-k KERNEL`` selects alone."""
    tests = re.findall(r"^def test_(\w+)", (ROOT / "tests" / "gpu" / "test_smallest.py").read_text(), re.MULTILINE)
    for kernel in table.KERNELS:
        assert kernel in tests
        assert all(name.startswith(kernel) for name in tests if kernel in name)


def test_lines_that_read_recipes_need_omegaconf_and_kernels_do_not():
    needs = {line.name: line.modules for part in PARTS for line in table.lines(part)}
    assert needs["decode_uneven"] == needs["redpajama_cpt"] == needs["evaluate"] == ("omegaconf",)
    assert needs["kernels"] == needs["smallest"] == needs["sanitizer_pool_append"] == needs["engine"] == ()


@pytest.mark.parametrize("memory", [24.0, 80.0, 140.0])
def test_shapes_fit_by_an_independent_count(memory):
    """Weights and a full cache, counted from the geometry, leave room beside them."""
    layers, kv, head = {"8b": (32, 8, 128), "1b": (16, 8, 64)}, 2, 2
    weights = {"8b": 16.06e9, "1b": 2.47e9}
    for line in table.speed():
        shape, _ = line.shape(memory)
        if shape.values.get("model", "").startswith("random:llama") and line.name != "train_step":
            name = shape.values["model"][-2:]
            n, heads, dim = layers[name]
            tokens = max(map(int, shape.values["context"].split(","))) * int(shape.values["batch"])
            assert weights[name] + n * heads * dim * kv * head * tokens < 0.9 * memory * 2**30, line.name


def bench_rows(*rows):
    return [{"context": c, "contestant": who, **more} for c, who, more in rows]


def test_goals_read_the_right_numbers():
    decoded = bench_rows(
        (9, "full", {"ms/token": 20}),
        (5, "full", {"ms/token": 10}),
        (9, "transformers", {"ms/token": 30}),
        (5, "transformers", {"ms/token": 12}),
        (5, "transformers, flash-attn", {"ms/token": 9}),
        (9, "transformers, static, math", {"ms/token": 5}),
        (9, "transformers, static, cudnn", {"ms/token": 6}),
        (5, "random 0.2", {"of roofline": 0.95}),
        (9, "random 0.2", {"of roofline": 0.5}),
    )
    goals = {goal.name: goal for goal in table.decode("d", 1, True, 1).goals}
    checked = {name: goal.check({"decode": {"rows": decoded}}) for name, goal in goals.items()}
    assert checked["of roofline over full"] | {"measured": 0.5, "met": False} == checked["of roofline over full"]
    assert checked["full over transformers"]["measured"] == 0.9
    (static,) = table.decode("d", 1, True, 1, static=("math", "cudnn")).goals
    assert static.check({"decode": {"rows": decoded}})["measured"] == 0.25
    lines = {line.name: line for line in table.speed()}
    read = bench_rows(
        (9, "flags 0.25", {"seconds": 2.0, "kept": 0.26}),
        (5, "flags 0.25", {"seconds": 1.5, "kept": 1}),
        (9, "transformers", {"seconds": 9.0, "kept": 1}),
        (9, "transformers, cudnn", {"seconds": 5.0, "kept": 1}),
        (9, "full", {"seconds": 8.0, "kept": 1}),
        (5, "full", {"seconds": 1.0, "kept": 1}),
    )
    fast, kept = (goal.check({"prefill": {"rows": read}}) for goal in lines["prefill_gates"].goals)
    assert (fast["measured"], fast["met"], kept["measured"]) == (2.5, True, 0.26)
    steps = bench_rows(
        (4, "gates+lora", {"time over lora": 1.5, "peak over held": 10}),
        (8, "gates+lora", {"time over lora": 1.2, "peak over held": 25}),
    )
    slow, doubled = (goal.check({"train": {"rows": steps}}) for goal in lines["train_step"].goals)
    assert (slow["measured"], slow["met"], doubled["measured"], doubled["met"]) == (1.2, True, 2.5, False)


def test_goals_of_kernels_read_the_right_numbers():
    rows = [
        {"kernel": "paged_decode", "of bound": 0.7},
        {"kernel": "paged_decode", "of bound": 0.5},
        {"kernel": "gated_attention forward", "of bound": 0.45},
        {"kernel": "gated_attention forward + backward", "of bound": 0.3},
        {"kernel": "gated_prefill", "of bound": 0.41, "ms": 4.0, "flash ms": 9.0, "cudnn ms": "no such kernel"},
    ]
    line = next(line for line in table.speed() if line.name == "kernels")
    checked = {goal.name.partition(",")[0]: goal.check({"kernels": {"rows": rows}}) for goal in line.goals}
    measured = {name: (found["measured"], found["met"]) for name, found in checked.items()}
    assert measured == {
        "gated_attention forward": (0.45, True),
        "gated_attention forward + backward": (0.3, True),
        "gated_prefill": (0.41, True),
        "column_sums": (None, False),
        "column_max": (None, False),
        "paged_decode": (0.5, False),
        "fastest dense attention over gated_prefill": (2.25, True),
    }


def test_the_line_that_the_documentation_adds_is_a_line():
    text = (ROOT / "docs" / "gpu.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    line = eval(example, {"Line": Line, "Shape": Shape, "Goal": Goal, "fitted": table.fitted})
    words = line.words({"out": "OUT", "work": "WORK", "data": "DATA", "device": "gpu"})
    assert words[:4] == ["ag.bench.card.fit", "OUT/fit.json", "recipe=my_recipe", "data.root=DATA"]
    assert line.goals[0].check({"fit": {"finite": 1.0}})["met"]


def card_rows(workspace, here, share):
    line = python("memory", WRITES.replace("0.25", str(share)), goals=(BELOW,))
    go([line], workspace, here)


def test_report_folds_two_cards_and_says_the_same_twice(tmp_path, capsys):
    for card, share in (("NVIDIA H200", 0.25), ("RTX | 4090", 0.75)):
        out = tmp_path / card[:3] / "speed"
        card_rows(run.Workspace(out, tmp_path / "work", {}), Machine(card, "580", 24.0, "c0ffee", H200.versions), share)
        summary.write(out)
        assert (out / summary.FILE).read_text().startswith(f"# speed: {card}")
        assert (out / summary.PICTURE).read_bytes()[:4] == b"\x89PNG"
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    words = ["report", str(tmp_path / "NVI"), str(tmp_path / "RTX"), "--to", str(page)]
    assert bench(words) == 0
    text = page.read_text()
    assert "| memory | share | at most 0.5 | 0.25 (met) | 0.75 (missed) |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert len(list((tmp_path / "docs" / "figures").iterdir())) == 2
    assert bench(words) == 0 and page.read_text() == text
    page.write_text("no markers")
    assert bench(words) == 2 and "--to" in capsys.readouterr().err
    assert bench(["report", str(tmp_path / "docs"), "--to", str(page)]) == 2


def test_kernels_count_pairs_and_bytes():
    config = kernels.KernelConfig(
        device="cpu", dtype="float32", heads=4, kv_heads=2, dim=16, train=40, prompt=40, decode=64, keep=0.5, batch=[2]
    )
    make = lambda function: function(config, torch.device("cpu"), torch.float32)  # noqa: E731
    (case,) = make(kernels._prefill)
    _, keep = kernels._inputs(config, 40, torch.device("cpu"), torch.float32)
    pairs = sum(1 for h in range(4) for j in range(40) for t in range(j + 1) if keep[0, h // 2, t] or t == j)
    assert case.flops == 4 * 16 * pairs
    assert case.bytes == 4 * 16 * 40 * (4 + 2 + 2 + 4)
    assert case.run().shape == (1, 4, 40, 16)
    (decoding,) = make(kernels._decoding(2))
    assert decoding.flops == decoding.bytes  # 4 D a key and query of its group of 2; 8 D bytes a key
    assert [case.run() is not None for case in make(kernels._training)] == [True, True]


def tiny(tmp_path, **changes):
    return ModelConfig(name="random:docs/models/tiny.json", **changes)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_random_base_is_the_geometry_and_the_same_each_time(tmp_path, quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    models_made = [models.load_base(tiny(tmp_path, quantization=quantization), "cpu") for _ in range(2)]
    (one, tokenizer), (two, _) = models_made
    ids = tokenizer("Random, but the same.\n\u00e9", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "Random, but the same.\n\u00e9"
    with torch.no_grad():
        logits = one(input_ids=ids).logits
        assert torch.equal(logits, two(input_ids=ids).logits) and logits.isfinite().all()
    assert logits.shape[-1] == 512
    kinds = {type(m).__name__ for n, m in one.named_modules() if n.endswith("_proj")}
    assert kinds == ({"Linear4bit"} if quantization == "nf4" else {"Linear"})
    if quantization == "none":
        weight = one.lm_head.weight  # a deviation of n drawn numbers is off by 1 / sqrt(2 n) of itself; five of those
        assert weight.std().item() == pytest.approx(random_base.SPREAD, rel=5 / (2 * weight.numel()) ** 0.5)
        want = type(one)(one.config).model.rotary_emb.inv_freq
        assert torch.equal(one.model.rotary_emb.inv_freq, want)
    config = Config(model=tiny(tmp_path))
    assert plan.model_config(config).num_hidden_layers == 2


def test_random_base_of_no_file_is_one_sentence():
    with pytest.raises(UserError, match=r"model.name=random:nothing.json.*docs/models/llama-2-7b.json"):
        models.load_base(ModelConfig(name="random:nothing.json"))


def test_halves_of_a_run_are_put_together():
    part = {"tokens/s": 100.0, "seconds a step": 4.0, "peak bytes": 7, "reserved bytes": 9, "row tokens": 4096}
    part |= {"exported": True, "validation": {}, "seconds to load": 1.0}
    rows = [{"step": n, "train/loss": 1.0, "train/grad_norm_gates": 2.0} for n in (1, 2, 3, 4)]
    halves = [part | {"metrics": rows[:2]}, part | {"metrics": rows[2:], "tokens/s": 300.0, "peak bytes": 8}]
    found = fit.summary(halves, fit.Job(samples=5000))
    assert (found["finite"], found["resumed"], found["peak bytes"]) == (1, 1, 8)
    assert found["hours on four cards"] == pytest.approx(5000 * 4096 / (4 * 200) / 3600)
    halves[1]["metrics"][1]["train/loss"] = float("nan")
    assert fit.summary(halves, fit.Job())["finite"] == 0
    halves[1]["metrics"] = rows[1:]
    assert fit.summary(halves, fit.Job())["resumed"] == 0


def test_words_are_read_and_refused(capsys):
    assert told(["gib=24", "plan=true", "link=/a b"], fit.Job) == fit.Job(gib=24, plan=True, link="/a b")
    assert told(["batch=[2]", "keep=0.5"], kernels.KernelConfig).batch == [2]
    for word in ("gb=1", "gib=many"):
        with pytest.raises(UserError, match=f"{word[:2]}.*expected"):
            told([word], fit.Job)
    assert kernels.main(["roundz=3"]) == 2
    assert capsys.readouterr().err.startswith("ag.bench.card.kernels: error: roundz: expected one of output, device")


def test_a_kernels_row_says_why_a_rival_has_no_time(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("No available kernel.\nAborting.")

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", refused)
    words = next(line for line in table.speed() if line.name == "kernels").rehearsal["more"].split()
    config = told([*words, "device=cpu", "batch=[1]"], kernels.KernelConfig)
    rows = {row["kernel"]: row for row in kernels.measure(config)["rows"]}
    assert set(rows) == set(table.REACHED)
    assert rows["gated_prefill"]["flash ms"] == rows["paged_decode"]["flash ms"] == "No available kernel."
    assert {row["timed by"] for row in rows.values()} == {"launches"}


def test_a_squeezed_model_fits_and_says_nearly_the_same(tmp_path, tiny_llama, tiny_tokenizer):
    source, target = tmp_path / "source", tmp_path / "packed"
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(source)
    tiny_tokenizer.save_pretrained(source)
    texts = ["the quick brown fox " * 8, "jumps over the lazy dog " * 8]
    sizes, losses = [], []
    for room in (90_000, 60_000):
        note = small_model.squeeze(source, target, room, texts)
        sizes.append(sum(file.stat().st_size for file in target.iterdir()))
        losses.append(abs(note["loss as packed"] - note["loss"]))
        assert sizes[-1] <= room
        folder = small_model.restore(target, tmp_path / f"restored{room}")
        again, _ = models.load_base(ModelConfig(name=str(folder)))
        ids = PreTrainedTokenizerFast.from_pretrained(folder)(texts[1], return_tensors="pt").input_ids[:, :512]
        with torch.no_grad():
            hold(again(input_ids=ids, labels=ids).loss, note["loss as packed"], of_nats(again, *ids))
    assert sizes[1] < sizes[0] and losses[0] < losses[1] < 1
    with pytest.raises(UserError, match="bits"):
        small_model.squeeze(source, target, 20_000, texts)


def test_bitsandbytes_is_left_with_the_libraries_of_one_cuda(tmp_path):
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = [f"bitsandbytes/libbitsandbytes_{n}.so" for n in ("cpu", "cuda118", "cuda130", "rocm72")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("bitsandbytes/__init__.py", *names):
            archive.writestr(name, name)
        archive.writestr("bitsandbytes-1.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    with pytest.raises(UserError, match="has libraries for 118, 130"):
        pack.trim(wheel, "12.9")
    pack.trim(wheel, "13.0")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {
            "bitsandbytes/__init__.py",
            names[0],
            names[2],
            "bitsandbytes-1.dist-info/RECORD",
        }
        assert archive.read("bitsandbytes-1.dist-info/RECORD").decode() == f"{names[0]},,\n{names[2]},,\n"


def test_closure_holds_what_packages_need_and_lists_are_read(tmp_path):
    found = pack.closure(["peft"], "3.12")
    assert {"peft", "torch", "transformers", "safetensors", "accelerate"} <= set(found)
    assert found["peft"] == versions("peft")["peft"]
    assert "pytest" not in found
    (tmp_path / "list").write_text("Package  Version\n-------\ntorch 2.11.0\nHuggingface_Hub==1.2\n\n")
    assert {"torch", "huggingface-hub"} <= pack._names(tmp_path / "list")


@pytest.mark.parametrize("words", [["pack"], ["pack", "--data", "/no/such/folder"]])
def test_a_pack_needs_documents(words, capsys):
    assert command.main(words) == 2
    assert "--data" in capsys.readouterr().err


def test_a_pack_does_not_replace_other_folders(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert command.main(["pack", str(tmp_path), "--data", str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()
