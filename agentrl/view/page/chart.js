// Line charts of numbers over steps.
"use strict";

const [WIDTH, HEIGHT] = [360, 170];
const [LEFT, RIGHT, TOP, BOTTOM] = [54, 8, 8, 20];
const COLORS = 8; // the classes c0 to c7 of the style sheet

function smooth(points, window) {
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i - window + 1), i + 1);
    return [x, part.reduce((sum, [, y]) => sum + y, 0) / part.length];
  });
}

// Mean and standard error of the last steps, for metrics without a standard error of their own.
function describeLastSteps(points) {
  const last = points.slice(-Math.max(5, smoothWindow(points))).map(([, y]) => y);
  const mean = last.reduce((a, b) => a + b, 0) / last.length;
  if (last.length < 2) return `${format(mean)}, n = 1 step`;
  const variance = last.reduce((a, y) => a + (y - mean) ** 2, 0) / (last.length - 1);
  return `${format(mean)} ± ${formatError(Math.sqrt(variance / last.length))}, n = ${last.length} last steps`;
}

// The last value of a validation, which is made in some steps only.
const describeLast = (points) => `${format(points.at(-1)[1])} at step ${points.at(-1)[0]}`;

const formatError = (error) => format(Number(error.toPrecision(2)));

function describePoint([step, mean, error, n, rows]) {
  const of = n === undefined ? "" : `${isMissing(error) ? "" : ` ± ${formatError(error)}`}, n = ${n} of ${plural(rows, "row")}`;
  return `step ${step}: ${format(mean)}${of}`;
}

const smoothWindow = (points) => Math.max(1, Math.min(10, Math.ceil(points.length / 10)));

// The multiples of 1, 2 or 5 times a power of ten between two numbers: one to five.
function roundValues(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 4));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= (high - low) / 4);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Draw lines over the same steps. `lines` have a `label`, the number of a `color`, and `points`: step
// and value, and if they are known standard error, n values and rows. `marks` are steps with a text. `openStep` is called
// with the step that is clicked.
function chart(name, lines, marks, openStep) {
  lines = lines.filter((line) => line.points.length);
  const all = lines.flatMap((line) => line.points);
  if (!all.length) return null;
  const steps = [...new Set(all.map(([step]) => step))].sort((a, b) => a - b);
  const [x0, x1] = [steps[0], steps.at(-1)];
  const ends = all.flatMap(([, y, error]) => [y - (error ?? 0), y + (error ?? 0)]);
  let [y0, y1] = ends.reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - x0)) / (x1 - x0 || 1);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - y0)) / (y1 - y0);
  const place = ([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`;
  const text = (left, top, content, anchor) => svg("text", { x: left, y: top, "text-anchor": anchor }, content);

  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  for (const value of roundValues(y0, y1)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }), text(LEFT - 4, y(value) + 4, format(value), "end"));
  }
  picture.append(text(LEFT, HEIGHT - 5, `step ${x0}`, "start"));
  if (x1 > x0) picture.append(text(WIDTH - RIGHT, HEIGHT - 5, String(x1), "end"));
  for (const [step, content] of marks.filter(([step]) => x0 <= step && step <= x1)) {
    picture.append(svg("line", { class: "mark", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, `step ${step}: ${content}`)));
  }
  const legend = make("ul", { class: "legend" });
  // One window for all lines, so that equal numbers look equal.
  const window = smoothWindow(lines.reduce((a, line) => (line.points.length > a.length ? line.points : a), []));
  for (const { label, points, color: number } of lines) {
    const color = `c${number % COLORS}`;
    const band = points.filter(([, , error]) => !isMissing(error));
    if (band.length > 1) {
      const edge = [...band.map(([s, v, e]) => place([s, v + e])), ...band.map(([s, v, e]) => place([s, v - e])).reverse()];
      picture.append(svg("polygon", { class: `band ${color}`, points: edge.join(" ") }));
    }
    if (points.length === 1) picture.append(svg("circle", { class: color, cx: x(points[0][0]), cy: y(points[0][1]), r: 3 }));
    picture.append(svg("polyline", { class: `raw ${color}`, points: points.map(place).join(" ") }));
    picture.append(svg("polyline", { class: `smooth ${color}`, points: smooth(points, window).map(place).join(" ") }));
    const end = points[0].length > 2 ? describePoint(points.at(-1)) : name.startsWith("val") ? describeLast(points) : describeLastSteps(points);
    legend.append(make("li", {}, make("span", { class: `swatch ${color}` }), label ? `${label}: ${end}` : end));
  }
  legend.append(make("li", {}, make("small", {}, `thin: raw; thick: mean of ${plural(window, "step")}`)));

  // A cursor: the pointer or the arrow keys choose a step, a click or Enter opens it.
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(cursor);
  const readout = make("output", {}, "");
  let at = steps.length - 1;
  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    cursor.setAttribute("x1", x(steps[at]));
    cursor.setAttribute("x2", x(steps[at]));
    cursor.setAttribute("visibility", "visible");
    const here = lines.flatMap(({ label, points }) => points.filter(([step]) => step === steps[at]).map((point) => [label, point]));
    readout.textContent = visible(here.map(([label, point], i) => `${label ? `${label} ` : ""}${i ? describePoint(point).replace(/^step \d+: /, "") : describePoint(point)}`).join("; "));
  }
  const area = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": visible(`${name}, steps ${x0} to ${x1}, ${format(y0)} to ${format(y1)}. Arrow keys read a step, Enter opens it`) }, picture);
  area.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
    show(steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(steps[best] - step) ? i : best), 0));
  });
  area.addEventListener("click", () => openStep(steps[at]));
  area.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 };
    if (event.key === "Enter") openStep(steps[at]);
    else if (event.key in moves) show(moves[event.key]);
    else return;
    event.preventDefault();
  });
  area.addEventListener("focus", () => show(at));
  return make("figure", {}, make("figcaption", {}, make("b", {}, name)), area, readout, legend);
}
