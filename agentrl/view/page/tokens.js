// The tokens of a segment, as coloured text or as a table of all their numbers.
//
// Only what is in sight exists as elements, so that an episode of any length scrolls. A token whose
// number is unknown is hatched, which is not the colour of 0. A token that was not sampled is grey.
"use strict";

const ROW = 22; // the height of a table's row in CSS pixels
const CHUNK = 500; // tokens that are fetched at once, and the tokens of a block of text
const QUANTITIES = {
  gap: "gap to the trainer (log p_trainer - log p_engine, in nats)",
  logprob: "logprob of the engine (in nats)",
  advantage: "advantage",
  clipped: "clipped (number of passes)",
  entropy: "entropy (in nats)",
  version: "version of the policy",
};
const DIVERGING = new Set(["gap", "advantage"]); // negative blue, positive orange; the others have one colour
const TOKEN_COLUMNS = ["turn", "position", "text", "token_id", "logprob", "old_logprob", "gap", "advantage", "clipped", "entropy", "version"];

// Return the class and the strength (0 to 1) of a token's colour.
function tokenColor(quantity, range, value, isSampled) {
  if (!isSampled) return ["observed", 0];
  if (isMissing(value)) return ["unknown-number", 0];
  const [low, high] = range;
  if (DIVERGING.has(quantity)) return [value < 0 ? "negative" : "positive", Math.abs(value) / (Math.max(-low, high) || 1)];
  if (quantity === "logprob") return ["negative", 1 - Math.exp(value)]; // the probability of all other tokens
  if (quantity === "version") return ["positive", high > low ? (0.2 + value - low) / (high - low + 0.2) : 0.2];
  return ["positive", high ? value / high : 0];
}

function legendOf(quantity, range) {
  const sample = (text, kind, strength = 0) => {
    const box = make("span", { class: `token ${kind}` }, text);
    box.style.setProperty("--strength", strength);
    return box;
  };
  const boxes = [];
  if (range) {
    const [low, high] = range;
    const most = Math.max(-low, high);
    let values = [low, (low + high) / 2, high];
    if (DIVERGING.has(quantity)) values = [-most, -most / 2, 0, most / 2, most];
    else if (quantity === "logprob") values = [0, -0.1, -0.5, -2].filter((value) => value > low).concat(low);
    else if (quantity !== "version") values = [0, high / 2, high];
    for (const value of [...new Set(values)]) boxes.push(sample(format(value), ...tokenColor(quantity, range, value, true)));
  }
  return make("p", { class: "tokenlegend" }, ...boxes, sample("unknown", "unknown-number"), sample("not sampled", "observed"));
}

