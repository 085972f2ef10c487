"""The keys of ``ag.serve`` that are its own."""

import pytest

from ag.commands.serve import ServeConfig
from ag.config.command_line import parse


@pytest.mark.parametrize(
    ("words", "nbytes"), [("2GiB", 2**31), ("1.5 mib", 1572864), ("3GB", 3 * 10**9), ("4096", 4096)]
)
def test_memory(words, nbytes):
    assert parse([f"memory={words}"], ServeConfig, "ag.serve").config.memory_bytes == nbytes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["memory=2GiBs"], "memory=2GiBs"),
        (["memory=much"], "memory=much"),
        (["share=0.5", "budget=64"], "share=0.5 and budget=64"),
        (["port=70000"], "at most 65535"),
    ],
)
def test_what_is_refused(words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(words, ServeConfig, "ag.serve")
    assert told in capsys.readouterr().err


def test_a_share_is_a_budget():
    config = parse(["share=0.3"], ServeConfig, "ag.serve").config
    assert (config.budget, config.share) == (0.3, None)
