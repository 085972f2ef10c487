"""The environment of the tests, their order, and the summary at the end. No library is imported here.

So the process that distributes tests starts the others sooner; those that run tests import
:mod:`tests.support.common`.
"""

import gc
import os
import shlex
from collections import Counter
from typing import Any

import pytest

from tests.support import ROOT

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15, with which the other test process would starve Ray's
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # of 2, after which a rank that has ended is seen
    "OMP_NUM_THREADS": "1",  # one test process a core, and the processes that tests start
}

if os.environ.get("AG_GPU_REHEARSAL") == "1":  # tests/gpu on a CPU: before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.common")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked nightly too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all") and not any("::" in name for name in config.args):
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    # the longest first, so that at the end no worker waits for another's
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection() -> None:
    gc.disable()  # nothing of what is collected goes, and the searches take seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the slowest files and what was skipped, and leave the names of the tests that failed to scripts/test.sh."""
    reports = [x for found in terminalreporter.stats.values() for x in found if isinstance(x, pytest.TestReport)]
    seconds: dict[str, float] = {}
    for report in reports:
        file = report.nodeid.partition("::")[0]
        seconds[file] = seconds.get(file, 0.0) + report.duration
    if config.getoption("durations"):
        terminalreporter.section("slowest files")
        for file in sorted(seconds, key=lambda x: -seconds[x])[:10]:
            terminalreporter.line(f"{seconds[file]:7.1f} s  {file}")
    # the reason of a skip ends with the command that runs the test; what another test runs says "elsewhere"
    reasons = Counter(x.longrepr[2].removeprefix("Skipped: ") for x in terminalreporter.stats.get("skipped", []))
    told = {reason: count for reason, count in reasons.most_common() if not reason.startswith("elsewhere: ")}
    if told:
        terminalreporter.section(f"{sum(told.values())} tests skipped, and what would run them")
        for reason, count in told.items():
            terminalreporter.line(f"{count:7}  {reason}")
    failed = dict.fromkeys(x.nodeid for kind in ("failed", "error") for x in terminalreporter.stats.get(kind, []))
    folder = ROOT / ".pytest_cache"
    if failed and folder.is_dir():
        shown = [shlex.quote(name) for name in failed][:5]
        (folder / "failed").write_text(" ".join(shown) + (f" # and {len(failed) - 5} more" * (len(failed) > 5)))