// Build the section of the tokens. `at` are the parameters of the episode's address.
function tokenSection(run, at, episode, parameters) {
  const segment = Number(parameters.get("segment") ?? 0);
  const { response: count = 0, ranges = {} } = episode.segments[segment] ?? {};
  const turns = episode.turns.map((turn, i) => ({ ...turn, i })).filter((turn) => turn.segment === segment);
  const turnAt = (i) => turns.find((turn) => turn.start <= i && i < turn.end);
  const fallback = ranges.gap ? "gap" : "logprob";
  const state = { color: parameters.get("color") ?? fallback, layout: parameters.get("layout") ?? "text", token: parameters.get("token") };
  if (!(state.color in QUANTITIES)) state.color = fallback;
  const chunks = new Map();
  const load = (c) => {
    if (!chunks.has(c)) chunks.set(c, get(`/api/runs/${run}/tokens`, { ...at, segment, from: c * CHUNK, to: (c + 1) * CHUNK }));
    return chunks.get(c);
  };
  const strip = make("div", { id: "tokens", tabindex: "0", role: "region", "aria-label": "tokens; the arrow keys choose one" });
  const readout = make("output", { class: "readout" }, count ? "choose a token: click it, or use the arrow keys" : "this episode has no tokens");
  const legend = make("div", {});
  let choose = () => {};

  async function describe(i) {
    const columns = await load(Math.floor(i / CHUNK));
    const value = (name) => format(columns[name][i % CHUNK]);
    const turn = turnAt(i);
    const where = turn ? `turn ${turn.i}${turn.thread ? `, conversation ${turn.thread}` : ""}` : "no turn";
    const text = columns.text[i % CHUNK];
    const parts = [`token ${i}`, where, `${isMissing(text) ? "?" : quote(text)} (id ${value("token_id")})`];
    if (!columns.mask[i % CHUNK]) parts.push("not sampled");
    else parts.push(...["version", "logprob", "old_logprob", "gap", "advantage", "clipped", "entropy"].map((name) => `${name} ${value(name)}`));
    readout.textContent = visible(parts.join(" · "));
  }

  async function select(i) {
    if (!count) return;
    state.token = String(Math.max(0, Math.min(count - 1, i)));
    keepAddress();
    await choose(Number(state.token));
    await describe(Number(state.token));
  }

  function keepAddress() {
    const search = new URLSearchParams({ ...at, segment, color: state.color, layout: state.layout, ...(isMissing(state.token) ? {} : { token: state.token }) });
    history.replaceState(null, "", `#/run/${run}/episode?${search}`);
  }

  async function draw() {
    legend.replaceChildren(legendOf(state.color, ranges[state.color]));
    const context = { strip, count, load, turnAt, state, select, range: ranges[state.color] };
    choose = await (state.layout === "table" ? drawTable(context) : drawText(context));
    if (!isMissing(state.token)) await select(Number(state.token));
  }

  strip.addEventListener("keydown", (event) => {
    const i = Number(state.token ?? -1);
    const moves = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: count - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(moves[event.key]);
  });
  const segments = episode.segments.map((s, i) => {
    const of = episode.turns.flatMap((turn, t) => (turn.segment === i ? [t] : []));
    const threads = [...new Set(of.map((t) => episode.turns[t].thread))].filter(Boolean);
    const ofTurns = of.length > 1 ? `turns ${of[0]} to ${of.at(-1)}` : of.length ? `turn ${of[0]}` : "no turn";
    const text = `segment ${i}: ${ofTurns}, ${s.response} tokens${threads.length ? `, sub-agent (conversation ${threads.join(", ")})` : ""}`;
    return make("li", {}, i === segment ? make("b", { "aria-current": "true" }, text) : link(text, `/run/${run}/episode`, { ...at, segment: i, color: state.color, layout: state.layout }));
  });
  const colors = Object.entries(QUANTITIES).map(([name, text]) => [name, ranges[name] ? text : `${text}: unknown`]);
  const controls = make("p", {},
    choice("colour", colors, state.color, (value) => { state.color = value; keepAddress(); draw(); }), " ",
    choice("as", [["text", "text"], ["table", "table of numbers"]], state.layout, (value) => { state.layout = value; keepAddress(); draw(); }));
  const node = make("section", { class: "tokens" }, make("h2", {}, "Tokens"), controls, ...(segments.length > 1 ? [make("ul", { class: "segments" }, ...segments)] : []), legend, strip, readout);
  return { node, draw };
}

function colored(element, { state, range }, columns, i) {
  const [kind, strength] = tokenColor(state.color, range ?? [0, 0], columns[state.color][i], columns.mask[i]);
  element.classList.add(kind);
  element.style.setProperty("--strength", strength.toFixed(3));
  return element;
}

// --- As text -------------------------------------------------------------------------------------

