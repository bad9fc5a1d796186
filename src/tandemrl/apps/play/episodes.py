"""Episodes on the page: an environment or a program acts between what senior and junior write."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tandemrl.apps.play.duo import Draft, Duo, Piece
from tandemrl.config import Config, SelectionConfig
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.rollout.collect import generate
from tandemrl.rollout.engine import Completion
from tandemrl.rollout.envs.episodes import EpisodeRunner, opening_prompts
from tandemrl.rollout.schedule import schedule_of
from tandemrl.training.state import sampling_of
from tandemrl.types import Response


class EpisodeDuo(Duo):
    """A `Duo` whose texts are episodes. An episode is written as a whole when its first piece is asked for. What was
    said between the turns is in it, by nobody (`Author.CONTEXT`). Of several branches it is the one written last.

    Args:
        runner: of the environment or source.
        config: that of the run, for its limits.
        rows: by the prompt that stands for them on the page. Any other prompt is a row that has nothing else.
        models, how: see `Duo`.
    """

    def __init__(self, *models: Any, runner: EpisodeRunner, config: Config, rows: dict[str, Row], **how: Any) -> None:
        super().__init__(*models, **how)
        self._runner, self._config, self._rows = runner, config, rows
        self._written = lru_cache(maxsize=4)(self._write)

    @property
    def turns(self) -> bool:
        return True

    def write(self, draft: Draft, count: int) -> Piece:
        """The next ``count`` tokens of an episode, or fewer at its end.

        Raises:
            ValueError: the prompt is too long, or the text so far is not that of the episode. EngineError: it failed.
        """
        self._check(draft.tokens)
        prompt, one = self._episode(draft)
        known, tokens = len(draft.tokens), one.tokens.tolist()
        if tuple(tokens[:known]) != draft.tokens:
            raise ValueError("this is not the episode's text; generate it anew")
        end = min(known + count, len(tokens))
        over = end == len(tokens)
        longer = replace(draft, tokens=tuple(tokens[:end]), authors=tuple(one.author[:end].tolist()))
        return Piece(self._read(longer, known, prompt, over=over), one.stop_reason if over else None)

    def say(self, draft: Draft, text: str) -> Piece:
        raise ValueError("nothing can be inserted into an episode")

    def answered(self, draft: Draft) -> tuple[Response, Transcript | None] | None:
        prompt, one = self._episode(draft)
        if len(draft.tokens) < len(one.tokens):
            return None
        return self._reader_of_responses.of(one, self._reader_of_responses.opened(prompt)), one.transcript

    def _episode(self, draft: Draft) -> tuple[Sequence[int], Completion]:
        return self._written(draft.prompt, draft.seed, draft.selection, draft.temperature)

    def _write(
        self, text: str, seed: int, selection: SelectionConfig, temperature: float
    ) -> tuple[Sequence[int], Completion]:
        row = self._rows.get(text) or Row("typed", ({"role": "user", "content": text},), "", "", {})
        prompts, _ = opening_prompts([row], self.tokenizer, self._config.data, self._runner)
        if not prompts:
            raise ValueError(f"the prompt is longer than data.max_prompt_tokens={self._config.data.max_prompt_tokens}")
        batch = generate(
            self.engine,
            [(0, prompts[0])],
            strategy=schedule_of(selection, self.tokenizer, self.engine.vocabulary, by_text=False).strategy(1),
            sampling=replace(sampling_of(self._config.rollout), temperature=temperature),
            group_size=1,
            seed=seed,
            step=0,
            episode_runner=self._runner,
        )
        [[one]] = batch.completions
        return prompts[0].tokens if one.prompt is None else one.prompt, one
