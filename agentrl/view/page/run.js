// The first page: the runs with their findings and curves, and the list of episodes of a query.
"use strict";

const CURVES = ["critic/score/mean", "val/reward/mean@1", "response_length/mean", "tool_call_counts/mean", "rollout/dropped", "waste/dead_group_frac", "curriculum/not_played",
  "curriculum/too_hard", "curriculum/in_band", "curriculum/too_easy", "actor/entropy",
  "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "rollout_corr/logprob_diff_mean", "timing_s/step"];
const PARTS = [["all", "nothing"], ["source", "data source"], ["agent", "agent loop"], ["tool", "tool"]];

async function showRuns(parameters) {
  const names = await get("/api/runs");
  const runs = await Promise.all(names.map(async (run, i) => ({ ...run, index: i, metrics: await get(`/api/runs/${i}/metrics`) })));
  const by = parameters.get("by") ?? "all";
  const chosen = parameters.get("metrics") ?? "";
  const change = (changes) => go("/", Object.fromEntries(Object.entries({ by, metrics: chosen, ...changes }).filter(([name, value]) => value && !(name === "by" && value === "all"))));
  const findings = make("section", { class: "findings" }, make("h2", {}, "Findings"), make("p", {}, "…"));
  const rollouts = make("section", {}, make("h2", {}, "Rollouts"), make("p", {}, "…"));
  const metrics = make("section", {});
  const filter = make("input", { value: chosen, placeholder: "a part of a name: val-core/, tool, timing_s/" });
  filter.addEventListener("change", () => change({ metrics: filter.value }));
  const open = (step) => go(`/run/0/step/${step}`);

  function drawMetrics(marks) {
    const every = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "step").sort();
    const shown = chosen ? every.filter((name) => name.includes(chosen)).slice(0, 60) : CURVES;
    const charts = shown.map((name) => chart(name, runs.map((run) => ({ label: runs.length > 1 ? run.name : "", color: run.index, points: metricPoints(run.metrics, name) })), marks, open)).filter(Boolean);
    metrics.replaceChildren(make("h2", {}, "Metrics"),
      make("p", {}, make("label", { class: "choice" }, "show ", filter), make("small", {}, " ± is the standard error between the last steps")),
      charts.length ? make("div", { class: "curves" }, ...charts) : make("p", {}, chosen ? `no metric has ${chosen} in its name` : "no step has recorded metrics yet"));
  }

  drawMetrics([]);
  return {
    nodes: [make("h1", {}, runs.length > 1 ? `${runs.length} runs` : `Run ${runs[0].name}`), make("ul", { class: "runs" }, ...runs.map(describeRun)), findings, rollouts, metrics],
    after: async () => {
      const drawRollouts = fillRollouts(rollouts, runs, by, (value) => change({ by: value }), open);
      const marks = await fillFindings(findings, runs);
      if (marks.length) drawMetrics(marks);
      (await drawRollouts)(marks);
    },
  };
}

function describeRun(run) {
  const steps = run.steps.slice(-400);
  const options = [["", "choose"], ...steps.map((step) => [String(step), String(step)])];
  const parts = [make("span", { class: `swatch c${run.index % COLORS}` }), make("b", {}, run.name), " ", link("episodes", `/run/${run.index}`), " ", choice("step", options, "", (step) => step && go(`/run/${run.index}/step/${step}`))];
  if (steps.length) parts.push(" ", stepLink(run.index, steps.at(-1), bundle ? `step ${steps.at(-1)}` : `last step (${steps.at(-1)})`));
  return make("li", {}, ...parts);
}

function metricPoints(metrics, name) {
  const values = metrics[name] ?? [];
  return metrics.step.map((step, i) => [step, values[i]]).filter(([, y]) => !isMissing(y));
}

// Show the findings, and return the steps where alarms begin, as marks of charts.
async function fillFindings(section, runs) {
  const notes = [];
  const marks = [];
  for (const run of runs) {
    for (const finding of await get(`/api/runs/${run.index}/findings`)) {
      const place = [...(runs.length > 1 ? [`${run.name}, `] : []), "from ", stepLink(run.index, finding.step), ":"];
      notes.push(findingNote(run.index, finding, place));
      if (finding.severity !== "note") marks.push([finding.step, finding.text]);
    }
  }
  section.replaceChildren(make("h2", {}, "Findings"), ...(notes.length ? notes : [make("p", {}, "none")]));
  return marks;
}

