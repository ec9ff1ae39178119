"""What mkdocs adds to docs/: the examples, the changelog and CONTRIBUTING.md as pages, formulas as MathML, pictures for
both colour schemes and for narrow screens, line breaks in long names in tables, the version in the footer.

Pages in docs/ link to these files where they are in the project (``../examples/plain_loop.py``), so that the links work
in a checkout; here they are turned to the site's own pages.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: Any) -> Any:
    """The version in the footer of every page."""
    version = re.search(r'__version__ = "(.+?)"', (ROOT / "src" / "ngplus" / "__init__.py").read_text())
    assert version is not None
    config.copyright = f"ngplus {version[1]}"
    return config


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


def on_page_content(html: str, page: Page, **_: Any) -> str:
    if page.file.src_uri.startswith("api/"):
        html = links_to_pages(one_default(html))
        html = re.sub(r'(?<=<span class="doc doc-object-name )[^<]+', lambda m: m[0].replace(".", ".<wbr>"), html)
    return pictures(formulas(stacked(names(plain_roles(html)))), Path(page.file.src_uri).parent)


def one_default(html: str) -> str:
    """An argument whose description has its default does not have it beside its type as well."""

    def item(found: re.Match[str]) -> str:
        own = re.compile(r", default:\s*<code[^>]*>.*?</code>\s*\)", re.S)
        return own.sub(")", found[0], count=1) if "(default:" in found[0] else found[0]

    return re.sub(r'<li class="doc-section-item.*?</li>', item, html, flags=re.S)


def links_to_pages(html: str) -> str:
    """Docstrings name pages as docs/method.md."""
    return re.sub(r"\bdocs/([\w-]+)\.md\b", r'<a href="../\1.html">docs/\1.md</a>', html)


def plain_roles(html: str) -> str:
    """What docstrings have of reStructuredText: :class:`Name` is the name, and a text that ends with :: goes on."""
    html = re.sub(r":(?:class|func|meth|mod):(?=<code>)", "", html)
    return html.replace("::</p>", ":</p>")


def names(html: str) -> str:
    """A short name in the text stays in one piece, also where it has hyphens. In the cells of tables a long one may go
    on in the next line, but only behind a _ / = or opening bracket. A number stays with its sign or %, and a range
    in one piece. Cells with more than a word or two are marked."""

    def breakable(code: re.Match[str]) -> str:
        if len(code[1]) <= 16:
            return f'<code class="whole">{code[1]}</code>'
        return "<code>" + re.sub(r"([_/=(])(?=.{4})", r"\1<wbr>", code[1]) + "</code>"

    def fitted(found: re.Match[str]) -> str:
        cell, short = found[1], found[2]
        if not cell:
            return f'<code class="whole">{short}</code>'
        cell = re.sub(r"([±≤≥]) | (?=%)", r"\1&nbsp;", cell)
        cell = re.sub(r"(?<=\d)–(?=\d)", "&NoBreak;–&NoBreak;", cell)
        length = len(unescape(re.sub(r"<[^>]+>|&NoBreak;", "", cell)))
        if length > 20:
            cell = cell.replace("<td", f'<td class="{"long" if length > 40 else "medium"}"', 1)
        return re.sub(r"<code>([^<]*)</code>", breakable, cell)

    inline = r"(?<!<pre>)(?<!</span>)<code>([^<]{1,28})</code>"  # not a block
    return re.sub(rf"(<td.*?</td>)|{inline}", fitted, html, flags=re.S)


def stacked(html: str) -> str:
    """On narrow screens a table with several columns of texts, or of two with long formulas, has its cells below each
    other, each with its heading (site.css). Others with three or more columns have small letters, and keep their first
    column in view where they scroll."""

    def marked(found: re.Match[str]) -> str:
        table = found[0]
        headings = [plain(cell) for cell in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.S)]
        if len(headings) < 3 and not re.search(r'<span class="arithmatex">[^<]{60}', table):
            return table
        rows = [re.findall(r"<td\b[^>]*", row) for row in re.findall(r"<tr>.*?</tr>", table, re.S)]
        texts = {k for row in rows for k, cell in enumerate(row) if k and re.search("medium|long", cell)}
        if len(texts) < min(2, len(headings) - 1) or (len(texts) == 1 and len(headings) > 3):
            return table.replace("<table", '<table data-phone="scroll"', 1)

        def row(found: re.Match[str]) -> str:
            labels = iter(headings)
            return re.sub(r"<td\b", lambda _: f'<td data-label="{next(labels)}"', found[0])

        table = re.sub(r"<tr>.*?</tr>", row, table, flags=re.S)
        return re.sub(r"<td([^>]*)></td>", r"<td\1 data-empty></td>", table).replace(
            "<table", '<table data-phone="stacked"', 1
        )

    return re.sub(r"<table>.*?</table>", marked, html, flags=re.S)


def plain(html: str) -> str:
    """The text of a heading, with formulas of one letter as that letter."""
    text = re.sub(r"<[^>]+>", "", html)
    return re.sub(r"\\\((.*?)\\\)", r"\1", text).replace("^\\top", "ᵀ").replace('"', "&quot;").strip()


def formulas(html: str) -> str:
    """Formulas from LaTeX, as pymdownx.arithmatex marks them, to MathML."""
    html = re.sub(r'<span class="arithmatex">\\\((.+?)\\\)</span>', lambda m: mathml(m[1], "inline"), html, flags=re.S)
    return re.sub(
        r'<div class="arithmatex">\s*\\\[(.+?)\\\]\s*</div>',
        lambda m: f'<div class="formula">{mathml(m[1], "block")}</div>',
        html,
        flags=re.S,
    )


def mathml(latex: str, display: str) -> str:
    out = convert(unescape(latex).strip(), display=display)
    # the name of a function: an identifier, with thin spaces behind a factor and before an argument without brackets
    thin = '<mspace width="0.167em" />'
    out = re.sub(
        r"(</mi>)?<mo>((?!mod)[a-z]{2,})</mo>(<mo stretchy)?",
        lambda found: (f"</mi>{thin}" if found[1] else "") + f"<mi>{found[2]}</mi>" + (found[3] or thin),
        out,
    )
    if unknown := re.search(r">\\\w*<", out):
        raise ValueError(f"latex2mathml does not know {unknown[0][1:-1]} in ${latex}$")
    return out


def pictures(html: str, folder: Path) -> str:
    """A picture NAME.svg that has NAME-dark.svg beside it follows the site's colour scheme, not the system's; on narrow
    screens it is NAME-narrow.svg, where there is one."""

    def both(found: re.Match[str]) -> str:
        image, source = found[0], found["source"]
        path = ROOT / "docs" / folder / source
        if not path.with_stem(f"{path.stem}-dark").exists():
            return image
        alt = re.search(r'alt="[^"]*"', image)
        parts = []
        for scheme, end in (("light", ""), ("dark", "-dark")):
            narrow = f"{path.stem}-narrow{end}"
            size = ""
            if path.with_stem(narrow).exists():
                size = f'<source media="(max-width: 600px)" srcset="{sibling(source, narrow)}">'
            own = f'<img {alt[0] if alt else ""} src="{sibling(source, path.stem + end)}">'
            parts.append(f'<picture class="only-{scheme}">{size}{own}</picture>')
        return "".join(parts)

    image = r'<img[^>]*?src="(?P<source>[^":]+)"[^>]*>'
    html = re.sub(rf"<picture>(?:\s*<source[^>]*>)*\s*({image})\s*</picture>", r"\1", html)
    return re.sub(image, both, html)


def sibling(source: str, stem: str) -> str:
    return str(Path(source).with_stem(stem))


def from_root(text: str) -> str:
    """A file of the project's top folder as a page: links into docs/ lose the folder, others become plain text."""
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)(?![\w/-]+\.md)[^)]*\)", r"\1", text)


def anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def examples_page() -> str:
    """examples/README.md, and below it every example in full, with what it prints."""
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text().replace("](../docs/", "](")
    text = re.sub(r"\]\(([\w.]+\.(?:py|ipynb))\)", lambda m: f"](#{anchor(m[1])})", text)
    parts = [text]
    for path in sorted(folder.glob("*.py")):
        parts.append(f"## {path.name} {{ #{anchor(path.name)} }}\n\n```python\n{path.read_text().strip()}\n```\n")
        parts.append(printed((folder / "output" / f"{path.stem}.txt").read_text()))
    for path in sorted(folder.glob("*.ipynb")):
        parts.append(f"## {path.name} {{ #{anchor(path.name)} }}\n\n{notebook(path)}")
    return "\n".join(parts)


def printed(text: str) -> str:
    return f"It prints:\n\n```text\n{text.strip()}\n```\n"


def notebook(path: Path) -> str:
    """The cells one after the other; headings one level down."""
    cells = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cells.append(f"```python\n{source}\n```\n")
            if text := "".join(line for output in cell["outputs"] for line in output["text"]):
                cells.append(printed(text))
        else:
            cells.append(re.sub(r"^#", "###", source, flags=re.M).replace("](../docs/", "](") + "\n")
    return "\n".join(cells)
