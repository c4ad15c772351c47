"""Kinds of rows: one wrong answer for all rows of a kind, and one ground truth for all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentrl.plural import plural
from agentrl.report.diagnoses.advice import advice
from agentrl.report.episodes import (
    EXAMPLES,
    Episodes,
    group_by,
    most_common,
    shorten,
    training_episodes,
)
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import read_series, reward_range

# --- kinds ---------------------------------------------------------------------------------------

COMMON_WORD = 0.125
"""A word that at least an eighth of the rows contain belongs to the wording of a kind of rows.
Names and things that vary are rarer."""
MAX_KINDS = 200
"""The largest number of kinds: with more, the wording does not tell kinds apart."""
MAX_TEXTS = 2
"""The number of kinds that the text of a finding describes."""


def _find_kinds(episodes: Episodes) -> dict[str, np.ndarray]:
    """Return masks of the episodes whose rows are worded alike, by an example of such a row.

    Numbers and rare words (names, things) are left out of the wording; see `COMMON_WORD`.
    """
    samples, agents, prompts = (
        episodes[name].tolist() for name in ("sample_id", "agent_name", "prompt")
    )
    words = {
        sample: re.findall(r"[^\W\d_]+|\d+", prompt[-2000:].lower())
        for sample, prompt in dict(zip(samples, prompts, strict=True)).items()
    }
    frequency = Counter(word for own in words.values() for word in set(own))
    common = {w for w, n in frequency.items() if n >= COMMON_WORD * len(words) and not w.isdigit()}
    wording = {sample: " ".join(w for w in own if w in common) for sample, own in words.items()}
    keys = list(zip(agents, map(wording.__getitem__, samples), strict=True))
    if len(set(keys)) > MAX_KINDS:
        keys = list(zip(agents, episodes["data_source"].tolist(), strict=True))
    kinds, are_several = {}, len(set(agents)) > 1
    for (agent, _), members in group_by(keys, range(len(keys))).items():
        example = " ".join(prompts[members[0]].split())
        text = example if len(example) <= 100 else "..." + example[-97:]
        name = f"{text} ({agent})" if are_several else text
        kinds[name] = np.zeros(len(keys), bool)
        kinds[name][members] = True
    return kinds


def _list_kinds(texts: list[str]) -> str:
    more = len(texts) - MAX_TEXTS
    others = [f"and {plural(more, 'other kind')} of rows"] if more > 0 else []
    return "; ".join([*texts[:MAX_TEXTS], *others])


# --- one wrong answer ----------------------------------------------------------------------------

COLLAPSE_STEPS = 5
"""The fewest last steps with the kind of rows, all of whose rollouts fail."""
COLLAPSE_ROLLOUTS = 40
"""The fewest rollouts in these steps. If a policy succeeded in only one of 20, all of 40 would fail
by chance in 13 % of the cases; they must give equal answers too."""
COLLAPSE_GROUPS = 5
"""The fewest groups in these steps."""
SAME_ANSWER = 0.9
"""The share of rollouts that give the most frequent answer of their group."""


@dataclass(frozen=True, slots=True)
class _Collapse:
    """A kind of rows whose rollouts all fail with the same answer."""

    kind: str
    step: int
    episodes: list[int]
    """The indexes of these episodes, the last ones first."""
    share: float
    """The share that gives the most frequent answer of its group."""


def collapse(run: Run) -> Iterator[Finding]:
    """All rollouts of a kind of rows give the same wrong answer."""
    episodes = training_episodes(run)
    if not len(episodes):
        return
    kinds, is_wrong = _find_kinds(episodes), _are_wrong(run, episodes)
    answers = np.array([answer.strip() for answer in episodes["answer"]], object)
    results = [_find_collapse(episodes, *item, is_wrong, answers) for item in kinds.items()]
    collapsed = [result for result in results if result]
    if not collapsed:
        return
    start = min(c.step for c in collapsed)
    others = episodes["step"] >= start
    others &= ~np.logical_or.reduce([kinds[c.kind] for c in collapsed])
    rollouts = sum(len(c.episodes) for c in collapsed)
    evidence = {"kinds": float(len(collapsed)), "rollouts": float(rollouts)}
    elsewhere = ""
    if others.any():
        evidence["reward_elsewhere"] = float(episodes["reward"][others].mean())
        elsewhere = f"; the other rows earn {evidence['reward_elsewhere']:.3g}"
    number = -(-EXAMPLES // len(collapsed))
    shown = [row for c in collapsed[:EXAMPLES] for row in c.episodes[:number]]
    yield Finding(
        start,
        _list_kinds([_describe_collapse(c, answers) for c in collapsed]) + elsewhere,
        evidence,
        episodes["episode_id"][shown].tolist(),
        **advice(run, "collapse"),
    )


def _are_wrong(run: Run, episodes: Episodes) -> np.ndarray:
    """Return the mask of the failed episodes; by the smallest reward if no range is recorded."""
    rewards, reward = reward_range(run), episodes["reward"]
    if not len(read_series(run, "critic/score/min")):
        return reward <= float(reward.min())
    return reward <= (rewards.failed if rewards.size > 0 else rewards.low)


def _find_collapse(
    episodes: Episodes, kind: str, members: np.ndarray, is_wrong: np.ndarray, answers: np.ndarray
) -> _Collapse | None:
    """Return the collapse of a kind of rows; None if some rollouts succeed or answers differ."""
    step = episodes["step"]
    good = step[members & ~is_wrong]
    rows = np.flatnonzero(members & (step > good.max()) if len(good) else members)
    if not _are_enough(step, rows):
        return None
    kept, share = _longest_agreement(rows, episodes.groups, answers)
    if not _are_enough(step, kept) or len(set(episodes.groups[kept])) < COLLAPSE_GROUPS:
        return None
    return _Collapse(kind, int(step[kept].min()), kept, share)


def _are_enough(step: np.ndarray, rows: np.ndarray | list[int]) -> bool:
    return len(rows) >= COLLAPSE_ROLLOUTS and len(np.unique(step[rows])) >= COLLAPSE_STEPS


def _describe_collapse(collapsed: _Collapse, answers: np.ndarray) -> str:
    number = len(collapsed.episodes)
    answer, count = most_common(answers[collapsed.episodes])
    same = "the same wrong answer to a row"
    if count >= SAME_ANSWER * number:
        same = f"the same wrong answer ({shorten(answer)!r})"
    return (
        f"rows like {collapsed.kind!r}: all {number} rollouts fail and {collapsed.share:.0%} give"
        f" {same} since step {collapsed.step}"
    )


def _longest_agreement(
    rows: np.ndarray, groups: np.ndarray, answers: np.ndarray
) -> tuple[list[int], float]:
    """Return the episodes of the longest stretch until now in which the groups agree.

    Returns:
        The episodes, the last ones first; and the share of them that give the most frequent answer
        of their group.
    """
    seen: list[int] = []
    agreeing = length = 0
    share = 0.0
    for group in reversed(group_by(groups[rows], rows.tolist()).values()):
        seen += group
        agreeing += most_common(answers[group])[1]
        if agreeing >= SAME_ANSWER * len(seen):
            length, share = len(seen), agreeing / len(seen)
    return seen[:length], share


# --- one ground truth ----------------------------------------------------------------------------

SAME_TRUTH_ROWS = 8
"""The fewest rows of a kind: with five possible answers, so many are equal by chance once in 80,000
kinds."""
MIN_TRUTHS = 5
"""The fewest different ground truths of rows that are compared: rows of a yes-or-no task agree
often."""
SKEWED_ROWS = 30
"""The fewest rows of an agent loop and data source. Of fewer, half may agree by chance."""
SKEWED_SHARE = 0.5
"""The share of these rows with the same ground truth from which on it is reported."""
SKEW = 3.0
"""How many times this share must be that of the most frequent ground truth of the other rows."""


def ground_truths(run: Run) -> Iterator[Finding]:
    """Rows of a kind have the same ground truth, and other rows have different ones."""
    episodes = training_episodes(run)
    truths, samples = episodes["ground_truth"], episodes["sample_id"]
    is_known = episodes.table.column("ground_truth").is_valid().to_numpy()
    if len(set(truths[is_known])) <= MIN_TRUTHS:
        return
    texts, shown = [], np.zeros(len(episodes), bool)
    for kind, members in _find_kinds(episodes).items():
        own, others = members & is_known, set(truths[is_known & ~members])
        rows = len(set(samples[own]))
        if rows < SAME_TRUTH_ROWS or len(set(truths[own])) > 1 or len(others) < MIN_TRUTHS:
            continue
        texts.append(f"all {rows} rows like {kind!r} have it: {shorten(truths[own][0])!r}")
        shown |= own
    if not texts:
        yield from _find_skewed_truths(run, episodes, is_known)
        return
    yield Finding(
        int(episodes["step"].min()),
        f"one ground truth for many questions: {_list_kinds(texts)}",
        {"kinds": float(len(texts)), "rows": float(len(set(samples[shown])))},
        **episodes.examples(shown),
        **advice(run, "ground_truths.kinds"),
        severity="audit",
    )


def _find_skewed_truths(run: Run, episodes: Episodes, is_known: np.ndarray) -> Iterator[Finding]:
    """Yield a finding for each agent loop and data source most of whose rows have one truth."""
    truths, samples = episodes["ground_truth"], episodes["sample_id"]
    subsets = episodes["agent_name"] + ", " + episodes["data_source"]

    def truth_of_rows(chosen: np.ndarray) -> Counter[str]:
        return Counter(dict(zip(samples[chosen], truths[chosen], strict=True)).values())

    for subset in sorted(set(subsets)):
        is_own = subsets == subset
        own, others = truth_of_rows(is_known & is_own), truth_of_rows(is_known & ~is_own)
        if not own or not others:
            continue
        [(truth, count)], [(_, other_count)] = own.most_common(1), others.most_common(1)
        rows = own.total()
        share, elsewhere = count / rows, other_count / others.total()
        if rows < SKEWED_ROWS or share < SKEWED_SHARE or share < SKEW * elsewhere:
            continue
        if min(len(own), len(others)) < MIN_TRUTHS:
            continue
        yield Finding(
            int(episodes["step"].min()),
            f"{share:.0%} of the {rows} rows of {subset} have the same ground truth,"
            f" {shorten(truth)!r}; in the other rows the most frequent one has {elsewhere:.0%}",
            {"share": share, "elsewhere": elsewhere, "rows": float(rows)},
            **episodes.examples(is_known & is_own & (truths == truth), "last"),
            **advice(run, "ground_truths.subset"),
            severity="audit",
            subject=subset,
        )
