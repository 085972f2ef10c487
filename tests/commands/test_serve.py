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
        (["port=70000"], "at most 65535"),
        (["cluster=local"], "unknown key 'cluster': a server is one process; start one for each GPU, with a port="),
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
    from ag.serve.server import load_service
    from tests.support.http_server import saved

    folder = saved(tiny_llama(), tmp_path)
    with refuses(UserError, f"memory={memory}", "give"):
        load_service(ServeConfig(model=str(folder), policy="full", memory=memory))


def test_a_file_of_keys(tmp_path, capsys):
    """The command line wins over the file, and the file over its base; what is printed can be read again."""
    (tmp_path / "base.yaml").write_text("model: smollm2\nport: 1\nbatch: 3\noptions: {window: 16}\n")
    file = tmp_path / "serve.yaml"
    file.write_text("base: base.yaml\npolicy: h2o\nbudget: 0.3\nport: 2\nprotect: [system]\nmemory: 2GiB\n")
    config = parse([f"config={file}", "memory=3GiB"], ServeConfig, "ag.serve").config
    assert (config.model, config.policy, config.budget, config.protect) == ("smollm2", "h2o", 0.3, ["system"])
    assert (config.port, config.batch, config.options) == (2, 3, {"window": 16})
    assert config.memory_bytes == 3 * 2**30
    with pytest.raises(SystemExit, match="0"):
        parse([f"config={file}", "memory=3GiB", "--print"], ServeConfig, "ag.serve")
    file.write_text(capsys.readouterr().out)
    assert parse([f"config={file}"], ServeConfig, "ag.serve").config == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polcy: h2o", "serve.yaml: unknown key 'polcy'; did you mean policy?"),
        ("replicas: [1, 8]", "serve.yaml: unknown key 'replicas': a server is one process; start one for each GPU"),
        ("port: 70000", "serve.yaml: port=70000: expected whole number, at least 0, at most 65535"),
        ("config: other.yaml", "config=other.yaml in a file of config=: write base: other.yaml"),
        ("- port", "serve.yaml: expected keys with values"),
        (None, "serve.yaml: there is no such file"),
    ],
)
def test_a_file_that_is_refused(text, expected, tmp_path, capsys):
    if text is not None:
        (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse([f"config={tmp_path / 'serve.yaml'}"], ServeConfig, "ag.serve")
    assert expected in capsys.readouterr().err


def test_without_the_extra():
    """The error names the command that installs it; the scheduler and help need no server library."""
    name = "openai"
    code = f"import sys; sys.modules[{name!r}] = None; import ag.serve; from ag.commands.serve import main; "
    done = subprocess.run([started(), "-c", f"{code}sys.exit(main(['port=0']))"], capture_output=True, text=True)
    message = f"ag.serve: error: ag.serve needs {name}, which is not installed: pip install 'ag[serve]'.\n"
    assert (done.returncode, done.stderr) == (2, message)
