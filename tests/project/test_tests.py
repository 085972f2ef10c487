"""Every test can fail: none returns before its end, and each reaches a check."""

import ast
from collections.abc import Iterator

from tests.support import TESTS

FILES = sorted(TESTS.rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
CHECKS = {"raises", "warns", "fail", "assert_close", "assert_allclose", "assert_array_equal"}


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes defined in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTION, ast.ClassDef, ast.Lambda)):
            yield from inside(node)


def called(node: ast.AST) -> str | None:
    """The last part of the name that a call is by: ``raises`` of ``pytest.raises(...)``."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def faults(sources: dict[str, str]) -> list[str]:
    """Name the tests of some sources that return early, or that check nothing.

    A check is an assertion, a call of one of CHECKS, a subprocess with ``check=True``, or a call of a helper that
    checks: the one of that name in the same file, else any other.
    """
    functions = [
        (file, node)
        for file, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTION)
    ]
    own = {(file, function.name) for file, function in functions}
    checking: set[tuple[str, str]] = set()
    helpers: set[str] = set()

    def checks(file: str, node: ast.AST) -> bool:
        name = called(node)
        if name is None:
            return isinstance(node, ast.Assert)
        must = [word.value for word in node.keywords if word.arg == "check"] if isinstance(node, ast.Call) else []
        if name in CHECKS or any(isinstance(value, ast.Constant) and value.value is True for value in must):
            return True
        return (file, name) in checking if (file, name) in own else name in helpers

    asked = [  # the nodes that can check anything, walked once
        (file, f.name, [node for node in ast.walk(f) if isinstance(node, (ast.Assert, ast.Call))])
        for file, f in functions
    ]
    before = -1
    while len(checking) > before:
        before = len(checking)
        helpers = {name for _, name in checking}
        checking |= {(file, name) for file, name, nodes in asked if any(checks(file, node) for node in nodes)}
    found = []
    for file, test in functions:
        if test.name.startswith("test"):
            found += [f"{file}:{x.lineno}: {test.name} returns" for x in inside(test) if isinstance(x, ast.Return)]
            if (file, test.name) not in checking:
                found.append(f"{file}:{test.lineno}: {test.name} checks nothing")
    return found


def test_every_test_checks_and_none_returns_early():
    assert faults({str(file.relative_to(TESTS)): file.read_text() for file in FILES}) == []


def test_what_is_found():
    text = """
def helper(x):
    assert x

def outer(x):
    helper(x)

def test_good():
    outer(1)

def test_raises():
    with pytest.raises(ValueError):
        int("x")

def test_idle():
    int("1")

def test_returns(x):
    if x:
        return
    assert x

def test_inner():
    def key(x):
        return x
    assert key(1)
"""
    assert faults({"a.py": text}) == ["a.py:15: test_idle checks nothing", "a.py:20: test_returns returns"]
