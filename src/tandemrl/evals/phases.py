"""The phases of an evaluation: what each needs, what it makes of its texts, and how these are measured.

A new phase is a function from texts to samples, a function from a problem's samples to its rates and counts, and a row
of `PHASES`. Everything that a model reads goes through `Texts.read_by`, with one reader or several.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandemrl.data.rows import Prompt
from tandemrl.evals.handover import affected, handover_effects, of_all_places, unit_of
from tandemrl.evals.measures import Sample, accepted, alone, drifted, graded, legible
from tandemrl.evals.protocol import grade, verify
from tandemrl.evals.reading import TextReader, Values, by_both, by_junior, read_texts, read_tokens
from tandemrl.evals.transfer import surprise, transfer, transferred
from tandemrl.types import Metrics


@dataclass(frozen=True)
class Phase:
    """What a phase needs, and what it says of texts.

    read: makes of the texts the samples that are stored. measure: the rates and the counts of one problem, of its
    samples and the k of pass@k. junior: whether it needs a junior. both: whether both write. by_junior: whether the
    junior writes alone. of_solo: whether the texts are those of ``pass-at-k``, which are used if they exist. judge:
    whether it needs a judge of reasoning. graded: whether rows need ground truths. one_vocabulary: whether the models
    must share theirs, if the junior is loaded at all. readers: whether it needs other readers. by_name: whether it is
    run only if it is asked for. settings: the keys of ``eval`` that only this phase reads.
    """

    name: str
    read: Callable[["Texts"], list[Sample]]
    measure: Callable[..., tuple[Metrics, Metrics]]
    junior: bool = True
    both: bool = False
    by_junior: bool = False
    of_solo: bool = False
    judge: bool = False
    graded: bool = True
    one_vocabulary: bool = False
    readers: bool = False
    by_name: bool = False
    settings: tuple[str, ...] = ()


@dataclass
class Texts:
    """The texts that a phase reads. session: the `Session`, whose module imports this one. progress: called with the
    number of texts that models have read. counters: what the result counts beside its measures."""

    session: Any
    samples: list[Sample]
    prompts: Sequence[Prompt]
    progress: Callable[[int], None]
    counters: Metrics

    def read_by(self, models: Sequence[str | None], values: Values, reader: TextReader | None = None) -> list[Sample]:
        """The samples with what models say of their texts (see ``reading.read_texts``)."""
        session, context = self.session, self.session.profile.context
        return read_texts(
            self.samples,
            self.prompts,
            [session.load(model) for model in models],
            values,
            reader=reader,
            context=context and context + session.observation_tokens,
            progress=self.progress,
        )


def scored(texts: Texts) -> list[Sample]:
    """The texts with their scores."""
    with texts.session.scorer() as scorer:
        samples = grade(texts.samples, texts.prompts, scorer)
        texts.counters |= {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
    return samples


def verified(texts: Texts) -> list[Sample]:
    """The texts with their scores, and what a judge thinks of the reasoning of correct ones."""
    return verify(scored(texts), texts.prompts, texts.session.judges)


def legibility(texts: Texts) -> list[Sample]:
    """The senior's texts as the junior reads them."""
    session, reader = texts.session, texts.session.reader
    drawn = (session.profile.sampling, session.vocabulary) if reader is None else ()
    return texts.read_by([session.junior], by_junior(*drawn), reader)


def drift(texts: Texts) -> list[Sample]:
    """The senior's texts as both read them."""
    return texts.read_by([texts.session.model, texts.session.junior], by_both)


def junior_alone(texts: Texts) -> list[Sample]:
    """The junior's texts with their scores, as it reads them itself."""
    texts.samples = [
        sample._replace(author=sample.author and sample.author.replace("S", "J"), senior_share=0.0)
        for sample in scored(texts)
    ]
    texts.session.close_engine()
    return texts.read_by([texts.session.model], by_junior())


def transfers(texts: Texts) -> list[Sample]:
    """What other readers make of parts of the senior's texts."""
    session, prompts = texts.session, texts.prompts
    samples = texts.samples if all(sample.correct is not None for sample in texts.samples) else scored(texts)
    with session.scorer() as scorer:
        return transfer(samples, prompts, session.readers(), lambda some: grade(some, prompts, scorer), texts.progress)


def surprises(texts: Texts) -> list[Sample]:
    """How the senior's texts, and their own, surprise other readers."""
    return surprise(texts.samples, texts.session.readers())


def handovers(texts: Texts) -> list[Sample]:
    """The senior's texts with the effects of handing over to the junior inside of them."""
    session, settings = texts.session, texts.session.config.eval
    read = read_tokens(texts.samples, texts.prompts, [session.load(session.junior)], by_junior())
    surprisals = {i: of_text["cross_entropy"] for i, of_text in read}
    engine = session.engine(PHASES["handover-effect"])
    with session.scorer() as scorer:
        samples = handover_effects(
            texts.samples,
            texts.prompts,
            unit_of(settings.handover, session.tokenizer, engine.vocabulary),
            engine=engine,
            tokenizer=session.tokenizer,
            profile=session.profile,
            branches=settings.branches,
            grade=lambda some: grade(some, texts.prompts, scorer),
            surprisals=surprisals,
            progress=texts.progress,
        )
    texts.counters |= of_all_places(samples)
    return samples


# What the senior writes alone (``protocol.strategies``), graded: every phase that is ``of_solo`` reads these texts.
_SOLO = Phase("pass-at-k", scored, graded, junior=False)
PHASES = {
    phase.name: phase
    for phase in (
        _SOLO,
        Phase("tandem", scored, graded, both=True),
        Phase("handoff", scored, graded, both=True),
        Phase("legibility", legibility, legible, of_solo=True, graded=False),
        Phase("drift", drift, drifted, of_solo=True, graded=False, one_vocabulary=True),
        replace(_SOLO, name="verified", read=verified, measure=accepted, of_solo=True, judge=True),
        Phase("junior", junior_alone, alone, by_junior=True),
        Phase("surprise", surprises, transferred, junior=False, of_solo=True, graded=False, readers=True),
        Phase("transfer", transfers, transferred, junior=False, of_solo=True, readers=True),
        Phase(
            "handover-effect",
            handovers,
            affected,
            both=True,
            of_solo=True,
            one_vocabulary=True,
            by_name=True,
            settings=("branches", "handover"),
        ),
    )
}
