// An episode: its facts, its tokens, and its messages with turns, tool calls and findings.
"use strict";

const FACTS = ["reward", "stop", "step", "split", "group", "rollout", "sample", "agent", "source", "masked", "seconds", "ground_truth"];

async function showEpisode(run, parameters) {
  const at = { id: parameters.get("id") ?? "" };
  if (parameters.has("step")) at.step = parameters.get("step");
  const episode = await get(`/api/runs/${run}/episode`, at);
  at.step = episode.step;
  const messages = episode.messages.map((message, i) => messageArticle(run, at, episode, message, i));
  const tokens = tokenSection(run, at, episode, parameters);
  const findings = make("section", {});
  return {
    nodes: [make("h1", {}, `Episode ${episode.episode}`), facts(run, episode), findings,
      make("div", { class: "split" }, tokens.node, make("section", {}, make("h2", {}, "Messages"), ...messages)), make("h2", {}, "Time"), ...timeOfEpisode(episode)],
    after: async () => {
      await tokens.draw();
      const turn = parameters.get("turn");
      if (turn !== null) messages[episode.messages.findIndex((m) => String(m.turn) === turn)]?.scrollIntoView();
      await fillCitations(run, episode, findings, messages);
    },
  };
}

function facts(run, episode) {
  const rewards = Object.entries({ ...episode.rewards, ...episode.metrics }).map(([name, value]) => `${name} ${format(value)}`).join(", ");
  const entries = FACTS.map((name) => [name.replace("_", " "), name === "step" ? stepLink(run, episode.step, String(episode.step)) : known(episode[name])]);
  if (rewards) entries.splice(1, 0, ["parts", rewards]);
  return make("dl", { class: "episode" }, ...entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// Put each finding that cites this episode at the message of its turn, or above all messages.
async function fillCitations(run, episode, section, messages) {
  for (const finding of await get(`/api/runs/${run}/findings`)) {
    const cited = finding.episodes.indexOf(episode.episode);
    if (cited < 0) continue;
    const turn = finding.turns?.[cited];
    const note = findingNote(run, { ...finding, episodes: [] }, ["from ", stepLink(run, finding.step), ":"]);
    const message = isMissing(turn) ? undefined : messages[episode.messages.findIndex((m) => m.turn === turn)];
    (message ?? section).append(note);
    if (message) section.append(make("p", {}, `${finding.severity} at turn ${turn}: `, link(finding.name, `/run/${run}/episode`, { id: episode.episode, step: episode.step, turn })));
  }
}

// --- Messages ------------------------------------------------------------------------------------

function messageArticle(run, at, episode, message, index) {
  const turn = isMissing(message.turn) ? null : episode.turns[message.turn];
  const text = make("pre", { tabindex: "0" }, ...contentNodes(run, message, message.content));
  const article = make("article", { class: `${message.role}${turn?.thread ? " other" : ""}` }, make("h3", {}, message.role, ...(turn ? describeTurn(run, at, message.turn, turn) : [])), text);
  if (message.length > message.content.length) article.append(restOfMessage(run, at, message, index, text));
  if (turn) article.append(...turn.calls.map(describeCall));
  return article;
}

// The texts of a message and its images, each at its U+FFFC.
function contentNodes(run, message, content) {
  if (!message.images.length) return [document.createTextNode(visible(content))];
  return content.split("\ufffc").flatMap((text, i) => [...(i ? [imageNode(run, message.images[i - 1])] : []), document.createTextNode(visible(text))]);
}

function imageNode(run, image) {
  const node = make("img", { alt: image.text, title: image.text });
  const fail = (error) => node.replaceWith(visible(`${image.text} ${error.message}`));
  get(`/api/runs/${run}/image`, { key: image.key }).then((answer) => node.setAttribute("src", answer.url)).catch(fail);
  return node;
}

function restOfMessage(run, at, message, index, text) {
  if (!isAvailable(`/api/runs/${run}/message`, { ...at, index })) return make("p", {}, `the first ${message.content.length} of ${message.length} characters`);
  const more = make("button", {}, `show all ${message.length} characters`);
  more.addEventListener("click", async () => {
    text.replaceChildren(...contentNodes(run, message, (await get(`/api/runs/${run}/message`, { ...at, index })).content));
    more.remove();
  });
  return more;
}

function describeTurn(run, at, index, turn) {
  const tokens = (text, token) => link(text, `/run/${run}/episode`, { ...at, segment: turn.segment, token });
  const parts = [` · turn ${index} · `, tokens(plural(turn.end - turn.start, "token"), turn.start), ` · ${seconds(turn.generate_seconds)} · advantage `, known(turn.advantage), " · clipped ", known(turn.clipped), " · largest gap "];
  parts.push(isMissing(turn.largest_gap) ? known(null) : tokens(format(turn.largest_gap), turn.largest_gap_at));
  if (turn.thread) parts.push(` · sub-agent, conversation ${turn.thread}`);
  if (turn.finish_reason !== "stop") parts.push(make("b", { class: "error" }, ` · cut (${turn.finish_reason})`));
  return parts;
}

function describeCall(call) {
  const state = isMissing(call.ok) ? "not run" : call.error || "ok";
  const time = isMissing(call.seconds) ? "" : `, ${seconds(call.seconds)}`;
  const malformed = call.malformed ? ` (${call.malformed})` : "";
  return make("div", { class: `call${call.ok ? "" : " error"}` }, make("b", {}, call.name || "?"), ` ${call.arguments}${malformed}: ${state}${time}`);
}

// --- Time ----------------------------------------------------------------------------------------

function timeOfEpisode(episode) {
  const total = Math.max(episode.seconds, ...episode.spans.map((span) => span.end));
  const threads = Map.groupBy(episode.spans, (span) => span.thread);
  const used = [...new Set(episode.spans.map((span) => span.name))];
  const legend = used.map((name) => {
    const sum = episode.spans.filter((span) => span.name === name).reduce((a, span) => a + span.end - span.start, 0);
    return make("li", {}, make("span", { class: `swatch span-${name}` }), `${name} ${seconds(sum)}`);
  });
  const tracks = [...threads].map(([thread, spans]) => track(thread ? `conversation ${thread}` : "main", 0, spans.map((s) => [s.name, s.start, s.end]), total, total));
  return [make("ul", { class: "legend" }, ...legend), make("div", { class: "tracks" }, ...tracks, scale(total))];
}
