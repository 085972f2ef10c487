"""Command lines that must fail, and files to name in them."""

from pathlib import Path
from typing import Any

import pytest

from ag.config import Config
from ag.config.command_line import parse


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a program that must fail; returns the one line that it prints."""

    def call(*argv: str, schema: type[Any] = Config) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(argv, schema, "ag.fit")
        out, err = capsys.readouterr()
        assert stopped.value.code == 2
        assert out == ""
        assert err.startswith("ag.fit: error: ")
        assert err.count("\n") == 1
        return err.strip()

    return call


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, text: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write
