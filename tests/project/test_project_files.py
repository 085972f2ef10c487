"""What contributors and GitHub read: workflows, sessions, hooks, the site, the release command, the table of names."""

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

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def loaded(path):
    return yaml.load(path.read_text(), yaml.BaseLoader)  # on: stays a word


def steps():
    for path in WORKFLOWS:
        for job in loaded(path)["jobs"].values():
            for case in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
                for step in job["steps"]:
                    yield job, case, step


def sessions():
    """Name the sessions of noxfile.py, as ``nox --list`` does."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    ids = [node.value.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "id"]
    for node in tree.body:
        marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
        if len(marks) == 2 and (python := re.fullmatch(r"nox\.session\(python=(.*)\)", marks[0])):
            yield from (f"{node.name}-{version}({case})" for version in ast.literal_eval(python[1]) for case in ids)
        elif marks == ["nox.session"]:
            yield node.name


def test_actions_are_pinned_and_may_only_read():
    used = [step["uses"] for _, _, step in steps() if "uses" in step]
    assert len(used) >= 8
    assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", name)] == []
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert workflow["permissions"] == {"contents": "read"}
        wider = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
        assert wider == ({"publish": {"pages": "write", "id-token": "write"}} if path.stem == "docs" else {})


def test_every_session_that_a_workflow_runs_exists():
    known, ran = set(sessions()), set()
    for job, case, step in steps():
        for name in re.findall(r'nox -s "([^"]+)"', step.get("run", "")):
            for option in job.get("strategy", {}).get("matrix", {}).get("session", [""]):
                filled = name
                for key, value in (case | {"session": option}).items():
                    filled = filled.replace(f"${{{{ matrix.{key} }}}}", value)
                ran.add(filled)
    assert {"lint", "types", "docs", "package", "tests-3.11(oldest)"} <= ran <= known
    text = (ROOT / "scripts" / "checks.sh").read_text()
    (listed,) = re.findall(r"^ +([a-z |]+)\) \"\$@\"", text, re.MULTILINE)
    assert {name.partition("-")[0] for name in known} == set(listed.split(" | "))


def test_hooks_before_a_commit_are_the_pinned_linters():
    repos = {repo["repo"]: repo for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert repos["https://github.com/astral-sh/ruff-pre-commit"]["rev"] == f"v{PINS['ruff']}"
    assert [hook["entry"] for hook in repos["local"]["hooks"]] == ["bash scripts/checks.sh types"]


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
        ("index.md", "[a](docs/caches.md#x)", "", "[a](caches.md#x)"),
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


@pytest.fixture
def copy(tmp_path):
    """A repository with what a release changes, committed."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "CITATION.cff", "scripts/release.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- A line.\n\n## 0.1.0\n\n- Old.\n")
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"$', 'version = "1.9.0rc2"', text))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    return tmp_path


def release(copy, *words):
    return subprocess.run(["bash", "scripts/release.sh", *words], cwd=copy, capture_output=True, text=True)


def test_release_sets_the_version_where_it_stands(copy):
    for refused, told in (("2", "1.2.3"), ("1.9.0rc1", "1.9.0rc2"), ("1.8.9", "1.9.0rc2")):
        done = release(copy, refused)
        assert done.returncode == 2 and told in done.stderr
    done = release(copy, "1.9.0")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["version"] == "1.9.0"
    citation = yaml.safe_load((copy / "CITATION.cff").read_text())
    assert citation["version"] == "1.9.0" and re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])
    heading = f"## Unreleased\n\n## 1.9.0 ({citation['date-released']})\n\n- A line.\n\n## 0.1.0\n\n- Old.\n"
    assert (copy / "CHANGELOG.md").read_text() == f"# Changelog\n\n{heading}"
    done = release(copy, "2.0.0")
    assert done.returncode == 2 and "not committed" in done.stderr


def taken():
    """The lines of the table of names that other libraries may take away: names, library, file and test."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## What other libraries may take away")[2]
    rows = re.findall(r"^\| (`.*) \| (\w+) \| (\S+) \| (\S+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    return [(re.findall(r"`(\w+)`", names), library, file, test) for names, library, file, test in rows]


def test_names_that_other_libraries_may_take_away_are_used_where_the_table_says():
    """It lists all private attributes that code reads of something else than itself, and that we do not define."""
    for names, _, file, test in taken():
        text = (ROOT / file).read_text()
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
        assert (ROOT / test).is_file()
    listed = {name for names, *_ in taken() for name in names}
    files = [path for folder in ("ag", "data", "callbacks", "kernels") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    ours |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and ast.unparse(node.value) != "self"
    }
    assert listed and read - ours - listed <= {"_exit", "_fields", "_replace"}  # Python's own
