"""The rollouts of a step from recorded answers instead of played rows: `agentrl train --from DIR`.

    scores in the order of time ─► answers that may train ─► groups of one ─► StepRollouts

A row of `data.train` is a score, and the position of a run counts the scores that it has used. So a
run that resumes uses the same ones, and scores that were sent since follow.

An answer trains if it was sampled from the full distribution at `rollout.temperature`, and its
version of the policy is at most `trainer.max_staleness` steps old when it trains. When a run
starts, the learner computes the logprobs of each answer with the weights of its version. An answer
whose recorded logprobs differ is left out: other weights sampled it, or somebody has changed the
record. `VERIFIED` in the run's folder keeps the results, because checkpoints are removed later.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from agentrl.config import Config, file_names
from agentrl.data.recorded import RecordedAnswer, ScoredAnswers, open_recorded
from agentrl.engine.base import Sampling
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.plural import plural
from agentrl.trainer.checkpoint import (
    checkpoint_path,
    find_steps,
    open_checkpoint,
    replace_file,
)
from agentrl.trainer.resume import Start
from agentrl.trainer.stream import StepRollouts, staleness_metrics
from agentrl.trajectory import (
    Group,
    Sample,
    Scored,
    Segment,
    Trajectory,
    Turn,
    float_array,
    token_array,
)

VERIFIED = "verified.json"
"""The file of a run's folder with the mean difference of each answer's logprobs, in nats."""
VERIFIED_ROWS = 64
"""The number of answers that are computed at once."""
LONGEST_LIST = 5
"""The number of ids of refused answers that are shown."""

SAMPLING = "sampled with other parameters than those of training"
AGE = "older than trainer.max_staleness"
CHECKPOINT = "of a version without a checkpoint"
LOGPROBS = "with other logprobs than those of their version"
TOKENS = "too long, or with tokens that the model does not have"
REASONS = {
    "other_sampling": SAMPLING,
    "too_old": AGE,
    "no_checkpoint": CHECKPOINT,
    "other_logprobs": LOGPROBS,
    "bad_tokens": TOKENS,
}
"""The metrics `recorded/NAME`: how many answers did not train until now, by reason."""


class RecordedStream:
    """Returns the scored answers of each step; `RolloutStream` plays rows instead.

    Args:
        config: the run's config.
        rows: the rows of the scores.
        vocabulary: the `hash_vocabulary` of the policy.

    Raises:
        ConfigError: the answers have the tokens of another vocabulary.
    """

    plays_ahead = False

    def __init__(self, config: Config, rows: Sequence[Sample], vocabulary: str):
        self._config, self._rows, self._folder = config, rows, Path(config.trainer.output)
        self._records = open_recorded(file_names(config.data.train))
        if (served := self._records.policies[-1])["vocabulary"] != vocabulary:
            raise ConfigError(
                f"{file_names(config.data.train)}: its answers have the tokens of"
                f" {served['model']}, which are not those of model.path={config.model.path}"
            )
        # Scores that were sent since the rows were read are for the next start.
        self._scored = self._records.scored()[: len(rows)]
        self._reasons: dict[str, str] = {}
        """Why an answer never trains, by its id."""
        self._left_out: Counter[str] = Counter()
        """How many answers of the scores that this process has used did not train, by reason."""
        self._trained = 0

    def take(self, position: int, step: int) -> StepRollouts:
        """Return the next scores with answers that train.

        Args:
            position: the number of scores that the run has used.
            step: the number of steps that the run has made, which is the version of the policy.
        """
        end, groups = self._find(position, step)
        self._left_out += self._count(position, end, step)
        self._trained += len(groups)
        metrics = {
            f"recorded/{name}": float(self._left_out[text]) for name, text in REASONS.items()
        }
        return StepRollouts(groups, [], end, metrics | staleness_metrics(groups, step))

    def is_used_up(self, position: int, step: int) -> bool:
        """Return whether too few scores are left for another step."""
        return len(self._find(position, step)[1]) < self._config.data.batch_size

    def summary(self, position: int, step: int) -> str:
        """Return a text: what has trained, what was left out, and what waits for more scores."""
        usable = [
            s for s in self._scored[position:] if any(not self._reason(a, step) for a in s.answers)
        ]
        left_out = self._left_out + self._count(position, len(self._scored), step)
        lines = [
            f"{file_names(self._config.data.train)}: {plural(self._trained, 'score')} trained;"
            f" {len(usable)} left, and a step takes {self._config.data.batch_size}"
        ]
        lines += [f"  left out: {plural(n, 'answer')} {reason}" for reason, n in left_out.items()]
        if damaged := self._records.damaged:
            lines.append(f"  {plural(damaged, 'damaged line')} ignored")
        return "\n".join(lines)

    def advance(self, step: int) -> None:
        """Do nothing: no rollouts are played."""

    def close(self) -> None:
        """Do nothing: no rollouts are played."""

    def _find(self, position: int, step: int) -> tuple[int, list[Group]]:
        """Return the position after the next step, and its groups."""
        groups: list[Group] = []
        while len(groups) < self._config.data.batch_size and position < len(self._scored):
            scored = self._scored[position]
            if answers := [a for a in scored.answers if not self._reason(a, step)]:
                weight = self._config.reward.outcome_weight
                groups.append(make_group(self._rows[position], scored, answers, weight))
            position += 1
        return position, groups

    def _count(self, position: int, end: int, step: int) -> Counter[str]:
        """Count the answers of some scores that do not train at a step, by reason."""
        answers = (a for scored in self._scored[position:end] for a in scored.answers)
        return Counter(filter(None, (self._reason(answer, step) for answer in answers)))

    def _reason(self, answer: RecordedAnswer, step: int) -> str:
        """Return why an answer does not train at a step, or ""."""
        is_old = step - answer.step > self._config.trainer.max_staleness
        return self._reasons.get(answer.id) or (AGE if is_old else "")

    # -- at the start -----------------------------------------------------------------------------

    def verify(self, learner: Learner, start: Start, step: int, limit: float) -> str:
        """Find the answers that never train; return a text about those with wrong logprobs.

        The learner gets the weights of other versions, and at the end those of the start again.

        Args:
            learner: the models, at the start of the run.
            start: the state that the run starts from.
            step: its step.
            limit: the largest mean difference of the logprobs of an answer, in nats.
        """
        known = _read_verified(self._folder) if start.checkpoint else {}
        pending = [a for scored in self._scored[start.position :] for a in scored.answers]
        by_version: dict[int, list[RecordedAnswer]] = defaultdict(list)
        vocabulary = learner.ranks.vocabulary()
        for answer in pending:
            if reason := self._find_reason(answer, vocabulary):
                self._reasons[answer.id] = reason
            elif answer.step > step:
                self._reasons[answer.id] = CHECKPOINT
            elif _key(answer) not in known and not self._reason(answer, step):
                by_version[answer.step].append(answer)
        # The present version first, while the learner has its weights.
        for version, answers in sorted(by_version.items(), reverse=True):
            known |= self._measure(learner, start, version, answers, step)
            self._reasons |= {a.id: CHECKPOINT for a in answers if _key(a) not in known}
        if start.checkpoint and by_version.keys() - {step}:
            learner.ranks.load(start.checkpoint.folder)
        wrong = {a.id: d for a in pending if not (d := known.get(_key(a), 0.0)) <= limit}
        self._reasons |= dict.fromkeys(wrong, LOGPROBS)
        replace_file(self._folder / VERIFIED, json.dumps(known, indent=1) + "\n")
        if not wrong:
            return ""
        shown = ", ".join(f"{id} ({d:.3g})" for id, d in [*wrong.items()][:LONGEST_LIST])
        return (
            f"{plural(len(wrong), 'answer')} refused: the recorded logprobs differ from those of"
            f" their version by more than {limit:.3g} nats a token: {shown}"
        )

    def _find_reason(self, answer: RecordedAnswer, vocabulary: int) -> str:
        """Return why an answer never trains, as far as the record alone tells, or ""."""
        full = Sampling(temperature=self._config.rollout.temperature).as_dict()
        names = ("temperature", "top_p", "top_k")
        if any(answer.sampling.get(name) != full[name] for name in names):
            return SAMPLING
        too_long = len(answer.sampled) > self._config.rollout.max_trajectory_tokens
        largest = max(max(answer.prompt), max(answer.sampled))
        return TOKENS if too_long or largest >= vocabulary else ""

    def _measure(
        self,
        learner: Learner,
        start: Start,
        version: int,
        answers: Sequence[RecordedAnswer],
        step: int,
    ) -> dict[str, float]:
        """Return the mean difference of the logprobs of answers; nothing without their weights."""
        is_base = version == 0 < step
        if version != step and not is_base:
            runs = [self._folder, *([Path(start.fork.checkpoint).parent] if start.fork else [])]
            found = [run for run in runs if version in find_steps(run)]
            try:
                learner.ranks.load(open_checkpoint(checkpoint_path(found[0], version)).folder)
            except (IndexError, ConfigError):
                return {}
        distances: dict[str, float] = {}
        for i in range(0, len(answers), VERIFIED_ROWS):
            part = answers[i : i + VERIFIED_ROWS]
            scored = (ScoredAnswers(a.id, 0.0, [a], [], {a.id: -1}) for a in part)
            batch = collate([make_group(self._rows[0], s, s.answers) for s in scored])
            logprobs = learner.initial_logprobs(batch) if is_base else learner.logprobs(batch)
            mask = batch.response_mask
            gaps = (logprobs - batch.rollout_logprobs).abs().masked_fill(~mask, 0.0)
            means = gaps.double().sum(1) / mask.sum(1)
            distances |= zip(map(_key, part), means.tolist(), strict=True)
        return distances


def _key(answer: RecordedAnswer) -> str:
    """Return the key of an answer in `VERIFIED`. It contains a hash of the numbers that train."""
    numbers = (array("i", [answer.step]), answer.prompt, answer.sampled, answer.logprobs)
    return f"{answer.id} {blake2b(b''.join(map(bytes, numbers)), digest_size=8).hexdigest()}"


def _read_verified(folder: Path) -> dict[str, float]:
    try:
        return json.loads((folder / VERIFIED).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise RunStopped(f"{folder / VERIFIED} cannot be read: {e}. Delete it") from None


def make_group(
    sample: Sample, scored: ScoredAnswers, answers: Sequence[RecordedAnswer], weight: float = 1.0
) -> Group:
    """Return the rollout of a score.

    A turn whose prompt begins with the row of the turn before it is in the same row. Otherwise a
    new row begins, as in training. Tokens that are not of `answers` have mask 0.

    Args:
        sample: the row of the score.
        scored: the score, and its conversation.
        answers: the answers that train, oldest first.
        weight: `reward.outcome_weight`.
    """
    rows: list[Segment] = []
    turns: list[Turn] = []
    for answer in answers:
        row = rows[-1] if rows else None
        ids = row.prompt_ids + row.response_ids if row else answer.prompt
        if row is None or answer.prompt[: len(ids)] != ids:
            ids, row = answer.prompt, Segment(answer.prompt, *_NO_RESPONSE)
            rows.append(row)
        observed, n = answer.prompt[len(ids) :], len(answer.sampled)
        zeros = [0] * len(observed)
        start = len(row.response_ids) + len(observed)
        rows[-1] = Segment(
            row.prompt_ids,
            row.response_ids + observed + answer.sampled,
            row.response_mask + token_array([*zeros, *[1] * n]),
            row.logprobs + float_array(zeros) + answer.logprobs,
            row.versions + token_array([*[-1] * len(observed), *[answer.step] * n]),
        )
        turns.append(Turn(
            len(rows) - 1, start, start + n, answer.finish_reason,
            prompt_tokens=len(answer.prompt), message_index=scored.indices[answer.id],
        ))  # fmt: skip
    trajectory = Trajectory(
        sample, episode_id=scored.id, rollout=0, segments=tuple(rows), turns=tuple(turns),
        messages=tuple(scored.messages), sampling=answers[-1].sampling, stop_reason="done",
        started=answers[0].time,
    )  # fmt: skip
    reward = weight * scored.score
    return Group(sample, (Scored(trajectory, {"outcome": scored.score}, reward),))


_NO_RESPONSE = token_array(), token_array(), float_array(), token_array()
