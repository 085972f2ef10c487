"""scripts/gpu.py: rows that are run, skipped, stopped and recorded; and the tests of a card in Triton's interpreter."""

import os
import re
import signal
import time
from threading import Thread

import pytest

from ag.commands.bench import BenchConfig
from ag.config.command_line import parse
from ag.engine import PolicySpec
from scripts import gpu
from scripts.gpu import Row
from tests.support import ROOT
from tests.support.inner import passed
from tests.support.warm import started

HERE = {"card": "NVIDIA H200", "gib": 140.0, "versions": {"torch": "2.11"}}
WRITES = "import os; from pathlib import Path; Path('{out}/found.json').write_text('{\"share\": 0.25}'); "
WRITES += "Path('{out}/found.md').write_text(os.environ.get('WORD', 'a table'))"
SMALLEST = ROOT / "tests" / "gpu" / "test_smallest.py"


def python(name, code, *words, **options):
    return Row(name, ("-c", code, *words), **{"seconds": 5} | options)


def statuses(folder, card="NVIDIA H200"):
    return {name: line["status"] for name, line in gpu.read(folder, card).items()}


@pytest.mark.slow
def test_every_row_is_run_and_recorded_whatever_becomes_of_the_others(tmp_path, capsys):
    rows = [
        python("fails", "print('the card burns'); raise SystemExit(3)"),
        python("dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        python("hangs", "import time; time.sleep(60)", seconds=-9.7),  # stopped after 0.9 seconds
        python("works", WRITES, environment={"WORD": "seven"}),
        python("skips", "print('SKIPPED [1] a.py:1: needs that\\n=== 1 skipped in 0.1s ===')", "pytest"),
        python("program", WRITES, prefix=("no-such-program",)),
        python("package", WRITES, needs=("json", "no_such_module")),
        python("memory", WRITES, gib=500),
        python("long", "", seconds=100),
    ]
    assert gpu.run(rows, tmp_path, HERE, minutes=1) == 1
    lines = gpu.read(tmp_path, "NVIDIA H200")
    ended = {"fails": "failed", "dies": "failed", "hangs": "timed out", "works": "ok"}
    assert statuses(tmp_path) == ended | dict.fromkeys(("skips", "program", "package", "memory"), "skipped")
    assert lines["works"]["result"] == {"found": {"share": 0.25}} and lines["works"]["versions"] == {"torch": "2.11"}
    assert lines["works"]["command"].startswith("WORD=seven python -c") and 0.9 <= lines["hangs"]["seconds"] < 30
    said = {
        "fails": "the card burns",
        "dies": "SIGKILL",
        "hangs": "after 1 s",
        "skips": "1 skipped in 0.1s; needs that",
    }
    said |= {"program": "no-such-program", "package": "install no_such_module", "memory": "500 GiB, the card has 140"}
    assert all(text in lines[name]["said"] for name, text in said.items())
    out, table, page = capsys.readouterr().out, gpu.outline(lines), (tmp_path / gpu.SUMMARY).read_text()
    assert (
        table in out and "no time after 0 s. It takes about 100 s" in out and len(table.splitlines()) == 1 + len(rows)
    )
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


def test_an_interrupt_stops_the_child_and_keeps_what_is_there(tmp_path, capsys):
    note = tmp_path / "pid"
    waits = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt():
        while not (note.exists() and note.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by a background job
    thread = Thread(target=interrupt)
    thread.start()
    assert gpu.run([python("first", ""), python("second", waits), python("third", "")], tmp_path / "out", HERE) == 130
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert statuses(tmp_path / "out") == {"first": "ok"}
    assert "goes on with the row" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_rows_are_commands_of_this_checkout():
    """Small cases and the sanitizer come first, every file of tests/gpu is run, and every bench can be parsed."""
    for gib, model, trained in ((24.0, "1b", "1024,2048"), (80.0, "8b", "2048,4096"), (140.0, "8b", "4096,8192")):
        rows = {row.name: row for row in gpu.rows(gib)}
        assert {f"context=[{trained}]", f"model=random:llama-{model}"} < {*rows["bench_train_step"].words}
    for row in rows.values():
        if row.words[1] == "ag.bench":
            words = [word.replace("{out}", "OUT") for word in row.words[2:]]
            config = parse(words, BenchConfig, "ag.bench", "mode").config
            assert (config.mode, config.output, config.device) == (row.words[2], "OUT", "cuda")
            assert all(PolicySpec.parse(text) for text in config.policy)
    kernels = sorted(file.parent.name for file in ROOT.glob("kernels/*/triton.py"))
    assert [*rows][: 1 + len(kernels)] == ["test_smallest", *(f"sanitizer_{kernel}" for kernel in kernels)]
    assert {f"{x}.py" for x in rows if x.startswith("test_")} == {x.name for x in SMALLEST.parent.glob("test_*.py")}
    tests = re.findall(r"^def test_(\w+)", SMALLEST.read_text(), re.MULTILINE)
    for kernel in kernels:  # -k KERNEL selects its case alone
        assert [name for name in tests if kernel in name] == [kernel]


def test_a_machine_without_a_card_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PROBE", "raise SystemExit('torch 2.11 finds no CUDA device')")
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["OUT"])
    assert "finds no CUDA device" in capsys.readouterr().err


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
