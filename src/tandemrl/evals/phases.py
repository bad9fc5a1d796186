"""The phases of an evaluation: for each, what it needs and what it makes of its texts (see `Phase`)."""

from dataclasses import replace
from typing import Any

from tandemrl.evals.measures import Sample, accepted, alone, drifted, graded, legible
from tandemrl.evals.protocol import grade, verify
from tandemrl.evals.reading import read_drift, read_legibility
from tandemrl.evals.session import Phase, Texts


def scored(texts: Texts) -> list[Sample]:
    """The texts with their scores."""
    with texts.session.scorer() as scorer:
        samples = grade(texts.samples, texts.prompts, scorer)
        texts.counters |= {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
    return samples


def verified(texts: Texts) -> list[Sample]:
    """The texts with their scores, and what a judge thinks of the reasoning of correct ones."""
    return verify(scored(texts), texts.prompts, texts.session.judges)


def read_by_junior(texts: Texts) -> list[Sample]:
    """The senior's texts as the junior reads them."""
    session, reader = texts.session, texts.session.reader
    return read_legibility(
        texts.samples,
        texts.prompts,
        session.load(session.junior),
        sampling=session.profile.sampling,
        vocabulary=session.vocabulary if reader is None else None,
        reader=reader,
        **_reading(texts),
    )


def drift(texts: Texts) -> list[Sample]:
    """The senior's texts as both read them."""
    session = texts.session
    models = session.load(session.model), session.load(session.junior)
    return read_drift(texts.samples, texts.prompts, *models, **_reading(texts))


def junior_alone(texts: Texts) -> list[Sample]:
    """The junior's texts with their scores, as it reads them itself."""
    samples = [
        sample._replace(author=sample.author and sample.author.replace("S", "J"), senior_share=0.0)
        for sample in scored(texts)
    ]
    texts.session.close_engine()
    return read_legibility(samples, texts.prompts, texts.session.load(texts.session.model), **_reading(texts))


def _reading(texts: Texts) -> dict[str, Any]:
    session = texts.session
    context = session.profile.context
    return {"context": context and context + session.observation_tokens, "progress": texts.read}


# What the senior writes alone (``protocol.strategies``), graded: every phase that is ``of_solo`` reads these texts.
_SOLO = Phase("pass-at-k", scored, graded, junior=False)
PHASES = {
    phase.name: phase
    for phase in (
        _SOLO,
        Phase("tandem", scored, graded, both=True),
        Phase("handoff", scored, graded, both=True),
        Phase("legibility", read_by_junior, legible, of_solo=True, graded=False),
        Phase("drift", drift, drifted, of_solo=True, graded=False, one_vocabulary=True),
        replace(_SOLO, name="verified", read=verified, measure=accepted, of_solo=True, judge=True),
        Phase("junior", junior_alone, alone, by_junior=True),
    )
}
