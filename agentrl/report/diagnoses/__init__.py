"""The shipped diagnoses, a file for each subject: functions that look for a known problem in a run.

Each one is a statistic, thresholds (constants, with the reason) and a text. Two rules keep healthy
runs free of alarms. A change counts only if it is large, and if it is several times the noise
between steps. And a run that has solved its rows is not reported for having nothing left to learn.

Users write their own:

    from agentrl.report import Finding, diagnosis

    @diagnosis("no_tools")
    def no_tools(run):
        \"\"\"The policy no longer calls tools.\"\"\"
        calls = run.metrics.column("tool_call_counts/mean").to_pylist()
        if calls[-1] == 0:
            yield Finding(step=len(calls), text="no rollout calls a tool", evidence={"calls": 0.0})

A file with such functions is loaded like one with tools: `--file my_diagnoses.py`, for `agentrl
train` and for `agentrl report`.
"""

from __future__ import annotations

from agentrl.report.diagnoses.answers import equal_rewards, rejected_answers
from agentrl.report.diagnoses.audit import audit
from agentrl.report.diagnoses.budgets import agent_error, dropped, truncation
from agentrl.report.diagnoses.failures import unrewarded
from agentrl.report.diagnoses.groups import dead_groups
from agentrl.report.diagnoses.length import length
from agentrl.report.diagnoses.mismatch import mismatch
from agentrl.report.diagnoses.rewards import reward_falls, reward_flat, reward_outliers
from agentrl.report.diagnoses.rows import collapse, ground_truths
from agentrl.report.diagnoses.settings import settings
from agentrl.report.diagnoses.speed import step_time
from agentrl.report.diagnoses.tools import repeated_calls, tool_errors, tool_use, tool_worth
from agentrl.report.diagnoses.updates import entropy, unstable_update
from agentrl.report.diagnoses.validation import overfitting, validation_falls
from agentrl.report.run import diagnosis

# In the order of causes: a problem is before those that it may cause.
for function in (
    tool_errors,
    mismatch,
    reward_outliers,
    unstable_update,
    entropy,
    unrewarded,
    equal_rewards,
    rejected_answers,
    dead_groups,
    agent_error,
    dropped,
    truncation,
    settings,
    tool_use,
    tool_worth,
    repeated_calls,
    collapse,
    ground_truths,
    reward_falls,
    validation_falls,
    overfitting,
    length,
    reward_flat,
    audit,
    step_time,
):
    diagnosis(function.__name__)(function)
