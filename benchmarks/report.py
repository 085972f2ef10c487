"""What the measurements of this folder do with what they find: a row as it comes, then a file and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def report(found: Iterable[T], table: Callable[[list[T]], str], config: Any, file: str) -> list[T]:
    """Take results as they come, and write them down.

    Args:
        found: dataclasses, each of which takes a while.
        table: makes the table of some of them; each row goes to stderr at once.
        config: a dataclass with the settings; ``output`` is the folder.
        file: name of the JSON file in it.

    Returns:
        All results, whose table is printed.
    """
    results = []
    for one in found:
        results.append(one)
        print(table([one]).splitlines()[-1], file=sys.stderr, flush=True)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"settings": asdict(config), "found": [asdict(x) for x in results]}  # type: ignore[call-overload]
    (folder / file).write_text(json.dumps(record) + "\n")
    print(table(results))
    return results
