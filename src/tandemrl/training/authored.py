"""The texts of rollouts by author: for samples.jsonl, for tables in a terminal and for other views."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from tandemrl.types import Author, Rollout, own_turns

STYLES = {Author.SENIOR: "cyan", Author.JUNIOR: "yellow", Author.CONTEXT: "dim"}
MARKS = {Author.SENIOR: ("", ""), Author.JUNIOR: ("‹", "›"), Author.CONTEXT: ("⟨", "⟩")}
OBSERVATION_CHARS = 200
"""How many characters are shown of what the environment says after a turn."""


def authored_spans(
    tokens: Sequence[int], author: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[Author, str]]:
    """The text of each run of tokens by the same author. Joined, the texts are the decoded whole.

    Each run is decoded together with the one before it, since some tokenizers need the token to the left. A character
    whose bytes are from two authors counts as the second author's.
    """
    spans: list[tuple[Author, str]] = []
    window, shown, start, boundary = 0, "", 0, 0  # ``shown`` of decode(tokens[window:start]) is in ``spans`` already
    for who, run in groupby(author):
        end = start + len(list(run))
        text = decode(list(tokens[window:end]))
        whole = text.rstrip("\ufffd") if end < len(tokens) else text
        if not whole.startswith(shown):
            whole = shown + decode(list(tokens[start:end]))
        spans.append((Author(who), whole[len(shown) :]))
        shown, start = whole, end
        if whole == text:  # no character is cut here, so that a window may begin here later
            window, boundary = boundary, end
            shown = decode(list(tokens[window:end]))
    return spans


def written_text(rollout: Rollout, tokenizer: Any) -> str:
    """The text that the authors wrote, with special tokens. Turns are joined by line breaks."""
    return "\n".join(tokenizer.decode(turn.tolist()) for turn in own_turns(rollout.tokens, rollout.author))


def authored_text(rollout: Rollout, tokenizer: Any, *, mark_steps: bool = False) -> Text:
    """The response of a rollout, coloured by author.

    For terminals without colour, the junior's text also stands between ‹ and ›. The beginning of what the environment
    says stands between ⟨ and ⟩.

    Args:
        mark_steps: write a blank line, which ends a step, as ¶ and a line break.
    """
    text = Text()
    tokens, authors = (channel[rollout.context_tokens :].tolist() for channel in (rollout.tokens, rollout.author))
    for author, span in authored_spans(tokens, authors, tokenizer.decode):
        if author == Author.CONTEXT:
            shown = span if len(span) <= OBSERVATION_CHARS else f"{span[:OBSERVATION_CHARS]}…"
        else:
            shown = span.replace("\n\n", "¶\n") if mark_steps else span
        left, right = MARKS[author]
        if shown:
            text.append(f"{left}{shown}{right}", style=STYLES[author])
    return text


def sample_table(step: int, rollouts: Sequence[Rollout], tokenizer: Any) -> Table:
    """A table of the responses of a few rollouts and their rewards. ¶ stands for a blank line, which ends a step."""
    observed = ", ⟨observation⟩" if any(rollout.transcript is not None for rollout in rollouts) else ""
    table = Table(title=f"samples of step {step}: senior, ‹junior›{observed}", title_justify="left", show_lines=True)
    table.add_column("example", overflow="fold")
    table.add_column("reward", justify="right")
    table.add_column("response", overflow="fold", ratio=1)
    for rollout in rollouts:
        table.add_row(
            Text(rollout.example_id), f"{rollout.reward:g}", authored_text(rollout, tokenizer, mark_steps=True)
        )
    return table
