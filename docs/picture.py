"""The pictures of the documents, with the authors in colour.

    python docs/picture.py runs/quickstart/jargon/seed-0/tandem runs/quickstart/jargon/seed-0/pair/senior
    python docs/picture.py --readers HuggingFaceTB/SmolLM2-135M-Instruct google/gemma-3-270m-it

The first, docs/images/rollout.svg, has the first right rollout of a run's last step; arguments: the run's folder, and
that of its tokenizer. The second, docs/images/readers.svg, has a text as models of two families read it; arguments:
folders or hub ids of their tokenizers.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import torch

from tandemrl import load_tokenizer, replay
from tandemrl.files import write_text
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.draws import request_key
from tandemrl.selection.whole_words import before_text_word, text_tables
from tandemrl.training.authored import authored_spans
from tandemrl.types import Author

IMAGES = Path(__file__).parent / "images"
TEXT = "A greengrocer unpacks 24 pomegranates and repackages 15 for Łukasz."
COLUMNS, ADVANCE, LINE, MARGIN = 72, 8.43, 26, 18
FILL = {Author.SENIOR: "#cfe3ff", Author.JUNIOR: "#ffe3c2", Author.CONTEXT: "#f1f1f1"}


def picture(spans: list[tuple[Author, str]], caption: str) -> str:
    """Characters on a grid, so that a box is as wide as its text in any monospace font."""
    boxes: list[str] = []
    row, column = 0, 0
    for author, text in spans:
        for i, line in enumerate(text.split("\n")):
            if i:
                row, column = row + 1, 0
            while line:
                fits = COLUMNS - column
                if len(line) > fits and " " in line[:fits]:
                    fits = line.rindex(" ", 0, fits) + 1
                part, line = line[:fits], line[fits:]
                boxes.append(_box(author, part, row, column))
                column += len(part)
                if line:
                    row, column = row + 1, 0
    return _sheet("".join(boxes), row + 3, caption)


def readers(names: list[str], key: int) -> str:
    """``TEXT`` in the tokens of both models: the senior's first."""
    senior, junior = map(load_tokenizer, names)
    tokens = senior.encode(TEXT, add_special_tokens=False)
    strategy = before_text_word(0.5, text_tables(senior))
    authors = replay(strategy, torch.tensor([key]), torch.tensor([tokens]), torch.tensor([len(tokens)])).author[0]
    by_character = [who for piece, who in _pieces(tokens, authors.tolist(), senior) for _ in piece]
    shown = []
    for row, (name, tokenizer) in enumerate(zip(("senior", "junior"), (senior, junior), strict=True)):
        tokens = tokenizer.encode(TEXT, add_special_tokens=False)
        y, column = MARGIN + 2.4 * row * LINE, 0
        shown.append(
            f'<text x="{MARGIN}" y="{y + 14}" fill="#5c5c5c">in the {name}\'s vocabulary: {len(tokens)} tokens</text>'
        )
        for piece, _ in _pieces(tokens, tokens, tokenizer):
            shown.append(_box(Author(by_character[column]), piece, 2.4 * row + 0.95, column, edge="#8a8a8a"))
            column += len(piece)
    return _sheet("".join(shown), 6.6, "each word has one author")


def _pieces(tokens: list[int], labels: list[int], tokenizer: Any) -> Iterator[tuple[str, int]]:
    """The text of each token; tokens that share a character are one piece."""
    known, part = token_bytes(tokenizer), b""
    for token, label in zip(tokens, labels, strict=True):
        part += known[token]
        with suppress(UnicodeDecodeError):
            yield part.decode(), label
            part = b""


def _sheet(boxes: str, rows: float, caption: str) -> str:
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, rows * LINE + 2 * MARGIN
    below = MARGIN + (rows - 0.8) * LINE
    legend = "".join(
        f'<rect x="{x}" y="{below - 14}" width="14" height="18" rx="3" fill="{FILL[who]}"/>'
        f'<text x="{x + 20}" y="{below}">{who.name.lower()}</text>'
        for who, x in ((Author.SENIOR, MARGIN), (Author.JUNIOR, MARGIN + 110))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(caption)}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
        f'fill="#1c1c1c"><title>{escape(caption)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="#c9c9c9"/>{boxes}{legend}'
        f'<text x="{MARGIN + 220}" y="{below}" fill="#5c5c5c">{escape(caption)}</text></svg>\n'
    )


def _box(author: Author, text: str, row: float, column: int, edge: str = "none") -> str:
    x, y, width = MARGIN + column * ADVANCE, MARGIN + row * LINE, len(text) * ADVANCE
    rect = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 4}" fill="{FILL[author]}" stroke="{edge}"/>'
    written = (
        f'<text x="{x:.1f}" y="{y + 16}" xml:space="preserve" textLength="{width:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
    return rect + written


def main() -> None:
    if sys.argv[1] == "--readers":
        out = IMAGES / "readers.svg"
        write_text(out, readers(sys.argv[2:], request_key(0, 0, 0, 0)))
        print(out)
        return
    run, tokenizer_folder = map(Path, sys.argv[1:])
    with open(run / "samples.jsonl", encoding="utf-8") as file:  # texts may hold other line separators than \n
        lines = [json.loads(line) for line in file]
    last = max(line["step"] for line in lines)
    sample = next(line for line in lines if line["step"] == last and line["reward"] == 1)
    tokenizer = load_tokenizer(tokenizer_folder)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    spans = authored_spans(sample["tokens"], sample["author"], decode)
    (prompt, question), *written = spans
    asked = " ".join(question.split()).removeprefix("user ").removesuffix(" assistant")
    shown = [(prompt, f"{asked}\n"), *((who, text.replace("\n\n", "\n")) for who, text in written)]
    out = IMAGES / "rollout.svg"
    write_text(out, picture(shown, f"first right rollout of step {last}"))
    print(out)


if __name__ == "__main__":
    main()
