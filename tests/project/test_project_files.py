"""What contributors and GitHub read: workflows, sessions, the site, the release command, the table of names."""

import ast
import importlib
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

import ag
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS
from ag.engine.wrappers import WRAPPERS
from scripts import docs_site
from tests.support import ROOT


def test_workflows_run_sessions_that_exist_and_may_only_read():
    tree, known = ast.parse((ROOT / "noxfile.py").read_text()), set()
    for node in tree.body:
        marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
        known |= {node.name} if any(mark.startswith("nox.session") for mark in marks) else set()
    text = (ROOT / "scripts" / "checks.sh").read_text()
    (listed,) = re.findall(r"^ +([a-z |]+)\) \"\$@\"", text, re.MULTILINE)
    assert known == set(listed.split(" | "))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        ran = re.findall(r'nox -s "(\w+)', text)
        ran += [name for names in re.findall(r"\bsession: \[(.*)\]", text) for name in names.split(", ")]
        assert set(ran) <= known, path
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", name) for name in re.findall(r"uses: (\S+)", text))


def site():
    """The pages that the navigation names."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])


def test_every_page_is_in_the_navigation_once_and_its_links_hold_on_the_site():
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(site()) == sorted([*written, *docs_site.OUTSIDE])
    read = {page: docs_site.text_of(ROOT / docs_site.OUTSIDE.get(page, f"docs/{page}")) for page in site()}
    for page, text in read.items():
        turned = docs_site.turned(text, page, "https://example.org/ag/")
        for _, _, target, _ in docs_site.LINK.findall("".join(docs_site.FENCE.split(turned)[::2])):
            if target.startswith("https://example.org/ag/"):
                assert (ROOT / target.removeprefix("https://example.org/ag/blob/HEAD/")).exists(), (page, target)
            elif ":" not in target:
                at = str((ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT))
                assert at in read or (ROOT / "docs" / at).is_file(), (page, target)


@pytest.mark.parametrize(
    ("page", "link", "repository", "expected"),
    [
        ("extending/kernel.md", "[a](../../kernels/kv_append/README.md)", "", "[a](../kernels/kv_append.md)"),
        ("caches.md", "[a](../ag/engine/layer.py)", "", "a"),
        ("caches.md", "[a](../ag/engine/layer.py)", "https://h/r", "[a](https://h/r/blob/HEAD/ag/engine/layer.py)"),
        (
            "caches.md",
            "```\n[a](../README.md)\n```\n[a](../README.md)",
            "",
            "```\n[a](../README.md)\n```\n[a](index.md)",
        ),
    ],
)
def test_link_is_turned(page, link, repository, expected):
    assert docs_site.turned(link, page, repository) == expected


def test_pages_name_all_that_is_public_and_every_part_of_a_policy():
    """Type checkers and the site's reference read the imports under TYPE_CHECKING; Python reads the table."""
    found = set()
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            found.add(id(getattr(importlib.import_module(module), attribute)))
    assert {id(getattr(ag, name)) for name in ag._PUBLIC} | {id(kind) for kind in SCORERS.values()} <= found
    for page in ("policies.md", "sources.md"):
        text = (ROOT / "docs" / page).read_text()
        assert [name for name in [*SCORERS, *WRAPPERS, *ALLOCATORS] if f"`{name}`" not in text] == []
    (checked,) = [x for x in ast.parse((ROOT / "ag" / "__init__.py").read_text()).body if isinstance(x, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert {name.asname: node.module for node in imports for name in node.names} == ag._PUBLIC


def test_release_sets_the_version_where_it_stands(tmp_path):
    def release(version):
        command = ["bash", "scripts/release.sh", version]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "CITATION.cff", "scripts/release.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- A line.\n\n## 0.1.0\n\n- Old.\n")
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"$', 'version = "1.9.0rc2"', text))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    for refused, told in (("2", "1.2.3"), ("1.9.0rc1", "1.9.0rc2")):
        done = release(refused)
        assert done.returncode == 2 and told in done.stderr
    done = release("1.9.0")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["version"] == "1.9.0"
    citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text())
    heading = f"## Unreleased\n\n## 1.9.0 ({citation['date-released']})\n\n- A line.\n\n## 0.1.0\n\n- Old.\n"
    assert citation["version"] == "1.9.0" and (tmp_path / "CHANGELOG.md").read_text() == f"# Changelog\n\n{heading}"
    done = release("2.0.0")
    assert done.returncode == 2 and "not committed" in done.stderr


def test_names_that_other_libraries_may_take_away_are_used_where_the_table_says():
    """The table lists all private attributes that code reads of objects of other libraries."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## What other libraries may take away")[2]
    rows = re.findall(r"^\| (`.*) \| \w+ \| (\S+) \| (\S+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    listed = set()
    for names, file, test in rows:
        names, code = set(re.findall(r"`(\w+)`", names)), (ROOT / file).read_text()
        listed |= names
        assert all(re.search(rf"\b{name}\b", code) for name in names) and (ROOT / test).is_file(), (names, file)
    files = [path for folder in ("ag", "data", "callbacks", "kernels") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text() for path in files)
    ours = set(re.findall(r"\b(?:def |class |self\.)(_[a-z]\w*)", code))
    ours |= set(re.findall(r"\b(_[a-z]\w*)(?: =[^=]|: )", code))
    read = set(re.findall(r"(?<!self)(?<=[\w\])])\.(_[a-z]\w*)", code))
    assert listed and read - ours - listed <= {"_exit", "_fields", "_replace"}, read - ours - listed  # Python's own
