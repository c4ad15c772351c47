"""`agentrl show`: find the episodes of a run, and print one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.plural import plural
from agentrl.terminal import aligned, echo

if TYPE_CHECKING:
    from agentrl.report.run import Run
    from agentrl.view.query import Found

COLUMNS = (
    *("step", "split", "group", "rollout", "reward", "stop", "turns", "calls", "failed", "tokens"),
    *("seconds", "source", "episode"),
)


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    query: Annotated[str, typer.Argument(metavar="[QUERY]")] = "",
    step: int | None = None,
    n: Annotated[int, typer.Option("-n", min=1)] = 20,
    after: Annotated[int, typer.Option(min=0)] = 0,
    episode: str | None = None,
    sft: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
) -> None:
    """Find the episodes of a run, and print them as a table, or one in full (--episode).

    A query has terms FIELD OP VALUE (= != < <= > >=), all of which must hold, and words, all of
    which the messages must contain. Fields: step, split, group, rollout, episode, sample, agent,
    source, reward, masked, stop, dropped, seconds, turns, tokens, calls, failed, tool, error.
    An empty cell or `?` is a number that the run did not record.

    Args:
        run: The folder of a run.
        query: Terms such as reward<0.5, and words.
        step: Only the episodes of this step.
        n: Print at most this many episodes.
        after: Skip this many episodes.
        episode: Print this episode in full: its id.
        sft: Write the tokens of all found episodes for agentrl sft.

    Examples:
        agentrl show runs/demo 'reward<0.5 stop=turns'

        agentrl show runs/demo 'tool=search error=timeout' --step 12

        agentrl show runs/demo 'group=7 calls=0' --step 12

        agentrl show runs/demo --episode train-11-96-0-4c5265d9-7

        agentrl show runs/demo 'reward>=1' --sft best.parquet
    """
    from agentrl.report.run import load_run
    from agentrl.view.query import find_episodes, parse_query

    loaded = load_run(run, None if step is None else [step])
    if episode is not None:
        echo(_describe_episode(loaded, episode))
        return
    if sft is not None:
        from agentrl.view.rejection import write_tokens

        written = write_tokens(loaded, parse_query(query), sft)
        echo(
            f"{plural(written.episodes, 'episode')}: {plural(written.rows, 'row')} with"
            f" {written.tokens:,} tokens, {written.sampled:,} of them sampled, in {sft}"
        )
        return
    found = find_episodes(loaded, parse_query(query), after, n)
    if not loaded.store.all_steps():
        echo(f"{run} has no recorded episodes: its folder trajectories is empty or missing")
        return
    echo(_describe_found(found, after))
    if step is not None and found.total:
        echo(_describe_gap(loaded, step))


def _describe_found(found: Found, after: int) -> str:
    """Return the table of the episodes, or why there is none."""
    if not found.total:
        lines = ["no episode matches"]
        for name, values in found.choices.items():
            known = ", ".join(f"{v[:60]!r}" for v in values[:20]) or "none"
            lines.append(f"{name} is one of: {known}" + (", ..." if len(values) > 20 else ""))
        return "\n".join(lines)
    cells = [[_cell(row[name]) for name in COLUMNS] for row in found.rows.to_pylist()]
    lines = [line.rstrip() for line in aligned([COLUMNS, *cells], len(COLUMNS))]
    last = after + len(cells)
    of = f"{plural(found.total, 'episode')}"
    if last < found.total or after:
        of += f", of which {after + 1} to {last} are shown (-n, --after)"
    return "\n".join([*lines, of])


def _describe_gap(run: Run, step: int) -> str:
    from agentrl.view.episode import largest_gaps

    gaps = largest_gaps(run, step)
    if not gaps:
        return f"largest gap to the trainer: step {step} has no logprobs of the trainer"
    [gap] = gaps
    text = f" {gap['text']!r}" if gap["text"] is not None else ""
    return (
        f"largest gap to the trainer: {gap['gap']:+.3g} nats, token {gap['position']}{text} of"
        f" segment {gap['segment']} of {gap['episode']}"
    )


def _cell(value: Any) -> str:
    """Return a value on one line, at most 40 characters long."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= 40 else f"{text[:39]}…"


def _describe_episode(run: Run, name: str) -> str:
    """Return an episode as text: its numbers, then its messages with their turns."""
    from agentrl.view.episode import EpisodeView

    view = EpisodeView(run, name)
    data = view.describe()
    rewards = ", ".join(f"{k} {v:g}" for k, v in data["rewards"].items())
    lines = [
        f"episode {data['episode']}",
        f"step {data['step']} ({data['split']}), group {_known(data['group'])}, rollout"
        f" {data['rollout']}, sample {data['sample']}, {data['agent']}, {data['source']}",
        f"reward {data['reward']:g} ({rewards}), stop {data['stop']}, {data['seconds']:.2f} s",
        f"ground truth {data['ground_truth']}",
    ]
    for message, content in zip(data["messages"], view.trajectory.messages, strict=True):
        turn = message["turn"]
        sampled = "" if turn is None else f" · turn {turn}{_describe_turn(data['turns'][turn])}"
        lines += ["", f"── {message['role']}{sampled}", content.shown]
        for call in data["turns"][turn]["calls"] if turn is not None else ():
            state = "not run" if call["ok"] is None else call["error"] or "ok"
            seconds = "" if call["seconds"] is None else f", {call['seconds'] * 1e3:.1f} ms"
            malformed = f" ({call['malformed']})" if call["malformed"] else ""
            lines.append(
                f"   call {call['name'] or '?'} {call['arguments']}{malformed}: {state}{seconds}"
            )
    return "\n".join(lines)


def _describe_turn(turn: dict[str, Any]) -> str:
    text = (
        f" · {plural(turn['end'] - turn['start'], 'token')} in {turn['generate_seconds']:.2f} s"
        f" · advantage {_known(turn['advantage'])} · clipped {_known(turn['clipped'])}"
        f" · largest gap {_known(turn['largest_gap'])}"
    )
    if turn["largest_gap_at"] is not None:
        text += f" at token {turn['largest_gap_at']}"
    return text + (f" · cut ({turn['finish_reason']})" if turn["finish_reason"] != "stop" else "")


def _known(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
