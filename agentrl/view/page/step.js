// A step: what took long, what did not train, and its groups with their rollouts side by side.
"use strict";

const KINDS = ["generate", "tools", "queue", "interaction", "reward", "open", "loop"];
const MEANING = {
  generate: "the engine samples", tools: "tool calls", queue: "waiting for the engine or a connection", interaction: "the simulated user", reward: "the reward function",
  open: "opening the tools", loop: "the agent loop itself",
};
const SINGLES = 50; // rollouts of groups of one that are listed
const TRACKS = 40; // rollouts that the timeline shows at first

async function showStep(run, step) {
  const data = await get(`/api/runs/${run}/step`, { step });
  data.rollouts.sort((a, b) => rank(a) - rank(b));
  const names = new Map(data.rollouts.map((row) => [row.episode, nameRollout(row)]));
  const findings = make("section", {});
  const gaps = make("section", {}, make("h2", {}, "Largest gaps to the trainer"), make("p", {}, "…"));
  const nextTo = [];
  if (step > 0) nextTo.push(stepLink(run, step - 1, "previous step"), " ");
  nextTo.push(stepLink(run, step + 1, "next step"));
  if (!data.rollouts.length) return { nodes: [make("h1", {}, `Step ${step}`), make("p", {}, "no rollout of this step is stored ", ...nextTo)] };
  return {
    nodes: [make("h1", {}, `Step ${step}`), make("p", {}, describeRollouts(data.rollouts), " · ", ...nextTo), findings,
      make("div", { class: "facts" }, gaps, slowCalls(run, data.slow_calls, names), untrained(run, data, names)),
      ...timeOfStep(run, step, data, names), make("h2", {}, "Groups"), ...groups(run, step, data.rollouts)],
    after: async () => {
      const list = await get(`/api/runs/${run}/gaps`, { step });
      const items = list.map((gap) => make("li", {}, `${format(gap.gap)} nats: `, episodeLink(run, `token ${gap.position} of ${gap.episode}`, { id: gap.episode, step, segment: gap.segment, token: gap.position }),
        isMissing(gap.text) ? "" : make("code", {}, quote(gap.text)), ` ${names.get(gap.episode) ?? ""}`));
      gaps.replaceChildren(make("h2", {}, "Largest gaps to the trainer"), items.length ? make("ol", {}, ...items) : make("p", { class: "unknown" }, "not recorded: the trainer's logprobs are kept for the last 50 steps"));
      const own = (await get(`/api/runs/${run}/findings`)).filter((finding) => finding.step === step);
      if (own.length) findings.replaceChildren(make("h2", {}, "Findings that begin here"), ...own.map((finding) => findingNote(run, finding, [])));
    },
  };
}

// Groups of each split are counted from 0, so all splits but training are named.
const nameRollout = (row) => `${row.split === "train" ? "" : `${row.split} `}group ${row.group}, rollout ${row.rollout}`;
const shortName = (row) => `${row.split === "train" ? "" : `${row.split} `}${row.group} / ${row.rollout}`;
const quote = (text) => JSON.stringify(text);

function describeRollouts(rollouts) {
  const splits = Map.groupBy(rollouts, (row) => row.split);
  return [...splits].map(([split, rows]) => `${split}: ${plural(rows.length, "rollout")} of ${plural(new Set(rows.map((row) => row.group)).size, "group")}`).join("; ");
}

function slowCalls(run, calls, names) {
  const items = calls.map((call) => make("li", {}, `${seconds(call.seconds)}: ${call.tool || "?"}${call.error ? ` (${call.error})` : ""}, `,
    episodeLink(run, `turn ${call.turn} of ${call.episode}`, { id: call.episode, turn: call.turn }), ` ${names.get(call.episode)}`));
  return make("section", {}, make("h2", {}, "Slowest tool calls"), items.length ? make("ol", {}, ...items) : make("p", {}, "no tool was called"));
}

function untrained(run, data, names) {
  const items = data.untrained.map((part) => {
    const more = [];
    if (part.groups.length) more.push(` Groups: ${part.groups.slice(0, 20).join(", ")}${part.groups.length > 20 ? ", …" : ""}.`);
    for (const id of part.episodes) more.push(" ", episodeLink(run, names.get(id), { id }));
    return make("li", {}, make("b", {}, `${plural(part.count, "rollout")} ${part.what}: `), part.why, ".", ...more);
  });
  return make("section", {}, make("h2", {}, "Dropped and not trained on"), items.length ? make("ul", {}, ...items) : make("p", {}, "nothing: all rollouts of this step trained"));
}

// --- Time ----------------------------------------------------------------------------------------

