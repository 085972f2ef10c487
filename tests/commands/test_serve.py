"""The keys of ``ag.serve``."""

import subprocess

import pytest

from ag.commands.serve import ServeConfig
from ag.config.command_line import parse
from ag.errors import UserError
from tests.support.refused import refuses
from tests.support.warm import started


@pytest.mark.parametrize(
    ("words", "nbytes"), [("2GiB", 2**31), ("1.5 mib", 1572864), ("3GB", 3 * 10**9), ("4096", 4096)]
)
def test_memory(words, nbytes):
    assert parse([f"memory={words}"], ServeConfig, "ag.serve").config.memory_bytes == nbytes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["memory=2GiBs"], "memory=2GiBs"),
        (["share=0.5", "budget=64"], "share=0.5 and budget=64"),
        (["port=70000"], "at most 65535"),
    ],
)
def test_what_is_refused(words, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(words, ServeConfig, "ag.serve")
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["64", "9000TiB"])
def test_memory_that_no_pool_can_take_is_told_as_it_was_given(memory, tmp_path, tiny_llama):
    """Fewer bytes than a block has; more than a process can address, where the machine was not asked before."""
    pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")
    from ag.serve.start import load_service
    from tests.support.http_server import saved

    folder = saved(tiny_llama(), tmp_path)
    with refuses(UserError, f"memory={memory}", "give"):
        load_service(ServeConfig(model=str(folder), policy="full", memory=memory))


def test_a_share_is_a_budget():
    config = parse(["share=0.3"], ServeConfig, "ag.serve").config
    assert (config.budget, config.share) == (0.3, None)


def test_without_the_extra():
    """The error names the command that installs it; the scheduler and help need no server library."""
    name = "openai"
    code = f"import sys; sys.modules[{name!r}] = None; import ag.serve; from ag.commands.serve import main; "
    done = subprocess.run([started(), "-c", f"{code}sys.exit(main(['port=0']))"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"ag.serve: error: ag.serve needs {name}: pip install 'ag[serve]'.\n")