// Blocks of CHUNK tokens. A block near the visible part has its tokens, the others keep their height.
async function drawText(context) {
  const { strip, count, load, turnAt, state, select } = context;
  strip.className = "text";
  const blocks = Array.from({ length: Math.ceil(count / CHUNK) }, (_, c) => make("div", { class: "block", "data-block": c }));
  blocks.forEach((block) => { block.style.minHeight = `${CHUNK / 3}px`; });
  strip.replaceChildren(...blocks);
  strip.scrollTop = 0;

  async function fill(block) {
    const c = Number(block.dataset.block);
    const columns = await load(c);
    if (block.firstChild) return;
    const tokens = columns.token_id.flatMap((id, j) => {
      const i = c * CHUNK + j;
      const text = columns.text[j] ?? `${id} `;
      const token = colored(make("span", { class: "token", "data-token": i }, text.replaceAll("\n", "⏎\n")), context, columns, j);
      if (String(i) === state.token) token.classList.add("chosen");
      const turn = turnAt(i);
      const before = i === 0 ? !turn : !turn && turnAt(i - 1);
      if (turn?.start === i) return [make("span", { class: `turn${turn.thread ? " other" : ""}` }, `turn ${turn.i}${turn.thread ? `, conversation ${turn.thread}` : ""}`), token];
      return before ? [make("span", { class: "turn none" }, "not sampled"), token] : [token];
    });
    block.replaceChildren(...tokens);
    block.style.minHeight = "";
  }
  function empty(block) {
    if (!block.firstChild) return;
    block.style.minHeight = `${block.offsetHeight}px`;
    block.replaceChildren();
  }

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) (isIntersecting ? fill : empty)(target);
  }, { root: strip, rootMargin: "600px" });
  blocks.forEach((block) => observer.observe(block));
  strip.onscroll = null;
  strip.onclick = (event) => event.target.dataset.token && select(Number(event.target.dataset.token));
  if (blocks.length) await fill(blocks[0]);
  return async (i) => {
    const block = blocks[Math.floor(i / CHUNK)];
    await fill(block);
    strip.querySelector(".chosen")?.classList.remove("chosen");
    const token = block.querySelector(`[data-token="${i}"]`);
    token.classList.add("chosen");
    const [box, frame] = [token.getBoundingClientRect(), strip.getBoundingClientRect()];
    if (box.top < frame.top || box.bottom > frame.bottom) strip.scrollTop += box.top - frame.top - frame.height / 3;
  };
}

// --- As a table ----------------------------------------------------------------------------------

async function drawTable(context) {
  const { strip, count, load, turnAt, state, select } = context;
  strip.className = "table";
  const cell = (name, content) => make("span", { class: name === "text" ? "cell text" : "cell" }, content);
  const head = make("div", { class: "head" }, ...TOKEN_COLUMNS.map((name) => cell(name, name)));
  const space = make("div", { class: "space" });
  space.style.height = `${count * ROW}px`;
  strip.replaceChildren(head, space);
  let last = "";
  async function draw() {
    const first = Math.max(0, Math.floor(strip.scrollTop / ROW) - 5);
    const end = Math.min(count, first + Math.ceil(strip.clientHeight / ROW) + 12);
    const range = `${first}-${end}`;
    last = range;
    const needed = new Map();
    for (let c = Math.floor(first / CHUNK); c * CHUNK < end; c++) needed.set(c, await load(c));
    if (last !== range) return;
    const rows = [];
    for (let i = first; i < end; i++) {
      const [columns, j] = [needed.get(Math.floor(i / CHUNK)), i % CHUNK];
      const turn = turnAt(i);
      const cells = TOKEN_COLUMNS.map((name) => {
        if (name === "turn") return cell(name, turn ? `turn ${turn.i}` : columns.mask[j] ? "sampled" : "not sampled");
        if (name === "position") return cell(name, String(i));
        if (name === "text") return cell(name, isMissing(columns.text[j]) ? known(null) : quote(columns.text[j]).slice(1, -1));
        const made = cell(name, known(columns[name][j]));
        return name === state.color ? colored(made, context, columns, j) : made;
      });
      const border = turn && turn.start === i ? " border" : "";
      const row = make("div", { class: `row${columns.mask[j] ? " sampled" : ""}${border}${String(i) === state.token ? " chosen" : ""}`, "data-token": i }, ...cells);
      row.style.top = `${i * ROW}px`;
      rows.push(row);
    }
    space.replaceChildren(...rows);
  }
  strip.onscroll = draw;
  strip.onclick = (event) => {
    const row = event.target.closest("[data-token]");
    if (row) select(Number(row.dataset.token));
  };
  await draw();
  return async (i) => {
    const top = i * ROW;
    if (top < strip.scrollTop || top > strip.scrollTop + strip.clientHeight - 3 * ROW) strip.scrollTop = Math.max(0, i - 8) * ROW;
    await draw();
  };
}
