"""Store the results of a run, or write the table and the curves of all results.

python recipes/table.py add RUN recipes/NAME/results/MACHINE/RUN_NAME.jsonl
python recipes/table.py     # writes recipes/README.md and recipes/NAME/curve.svg
"""

import json
import re
import sys
from pathlib import Path

from agentrl.record import read_metrics

KEPT = re.compile(
    r"critic/score/mean|response_length/mean|num_turns/mean|perf/throughput|actor/(grad_norm|ppo_kl)"
    r"|canary/(mismatch|rounding)|timing_s/step|val(_greedy|-core/\w+)?/(reward/(mean|se)@1|rows)"
    r"|val(_greedy)?/grader/\w+"
)
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
FOLDER = Path(__file__).parent
KINDS = {
    "seed": ("all weights", "#1f77b4"),
    "lora": ("LoRA", "#2ca02c"),
    "control": ("control: rewards permuted", "#999999"),
    "alone": ("control: without the calculator", "#999999"),
    "no_hint": ("control: without the hint", "#999999"),
    "grpo": ("GRPO", "#1f77b4"),
    "turn": ("credit for turns", "#2ca02c"),
    "ppo": ("PPO with a critic", "#d62728"),
    "async": ("GRPO, asynchronous", "#9467bd"),
}
"""Labels and colours of runs."""


def add(run, file):
    """Copy the metrics of a run or an evaluation that `KEPT` names into a file of results.

    `run` is the folder of a run, or that of `agentrl eval --output`, whose step is 0.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    steps = read_metrics(run / "metrics.jsonl", KEPT.fullmatch)
    if (evaluation := run / "metrics.json").exists():
        metrics = json.loads(evaluation.read_text())
        steps = [(0, {key: value for key, value in metrics.items() if KEPT.fullmatch(key)})]
    with file.open("w") as kept:
        for step, data in steps:
            kept.write(json.dumps({"step": step, "data": data}) + "\n")


def read_metric(file, key):
    """Return (step, value) for each step in a file of results that has the metric."""
    return [(step, data[key]) for step, data in read_metrics(file) if key in data]


def read_scores(file, part):
    """Return (step, share of right answers) of each validation; `part` is val or val_greedy.

    The rewards of a control are permuted, so its share is in the metric `right`.
    """
    return read_metric(file, f"{part}/grader/right") or read_metric(file, f"{part}/reward/mean@1")


def interval(share, rows):
    """Return the 95 % interval of a share of `rows`, as text (Wilson, JASA 22, 1927)."""
    z2 = 1.96**2 / rows
    centre = share + z2 / 2
    half = (z2 * (share * (1 - share) + z2 / 4)) ** 0.5
    low, high = (max(0, (centre + sign * half) / (1 + z2)) for sign in (-1, 1))
    return f"{low:.2f}, {high:.2f}"


def table_row(file):
    """Return the line of a run in the table."""
    cells = []
    for part in ("val", "val_greedy"):
        scores = read_scores(file, part)
        rows = read_metric(file, f"{part}/rows")[0][1]
        shares = [share for _, share in scores[:1] + scores[1:][-1:]]
        cells.append(" → ".join(f"{p:.3f} [{interval(p, rows)}]" for p in shares))
    seconds = sum(value for _, value in read_metric(file, "timing_s/step"))
    minutes = f"{seconds / 60:.1f}" if seconds else ""
    names = [file.parent.parent.parent.name, file.parent.name, file.stem]
    return f"| {' | '.join([*names, str(scores[-1][0]), *cells])} | {minutes} |"


def draw(recipe, files):
    """Write the curve of a recipe; the stems of its files begin with a key of `KINDS`.

    Evaluations have no curve: the stems of their files begin with `base`.
    """
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "recipes"  # So the same results give the same file.
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    shown = set()
    for file in files:
        if file.stem.startswith("base"):
            continue
        kind, colour = next(v for k, v in KINDS.items() if file.stem.startswith(k))
        on_cpu = "cores" in file.parent.name
        steps, scores = zip(*read_scores(file, "val"), strict=True)
        label = f"{kind} (two CPU cores)" if on_cpu else kind
        style = {"marker": "o", "ms": 3, "color": colour, "ls": "--" if on_cpu else "-"}
        axis.plot(steps, scores, label="" if label in shown else label, **style)
        shown.add(label)
    axis.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axis.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(FOLDER / recipe / "curve.svg", metadata={"Date": None}, bbox_inches="tight")


def main():
    if sys.argv[1:2] == ["add"]:
        return add(Path(sys.argv[2]), Path(sys.argv[3]))
    files = sorted(FOLDER.glob("*/results/*/*.jsonl"))
    for recipe in sorted({f.parent.parent.parent.name for f in files}):
        draw(recipe, [f for f in files if f.parent.parent.parent.name == recipe])
    head = "| recipe | machine | run | steps | sampled | greedy | minutes of steps |\n"
    table = head + "|---" * 7 + "|\n" + "".join(f"{table_row(f)}\n" for f in files)
    page = FOLDER / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
