// Pages of recorded runs. Texts of models, tools and datasets become text nodes only, with control
// characters escaped; the server's Content-Security-Policy forbids all other scripts. This is no module: browsers send an Origin header for modules, which the
// server refuses.
"use strict";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const query = document.getElementById("query");
const ROW = 22; // the height of a token's row in CSS pixels
const CHUNK = 500; // tokens that are fetched at once
const POLL_MS = 5000;

// In localStorage, so that a link may be opened in another tab.
const given = /^#token=([\w-]+)/.exec(location.hash);
if (given) {
  localStorage.setItem("token", given[1]);
  history.replaceState(null, "", "#/");
}

class Failed extends Error {}

async function get(path, parameters = {}, signal = undefined) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(parameters)) url.searchParams.set(name, value);
  const token = localStorage.getItem("token") ?? "";
  const answer = await fetch(url, { headers: { authorization: `Bearer ${token}` }, signal });
  if (answer.status === 401) throw new Failed("Open the address that `agentrl view` printed: it contains the token.");
  const body = await answer.json();
  if (!answer.ok) throw new Failed(body.message ?? `the server answered with ${answer.status}`);
  return body;
}

// Escape characters that are not visible or change the writing direction.
function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu, (c) => {
    if (c === "\n" || c === "\t") return c;
    const code = c.codePointAt(0);
    if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
    return code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
  });
}

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const child of children) element.append(child instanceof Node ? child : visible(child));
  return element;
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function format(value) {
  if (value === null || value === undefined) return "?";
  if (typeof value === "number") {
    if (Number.isInteger(value)) return String(value);
    return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  return Array.isArray(value) ? value.join(", ") : String(value);
}

function known(value) {
  const missing = value === null || value === undefined;
  return make("span", missing ? { class: "unknown", title: "not recorded" } : {}, format(value));
}

function table(names, rows, cell) {
  const body = rows.map((row) => make("tr", {}, ...names.map((name) => make("td", { class: name === "error" || name === "tool" ? "text" : "" }, cell(row, name)))));
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function link(text, page, parameters = {}) {
  const search = new URLSearchParams(parameters).toString();
  return make("a", { href: `#${page}${search ? "?" + search : ""}` }, text);
}

const episodeLink = (run, row) => link(row.episode, `/run/${run}/episode`, { id: row.episode, step: row.step });

// --- Run -----------------------------------------------------------------------------------------

const CURVES = ["critic/score/mean", "response_length/mean", "num_turns/mean", "tool_call_counts/mean", "waste/dead_group_frac", "actor/entropy",
  "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "rollout_corr/logprob_diff_mean", "timing_s/step"];

function points(metrics, name) {
  const values = metrics[name] ?? [];
  return metrics.step.map((step, i) => [step, values[i]]).filter(([, y]) => y !== null && y !== undefined);
}

function smooth(line, window) {
  return line.map(([x], i) => {
    const part = line.slice(Math.max(0, i - window + 1), i + 1);
    return [x, part.reduce((sum, [, y]) => sum + y, 0) / part.length];
  });
}

function describeEnd(line, window) {
  const last = line.slice(-Math.max(window, 5)).map(([, y]) => y);
  const mean = last.reduce((a, b) => a + b, 0) / last.length;
  if (last.length < 2) return `${format(mean)} (n = 1 step)`;
  const variance = last.reduce((a, y) => a + (y - mean) ** 2, 0) / (last.length - 1);
  return `${format(mean)} ± ${format(Math.sqrt(variance / last.length))} (mean and standard error of the last n = ${last.length} steps)`;
}

function curve(name, runs) {
  const lines = runs.map((run) => points(run.metrics, name));
  const all = lines.flat();
  if (!all.length) return null;
  const [W, H] = [360, 150];
  const range = (i) => [Math.min(...all.map((p) => p[i])), Math.max(...all.map((p) => p[i]))];
  const [[x0, x1], [y0, y1]] = [range(0), range(1)];
  const place = ([x, y]) => `${(5 + ((W - 10) * (x - x0)) / (x1 - x0 || 1)).toFixed(1)},${(H - 18 - ((H - 36) * (y - y0)) / (y1 - y0 || 1)).toFixed(1)}`;
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": visible(`${name}, steps ${x0} to ${x1}, from ${format(y0)} to ${format(y1)}`) });
  const caption = make("figcaption", {}, make("b", {}, name));
  lines.forEach((line, i) => {
    if (!line.length) return;
    const window = Math.max(1, Math.min(10, Math.ceil(line.length / 10)));
    picture.append(svg("polyline", { class: `raw c${i % 4}`, points: line.map(place).join(" ") }));
    picture.append(svg("polyline", { class: `smooth c${i % 4}`, points: smooth(line, window).map(place).join(" ") }));
    caption.append(make("div", { class: `c${i % 4}` }, `${runs[i].name}: ${describeEnd(line, window)}; thin: raw, thick: mean of ${window} steps`));
  });
  const label = (x, y, text, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);
  picture.append(label(5, 12, format(y1), "start"), label(5, H - 4, `${format(y0)}   step ${x0}`, "start"), label(W - 5, H - 4, String(x1), "end"));
  return make("figure", {}, picture, caption);
}

async function showRuns(parameters) {
  const names = await get("/api/runs");
  const runs = await Promise.all(names.map(async (run, i) => ({ ...run, metrics: await get(`/api/runs/${i}/metrics`) })));
  const chosen = parameters.get("metrics") ?? "";
  const every = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "step").sort();
  const shown = chosen ? every.filter((name) => name.includes(chosen)).slice(0, 60) : CURVES;
  const filter = make("input", { value: chosen, id: "metrics", placeholder: "part of a name, such as val-core/ or rollout/" });
  filter.addEventListener("change", () => go("/", filter.value ? { metrics: filter.value } : {}));
  const lists = runs.map((run, i) => {
    const steps = run.steps.length > 400 ? run.steps.slice(-400) : run.steps;
    const options = steps.map((step) => make("option", { value: step }, String(step)));
    const choice = make("select", { "aria-label": `step of run ${run.name}` }, make("option", { value: "" }, "..."), ...options);
    choice.addEventListener("change", () => go(`/run/${i}/step/${choice.value}`));
    return make("li", { class: `c${i % 4}` }, run.name, " · ", link("episodes", `/run/${i}`), " · step ", choice);
  });
  const findings = make("section", {}, make("h2", {}, "Findings"), make("p", {}, "…"));
  const curves = shown.map((name) => curve(name, runs)).filter(Boolean);
  return {
    nodes: [make("h1", {}, runs.length > 1 ? `${runs.length} runs` : "Run"), make("ul", {}, ...lists), findings,
      make("h2", {}, "Curves"), make("p", {}, make("label", { for: "metrics" }, "Metrics "), filter),
      curves.length ? make("div", { class: "curves" }, ...curves) : make("p", {}, `no step has recorded ${chosen || "these metrics"} yet`)],
    after: () => fillFindings(findings, runs),
  };
}

async function fillFindings(section, runs) {
  const parts = [];
  for (const [i, run] of runs.entries()) {
    for (const finding of await get(`/api/runs/${i}/findings`)) {
      const episodes = finding.episodes.slice(0, 4).flatMap((id) => [" ", link(id, `/run/${i}/episode`, { id })]);
      const alarm = ["error", "warning"].includes(finding.severity) ? "alarm" : "";
      const text = `${finding.severity}${runs.length > 1 ? `, ${run.name}` : ""}: ${finding.text} `;
      const more = [...finding.causes.slice(0, 1).map((c) => `likely cause: ${c}`), ...finding.tries.slice(0, 1).map((t) => `try: ${t}`)];
      parts.push(make("article", { class: alarm }, text, link(`step ${finding.step}`, `/run/${i}/step/${finding.step}`), ...more.map((m) => make("div", {}, m)), ...episodes));
    }
  }
  section.replaceChildren(make("h2", {}, "Findings"), ...(parts.length ? parts : [make("p", {}, "none")]));
}

// --- Episodes and steps --------------------------------------------------------------------------

const COLUMNS = ["step", "split", "group", "rollout", "reward", "stop", "turns", "calls", "failed", "tokens", "seconds", "source", "tool", "error", "episode"];

async function showEpisodes(run, parameters, signal) {
  const q = parameters.get("q") ?? "";
  const after = Number(parameters.get("after") ?? 0);
  query.value = q;
  const found = await get(`/api/runs/${run}/episodes`, { q, after }, signal);
  const end = after + found.rows.length;
  const cell = (row, name) => (name === "episode" ? episodeLink(run, row) : name === "step" ? link(row.step, `/run/${run}/step/${row.step}`) : known(row[name]));
  const turn = [];
  if (after) turn.push(link("previous", `/run/${run}`, { q, after: Math.max(0, after - found.limit) }), " ");
  if (end < found.total) turn.push(link("next", `/run/${run}`, { q, after: end }));
  const hints = Object.entries(found.choices).map(([name, values]) => make("p", {}, `${name} is one of: ${values.join(", ")}`));
  const count = found.total ? `${found.total} episodes; ${after + 1} to ${end}` : "no episode matches";
  return { nodes: [make("h1", {}, `Episodes ${q}`), make("p", {}, count + " ", ...turn), ...hints, found.total ? table(COLUMNS, found.rows, cell) : ""] };
}

async function showStep(run, step) {
  const found = await get(`/api/runs/${run}/episodes`, { q: `step=${step}`, limit: 2000 });
  const gaps = await get(`/api/runs/${run}/gaps`, { step });
  found.rows.sort((a, b) => (b.split === "train") - (a.split === "train"));
  const groups = Map.groupBy(found.rows, (row) => `${row.split} group ${format(row.group)} · ${row.sample}`);
  const parts = [...groups].map(([title, rows]) => {
    const cell = (row, name) => (name === "rollout" ? link(`rollout ${row.rollout}`, `/run/${run}/episode`, { id: row.episode, step }) : known(row[name]));
    const lost = rows[0].dropped ? `, ${rows[0].dropped} dropped` : "";
    return make("section", {}, make("h2", {}, title + lost), table(["rollout", "reward", "stop", "calls", "failed", "tokens", "seconds"], rows, cell));
  });
  const worst = gaps.map((gap) => make("li", {}, `${format(gap.gap)} nats: `, link(`token ${gap.position} of ${gap.episode}`, `/run/${run}/episode`, { id: gap.episode, step, segment: gap.segment, token: gap.position })));
  const slow = [...found.rows].sort((a, b) => b.seconds - a.seconds).slice(0, Math.max(1, Math.min(5, Math.ceil(found.rows.length / 20))));
  const cut = found.total > found.rows.length ? `the first ${found.rows.length} of ` : "";
  return {
    nodes: [make("h1", {}, `Step ${step}`), make("p", {}, `${cut}${found.total} episodes `, link("previous step", `/run/${run}/step/${step - 1}`), " ", link("next step", `/run/${run}/step/${step + 1}`)),
      make("h2", {}, "Largest gaps to the trainer"), worst.length ? make("ul", {}, ...worst) : make("p", { class: "unknown" }, "the trainer's logprobs of this step are not recorded"),
      make("h2", {}, "Slowest"), make("ul", {}, ...slow.map((row) => make("li", {}, `${format(row.seconds)} s: `, episodeLink(run, row)))),
      make("div", { class: "groups" }, ...parts)],
  };
}

// --- Episode -------------------------------------------------------------------------------------

function describeTurn(run, episode, index, turn) {
  const parts = [` · turn ${index} · ${turn.end - turn.start} tokens · ${format(turn.generate_seconds)} s · advantage `, known(turn.advantage), " · clipped ", known(turn.clipped), " · largest gap "];
  const at = { id: episode.episode, step: episode.step, segment: turn.segment, token: turn.largest_gap_at };
  parts.push(turn.largest_gap === null ? known(null) : link(format(turn.largest_gap), `/run/${run}/episode`, at));
  if (turn.thread) parts.push(` · conversation ${turn.thread}`);
  if (turn.finish_reason !== "stop") parts.push(` · cut (${turn.finish_reason})`);
  return parts;
}

function describeCall(call) {
  const state = call.ok === null ? "not run" : call.error || "ok";
  const seconds = call.seconds === null ? "" : `, ${format(call.seconds * 1000)} ms`;
  const malformed = call.malformed ? ` (${call.malformed})` : "";
  return make("div", { class: call.ok ? "" : "error" }, `call ${call.name || "?"} ${call.arguments}${malformed}: ${state}${seconds}`);
}

async function showEpisode(run, parameters) {
  const at = { id: parameters.get("id") ?? "" };
  if (parameters.has("step")) at.step = parameters.get("step");
  const episode = await get(`/api/runs/${run}/episode`, at);
  const facts = ["step", "split", "group", "rollout", "sample", "agent", "source", "reward", "stop", "masked", "seconds", "ground_truth"];
  const messages = episode.messages.map((message, i) => {
    const turn = message.turn === null ? null : episode.turns[message.turn];
    const text = make("pre", { tabindex: "0" }, message.content);
    const article = make("article", { class: message.role }, make("h3", {}, message.role, ...(turn ? describeTurn(run, episode, message.turn, turn) : [])), text);
    if (message.length > message.content.length) {
      const more = make("button", {}, `show all ${message.length} characters`);
      more.addEventListener("click", async () => {
        text.replaceChildren(visible((await get(`/api/runs/${run}/message`, { ...at, index: i })).content));
        more.remove();
      });
      article.append(more);
    }
    if (turn) article.append(...turn.calls.map(describeCall));
    return article;
  });
  const segment = Number(parameters.get("segment") ?? 0);
  const choices = episode.segments.map((s, i) => [link(`segment ${i} (${s.response} tokens)`, `/run/${run}/episode`, { ...at, segment: i }), " "]).flat();
  const rewards = Object.entries(episode.rewards).map(([name, value]) => `${name} ${format(value)}`).join(", ");
  const spans = episode.spans.length ? table(["name", "start", "end", "thread"], episode.spans, (row, name) => known(row[name])) : make("p", { class: "unknown" }, "not recorded");
  const strip = make("div", { id: "tokens", tabindex: "0", role: "region", "aria-label": "tokens" });
  return {
    nodes: [make("h1", {}, `Episode ${episode.episode}`),
      make("p", {}, ...facts.flatMap((name) => [`${name} `, known(episode[name]), " · "]), `rewards: ${rewards}`),
      make("h2", {}, "Tokens"), make("p", {}, ...choices), strip, make("h2", {}, "Messages"), ...messages, make("h2", {}, "Time, in seconds"), spans],
    after: () => fillTokens(strip, run, at, episode, segment, parameters.get("token")),
  };
}

const TOKEN_COLUMNS = ["turn", "position", "text", "token_id", "logprob", "old_logprob", "gap", "advantage", "clipped", "entropy", "version"];

// Only the rows in sight exist, so that an episode of any length scrolls.
function fillTokens(strip, run, at, episode, segment, chosen) {
  const count = episode.segments[segment]?.response ?? 0;
  const turns = episode.turns.map((turn, i) => ({ ...turn, i })).filter((turn) => turn.segment === segment);
  const head = make("div", { class: "head" }, ...TOKEN_COLUMNS.map((name) => make("span", { class: name === "text" ? "cell text" : "cell" }, name)));
  const space = make("div", {});
  space.style.height = `${count * ROW}px`;
  space.style.position = "relative";
  strip.append(head, space);
  const chunks = new Map();
  let last = "";
  async function draw() {
    const first = Math.max(0, Math.floor(strip.scrollTop / ROW) - 5);
    const end = Math.min(count, first + Math.ceil(strip.clientHeight / ROW) + 12);
    const range = `${first}-${end}`;
    last = range;
    for (let c = Math.floor(first / CHUNK); c * CHUNK < end; c++) {
      if (!chunks.has(c)) chunks.set(c, get(`/api/runs/${run}/tokens`, { ...at, step: episode.step, segment, from: c * CHUNK, to: (c + 1) * CHUNK }));
      await chunks.get(c);
    }
    if (last !== range) return;
    const rows = [];
    for (let i = first; i < end; i++) {
      const token = (await chunks.get(Math.floor(i / CHUNK)))[i % CHUNK];
      const turn = turns.find((t) => t.start <= i && i < t.end);
      const cells = TOKEN_COLUMNS.map((name) => {
        if (name === "turn") return make("span", { class: "cell" }, turn ? `turn ${turn.i}` : token.mask ? "sampled" : "not sampled");
        const text = name === "text" && token.text !== null ? JSON.stringify(token.text).slice(1, -1) : null;
        const value = text === null ? known(token[name]) : text;
        return make("span", { class: name === "text" ? "cell text" : "cell" }, value);
      });
      const border = turn && turn.start === i ? " border" : "";
      const row = make("div", { class: `row${token.mask ? " sampled" : ""}${border}${String(i) === chosen ? " chosen" : ""}` }, ...cells);
      row.style.top = `${i * ROW}px`;
      rows.push(row);
    }
    space.replaceChildren(...rows);
  }
  strip.addEventListener("scroll", draw);
  if (chosen !== null) strip.scrollTop = Math.max(0, Number(chosen) - 8) * ROW;
  return draw();
}

// --- Pages ---------------------------------------------------------------------------------------

let current = new AbortController();
let state = "";

function address() {
  const [path, search] = location.hash.slice(1).split(/\?(.*)/s);
  return { path: path || "/", parameters: new URLSearchParams(search ?? "") };
}

function go(path, parameters = {}) {
  const search = new URLSearchParams(parameters).toString();
  location.hash = `#${path}${search ? "?" + search : ""}`;
}

const runOf = (path) => Number(/^\/run\/(\d+)/.exec(path)?.[1] ?? 0);

function openPage(path, parameters, signal) {
  const run = runOf(path);
  const step = /^\/run\/\d+\/step\/(\d+)$/.exec(path);
  if (step) return showStep(run, Number(step[1]));
  if (/^\/run\/\d+\/episode$/.test(path)) return showEpisode(run, parameters);
  if (/^\/run\/\d+$/.test(path)) return showEpisodes(run, parameters, signal);
  return showRuns(parameters);
}

async function draw() {
  current.abort();
  current = new AbortController();
  const { signal } = current;
  const { path, parameters } = address();
  document.body.dataset.ready = "";
  try {
    const page = await openPage(path, parameters, signal);
    if (signal.aborted) return;
    nav.replaceChildren(link("run", "/"), link("episodes", `/run/${runOf(path)}`));
    main.replaceChildren(...page.nodes);
    await page.after?.();
  } catch (error) {
    if (signal.aborted) return;
    main.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
  }
  document.body.dataset.ready = "yes";
}

async function poll() {
  const { path } = address();
  if (document.hidden || !/^\/(run\/\d+)?$/.test(path)) return;
  try {
    const now = JSON.stringify(await get("/api/state"));
    if (state && now !== state) await draw();
    state = now;
  } catch {
    // The server may be restarting; the next poll tries again.
  }
}

document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  go(`/run/${runOf(address().path)}`, { q: query.value });
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  if (event.key === "/") {
    event.preventDefault();
    query.focus();
  } else if (event.key === "j" || event.key === "k") {
    const links = [...main.querySelectorAll("a, button")];
    const next = links.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    links[Math.max(0, Math.min(links.length - 1, next))]?.focus();
  }
});
addEventListener("hashchange", draw);
setInterval(poll, POLL_MS);
draw();
