"""Answers that a judge model grades (judge.yaml), and a rule that needs no server (run.yaml)."""

from agentrl import reward


# A reward sees the whole trajectory: messages, final_text, turns, stop_reason, the sample.
@reward("rule")
def rule(trajectory) -> dict[str, float]:
    """Return 1 for the right number in the right form, 0.5 for the right number alone, else 0.

    The other entries are metrics. Compare the judge with such a rule before you trust it.
    """
    answer, text = trajectory.sample.ground_truth, trajectory.final_text.strip()
    has_form = text == f"#### {answer}"
    score = 1.0 if has_form else 0.5 * (text == answer)
    return {"score": score, "has_form": float(has_form)}
