"""Every test can fail: none returns before its end, and each reaches a check."""

import ast
from collections.abc import Iterator

from tests.support import TESTS

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
CHECKS = {"raises", "warns", "fail", "assert_close", "assert_allclose", "assert_array_equal", "check_call"}


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes defined in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTION, ast.ClassDef, ast.Lambda)):
            yield from inside(node)


def faults(sources: dict[str, str]) -> list[str]:
    """Name the tests of some sources that return early, or that check nothing.

    A check is an assertion, a call of one of CHECKS, a subprocess with ``check=True``, or a call of a function that
    checks: that of the test module that is named, else the one of that name in the same file, else any other.
    """
    trees = {file: ast.parse(text) for file, text in sources.items()}
    functions = {
        (file, node.name): node for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, FUNCTION)
    }
    checking: set[tuple[str, str]] = set()

    def checks(file: str, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return isinstance(node, ast.Assert)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CHECKS or any(x.arg == "check" and getattr(x.value, "value", 0) is True for x in node.keywords):
            return True
        module = getattr(getattr(node.func, "value", None), "id", "")
        if module.startswith("test_"):
            return any(other == name and place.endswith(f"{module}.py") for place, other in checking)
        return (file, name) in checking if (file, name) in functions else name in {other for _, other in checking}

    before = -1
    while before != len(checking):
        before = len(checking)
        checking |= {x for x, function in functions.items() if any(checks(x[0], node) for node in inside(function))}
    tests = {x: node for x, node in functions.items() if x[1].startswith("test")}
    early = [x for x, node in tests.items() if any(isinstance(inner, ast.Return) for inner in inside(node))]
    found = [f"{file}: {name} returns" for file, name in early]
    return found + [f"{file}: {name} checks nothing" for file, name in tests if (file, name) not in checking]


def test_every_test_checks_and_none_returns_early():
    assert faults({str(file.relative_to(TESTS)): file.read_text() for file in TESTS.rglob("*.py")}) == []


def test_what_is_found():
    idle = "def test_idle():\n    int('1')\n\n\ndef test_inner():\n    def key(x):\n        assert x\n"
    returns = "def outer(x):\n    helper(x)\n\n\ndef test_returns(x):\n    if x:\n        return\n    outer(x)\n"
    helper = (
        "def helper(x):\n    assert x\n\n\ndef test_raises():\n    with pytest.raises(ValueError):\n        int('x')\n"
    )
    same = "def test_idle():\n    test_a.test_idle()\n\n\ndef test_raises():\n    test_c.test_raises()\n"
    assert faults({"test_c.py": helper, "d.py": same}) == ["d.py: test_idle checks nothing"]
    found = faults({"a.py": idle, "b.py": returns, "c.py": helper})
    assert found == ["b.py: test_returns returns", "a.py: test_idle checks nothing", "a.py: test_inner checks nothing"]
