"""The pages of the site that are made from the sources (a hook of mkdocs), and links that leave the folder docs/."""

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tandemrl.config import Config, expected, explanation, leaves

ROOT = Path(__file__).resolve().parents[1]
COPIES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NOTEBOOKS = {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
ONE_PIECE = re.compile(r"\[[−+-]?[\d.,]+, [−+-]?[\d.,]+\]|&[lg]t;= -?[\d.]+")
"""An interval or a bar in a table."""
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in COPIES.items():
        files.append(File.generated(config, page, content=_links((ROOT / name).read_text(), ROOT, config)))
    files.append(File.generated(config, "configuration.md", content=configuration()))
    files.append(File.generated(config, "api.md", content=api()))
    for source, page in NOTEBOOKS.items():
        text, pictures = notebook(ROOT / source, config)
        files.append(File.generated(config, page, content=text))
        for name, png in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=png))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Comments that frame generated tables say nothing to a reader."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    text = re.sub(r"<!-- (figures: [\w-]+|end) -->\n?", "", markdown)
    return text if page.file.src_uri in COPIES.values() else _links(text, folder, config)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables that read well in narrow columns: an interval stays in one piece, and a name breaks after a dot."""

    def cell(match: re.Match[str]) -> str:
        text = ONE_PIECE.sub(r'<span class="one-piece">\g<0></span>', match[0])
        return re.sub(r"(?<=<code>)[^<]*", lambda code: re.sub(r"([._/,])(?=\w)", r"\1<wbr>", code[0]), text)

    return re.sub(r"<table>.*?</table>", _of_keys, re.sub(r"<td.*?</td>", cell, html, flags=re.DOTALL), flags=re.DOTALL)


def _of_keys(match: re.Match[str]) -> str:
    """A table of keys is marked as one, and its cells with their columns, for phones: site.css."""
    heads = re.findall(r"<th[^>]*>(.*?)</th>", match[0])
    if heads[0] != "key":
        return match[0]

    def row(cells: re.Match[str]) -> str:
        names = iter("" if head in ("key", "meaning") else f' data-name="{head}"' for head in heads)
        return re.sub("<td", lambda _: f"<td{next(names)}", cells[0])

    return f'<div class="keys">{re.sub(r"<tr>.*?</tr>", row, match[0], flags=re.DOTALL)}</div>'


def _links(text: str, folder: Path, config: MkDocsConfig) -> str:
    """Links to files outside of docs/ lead to the repository, those to pages that are made here to these."""

    def moved(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match.group(0)  # mkdocs knows it, or warns
        name = path.relative_to(ROOT).as_posix()
        if page := (COPIES | NOTEBOOKS).get(name):
            target = "../" * len(folder.relative_to(ROOT / "docs").parts) + page if folder != ROOT else page
        elif folder == ROOT and path.is_relative_to(ROOT / "docs"):
            target = path.relative_to(ROOT / "docs").as_posix()
        elif not path.is_relative_to(ROOT / "docs"):
            target = f"{config.extra['repository']}/blob/main/{name}"
        return f"{opening}{target}{anchor or ''}{closing}"

    return LINK.sub(moved, text)


def configuration() -> str:
    """Every key with its type, default, range and meaning, a table per section."""
    lines = [
        "# Configuration",
        "",
        "Every key, as `tandemrl config` prints it. Set one on the command line (`train.lr=1e-4`), in a YAML file",
        '(`--config mine.yaml`), or in Python (`load("quickstart", ["train.lr=1e-4"])`).',
    ]
    section = None
    for key in leaves(Config()):
        if key.section is not section:
            section = key.section
            name = key.key.rpartition(".")[0] or "top level"
            lines += ["", f"## {name}", "", " ".join((section.__doc__ or "").split()), ""]
            lines += ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
        default = key.value if isinstance(key.value, str) and key.value else json.dumps(key.value)
        cells = (f"`{key.key}`", expected(key.type), f"`{default}`", key.allowed.words if key.allowed else "")
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in (*cells, explanation(key))) + " |")
    return "\n".join(lines) + "\n"


def notebook(source: Path, config: MkDocsConfig) -> tuple[str, dict[str, bytes]]:
    """A notebook with its committed outputs as a page, and its pictures by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(source.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown, png = _output(output, f"{source.stem}-{cell['id']}.png")
            parts.append(shown)
            pictures |= png
    where = f"{config.extra['repository']}/blob/main/notebooks/{source.name}"
    title, first, *rest = parts[0].split("\n\n")
    parts[0] = "\n\n".join((title, first, f"This page is a notebook: [{source.name}]({where}).", *rest))
    return "\n\n".join(parts) + "\n", pictures


def _output(output: dict[str, Any], picture: str) -> tuple[str, dict[str, bytes]]:
    """What a cell put out, as Markdown: its picture, else its richest text."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```", {}
    data = {kind: "".join(text) for kind, text in output["data"].items()}
    if "image/png" in data:
        return f'<div class="plot" markdown>![plot]({picture})</div>', {picture: base64.b64decode(data["image/png"])}
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>', {}
    return data.get("text/markdown") or f"```text\n{data['text/plain']}\n```", {}


def api() -> str:
    """The public names, in the groups of ARCHITECTURE.md, with their docstrings."""
    stub = ast.parse((ROOT / "src" / "tandemrl" / "__init__.pyi").read_text())
    home = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Public names")[2].partition("\n## ")[0]
    lines = ["# Python API", "", "Every name can be imported from `tandemrl`."]
    for row in section.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell) if name in home]
        if row.startswith("|") and names:
            lines += ["", f"## {re.sub('`', '', cells[0]).capitalize()}"]
            lines += [text for name in names for text in ("", f"::: {home[name]}")]
    return "\n".join(lines) + "\n"
