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
