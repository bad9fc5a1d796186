"""The warning about authors that hardly change."""

from tandemrl.training.diagnostics import AFTER, handover_warner


def test_a_run_warns_once_of_too_few_handovers() -> None:
    warning = handover_warner()
    few = {"tandem/handovers": 0.25, "tandem/senior_draw_frac": 0.5}
    said = [warning(few) for _ in range(3 * AFTER)]
    [told] = [line for line in said if line]
    assert said[AFTER - 1] == told
    assert "fewer than one handover per rollout (tandem/handovers), 0.25 on average" in told
    assert "selection.strategy=bernoulli" in told


def test_enough_handovers_or_one_author_by_choice_are_no_cause() -> None:
    for metrics in (
        {"tandem/handovers": 1.0, "tandem/senior_draw_frac": 0.5},
        {"tandem/handovers": 0.0, "tandem/senior_draw_frac": 1.0},  # prob_senior=1
        {"tandem/senior_draw_frac": 0.5},
    ):
        warning = handover_warner()
        assert not any(warning(metrics) for _ in range(3 * AFTER))
