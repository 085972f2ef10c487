"""The lines of scripts/gpu.sh: chosen by memory and time, recorded whatever happens, summed up over cards."""

import re
import zipfile

import pytest
import torch

from ag.bench.__main__ import main as bench
from ag.errors import UserError
from ag.versions import versions
from scripts.gpu import PARTS, ROOT, fit, kernels, machine, pack, run, summary, table
from scripts.gpu import __main__ as command
from scripts.gpu.line import Goal, Line, Shape
from scripts.gpu.machine import Machine
from scripts.gpu.options import read_options

H200 = Machine("NVIDIA H200", "580.1", 140.0, "abc1234", {"torch": "2.11", "triton": "3.6", "transformers": "5.17"})
BELOW = Goal("share", "at most", 0.5, lambda r: r["found"]["share"])
WRITES = "import json; json.dump(dict(share=0.25), open(OUT + chr(47) + chr(102) + 'ound.json', 'w'))"
FAILS = "print(3 * chr(120)); raise SystemExit(1)"


def python(name, code, **options):
    """A line that runs Python code, where OUT is its folder."""
    words = ("timeit", "-n1", "-r1", "-s", f"OUT='{{out}}'; S='''{code}'''", "exec(S)")
    return Line(name=name, command=words, **{"seconds": 5} | options)


@pytest.fixture
def workspace(tmp_path):
    return run.Workspace(tmp_path / "out" / "speed", tmp_path / "work", {"device": "cuda"})


def go(lines, workspace, here=H200, seconds=600, after=lambda: None):
    said = []
    return run.run(lines, workspace, here, seconds, after, said.append), "\n".join(said)


def status(rows):
    return {name: row["status"] for name, row in rows.items()}


def test_a_line_that_fails_and_one_that_hangs_are_recorded_and_the_next_one_runs(workspace):
    def broken():
        raise KeyError("x")

    lines = [
        python("fails", FAILS),
        python("hangs", "import time; time.sleep(60)", seconds=-9),  # limit: 3 seconds
        python("works", WRITES, goals=(BELOW,), environment={"X": "7"}),
    ]
    rows, said = go(lines, workspace, after=broken)
    assert status(rows) == {"fails": "failed", "hangs": "timed out", "works": "ok"}
    assert rows["fails"]["why"] == "exit code 1" and "xxx" in rows["fails"]["tail"]
    assert 3 <= rows["hangs"]["seconds"] < 30
    assert rows["works"]["result"] == {"found": {"share": 0.25}}
    assert rows["works"]["goals"] == [{"goal": "share", "kind": "at most", "bar": 0.5, "measured": 0.25, "met": True}]
    assert rows["works"]["command"].startswith("X=7 python -m timeit")
    assert {"card", "driver", "commit", "versions"} <= set(rows["works"])
    assert "3/3" in said and "share 0.25 (met)" in said and "no summary: KeyError" in said


def test_an_out_that_exists_is_continued_with_what_was_not_tried_and_then_with_what_failed(workspace):
    good, late = python("good", WRITES), [python(name, WRITES, seconds=300) for name in ("long", "late")]
    rows, _ = go([good, python("bad", FAILS), *late], workspace, seconds=run.RESERVE + 60)
    assert status(rows) == {"good": "ok", "bad": "failed", "long": "no time", "late": "no time"}
    assert "takes about 300 s" in rows["long"]["why"]
    with open(workspace.out / run.ROWS, "a") as file:
        file.write('{"line": "late", "sta')  # cut short by a kill
    lines = [good, python("bad", WRITES), *late]
    assert [line.name for line in run.missing(lines, workspace.out, H200)] == ["long", "late", "bad"]
    rows, said = go(lines, workspace)
    assert set(status(rows).values()) == {"ok"} and "1 of 4 lines" in said
    with pytest.raises(UserError, match="holds rows of NVIDIA H200, this is a 4090"):
        run.missing(lines, workspace.out, Machine("a 4090", "", 24.0, "", {}))


def test_a_line_that_the_end_of_the_part_stops_comes_first_again(workspace, monkeypatch):
    """It had less than twice the time that it should take; one that had more hangs."""
    monkeypatch.setattr(run, "_process", lambda *_: (None, ""))  # stopped
    lines = [python("hangs", "", seconds=20), python("cut", "", seconds=40)]
    rows, _ = go(lines, workspace, seconds=run.RESERVE + 60)
    assert status(rows) == {"hangs": "timed out", "cut": "no time"}
    assert [line.name for line in run.missing(lines, workspace.out, H200)] == ["cut", "hangs"]


