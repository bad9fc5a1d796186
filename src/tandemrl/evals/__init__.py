"""Evaluation: the senior alone and with the junior, how the junior reads it, and what a judge thinks of it.

Every phase is the same engine call with another strategy, under one sampling profile that no phase overrides:

- ``pass-at-k``: the senior writes alone.
- ``tandem``: both write, by the ``word`` schedule of training, or where ``selection.strategy`` is ``turn`` by that.
- ``handoff``: both write, one step each; once with the senior first and once with the junior first. Nothing caps the
  number of rounds; the whole text is graded. With turns there are three more arms: one turn each, with either of them
  first, and ``senior_then_junior``, in which the junior takes over after the first turn.
- ``legibility``: the junior's mean cross-entropy per token on what the senior wrote alone, and ``acceptance``, the
  share of its tokens that the junior draws, too, from the same prefix, sampling and random numbers. Samples that do not
  say how they were drawn have none.
- ``drift``: of the same texts, the senior's own surprisal, what the junior pays in excess of it, and the exact
  KL(senior || junior) of the next token, all per token and at temperature 1.
- ``verified``: ``pass-at-k``, and ``verified_pass@k``, which counts a correct sample only if a judge accepts its
  reasoning too (arXiv 2510.07774).

In an environment (``rollout.environment``) every phase takes turns with it. What it says is context: it is neither
counted as text nor read by ``legibility`` and ``drift``.

Rates are means over the samples of a problem, then over the problems of a set; macro is the unweighted mean over sets.
Counts (``problems``, ``samples``, …) are sums, in macro too. ``NAME/low`` and ``NAME/high`` bound the 95 % bootstrap
interval over problems. Parts of scores (``em``, ``f1``, …) and what happened in episodes (``turns``, …) are rates, too;
the headline ones are also given by number of hops (``hops=2/em``). The protocol is that of arXiv 2606.28166.

``suite`` runs phases (``evaluate``) in a ``session`` (models and data, each loaded once). Below it are
``protocol`` (profiles, writing, grading), ``reading`` (the junior reads), ``remote`` (a model behind an endpoint plays
episodes), ``measures`` (from samples to numbers) and ``files`` (results on disk). ``qa`` is about MuSiQue.
"""

from tandemrl.evals.files import EvalResult as EvalResult
from tandemrl.evals.files import differences as differences
from tandemrl.evals.files import read_result as read_result
from tandemrl.evals.files import read_samples as read_samples
from tandemrl.evals.files import write_result as write_result
from tandemrl.evals.measures import EvalError as EvalError
from tandemrl.evals.measures import Sample as Sample
from tandemrl.evals.measures import accepted as accepted
from tandemrl.evals.measures import author_runs as author_runs
from tandemrl.evals.measures import authors_of as authors_of
from tandemrl.evals.measures import graded as graded
from tandemrl.evals.measures import group_of as group_of
from tandemrl.evals.measures import is_headline as is_headline
from tandemrl.evals.measures import legible as legible
from tandemrl.evals.measures import measure_sets as measure_sets
from tandemrl.evals.measures import summarise as summarise
from tandemrl.evals.protocol import PHASES as PHASES
from tandemrl.evals.protocol import PROFILES as PROFILES
from tandemrl.evals.protocol import Phase as Phase
from tandemrl.evals.protocol import Profile as Profile
from tandemrl.evals.protocol import generate_and_grade as generate_and_grade
from tandemrl.evals.protocol import generate_samples as generate_samples
from tandemrl.evals.protocol import grade as grade
from tandemrl.evals.protocol import measure_of as measure_of
from tandemrl.evals.protocol import profile_of as profile_of
from tandemrl.evals.protocol import sampling_for as sampling_for
from tandemrl.evals.protocol import strategies as strategies
from tandemrl.evals.protocol import verify as verify
from tandemrl.evals.reading import divergence as divergence
from tandemrl.evals.reading import read_drift as read_drift
from tandemrl.evals.reading import read_legibility as read_legibility
from tandemrl.evals.remote import Endpoint as Endpoint
from tandemrl.evals.suite import Progress as Progress
from tandemrl.evals.suite import evaluate as evaluate
from tandemrl.evals.suite import evaluate_remote as evaluate_remote
from tandemrl.evals.suite import left_out as left_out