function timeOfStep(run, step, data, names) {
  const { time } = data;
  const heading = make("h2", {}, "What waited for what");
  const total = Object.values(time.parts).reduce((a, b) => a + b, 0);
  const shares = Object.entries(time.parts).filter(([, part]) => part / total >= 0.001);
  const sums = shares.map(([name, part]) => make("li", {}, make("span", { class: `swatch span-${name}` }), `${name} ${Math.round((100 * part) / total)} %`, make("small", {}, ` ${MEANING[name] ?? ""}`)));
  const wait = Math.max(0, time.seconds - time.others_end);
  const last = time.last.slice(0, 5).map((row) => {
    const parts = Object.entries(row.parts).filter(([, part]) => part >= 0.001).slice(0, 3).map(([name, part]) => `${name} ${seconds(part)}`);
    return make("li", {}, episodeLink(run, names.get(row.episode), { id: row.episode, step }), ` ended at ${seconds(row.end)}${parts.length ? `, meanwhile: ${parts.join(", ")}` : ""}`);
  });
  const others = time.last.slice(5).flatMap((row) => [" ", episodeLink(run, names.get(row.episode), { id: row.episode, step })]);
  const timed = data.rollouts.filter((row) => !isMissing(row.end)).sort((a, b) => b.end - a.end);
  const tracks = make("div", { class: "tracks" });
  const draw = (rows) => tracks.replaceChildren(...rows.map((row) => track(episodeLink(run, shortName(row), { id: row.episode, step }), row.start, row.spans, time.seconds, row.end)), scale(time.seconds));
  const heads = make("div", { class: "track" }, make("div", { class: "label" }, make("small", {}, "group / rollout")), make("small", {}, "seconds since the first rollout of the step began; the last to end is the first"));
  draw(timed.slice(0, TRACKS));
  const nodes = [heading,
    make("p", {}, `The rollouts took ${seconds(time.seconds)}. The last ${plural(time.last.length, "rollout")} of ${time.rollouts} (5 %) kept the step waiting for ${seconds(wait)} after all others had ended:`),
    make("ol", {}, ...last), ...(others.length ? [make("p", {}, "and, ended before them:", ...others)] : []), make("p", {}, "All rollouts spent their time on:"), make("ul", { class: "legend" }, ...sums), heads, tracks];
  if (timed.length > TRACKS) {
    const more = make("button", {}, `show all ${timed.length} rollouts; these are the last ${TRACKS}`);
    more.addEventListener("click", () => { draw(timed); more.remove(); });
    nodes.push(more);
  }
  return nodes;
}

// A row of the timeline: a label, and the spans that began `start` seconds after the step.
function track(label, start, spans, total, end) {
  const bar = make("div", { class: "bar" });
  for (const [name, from, to] of spans ?? [["not loaded", 0, end - start]]) {
    const part = make("span", { class: `span-${KINDS.includes(name) ? name : "loop"}`, title: visible(`${name}: ${seconds(to - from)}, from ${seconds(start + from)} on`) });
    part.style.left = `${(100 * (start + from)) / total}%`;
    part.style.width = `${(100 * Math.max(0, to - from)) / total}%`;
    bar.append(part);
  }
  return make("div", { class: "track" }, make("div", { class: "label" }, label), bar);
}

function scale(total) {
  const ends = make("div", { class: "scale" }, make("span", {}, "0 s"), make("span", {}, seconds(total / 2)), make("span", {}, seconds(total)));
  return make("div", { class: "track" }, make("div", { class: "label" }), ends);
}

// --- Groups --------------------------------------------------------------------------------------

// Training comes before validations.
function rank(row) {
  const at = ["train", "evicted", "baseline"].indexOf(row.split);
  return at < 0 ? 3 : at;
}

const GROUP_COLUMNS = ["rollout", "reward", "stop", "turns", "calls", "failed", "tokens", "seconds"];

function groups(run, step, rollouts) {
  const parts = Map.groupBy(rollouts, (row) => row.split);
  return [...parts].flatMap(([split, rows]) => {
    const heading = parts.size > 1 ? [make("h3", {}, split)] : [];
    const byGroup = Map.groupBy(rows, (row) => row.group);
    if (byGroup.size === rows.length) return [...heading, ...singleRollouts(run, step, split, rows)];
    const sections = [...byGroup].map(([number, of]) => groupSection(run, step, `Group ${number}`, of));
    return [...heading, make("div", { class: "groups" }, ...sections)];
  });
}

// Groups of one rollout, as in most validations, are one table.
function singleRollouts(run, step, split, rows) {
  const cell = (row, name) => (name === "group" ? episodeLink(run, format(row.group), { id: row.episode, step }) : known(row[name]));
  const nodes = [table(split, ["group", ...GROUP_COLUMNS.slice(1), "source"], rows.slice(0, SINGLES), cell)];
  if (rows.length > SINGLES && !bundle) nodes.push(make("p", {}, link(`all ${rows.length} rollouts`, `/run/${run}`, { q: `step=${step} split=${split}` })));
  return nodes;
}

function groupSection(run, step, title, rows) {
  const cell = (row, name) => (name === "rollout" ? episodeLink(run, String(row.rollout), { id: row.episode, step }) : known(row[name]));
  const notes = [`row ${rows[0].sample}`, rows[0].agent, rows[0].source].filter(Boolean);
  if (rows.length > 1 && new Set(rows.map((row) => row.reward)).size === 1) notes.push("all rewards are equal");
  if (rows[0].dropped) notes.push(`${rows[0].dropped} dropped`);
  const masked = rows.filter((row) => row.masked).length;
  if (masked) notes.push(`${masked} masked`);
  return make("section", {}, make("h3", {}, title, " ", make("small", {}, notes.join(" · "))), table(title, GROUP_COLUMNS, rows, cell));
}