@pytest.mark.slow
def test_lines_whose_tests_all_skip_are_skipped(workspace, tmp_path):
    """A file that skips as a whole makes pytest exit with 5, one whose tests skip with 0."""
    texts = {
        "module": "import pytest\npytest.importorskip('no_such_module', reason='needs \"this\"')\n",
        "each": "import pytest\n@pytest.mark.skip(reason='needs that')\ndef test_a(): pass\n",
        "some": "import pytest\n@pytest.mark.skip(reason='needs that')\ndef test_a(): pass\ndef test_b(): pass\n",
        "bad": "def test_a(): assert False\ndef test_b(): pass\n",
        "none": "",
    }
    lines = []
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
        words = ("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tmp_path}")
        lines.append(Line(name, (*words, str(tmp_path / f"test_{name}.py"), "--junitxml={out}/junit.xml"), 5))
    rows, said = go(lines, workspace)
    expected = {"module": "skipped", "each": "skipped", "some": "ok", "bad": "failed", "none": "failed"}
    assert status(rows) == expected and "skipped after" in said
    assert (rows["module"]["why"], rows["each"]["why"]) == ('needs "this"', "needs that")
    tests = rows["bad"]["result"]["tests"]
    assert (tests["passed"], tests["failures"], tests["names of failures"]) == (1, 1, ["test_a"])


def test_a_small_card_gets_a_smaller_shape_and_what_is_not_there_is_skipped(workspace):
    shapes = (Shape(80, {"size": "large"}), Shape(10, {"size": "small"}))
    lines = [
        python("sized", WRITES.replace("0.25", "len('{size}') / 20"), shapes=shapes),
        python("program", WRITES, prefix=("no-such-program",)),
        python("file", WRITES, files=("{work}/run/export",)),
        python("memory", WRITES, shapes=(Shape(500, {}),)),
        python("package", WRITES, modules=("json", "no_such_module")),
    ]
    rows, _ = go(lines, workspace, Machine("a 4090", "1", 24.0, "c", H200.versions))
    sized = rows.pop("sized")
    assert (sized["shape"], sized["result"]["found"]["share"]) == ({"size": "small"}, 0.25)
    assert sized["smaller"] == ["size=large: needs 80 GiB, the card has 24"]
    assert set(status(rows).values()) == {"skipped"}
    said = {"program": "no-such-program", "file": "run/export", "memory": "500 GiB", "package": "no_such_module"}
    assert all(said[name] in row["why"] for name, row in rows.items())
    assert Shape(1, {}, ("no_such_module",)).refuses(140) == "no_such_module is not installed"


def test_goals_of_a_rehearsal_are_not_judged(workspace):
    here = Machine("CPU rehearsal", "none", None, "c", H200.versions)
    (goal,) = go([python("a", WRITES, goals=(BELOW,))], workspace, here)[0]["a"]["goals"]
    assert (goal["measured"], goal["met"]) == (0.25, None)
    assert BELOW.check({})["why"].startswith("no such number: KeyError")
    assert BELOW.check({"found": {"share": 0.6}})["met"] is False


