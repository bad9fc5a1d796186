"""Evaluation of the senior alone and with the junior, of its legibility to the junior, and of its reasoning by a judge.

Every phase is the same engine call with another strategy, under one sampling profile that no phase overrides:

- ``pass-at-k``: the senior writes alone (``solo("senior")``), ``eval.samples`` texts for each prompt; ``pass@k`` is the
  unbiased ``stats.pass_at_k``. During a run, ``training.evaluation.evaluate_solo`` does it.
- ``tandem``: both write, under the strategy ``word``, or under ``turn`` if ``selection.strategy`` is ``turn``.
- ``handoff``: both write, alternating after every step; once with the senior first and once with the junior first. The
  number of rounds is not limited, and the whole text is graded. In an environment there are three more arms: two in
  which the authors alternate after every turn, with either of them first, and ``senior_then_junior``, in which the
  junior takes over after the first turn.
- ``legibility``: the junior's mean cross-entropy per token and per byte on what the senior wrote alone, and
  ``acceptance``, the share of its tokens that the junior also draws from the same prefix, sampling and random numbers.
  A junior of another vocabulary has none.
- ``drift``: for the same texts, the senior's own surprisal, the excess of the junior's cross-entropy over it, and the
  exact KL(senior || junior) of the next token, all per token and at temperature 1.
- ``verified``: ``pass-at-k``, and ``verified_pass@k``, which counts a correct sample only if a judge accepts its
  reasoning as well (arXiv 2510.07774).
- ``transfer``: other readers (``eval.readers``) get growing parts of the senior's texts and then answer, see
  `evals.transfer`; one arm per reader. ``surprise``: the cross-entropies of it alone, which need no ground truths.
- ``judge-legibility``: a judge's grade, 0 to 4, of how well correct texts can be followed. ``recover``, ``checkable``,
  ``monitor``, ``intervene``: see `evals.probes`.
- ``handover-effect``: what a handover inside of a solo text does to its reward (see ``handover``). Run by name only.

With an environment (``rollout.environment``), the authors take turns with it in every phase. What it says is context:
it is neither counted as text nor read by ``legibility`` and ``drift``.

Rates are means over the samples of a problem, then over the problems of a set; macro is the unweighted mean over sets.
Counts (``problems``, ``samples``, …) are sums, in macro too. ``NAME/low`` and ``NAME/high`` bound the 95 % bootstrap
interval over problems. Parts of scores (``em``, ``f1``, …) and counts of episodes (``turns``, …) are rates as well. The
headline rates are also given by number of hops (``hops=2/em``). The protocol is that of arXiv 2606.28166.

``suite`` runs the ``phases`` (``evaluate``) in a ``session`` (models and data, each loaded once). They use ``protocol``
(profiles, writing, grading), ``reading`` (the junior reads texts), ``readers`` and ``traces`` (others go on from parts
of texts), ``remote`` (a model behind an endpoint acts in episodes), ``measures`` (from samples to numbers) and
``files`` (results on disk). A new phase is a row of
``phases.PHASES``.
"""

from tandemrl.evals.files import EvalResult as EvalResult
from tandemrl.evals.files import read_result as read_result
from tandemrl.evals.files import read_samples as read_samples
from tandemrl.evals.measures import EvalError as EvalError
from tandemrl.evals.measures import Sample as Sample
from tandemrl.evals.measures import authors_of as authors_of
from tandemrl.evals.measures import graded as graded
from tandemrl.evals.measures import is_headline as is_headline
from tandemrl.evals.measures import summarise as summarise
from tandemrl.evals.phases import PHASES as PHASES
from tandemrl.evals.protocol import generate_samples as generate_samples
from tandemrl.evals.protocol import grade as grade
from tandemrl.evals.protocol import profile_of as profile_of
from tandemrl.evals.protocol import run_of_model as run_of_model
from tandemrl.evals.protocol import sampling_for as sampling_for
from tandemrl.evals.protocol import sampling_of_model as sampling_of_model
from tandemrl.evals.session import Endpoint as Endpoint
from tandemrl.evals.stored import Stored as Stored
from tandemrl.evals.suite import evaluate as evaluate
from tandemrl.evals.suite import left_out as left_out
