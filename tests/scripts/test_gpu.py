"""scripts/gpu.py: rows that are run, skipped, stopped and recorded; and the tests of a card in Triton's interpreter."""

import json
import os
import re
import signal
import time
from threading import Timer

import pytest

from ag.commands.bench import BenchConfig
from ag.config.command_line import parse
from ag.engine import PolicySpec
from benchmarks import kernels
from scripts import gpu
from scripts.gpu import Row
from tests.support import ROOT
from tests.support.inner import passed
from tests.support.warm import started

HERE = {"card": "NVIDIA H200", "gib": 140.0, "versions": {"torch": "2.11"}}
WRITES = "import os; from pathlib import Path; Path('{out}/found.json').write_text('{\"share\": 0.25}'); "
WRITES += "Path('{out}/found.md').write_text(os.environ.get('WORD', 'a table'))"
SMALLEST = ROOT / "tests" / "gpu" / "test_smallest.py"


def python(name, code, **options):
    return Row(name, ("-c", code), **{"seconds": 5} | options)


def statuses(folder, card="NVIDIA H200"):
    return {name: line["status"] for name, line in gpu.read(folder, card).items()}


@pytest.mark.slow
def test_every_row_is_run_and_recorded_whatever_becomes_of_the_others(tmp_path, capsys):
    rows = [
        python("fails", "print('the card burns'); raise SystemExit(3)"),
        python("dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        python("hangs", "import time; time.sleep(60)", seconds=-9.7),  # stopped after 0.9 seconds
        python("works", WRITES, environment={"WORD": "seven"}),
        python("program", WRITES, prefix=("no-such-program",)),
        python("package", WRITES, needs=("json", "no_such_module")),
        python("memory", WRITES, gib=500),
    ]
    assert gpu.run(rows, tmp_path, HERE) == 1
    lines = gpu.read(tmp_path, "NVIDIA H200")
    ended = {"fails": "failed", "dies": "failed", "hangs": "timed out", "works": "ok"}
    assert statuses(tmp_path) == ended | dict.fromkeys(("program", "package", "memory"), "skipped")
    assert lines["works"]["result"] == {"found": {"share": 0.25}} and lines["works"]["versions"] == {"torch": "2.11"}
    assert lines["works"]["command"].startswith("WORD=seven python -c") and 0.9 <= lines["hangs"]["seconds"] < 30
    said = {"fails": "the card burns", "dies": "SIGKILL", "hangs": "after 1 s"}
    said |= {"program": "no-such-program", "package": "install no_such_module", "memory": "500 GiB, the card has 140"}
    assert all(text in lines[name]["said"] for name, text in said.items())
    table = gpu.outline(lines)
    assert table in capsys.readouterr().out and len(table.splitlines()) == 2 + len(rows)
    assert re.search(r"^\| fails \| failed \| \d+ \| .* \| the card burns \|$", table, re.MULTILINE)
    page = (tmp_path / gpu.SUMMARY).read_text()
    assert table in page and "## works\n\nseven" in page and "```\nthe card burns\n```" in page


def test_a_second_call_skips_what_is_there_and_tries_what_failed_last(tmp_path, monkeypatch, capsys):
    tried = []
    ends = {"bad": {"status": "failed", "seconds": 1.0, "said": "a fault"}}
    well = {"status": "ok", "seconds": 1.0, "said": ""}

    def attempt(row, *_):
        tried.append(row.name)
        return ends.get(row.name, well)

    monkeypatch.setattr(gpu, "attempt", attempt)
    assert gpu.run([python("bad", ""), python("good", "")], tmp_path, HERE) == 1
    with open(tmp_path / gpu.LINES, "a") as file:
        file.write('{"row": "new", "card": "NVIDIA H200", "sta')  # cut short by a kill
    ends.clear()
    assert gpu.run([python(name, "") for name in ("bad", "good", "new")], tmp_path, HERE) == 0
    assert tried == ["bad", "good", "new", "bad"] and "2 of 3 rows to run" in capsys.readouterr().out
    assert statuses(tmp_path) == {"bad": "ok", "good": "ok", "new": "ok"}
    gpu.run([python("good", "")], tmp_path, HERE | {"card": "a 4090"})
    assert tried[4:] == ["good"] and statuses(tmp_path, "a 4090") == {"good": "ok"}


def test_a_row_that_time_does_not_suffice_for_is_left_for_the_next_call(tmp_path, capsys):
    assert gpu.run([python("long", "", seconds=100)], tmp_path, HERE, minutes=1) == 0
    assert statuses(tmp_path) == {}
    assert "no time after 0 s. It takes about 100 s, 60 are left" in capsys.readouterr().out


def test_an_interrupt_stops_the_child_and_keeps_what_is_there(tmp_path, capsys):
    note = tmp_path / "pid"
    waits = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    rows = [python("first", "", seconds=9), python("second", waits, seconds=90), python("third", "", seconds=9)]
    timer = Timer(0, lambda: None)

    def interrupt():
        while not (note.exists() and note.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    timer.function = interrupt
    timer.start()
    assert gpu.run(rows, tmp_path / "out", HERE) == 130
    timer.join()
    assert statuses(tmp_path / "out") == {"first": "ok"}
    assert "goes on with the row" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.slow
def test_files_of_tests_that_all_skip_are_skipped_with_the_reason(tmp_path):
    skip = "import pytest\n@pytest.mark.skip(reason='needs that')\ndef test_a(): pass\n"
    rows = []
    for name, text in {"each": skip, "bad": skip + "def test_b(): assert False\n"}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
        words = ("--noconftest", "-p", "no:xdist", "-q", "-rsfE", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
        rows.append(Row(name, ("-m", "pytest", str(tmp_path / f"test_{name}.py"), *words), 60))
    assert gpu.run(rows, tmp_path / "out", HERE) == 1
    assert statuses(tmp_path / "out") == {"each": "skipped", "bad": "failed"}
    said = {name: line["said"] for name, line in gpu.read(tmp_path / "out", "NVIDIA H200").items()}
    assert said["each"].endswith("; needs that") and said["bad"].startswith("1 failed, 1 skipped")


def test_rows_are_commands_of_this_checkout():
    """Small cases and the sanitizer come first, every file of tests/gpu is run, and every bench can be asked for."""
    names = [row.name for row in gpu.rows(140.0)]
    for gib, model, trained in ((24.0, "1b", "1024,2048"), (80.0, "8b", "2048,4096"), (140.0, "8b", "4096,8192")):
        rows = {row.name: row for row in gpu.rows(gib)}
        assert [*rows] == names and all(row.lacks(gib) is None or row.prefix for row in rows.values())
        assert {f"context=[{trained}]", f"model=random:llama-{model}"} < {*rows["bench_train_step"].words}
    for row in rows.values():
        if row.words[1] == "ag.bench":
            config = parse(
                [word.replace("{out}", "OUT") for word in row.words[2:]], BenchConfig, "ag.bench", "mode"
            ).config
            assert (config.mode, config.output, config.device) == (row.words[2], "OUT", "cuda")
            assert all(PolicySpec.parse(text) for text in config.policy)
    kernels = sorted(file.parent.name for file in ROOT.glob("kernels/*/triton.py"))
    assert names[: 1 + len(kernels)] == ["test_smallest", *(f"sanitizer_{kernel}" for kernel in kernels)]
    assert {f"{name}.py" for name in names if name.startswith("test_")} == {
        file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py")
    }
    tests = re.findall(r"^def test_(\w+)", SMALLEST.read_text(), re.MULTILINE)
    for kernel in kernels:  # -k KERNEL selects its case alone
        assert [name for name in tests if kernel in name] == [kernel]


def test_a_machine_without_a_card_is_told_so(monkeypatch, capsys):
    for probe, says in (
        ("raise SystemExit('torch 2.11 finds no CUDA device')", "finds no CUDA device"),
        (f"print('{json.dumps(HERE)}')", "expected the beginning of a row's name: test_smallest"),
    ):
        monkeypatch.setattr(gpu, "PROBE", probe)
        with pytest.raises(SystemExit, match="2"):
            gpu.main(["OUT", "--only", "nothing"])
        assert says in capsys.readouterr().err


# ---- the kernels' times


def test_kernels_count_pairs_and_bytes_and_say_why_a_rival_has_no_time(monkeypatch, tmp_path):
    import torch

    def refused(*_, **__):
        raise RuntimeError("No available kernel.\nAborting.")

    def draw(*shape):
        return torch.randn(*shape, 16)

    for name, value in {"HEADS": 4, "KV_HEADS": 2, "DIM": 16, "KEPT": 0.5}.items():
        monkeypatch.setattr(kernels, name, value)
    torch.manual_seed(0)
    (found,) = kernels.prefill(draw, 40)
    torch.manual_seed(0)
    for heads in (4, 2, 2):
        draw(1, heads, 40)
    keep = torch.rand(1, 2, 40) < 0.5
    pairs = sum(1 for h in range(4) for j in range(40) for t in range(j + 1) if keep[0, h // 2, t] or t == j)
    assert found[2:4] == (4 * 16 * pairs, 4 * 16 * 40 * (4 + 2 + 2 + 4))
    for _, _, operations, moved, _ in kernels.decoding(draw, 64):
        assert operations == moved  # 4 D a key and query of its group of 2; 8 D bytes a key
    monkeypatch.setattr(kernels, "scaled_dot_product_attention", refused)
    measured = kernels.measure("cpu", 40, 40, 64, 65536, 64)
    assert {row["timed by"] for row in measured["rows"]} == {"launches"} and len(measured["rows"]) == 7
    assert measured["rows"][0]["flash ms"] == measured["rows"][-1]["cudnn ms"] == "No available kernel."
    kernels.main(tmp_path, measured)
    assert json.loads((tmp_path / "kernels.json").read_text()) == measured
    assert "| paged_attention, 8 x 64 tokens, 50% kept |" in (tmp_path / "kernels.md").read_text()


# ---- the tests of a card


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)  # beside other work
def test_the_tests_of_a_card():
    """A card meets tests that work: they run in Triton's interpreter; the smallest ones below."""
    pytest.importorskip("triton", reason="needs Triton")
    python = started(TRITON_INTERPRET="1")
    passed(SMALLEST.parent, f"--ignore={SMALLEST}", python=python, AG_GPU_REHEARSAL="1")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kernels_are_tested_without_the_packages_of_training():
    """Every file is collected; the smallest case of each kernel runs, in Triton's interpreter."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    words = ("-p", "tests.support.absent", "-k", "smallest", SMALLEST.parent)
    said = passed(*words, AG_GPU_REHEARSAL="1", PYTHONPATH=".")
    passes = re.search(r"(\d+) passed, 1 skipped", said)
    assert passes and int(passes[1]) >= 6 and "needs bitsandbytes" in said