def test_a_machine_that_cannot_is_told_why(tmp_path, capsys, monkeypatch):
    for given, says in {
        (None, "", "13.0", False): "no CUDA device is there.*--cpu-rehearsal",
        ("H100", "580", None, False): "built without CUDA",
        ("H100", "470.1", "13.0", False): "driver 470.1 is too old",
    }.items():
        with pytest.raises(UserError, match=says):
            machine.usable(*given)
    machine.usable("H100", "580", "13.0", True)
    monkeypatch.setattr(machine, "_card", lambda: (None, "", 0.0))
    assert command.main(["check", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("gpu.sh: error: no CUDA device") and "--cpu-rehearsal" in error


# ---- the table


@pytest.mark.parametrize("part", PARTS)
def test_every_line_has_a_size_for_every_card_and_its_words_are_whole(part):
    """Weights and a full cache, counted from the geometry, leave room beside them."""
    layers, weights = {"8b": 32 * 8 * 128, "1b": 16 * 8 * 64}, {"8b": 16.06e9, "1b": 2.47e9}
    lines = table.lines(part)
    assert len({line.name for line in lines}) == len(lines)
    values = dict.fromkeys(("out", "work", "data", "model", "device", "torch_device"), "X")
    for line in lines:
        for memory in (24.0, 80.0, 140.0, None):
            shape, _ = line.shape(memory)
            assert shape is not None and line.seconds < 540, line.name
            assert not any("{" in word for word in line.words(values | dict(shape.values)))
            name = shape.values.get("model", "")[-2:]
            if memory and name in layers and line.name != "train_step":
                batch = int(shape.values["batch"].partition(",")[0])  # of several those without room are skipped
                tokens = max(map(int, shape.values["context"].split(","))) * batch
                assert weights[name] + 2 * layers[name] * 2 * tokens < 0.9 * memory * 2**30, line.name
    calls = {"check": 3, "speed": 3, "train": 1}[part]  # of nine minutes
    assert sum(line.seconds for line in lines) <= calls * (540 - run.RESERVE)


def test_small_cases_and_the_sanitizer_come_first():
    lines = table.lines("check")
    first, rest = lines[: 1 + len(table.KERNELS)], lines[1 + len(table.KERNELS) :]
    assert [line.name for line in first] == ["smallest", *(f"sanitizer_{kernel}" for kernel in table.KERNELS)]
    for line in first[1:]:
        assert line.prefix[0] == "compute-sanitizer" and line.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert [line.name for line in rest][:4] == ["gated_attention", "paged_attention", "engine", "gated_prefill"]
    files = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {line.name for line in rest} == files - {"smallest"}
    assert sum(line.seconds for line in [*first, *rest[:4]]) <= 540 - run.RESERVE  # one call
    tests = re.findall(r"^def test_(\w+)", (ROOT / "tests" / "gpu" / "test_smallest.py").read_text(), re.MULTILINE)
    for kernel in table.KERNELS:  # -k KERNEL selects its case alone
        assert kernel in tests and all(name.startswith(kernel) for name in tests if kernel in name)
    needs = {line.name: line.modules for part in PARTS for line in table.lines(part)}
    assert needs["decode_uneven"] == needs["redpajama_cpt"] == needs["evaluate"] == ("omegaconf",)
    assert needs["kernels"] == needs["smallest"] == needs["sanitizer_kv_append"] == needs["engine"] == ()


def test_goals_read_the_right_numbers():
    def rows(*rows):
        return {"rows": [{"context": c, "contestant": who, "kernel": who, **more} for c, who, more in rows]}

    decoded = rows(
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
    read = rows(
        (9, "flags 0.25", {"seconds": 2.0, "kept": 0.26}),
        (5, "flags 0.25", {"seconds": 1.5, "kept": 1}),
        (9, "transformers", {"seconds": 9.0, "kept": 1}),
        (9, "transformers, cudnn", {"seconds": 5.0, "kept": 1}),
        (5, "full", {"seconds": 1.0, "kept": 1}),
    )
    steps = rows(
        (4, "gates+lora", {"time over lora": 1.5, "peak over held": 10}),
        (8, "gates+lora", {"time over lora": 1.2, "peak over held": 25}),
    )
    timed = rows(
        (1, "paged_attention", {"of bound": 0.7}),
        (8, "paged_attention", {"of bound": 0.5}),
        (1, "gated_attention forward", {"of bound": 0.45}),
        (1, "gated_attention forward + backward", {"of bound": 0.2}),
        (1, "gated_prefill", {"of bound": 0.41, "ms": 4.0, "flash ms": 9.0, "cudnn ms": "no such kernel"}),
    )
    lines = {line.name: line for line in table.speed()}

    def found(line, mode, result):
        return [(goal.check({mode: result})["measured"], goal.check({mode: result})["met"]) for goal in line.goals]

    assert found(lines["decode_uneven"], "decode", decoded) == [(0.5, False), (0.9, False)]
    assert found(lines["decode_static"], "decode", decoded) == [(0.25, False)]
    assert found(lines["prefill_gates"], "prefill", read) == [(2.5, True), (0.26, True)]
    assert found(lines["train_step"], "train", steps) == [(1.2, True), (2.5, False)]
    reached = [(0.45, True), (0.2, False), (0.41, True), (None, False), (None, False), (0.5, False), (2.25, True)]
    assert found(lines["kernels"], "kernels", timed) == reached


def test_the_line_that_the_documentation_adds_is_a_line():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.DOTALL)
    line = eval(example, {"Line": Line, "Shape": Shape, "Goal": Goal, "fitted": table.fitted})
    words = line.words({"out": "OUT", "work": "WORK", "data": "DATA", "device": "gpu"})
    assert words[:4] == ["scripts.gpu.fit", "OUT/fit.json", "recipe=my_recipe", "data.root=DATA"]
    assert line.goals[0].check({"fit": {"finite": 1.0}})["met"]


def test_report_folds_two_cards_and_says_the_same_twice(tmp_path, capsys):
    for card, share in (("NVIDIA H200", 0.25), ("RTX | 4090", 0.75)):
        out = tmp_path / card[:3] / "speed"
        line = python("memory", WRITES.replace("0.25", str(share)), goals=(BELOW,))
        here = Machine(card, "580", 24.0, "c0ffee", H200.versions)
        go([line], run.Workspace(out, tmp_path / "work", {}), here, after=lambda out=out: summary.write(out))
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


# ---- kernels, training, packs


def test_kernels_count_pairs_and_bytes_and_say_why_a_rival_has_no_time(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("No available kernel.\nAborting.")

    words = "device=cpu dtype=float32 heads=4 kv_heads=2 dim=16 train=40 prompt=40 decode=64 keep=0.5 batch=[2]"
    config = read_options([*words.split(), "copy=65536", "square=64", "rounds=1"], kernels.KernelConfig)
    cpu = torch.device("cpu")
    (case,), (decoding,) = (make(config, cpu, torch.float32) for make in (kernels._prefill, kernels._decoding(2)))
    _, keep = kernels._inputs(config, 40, cpu, torch.float32)
    pairs = sum(1 for h in range(4) for j in range(40) for t in range(j + 1) if keep[0, h // 2, t] or t == j)
    assert (case.flops, case.bytes) == (4 * 16 * pairs, 4 * 16 * 40 * (4 + 2 + 2 + 4))
    assert decoding.flops == decoding.bytes  # 4 D a key and query of its group of 2; 8 D bytes a key
    monkeypatch.setattr(kernels, "scaled_dot_product_attention", refused)
    rows = {row["kernel"]: row for row in kernels.measure(config)["rows"]}
    assert set(rows) == set(table.REACHED) and {row["timed by"] for row in rows.values()} == {"launches"}
    assert rows["gated_prefill"]["flash ms"] == rows["paged_attention"]["flash ms"] == "No available kernel."


def test_words_are_read_and_refused(capsys):
    assert read_options(["gib=24", "plan=true", "link=/a b"], fit.Job) == fit.Job(gib=24, plan=True, link="/a b")
    for word in ("gb=1", "gib=many"):
        with pytest.raises(UserError, match=f"{word[:2]}.*expected"):
            read_options([word], fit.Job)
    assert kernels.main(["roundz=3"]) == 2
    assert "roundz: expected one of output, device" in capsys.readouterr().err


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


def test_bitsandbytes_is_left_with_the_libraries_of_one_cuda(tmp_path):
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = [f"bitsandbytes/libbitsandbytes_{n}.so" for n in ("cpu", "cuda118", "cuda130", "rocm72")]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("bitsandbytes/__init__.py", *names):
            archive.writestr(name, name)
        archive.writestr(record, "".join(f"{name},,\n" for name in names))
    with pytest.raises(UserError, match="has libraries for 118, 130"):
        pack.trim(wheel, "12.9")
    pack.trim(wheel, "13.0")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {"bitsandbytes/__init__.py", names[0], names[2], record}
        assert archive.read(record).decode() == f"{names[0]},,\n{names[2]},,\n"


def test_a_pack_holds_what_packages_need_and_refuses_other_folders(tmp_path, capsys):
    found = pack.closure(["peft"], "3.12")
    assert {"torch", "transformers", "safetensors", "accelerate"} <= set(found) and "pytest" not in found
    assert found["peft"] == versions("peft")["peft"]
    (tmp_path / "list").write_text("Package  Version\n-------\ntorch 2.11.0\nHuggingface_Hub==1.2\n\n")
    assert {"torch", "huggingface-hub"} <= pack._names(tmp_path / "list")
    for words, says in {
        (): "--data",
        ("--data", "/no/such/folder"): "--data /no/such/folder",
        (str(tmp_path), "--data", str(tmp_path)): "holds something else",
    }.items():
        assert command.main(["pack", *words]) == 2
        assert says in capsys.readouterr().err
    assert (tmp_path / "list").exists()
