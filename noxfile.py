"""Sessions with environments of their own: nox -s lint|types|tests|docs|package|vllm. Commands: scripts/checks.sh.

``nox -s "tests-3.11(oldest)" -- -m "not slow"`` runs the tests on the oldest supported torch and transformers,
``(pinned)`` on the versions of constraints.txt, and ``(newest)`` on the newest releases of everything that
pyproject.toml lets in, torch included, whatever the pins say; words after ``--`` go to pytest.
"""

import re
from pathlib import Path

import nox

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = ("-c", "constraints.txt")
OLDEST = {
    name: re.search(rf"^{name}>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE)[1]
    for name in ("torch", "transformers")
}
#: Pins that fit only the newest torch or transformers, or not instructor; pip finds others.
FOLLOWING = {
    "torch": ("torch", "setuptools"),
    "transformers": ("transformers", "tokenizers", "huggingface_hub"),
    "instructor": ("jiter", "openai", "rich"),
}
CASES = [
    nox.param((), id="pinned"),
    nox.param(None, id="newest"),
    nox.param(("torch", "transformers"), id="oldest"),
    nox.param(("torch",), id="old-torch"),
    nox.param(("transformers",), id="old-transformers"),
    nox.param(("instructor",), id="clients"),
]

nox.options.sessions = ["lint", "types", "tests-3.11(pinned)", "docs", "package"]
nox.options.error_on_missing_interpreters = True


def check(session: nox.Session) -> None:
    """Run the check that has the session's name, with the session's programs."""
    name = session.name.partition("-")[0]
    session.run("bash", "scripts/checks.sh", name, *session.posargs, env={"BIN": session.bin}, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and bandit."""
    session.install(*PINS, "ruff", "bandit")
    check(session)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy, strictly."""
    session.install(*PINS, "-e", ".[dev]")
    check(session)


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("old", CASES)
def tests(session: nox.Session, old: tuple[str, ...] | None) -> None:
    """Run the tests on the pinned packages, with the oldest torch or transformers that are supported, or without pins.

    The case ``clients`` has the libraries of other clients of the server.

    Which torch comes (CPU or CUDA) is pip's to say, by PIP_EXTRA_INDEX_URL.
    """
    if old is None:
        session.install("--upgrade", "--upgrade-strategy", "eager", "-e", ".[dev]")
        check(session)
        return
    loose = {name for package in old for name in FOLLOWING[package]}
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if line.partition("==")[0] not in loose]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    pins += [f"{package}=={OLDEST[package]}" for package in old if package in OLDEST]
    constraints.write_text("\n".join(pins) + "\n")
    session.install("-c", str(constraints), "-e", ".[dev,clients]" if "instructor" in old else ".[dev]")
    check(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site strictly into build/site, and check its links."""
    session.install(*PINS, *EXTRAS["docs"])
    check(session)


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and source distribution, and try each away from the checkout, on the dependencies declared."""
    session.install(*PINS, "setuptools", *PROJECT["dependencies"])
    check(session)


@nox.session(venv_backend="none")
def vllm(session: nox.Session) -> None:
    """Test eviction inside vLLM, in the environment of scripts/vllm_env.sh."""
    session.run("bash", "scripts/checks.sh", "vllm", *session.posargs, external=True)
