"""Which module of the library imports which, wherever in it: in functions and for types too."""

import ast
from pathlib import Path

import ag

ROOT = Path(ag.__file__).parent


def imports(path: Path) -> set[str]:
    """The modules of ag that a file imports, wherever in it; a package's own names count as the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if is_module(name)}
            found |= submodules | ({node.module} if submodules != names else set())
    return {name for name in found if name.startswith("ag.")}


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def graph(*folders: str) -> dict[str, set[str]]:
    """From each module of some folders of the library, all by default, to those that it imports."""
    found = {}
    for folder in folders or [""]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = imports(path)
    return found
