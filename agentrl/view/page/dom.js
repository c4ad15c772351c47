// Elements, texts and requests: what all pages use.
//
// Texts of models, tools and datasets become text nodes only, with control characters escaped. The
// files are plain scripts that share their names, not modules: browsers send an Origin header for
// modules, which the server refuses.
"use strict";

// An exported file contains the answers to all requests, by path and parameters.
const bundle = JSON.parse(document.getElementById("bundle")?.textContent ?? "null");

// The token is in the address that `agentrl view` prints. It is kept in localStorage, so that a
// link may be opened in another tab.
const tokenInAddress = /^#token=([\w-]+)/.exec(location.hash);
if (tokenInAddress) {
  localStorage.setItem("token", tokenInAddress[1]);
  history.replaceState(null, "", "#/");
}

// --- Requests ------------------------------------------------------------------------------------

function request(path, parameters, signal) {
  const token = localStorage.getItem("token") ?? "";
  const search = new URLSearchParams(parameters);
  return fetch(`${path}?${search}`, { headers: { authorization: `Bearer ${token}` }, signal });
}

async function refuse(answer) {
  if (answer.status === 401) throw new Error("Open the address that `agentrl view` printed: it contains the token.");
  throw new Error((await answer.json()).message ?? `the server answered with ${answer.status}`);
}

// The name of an answer in an exported file. An episode has one, whether or not its step is named.
function bundleKey(path, parameters) {
  const entries = Object.entries(parameters).filter(([name]) => name !== "step" || !("id" in parameters));
  return `${path}?${entries.map(([name, value]) => `${name}=${value}`).sort().join("&")}`;
}

function isAvailable(path, parameters) {
  return !bundle || bundleKey(path, parameters) in bundle;
}

function fromBundle(path, parameters) {
  if (!isAvailable(path, parameters)) throw new Error("This file does not contain that: it was exported from a part of the run.");
  return bundle[bundleKey(path, parameters)];
}

async function get(path, parameters = {}, signal = undefined) {
  if (bundle) return fromBundle(path, parameters);
  const answer = await request(path, parameters, signal);
  return answer.ok ? answer.json() : refuse(answer);
}

// Call `receive` with each line of an answer that the server sends bit by bit.
async function getLines(path, parameters, signal, receive) {
  if (bundle) return fromBundle(path, parameters).forEach(receive);
  const answer = await request(path, parameters, signal);
  if (!answer.ok) await refuse(answer);
  let rest = "";
  const decoder = new TextDecoder();
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    const lines = (rest + (done ? "" : decoder.decode(value, { stream: true }))).split("\n");
    rest = lines.pop();
    lines.map((line) => JSON.parse(line)).forEach(receive);
    if (done) return;
  }
}

// --- Texts and elements --------------------------------------------------------------------------

// Escape characters that are not visible or change the writing direction.
function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu, (c) => {
    if (c === "\n" || c === "\t") return c;
    const code = c.codePointAt(0);
    if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
    return code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
  });
}

function append(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const child of children) element.append(child instanceof Node ? child : visible(child));
  return element;
}

const make = (name, attributes = {}, ...children) => append(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => append(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

const isMissing = (value) => value === null || value === undefined;

function format(value) {
  if (isMissing(value)) return "?";
  if (typeof value === "number") {
    if (Number.isInteger(value)) return String(value);
    return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  return Array.isArray(value) ? value.join(", ") : String(value);
}

function seconds(value) {
  if (isMissing(value)) return "?";
  return Math.abs(value) < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
}

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const known = (value) => make("span", isMissing(value) ? { class: "unknown", title: "not recorded" } : {}, format(value));

function link(text, page, parameters = {}) {
  const search = new URLSearchParams(parameters).toString();
  return make("a", { href: `#${page}${search ? "?" + search : ""}` }, text);
}

// A link to an episode, or its text if an exported file does not contain the episode.
function episodeLink(run, text, parameters) {
  const isThere = isAvailable(`/api/runs/${run}/episode`, { id: parameters.id });
  return isThere ? link(text, `/run/${run}/episode`, parameters) : make("span", {}, text);
}

function stepLink(run, step, text = `step ${step}`) {
  return isAvailable(`/api/runs/${run}/step`, { step }) ? link(text, `/run/${run}/step/${step}`) : make("span", {}, text);
}

const NUMBERS = new Set(["step", "group", "rollout", "reward", "turns", "calls", "failed", "tokens", "seconds"]);

function tableRow(names, row, cell) {
  return make("tr", {}, ...names.map((name) => make("td", NUMBERS.has(name) ? { class: "number" } : {}, cell(row, name))));
}

function table(label, names, rows, cell) {
  const head = make("tr", {}, ...names.map((name) => make("th", NUMBERS.has(name) ? { scope: "col", class: "number" } : { scope: "col" }, name)));
  const body = make("tbody", {}, ...rows.map((row) => tableRow(names, row, cell)));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": visible(label) }, make("table", {}, make("thead", {}, head), body));
}

function choice(label, options, chosen, onChange) {
  const select = make("select", {}, ...options.map(([value, text]) => make("option", { value, ...(value === chosen ? { selected: "" } : {}) }, text)));
  select.addEventListener("change", () => onChange(select.value));
  return make("label", { class: "choice" }, `${label} `, select);
}

// --- Findings ------------------------------------------------------------------------------------

// A finding as a note. `run` is the index of its run, `place` what to say about where it holds.
function findingNote(run, finding, place) {
  const isAlarm = finding.severity === "error" || finding.severity === "warning";
  const shown = finding.episodes.slice(0, 5).flatMap((id, i) => {
    const turn = finding.turns?.[i];
    return [" ", episodeLink(run, isMissing(turn) ? id : `${id}, turn ${turn}`, isMissing(turn) ? { id } : { id, turn })];
  });
  const more = [];
  if (finding.causes.length) more.push(make("p", {}, make("b", {}, "Likely cause: "), finding.causes[0]));
  if (finding.tries.length) more.push(make("p", {}, make("b", {}, "Try: "), finding.tries[0]));
  if (shown.length) more.push(make("p", {}, make("b", {}, "Episodes:"), ...shown));
  return make("article", { class: `finding${isAlarm ? " alarm" : ""}` }, make("p", {}, make("b", {}, finding.severity), " ", ...place, " ", finding.text, make("small", {}, ` [${finding.name}]`)), ...more);
}
