"""The experiments that there are: arms, and what is compared of them. Nothing here needs torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

BASE = "base"
"""The arm of the model before training, as ``report.records`` has it; this module is to import nothing heavy."""


class ExperimentError(RuntimeError):
    """An experiment cannot be run, or parts of it failed. The message names them."""


class Arm(NamedTuple):
    """One way to train.

    ``overrides`` are assignments of config keys, in which ``{junior}`` is the folder of the junior, and each name of
    `makings` what is built under it. If ``junior_steps`` is set, the arm trains with a junior whose warm start took
    that many steps, instead of with the pair's own (evaluation keeps the pair's). If ``of`` is set, nothing is trained:
    it is that arm's model, at the temperature at which its texts have the entropy of those of the arm ``matched_to``
    (`sharpness`).
    """

    name: str
    title: str
    overrides: tuple[str, ...] = ()
    junior_steps: int | None = None
    of: str | None = None
    matched_to: str | None = None

    @property
    def needs(self) -> frozenset[str]:
        """The arms that are trained before."""
        return frozenset(name for name in (self.of, self.matched_to) if name is not None)


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare.

    contrasts: pairs of arms (a, b), for paired differences a - b. config, overrides: the config of every run, and
    assignments of keys on top of it. pair_steps: the number of warm-start steps; None means the pair's own. device:
    where everything runs. problems, samples: the number of held-out problems of every evaluation, and of samples for
    each. readers: how many models that are never in training read the texts of every arm. evaluation,
    evaluation_overrides: the config of every evaluation (None means the defaults), and assignments of keys on top of
    it. summary: a line for users.
    """

    name: str
    arms: tuple[Arm, ...]
    pairs: tuple[str, ...] = ("jargon",)
    contrasts: tuple[tuple[str, str], ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    config: str = "quickstart"
    overrides: tuple[str, ...] = ()
    pair_steps: int | None = None
    device: str = "cpu"
    problems: int = 512
    samples: int = 4
    readers: int = 0
    evaluation: str | None = None
    evaluation_overrides: tuple[str, ...] = ()
    summary: str = ""

    def only(self, names: Sequence[str]) -> "Experiment":
        """The experiment with only these arms, in this order, and the contrasts between them or with the model before
        training.

        Raises:
            ExperimentError: one of the names is not an arm of the experiment.
        """
        arms = {arm.name: arm for arm in self.arms}
        if unknown := [name for name in names if name not in arms]:
            raise ExperimentError(f"{self.name}: unknown arms {', '.join(unknown)}; known: {', '.join(arms)}")
        contrasts = tuple(pair for pair in self.contrasts if set(pair) <= {*names, BASE})
        return replace(self, arms=tuple(arms[name] for name in names), contrasts=contrasts)

    def to_json(self) -> dict[str, Any]:
        """The experiment as it is after writing it to JSON and reading it back."""
        fields = asdict(self) | {"arms": [arm._asdict() for arm in self.arms]}
        return {key: value for key, value in json.loads(json.dumps(fields)).items() if key != "summary"}


GRPO = Arm("grpo", "GRPO", ("selection.strategy=solo", "model.junior=null"))
KL = Arm("kl", "GRPO, KL", (*GRPO.overrides, "loss.kl_coef=0.05"))
TANDEM = Arm("tandem", "tandem")


def _arm(name: str, *overrides: str) -> Arm:
    return Arm(name, name.replace("_", " "), overrides)


SENTENCE = Arm("sentence", "tandem by steps", ("selection.strategy=sentence",))
RECIPE = ("train.mini_batch_prompts=8",)
"""Two updates per rollout batch, as in the paper. The quickstart config has 50 steps."""
LONGER = (*RECIPE, "train.steps=80", "train.eval_every=20")
"""For claims about solo skill, in which tandem is still a little behind after 50 steps, and for what is learnt late."""

MISREAD = ("selection.max_untranslatable=0.1",)
"""A junior that has never seen jargon writes anything after it, half characters included."""

TURNS = Arm("turns", "tandem by turns", ("selection.strategy=turn",))
WORDS = Arm("words", "tandem by words", ("selection.strategy=word",))

JUNIOR_KL = Arm(
    "junior_kl", "GRPO, KL to the junior", ("selection.strategy=solo", "loss.kl_coef=0.05", "loss.kl_to=junior")
)
DISTILLED = Arm("distilled", "distillation, reward", (*JUNIOR_KL.overrides, "loss.kl_kind=k2"))
MATCHED = Arm("matched", "GRPO, tandem's entropy", of="grpo", matched_to="tandem")


def _rewarded(name: str, title: str, reward: str, *overrides: str, of: Arm = GRPO) -> Arm:
    """An arm whose reward is correctness and one of `arm_rewards`."""
    total = f"reward.scorers={{'*': 'boxed + tandemrl.apps.experiments.arm_rewards:{reward}'}}"
    return Arm(name, title, (*of.overrides, total, *overrides))


BREVITY = _rewarded("brevity", "GRPO, length penalty", "brevity")
TANDEM_BREVITY = _rewarded("tandem_brevity", "tandem, length penalty", "brevity", of=TANDEM)
_PATIENT = "reward.timeout_s=120"  # models are loaded in the processes of the scorers
_BY_JUNIOR = (
    "reward.parameters.junior_likelihood.model={junior}",
    "reward.weights.junior_likelihood=0.1",
    _PATIENT,
)
LIKELIHOOD = _rewarded("likelihood", "GRPO, junior's likelihood", "junior_likelihood", *_BY_JUNIOR)
PROVER = Arm("prover", "GRPO, prover", (*LIKELIHOOD.overrides, "reward.parameters.junior_likelihood.of=stated"))
VERIFIED = _rewarded(
    "verified", "GRPO, trained verifier", "verified", "reward.parameters.verified.model={verifier}", _PATIENT
)
IMITATION = Arm("imitation", "SFT on the junior's texts, GRPO", (*GRPO.overrides, "model.senior='{imitator}'"))
POOL = Arm(
    "pool",
    "tandem, pool of juniors",
    ("rollout.engine=tandemrl.rollout.junior_pool:JuniorPool", "rollout.engine_parameters.juniors={juniors}"),
)
ANNEALED = Arm(
    "annealed",
    "tandem, annealed",
    ("selection.prob_senior=0.9", "selection.prob_senior_final=0.5", "selection.anneal_steps=40"),
)

ABLATIONS = (
    _arm("word_aligned", "selection.strategy=word_aligned"),
    SENTENCE,
    _arm("chunk_8", "selection.strategy=chunk", "selection.chunk_size=8"),
    _arm("bernoulli", "selection.strategy=bernoulli"),
    _arm("p_0.25", "selection.prob_senior=0.25"),
    _arm("p_0.75", "selection.prob_senior=0.75"),
    _arm("p_0.9_to_0.5", "selection.prob_senior=0.9", "selection.prob_senior_final=0.5", "selection.anneal_steps=40"),
    _arm("K_2", "selection.max_gap_tokens=2"),
    _arm("K_8", "selection.max_gap_tokens=8"),
    _arm("junior_weight_0.5", "loss.junior_weight=0.5"),
    _arm("junior_weight_1", "loss.junior_weight=1.0"),
    _arm("junior_kl_0.1", "loss.junior_kl_coef=0.1"),
    Arm("weak_junior", "weaker junior", junior_steps=250),
)
"""The arms of the ablations. Each changes one thing about tandem GRPO, and is compared with it."""

SMOLLM2 = Experiment(
    "smollm2",
    (
        GRPO,
        KL,
        Arm("tandem_self", "tandem, self-paired", ("model.junior=null",)),
        TANDEM,
        SENTENCE,
        Arm("grpo_8", "GRPO, half batch", (*GRPO.overrides, "train.prompts_per_step=8")),
    ),
    pairs=("word_problems",),
    contrasts=(
        *((arm, BASE) for arm in ("grpo", "grpo_8", "tandem_self", "tandem", "sentence")),
        *((arm, "grpo") for arm in ("kl", "grpo_8", "tandem_self", "tandem", "sentence")),
        *((arm, "grpo_8") for arm in ("tandem_self", "tandem", "sentence")),
        *((arm, "tandem") for arm in ("tandem_self", "sentence")),
    ),
    seeds=(0, 1, 2),
    config="smollm2",
    overrides=("train.steps=12",),
    problems=256,
    samples=4,
    evaluation="smollm2",
    summary="SmolLM2-135M on word problems: six arms. Three seeds, about ten hours on two cores.",
)
"""A pretrained model on a laptop: for every seed a pair, six arms of a quarter of an hour on a core, and seven
evaluations of three times that."""

FRONTIER = Experiment(
    "frontier",
    (GRPO, JUNIOR_KL, DISTILLED, BREVITY, TANDEM, MATCHED, SENTENCE, ANNEALED),
    contrasts=(
        *((arm, "grpo") for arm in ("junior_kl", "distilled", "brevity", "tandem", "matched", "sentence", "annealed")),
        *(("tandem", arm) for arm in ("matched", "junior_kl", "distilled", "brevity")),
    ),
    overrides=(*RECIPE, "train.steps=80", "train.eval_every=80"),
    samples=1,
    readers=3,
    summary="Accuracy against transfer to unseen readers: tandem beside other ways to stay legible.",
)
"""What is claimed and tested of it: `registered.REGISTERED`."""

EXPERIMENTS: dict[str, Experiment] = {
    "frontier": FRONTIER,
    "frontier-quick": replace(
        FRONTIER.only(("grpo", "junior_kl", "distilled", "brevity", "tandem", "matched")),
        name="frontier-quick",
        seeds=(0, 1),
        overrides=(*RECIPE, "train.steps=40", "train.eval_every=20"),
        problems=128,
        summary="The same with six arms, two seeds and half of the steps.",
    ),
    "frontier-more": replace(
        FRONTIER,
        name="frontier-more",
        arms=(GRPO, TANDEM, POOL, LIKELIHOOD, PROVER, VERIFIED, IMITATION),
        contrasts=tuple(
            (arm, of) for of in ("grpo", "tandem") for arm in ("pool", "likelihood", "prover", "verified", "imitation")
        ),
        summary="Five further ways, by a pool of juniors, the junior's probabilities, a verifier, its own texts.",
    ),
    "shorthand": Experiment(
        "shorthand",
        (GRPO, BREVITY, TANDEM, TANDEM_BREVITY),
        pairs=("shorthand",),
        contrasts=(
            ("tandem_brevity", "brevity"),
            ("grpo", "brevity"),
            ("tandem", "grpo"),
            ("tandem_brevity", "tandem"),
        ),
        seeds=(0, 1, 2),
        overrides=(*RECIPE, "train.steps=40", "train.eval_every=0"),
        problems=256,
        samples=1,
        readers=1,
        summary="Whether a length penalty makes a senior leave out what its junior needs, with tandem and without.",
    ),
    "quickstart": Experiment(
        "quickstart",
        (GRPO, TANDEM),
        contrasts=(("tandem", "grpo"),),
        seeds=(0,),
        overrides=RECIPE,
        summary="GRPO beside tandem GRPO, one seed.",
    ),
    "paper-claims": Experiment(
        "paper-claims",
        (GRPO, KL, TANDEM),
        contrasts=(("tandem", "grpo"), ("tandem", "kl"), ("kl", "grpo")),
        overrides=LONGER,
        summary="The paper's claims, on five seeds.",
    ),
    "two-tokenizers": Experiment(
        "two-tokenizers",
        (GRPO, TANDEM._replace(overrides=("selection.strategy=before_word",))),
        pairs=("jargon_two_tokenizers",),
        contrasts=(("tandem", "grpo"),),
        overrides=(*LONGER, *MISREAD),
        evaluation_overrides=MISREAD,
        summary="The same with a junior that has a tokenizer of its own.",
    ),
    "repair": Experiment(
        "repair",
        (GRPO, TANDEM, SENTENCE),
        pairs=("repair",),
        contrasts=(("tandem", "grpo"), ("sentence", "grpo")),
        overrides=LONGER,
        summary="Whether a senior learns to repair its junior's slips.",
    ),
    "ablations": Experiment(
        "ablations",
        (GRPO, TANDEM, *ABLATIONS),
        contrasts=(("tandem", "grpo"), *((arm.name, "tandem") for arm in ABLATIONS)),
        seeds=(0, 1, 2),
        overrides=LONGER,
        summary="Thirteen arms, each with one change to tandem GRPO.",
    ),
    "hops": Experiment(
        "hops",
        (GRPO, TURNS, WORDS),
        pairs=("hops_jargon",),
        contrasts=(("turns", "grpo"), ("words", "grpo"), ("turns", "words")),
        config="hops_tandem",
        overrides=("train.eval_every=25",),
        problems=1024,
        samples=2,
        evaluation="hops_tandem",
        summary="Agents that search: GRPO, tandem by turns and by words.",
    ),
    "smollm2": SMOLLM2,
    "smollm2-quick": replace(
        SMOLLM2.only(("grpo", "tandem_self")),
        name="smollm2-quick",
        seeds=(0,),
        problems=128,
        samples=1,
        summary="SmolLM2-135M on word problems: two arms. One seed, half an hour on two cores.",
    ),
}