// Show the curves of the rollouts, and return a function that shows them again with marks.
async function fillRollouts(section, runs, by, onChange, open) {
  const every = await Promise.all(runs.map((run) => get(`/api/runs/${run.index}/curves`, { by })));
  const names = [...new Set(every.flatMap((answer) => answer.curves.map((curve) => curve.name)))];
  const labels = [];
  const drawCharts = (marks) => names.map((name) => {
    const lines = every.flatMap((answer, i) =>
      answer.curves.filter((curve) => curve.name === name).flatMap((curve) => curve.lines).map((line) => ({
        label: [...(runs.length > 1 ? [runs[i].name] : []), ...(by === "all" ? [] : [line.part || "(none)"])].join(" · "),
        points: line.points,
      })));
    // A part has the same colour in all charts, though some charts lack it.
    for (const line of lines) {
      if (!labels.includes(line.label)) labels.push(line.label);
      line.color = labels.indexOf(line.label);
    }
    return chart(name, lines, marks, open);
  });
  const strides = every.map((answer) => answer.every).filter((stride) => stride > 1);
  const note = strides.length ? ` Every ${strides.join(", ")} steps are read.` : "";
  const grid = make("div", { class: "curves" }, ...drawCharts([]));
  section.replaceChildren(make("h2", {}, "Rollouts"),
    make("p", {}, choice("divide by", PARTS, by, onChange), make("small", {}, ` training rollouts; ± and the band are the standard error, clustered by row.${note}`)),
    names.length ? grid : make("p", {}, by === "tool" ? "no tool was called" : "no rollouts are stored"));
  return (marks) => marks.length && grid.replaceChildren(...drawCharts(marks));
}

// --- Episodes ------------------------------------------------------------------------------------

const EPISODE_COLUMNS = ["episode", "step", "split", "group", "rollout", "reward", "stop", "turns", "calls", "failed", "tokens", "seconds", "source", "tool", "error"];

// Queries for a reader who does not know the fields yet.
const EXAMPLES = ["reward<0.5", "calls=0", "failed>0", "stop!=done", "masked=true", "dropped>0", "split=evicted"];

async function showEpisodes(run, parameters, signal) {
  const q = parameters.get("q") ?? "";
  const after = Number(parameters.get("after") ?? 0);
  const examples = make("p", {}, make("small", {}, "for example: "), ...EXAMPLES.flatMap((example) => [link(example, `/run/${run}`, { q: example }), " "]));
  const status = make("p", { role: "status" }, "searching…");
  const pages = make("p", {});
  const cell = (row, name) => {
    if (name === "episode") return episodeLink(run, row.episode, { id: row.episode, step: row.step });
    if (name === "step") return stepLink(run, row.step, String(row.step));
    if (name === "tool" || name === "error") return known([...new Set(row[name])].filter(Boolean));
    return known(row[name]);
  };
  const list = table("episodes", EPISODE_COLUMNS, [], cell);
  list.hidden = true;
  const body = list.querySelector("tbody");
  return {
    nodes: [make("h1", {}, q ? `Episodes: ${q}` : "Episodes"), ...(bundle ? [] : [examples]), status, list, pages],
    after: async () => {
      let limit = 0;
      await getLines(`/api/runs/${run}/episodes`, { q, after }, signal, (line) => {
        if (line.message) throw new Error(line.message);
        for (const row of line.rows ?? []) body.append(tableRow(EPISODE_COLUMNS, row, cell));
        const shown = body.childElementCount;
        list.hidden = !shown;
        limit = line.limit ?? limit;
        const range = shown && shown < line.total ? `; ${after + 1} to ${after + shown} are shown` : "";
        if (!line.choices) {
          status.textContent = `${line.total} found until now, ${line.searched} of ${line.files} files searched`;
          return;
        }
        status.textContent = line.total ? `${plural(line.total, "episode")}${range}` : "no episode matches";
        for (const [name, values] of Object.entries(line.choices)) status.after(make("p", {}, `${name} is one of: ${values.join(", ")}`));
        if (after) pages.append(link("previous", `/run/${run}`, { q, after: Math.max(0, after - limit) }), " ");
        if (after + shown < line.total) pages.append(link("next", `/run/${run}`, { q, after: after + shown }));
      });
    },
  };
}
