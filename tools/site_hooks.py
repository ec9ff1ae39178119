"""What mkdocs adds to the site beside docs/: the examples as one page, the changelog and CONTRIBUTING.md; and where
long names in tables may be broken.

Pages in docs/ link to these files where they are in the project (``../examples/plain_loop.py``), so that the links work
in a checkout; here they are turned to the site's own pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made here."""
    files.append(File.generated(config, "examples.md", content=examples_page()))
    for source, page in OTHERS.items():
        files.append(File.generated(config, page, content=from_root((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ to the pages made here."""
    markdown = re.sub(r"\]\((?:\.\./)+examples/README\.md\)", "](examples.md)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+examples/([\w.]+)\)", lambda m: f"](examples.md#{anchor(m[1])})", markdown)
    for source, page in OTHERS.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """A short name in the text stays in one piece, also where it has hyphens. In the cells of tables a long one may go
    on in the next line, but only behind a _ / = or opening bracket."""

    def breakable(code: re.Match[str]) -> str:
        return "<code>" + re.sub(r"([_/=(])(?=.{4})", r"\1<wbr>", code[1]) + "</code>"

    def fitted(found: re.Match[str]) -> str:
        cell, short = found[1], found[2]
        return re.sub(r"<code>([^<]*)</code>", breakable, cell) if cell else f'<code class="whole">{short}</code>'

    inline = r"(?<!<pre>)(?<!</span>)<code>([^<]{1,28})</code>"  # not a block
    return re.sub(rf"(<td.*?</td>)|{inline}", fitted, html, flags=re.S)


def from_root(text: str) -> str:
    """A file of the project's top folder as a page: links into docs/ lose the folder, others become plain text."""
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)(?![\w/-]+\.md)[^)]*\)", r"\1", text)


def anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def examples_page() -> str:
    """examples/README.md, and below it every example in full."""
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text().replace("](../docs/", "](")
    text = re.sub(r"\]\(([\w.]+\.(?:py|ipynb))\)", lambda m: f"](#{anchor(m[1])})", text)
    parts = [text]
    for path in sorted(folder.glob("*.py")):
        parts.append(f"## {path.name} {{ #{anchor(path.name)} }}\n\n```python\n{path.read_text().strip()}\n```\n")
    for path in sorted(folder.glob("*.ipynb")):
        parts.append(f"## {path.name} {{ #{anchor(path.name)} }}\n\n{notebook(path)}")
    return "\n".join(parts)


def notebook(path: Path) -> str:
    """The cells one after the other; headings one level down."""
    cells = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cells.append(f"```python\n{source}\n```\n")
        else:
            cells.append(re.sub(r"^#", "###", source, flags=re.M).replace("](../docs/", "](") + "\n")
    return "\n".join(cells)
