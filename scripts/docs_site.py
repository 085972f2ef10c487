"""The hook of mkdocs.yml: pages from other files than docs/*.md, and links that hold in the repository and on the site.

Pages are written for the repository. On the site a link to a file that has no page there becomes one to the repository
(``REPOSITORY_URL``), or plain text where no repository is named.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what needs no mkdocs is tested without it
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Page of the site: file of the repository, for files outside docs/ and notebooks.
OUTSIDE = {
    "index.md": "README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "changelog.md": "CHANGELOG.md",
    "tour.md": "docs/tour.ipynb",
    **{f"kernels/{file.parent.name}.md": str(file.relative_to(ROOT)) for file in ROOT.glob("kernels/*/README.md")},
}
PAGES = {file: page for page, file in OUTSIDE.items()}
ROLE = re.compile(r":[a-z]+:(?=<code)")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of OUTSIDE."""
    from mkdocs.structure.files import File

    for page, file in OUTSIDE.items():
        files.append(File.generated(config, page, content=text_of(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page."""
    return turned(markdown, page.file.src_uri, config.repo_url or "")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drop what Sphinx would read in docstrings, such as ``:func:``."""
    return ROLE.sub("", html)


def text_of(file: Path) -> str:
    """Return the Markdown of a page; of a notebook that of its cells, with what is stored of their outputs."""
    if file.suffix != ".ipynb":
        return file.read_text()
    return "\n\n".join(part for cell in json.loads(file.read_text())["cells"] for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of a notebook's cell, then of each of its outputs."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        if "text" in output:
            yield f"```text\n{''.join(output['text']).strip()}\n```"
        else:
            yield f"![](data:image/png;base64,{output['data']['image/png'].strip()})"


def turned(markdown: str, page: str, repository: str) -> str:
    """Return a page's text with links for the site.

    Args:
        markdown: the text, with links relative to its file in the repository.
        page: its place on the site, such as ``extending/scorer.md``.
        repository: address of the repository, or an empty text.
    """
    folder = posixpath.dirname(OUTSIDE.get(page, f"docs/{page}"))

    def link(match: re.Match[str]) -> str:
        sign, text, target, anchor = match.groups("")
        if ":" in target:
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, target))
        at = PAGES.get(file, file.removeprefix("docs/"))
        if at != file:
            return f"{sign}[{text}]({posixpath.relpath(at, posixpath.dirname(page) or '.')}{anchor})"
        if not (ROOT / file).exists():
            return match[0]  # mkdocs names it
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{file}{anchor})" if repository else text

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCE.split(markdown))
