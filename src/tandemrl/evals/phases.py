"""The phases of an evaluation: what each needs, what it makes of its texts, and how these are measured.

A new phase is a function from texts to samples, a function from a problem's samples to its rates and counts, and a row
of `PHASES`. Everything that a model reads goes through `Texts.read_by`, with one reader or several.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tandemrl.data.rows import Prompt
from tandemrl.evals.handover import affected, handover_effects, of_all_places, unit_of
from tandemrl.evals.measures import Sample, accepted, alone, drifted, graded, legible, rated, sampled
from tandemrl.evals.probes import (
    checkable,
    checked,
    g_mean2,
    intervene,
    monitor,
    monitored,
    moved,
    pooled_auroc,
    recover,
)
from tandemrl.evals.protocol import grade, verify
from tandemrl.evals.readers import Reader
from tandemrl.evals.reading import TextReader, Values, by_both, by_itself, by_junior, read_texts, read_tokens
from tandemrl.evals.transfer import surprise, transfer, transferred
from tandemrl.types import Metrics


@dataclass(frozen=True)
class Phase:
    """What a phase needs, and what it says of texts.

    read: makes of the texts the samples that are stored. measure: the rates and the counts of one problem, of its
    samples and the k of pass@k. junior: whether it needs a junior. both: whether both write. by_junior: whether the
    junior writes alone. of_solo: whether the texts are those of ``pass-at-k``, which are used if they exist. judge:
    whether it needs a judge of reasoning. graded: whether rows need ground truths. one_vocabulary: whether the models
    must share theirs, if the junior is loaded at all. readers: whether it needs other readers. log_probs: whether
    these must say how likely a text is. itself: whether the senior reads its own texts again. by_name: whether it is
    run only if it is asked for. settings: the keys of ``eval`` that only this phase reads. whole: what it says of all
    samples together, with the resamples and the seed of intervals.
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
    log_probs: bool = False
    itself: bool = False
    by_name: bool = False
    settings: tuple[str, ...] = ()
    whole: Callable[[Sequence[Sample], int, int], Metrics] | None = None


@dataclass
class Texts:
    """The texts that a phase reads. session: the `Session`, whose module imports this one. progress: called with the
    number of texts that models have read. counters: what the result counts beside its measures. meter: makes a callback
    that adds up amounts, of what they are and of their total."""

    session: Any
    samples: list[Sample]
    prompts: Sequence[Prompt]
    progress: Callable[[int], None]
    counters: Metrics
    meter: Callable[[str, int], Callable[[int], None]]

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


def entropy(texts: Texts) -> list[Sample]:
    """The senior's texts with the entropy that it drew them with."""
    session = texts.session
    return texts.read_by([session.model], by_itself(session.profile.sampling))


def junior_alone(texts: Texts) -> list[Sample]:
    """The junior's texts with their scores, as it reads them itself."""
    texts.samples = [
        sample._replace(author=sample.author and sample.author.replace("S", "J"), senior_share=0.0)
        for sample in scored(texts)
    ]
    texts.session.close_engine()
    return texts.read_by([texts.session.model], by_junior())


def others(
    make: Callable[..., list[Sample]],
    *settings: str,
    graded: bool = True,
    itself: bool = False,
) -> Callable[[Texts], list[Sample]]:
    """What reads texts with other models, or with the senior ``itself``: ``make`` gets the texts, which are graded
    unless not ``graded``, their prompts, the readers, a grader, and the values of ``settings``, keys of ``eval``."""

    def read(texts: Texts) -> list[Sample]:
        session, prompts, samples = texts.session, texts.prompts, texts.samples
        values = [getattr(session.config.eval, key) for key in settings]

        def readers() -> Iterator[Reader]:
            for reader in session.readers((session.model,) if itself else None):
                reader.meter = texts.meter
                yield reader
                texts.progress(len(samples))

        if not graded:
            return make(samples, prompts, readers(), list, *values)
        if any(sample.correct is None for sample in samples):
            samples = scored(texts)
            session.close_engine()
        with session.scorer() as scorer:
            return make(samples, prompts, readers(), lambda some: grade(some, prompts, scorer), *values)

    return read


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
_of_readers = partial(Phase, junior=False, of_solo=True, readers=True)
PHASES = {
    phase.name: phase
    for phase in (
        _SOLO,
        Phase("tandem", scored, graded, both=True),
        Phase("handoff", scored, graded, both=True),
        Phase("legibility", legibility, legible, of_solo=True, graded=False),
        Phase("drift", drift, drifted, of_solo=True, graded=False, one_vocabulary=True),
        replace(_SOLO, name="verified", read=verified, measure=accepted, of_solo=True, judge=True),
        replace(_SOLO, name="judge-legibility", read=verified, measure=rated, of_solo=True, judge=True, by_name=True),
        Phase("junior", junior_alone, alone, by_junior=True),
        _of_readers("transfer", others(transfer, "draws"), transferred, settings=("draws",)),
        _of_readers(
            "surprise", others(surprise, graded=False), transferred, log_probs=True, graded=False, by_name=True
        ),
        _of_readers("recover", others(recover), transferred, by_name=True),
        _of_readers("checkable", others(checkable), checked, log_probs=True, by_name=True, whole=pooled_auroc),
        _of_readers(
            "monitor",
            others(monitor, graded=False),
            monitored,
            log_probs=True,
            graded=False,
            by_name=True,
            whole=g_mean2,
        ),
        replace(_SOLO, name="intervene", read=others(intervene, itself=True), measure=moved, by_name=True, itself=True),
        Phase("entropy", entropy, sampled, junior=False, of_solo=True, graded=False, itself=True, by_name=True),
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
