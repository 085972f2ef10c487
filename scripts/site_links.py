"""Follow every link of a built site to its file and anchor: python scripts/site_links.py FOLDER.

mkdocs checks what pages say in Markdown; this also sees what themes, plugins and HTML add. Other sites are not asked.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Names(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's link and its anchor."""
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def lost(site: Path) -> list[str]:
    """Return ``PAGE: LINK`` for each link of a site's pages that leads nowhere on it."""
    files = [file.resolve() for file in sorted(site.rglob("*.html")) if file.name != "404.html"]
    pages = {file: Names(file.read_text()) for file in files}
    found = []
    for file, names in pages.items():
        for link in names.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            target = (file.parent / path).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            there = unquote(parts.fragment) in pages[target].anchors if target in pages else target.is_file()
            if not there:
                found.append(f"{file.relative_to(site.resolve())}: {link}")
    return found


if __name__ == "__main__":
    missing = lost(Path(sys.argv[1]))
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing))
