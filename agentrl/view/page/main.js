// Chooses the page of an address, and handles the search, the keyboard and the polls for new data.
"use strict";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const query = document.getElementById("query");
const POLL_MS = 5000;
const TYPING_MS = 400; // a pause that ends typing

let current = new AbortController();
let version = "";
let typing;

function address() {
  const [path, search] = location.hash.slice(1).split(/\?(.*)/s);
  return { path: path || "/", parameters: new URLSearchParams(search ?? "") };
}

function go(path, parameters = {}) {
  const search = new URLSearchParams(parameters).toString();
  location.hash = `#${path}${search ? "?" + search : ""}`;
}

const runOf = (path) => Number(/^\/run\/(\d+)/.exec(path)?.[1] ?? 0);

// A page is its `nodes`, and what is loaded `after` they are shown.
function openPage(path, parameters, signal) {
  const run = runOf(path);
  const step = /^\/run\/\d+\/step\/(\d+)$/.exec(path);
  if (step) return showStep(run, Number(step[1]));
  if (/^\/run\/\d+\/episode$/.test(path)) return showEpisode(run, parameters);
  if (/^\/run\/\d+$/.test(path)) return showEpisodes(run, parameters, signal);
  return showRuns(parameters);
}

// Show the page of the address. A page that is still loading, or searching, is cancelled.
async function draw() {
  current.abort();
  current = new AbortController();
  const { signal } = current;
  const { path, parameters } = address();
  document.body.dataset.ready = "";
  let isShown = false;
  try {
    const page = await openPage(path, parameters, signal);
    if (signal.aborted) return;
    nav.replaceChildren(link("run", "/"), link("episodes", `/run/${runOf(path)}`));
    main.replaceChildren(...page.nodes);
    isShown = true;
    if (document.activeElement !== query) query.value = parameters.get("q") ?? "";
    document.title = `${page.nodes[0].textContent} · agentrl view`;
    await page.after?.();
  } catch (error) {
    if (signal.aborted) return;
    if (!isShown) main.replaceChildren();
    main.querySelector("[role=status]")?.remove();
    main.append(make("p", { class: "error", role: "alert" }, error.message));
  }
  if (!signal.aborted) document.body.dataset.ready = "yes";
}

async function poll() {
  const { path } = address();
  const isBusy = document.hidden || document.body.dataset.ready !== "yes";
  if (isBusy || !/^\/(run\/\d+)?$/.test(path)) return;
  try {
    const now = JSON.stringify(await get("/api/state"));
    const isNew = version && now !== version;
    version = now;
    if (isNew) await redraw();
  } catch {
    // The server may be restarting; the next poll tries again.
  }
}

// Draw the page again at the same place: with its scroll position and focus.
async function redraw() {
  const top = scrollY;
  const inMain = [...main.querySelectorAll("a, button, input, select, [tabindex]")];
  const focused = inMain.indexOf(document.activeElement);
  await draw();
  if (focused >= 0) main.querySelectorAll("a, button, input, select, [tabindex]")[focused]?.focus({ preventScroll: true });
  scrollTo(0, top);
}

function search() {
  clearTimeout(typing);
  const before = location.hash;
  go(`/run/${runOf(address().path)}`, { q: query.value });
  if (location.hash === before) draw();
}

document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
// In the list of episodes typing stops the search before, and a pause starts the new one.
query.addEventListener("input", () => {
  if (!/^\/run\/\d+$/.test(address().path)) return;
  current.abort();
  clearTimeout(typing);
  typing = setTimeout(search, TYPING_MS);
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  if (event.key === "/" && !bundle) {
    event.preventDefault();
    query.focus();
  } else if (event.key === "j" || event.key === "k") {
    const links = [...main.querySelectorAll("a, button")];
    const next = links.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    links[Math.max(0, Math.min(links.length - 1, next))]?.focus();
  }
});
addEventListener("hashchange", draw);
if (bundle) document.getElementById("search").hidden = true;
else setInterval(poll, POLL_MS);
draw();
