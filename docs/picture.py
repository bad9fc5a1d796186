"""The picture of README.md: the first right rollout of a run's last step, with its authors in colour.

    python docs/picture.py runs/quickstart/jargon/seed-0/tandem runs/quickstart/jargon/seed-0/pair/senior

Arguments: a run's folder, and the folder of its tokenizer. Writes docs/images/rollout.svg.
"""

import json
import sys
from html import escape
from pathlib import Path

from tandemrl import load_tokenizer
from tandemrl.files import write_text
from tandemrl.training.tracking import authored_spans
from tandemrl.types import Author

OUT = Path(__file__).parent / "images" / "rollout.svg"
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
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, (row + 3) * LINE + 2 * MARGIN
    below = MARGIN + (row + 2.2) * LINE
    legend = "".join(
        f'<rect x="{x}" y="{below - 14}" width="14" height="18" rx="3" fill="{FILL[who]}"/>'
        f'<text x="{x + 20}" y="{below}">{who.name.lower()}</text>'
        for who, x in ((Author.SENIOR, MARGIN), (Author.JUNIOR, MARGIN + 110))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(caption)}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
        f'fill="#1c1c1c"><title>{escape(caption)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="#c9c9c9"/>{"".join(boxes)}{legend}'
        f'<text x="{MARGIN + 220}" y="{below}" fill="#5c5c5c">{escape(caption)}</text></svg>\n'
    )


def _box(author: Author, text: str, row: int, column: int) -> str:
    x, y, width = MARGIN + column * ADVANCE, MARGIN + row * LINE, len(text) * ADVANCE
    rect = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 4}" fill="{FILL[author]}"/>'
    written = (
        f'<text x="{x:.1f}" y="{y + 16}" xml:space="preserve" textLength="{width:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
    return rect + written


def main() -> None:
    run, tokenizer_folder = map(Path, sys.argv[1:])
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    sample = next(line for line in lines if line["step"] == last and line["reward"] == 1)
    tokenizer = load_tokenizer(tokenizer_folder)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    spans = authored_spans(sample["tokens"], sample["author"], decode)
    (prompt, question), *written = spans
    asked = " ".join(question.split()).removeprefix("user ").removesuffix(" assistant")
    shown = [(prompt, f"{asked}\n"), *((who, text.replace("\n\n", "\n")) for who, text in written)]
    write_text(OUT, picture(shown, f"first right rollout of step {last}"))
    print(OUT)


if __name__ == "__main__":
    main()
