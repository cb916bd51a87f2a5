"use strict";
// Plots of the report: what page.py wrote into #numbers, drawn as SVG. Drag to zoom all plots, double-click to reset.
const data = JSON.parse(document.getElementById("numbers").textContent);
const COLORS = ["#1f5fa8", "#d1661f", "#3b8c4f", "#8a4fa3", "#b0343c", "#7a7a7a", "#0f8b8d", "#a07a00"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const W = 600, H = 230, LEFT = 58, RIGHT = 18, TOP = 16, BOTTOM = 24;
const LETTER = 8;  // width of one of a phase's name, at most
const several = data.runs.length > 1;
const view = { axis: data.axis, range: null };
const charts = [];

function node(tag, attributes = {}, parent = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

function text(parent, x, y, words, anchor = "start", extra = {}) {
  node("text", { x, y, "text-anchor": anchor, ...extra }, parent).textContent = words;
}

function html(tag, className, parent, words = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = words;
  parent.append(made);
  return made;
}

// Where a step is on the x axis, and back. Tokens grow evenly between the knots [step, tokens], and behind the last.
function along(knots, from, value) {
  let at = 1;
  while (at < knots.length - 1 && knots[at][from] < value) at++;
  const [before, after] = [knots[at - 1], knots[at]], width = after[from] - before[from];
  return width ? before[1 - from] + ((value - before[from]) * (after[1 - from] - before[1 - from])) / width : after[1 - from];
}

const xOf = (run, step) => (view.axis === "tokens" ? along(data.runs[run].tokens, 0, step) : step);
const stepAt = (run, x) => (view.axis === "tokens" ? along(data.runs[run].tokens, 1, x) : x);

function short(value, percent = false) {
  if (percent) return `${+(100 * value).toPrecision(3)}%`;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return +(value / (unit === "k" ? 1e3 : limit)).toPrecision(4) + unit;
  return size > 0 && size < 1e-3 ? value.toExponential(1).replace(".0", "") : String(+value.toPrecision(4));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12) + 1e-300; at++) found.push(at * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of high / low > 1e3 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
  return found.filter((each) => each >= low * 0.999 && each <= high * 1.001);
}

function wholeRange() {
  let low = Infinity, high = -Infinity;
  data.runs.forEach((run, index) => {
    low = Math.min(low, xOf(index, run.first));
    high = Math.max(high, xOf(index, run.last));
  });
  return [low, high > low ? high : low + 1];
}

function yRange(panel, series, xs) {
  let low = Infinity, high = -Infinity;
  const log = panel.scale === "log";
  series.forEach((line, index) => {
    for (const values of [line.y, line.low, line.high])
      (values || []).forEach((value, at) => {
        const x = xOf(line.run, line.x[at]);
        if (value === null || x < xs[0] || x > xs[1] || (log && value <= 0)) return;
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
  });
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (panel.scale === "share") return [Math.min(0, low), Math.max(1, high)];
  if (panel.scale === "percent" || panel.scale === "count") return [Math.min(0, low), high > 0 ? high * 1.05 : panel.scale === "percent" ? 0.01 : 1];
  if (log) return high > low ? [low / 1.15, high * 1.15] : [low / 2, high * 2];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

const look = (line, index) => several
  ? { stroke: COLORS[line.run % COLORS.length], "stroke-dasharray": DASHES[line.kind % DASHES.length] }
  : { stroke: COLORS[index % COLORS.length], "stroke-dasharray": DASHES[Math.floor(index / COLORS.length) % 4] };

function draw(chart) {
  const { panel, svg } = chart;
  svg.replaceChildren();
  const xs = view.range || wholeRange(), ys = yRange(panel, panel.series, xs);
  const log = panel.scale === "log", percent = panel.scale === "percent" || panel.scale === "share";
  const X = (x) => LEFT + ((x - xs[0]) / (xs[1] - xs[0])) * (W - LEFT - RIGHT);
  const place = (y) => (log ? Math.log(y / ys[0]) / Math.log(ys[1] / ys[0]) : (y - ys[0]) / (ys[1] - ys[0]));
  const Y = (y) => H - BOTTOM - place(y) * (H - TOP - BOTTOM);
  Object.assign(chart, { X, Y, xs });
  for (const y of log ? logTicks(...ys) : ticks(...ys, 5)) {
    node("line", { x1: LEFT, x2: W - RIGHT, y1: Y(y), y2: Y(y), stroke: "#e8ebf0" }, svg);
    text(svg, LEFT - 6, Y(y) + 4, short(y, percent), "end");
  }
  for (const x of ticks(...xs, 6)) text(svg, X(x), H - BOTTOM + 15, short(x), "middle");
  const clip = `clip${chart.number}`;
  node("rect", { x: LEFT, y: TOP - 3, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM + 5 }, node("clipPath", { id: clip }, svg));
  const inside = node("g", { "clip-path": `url(#${clip})` }, svg);
  drawMarks(inside, X);
  if (!several) namePhases(svg, X);
  panel.series.forEach((line, index) => {
    const style = look(line, index);
    const ok = (y) => y !== null && (!log || y > 0);
    if (line.low) {
      const points = line.x.map((x, at) => [xOf(line.run, x), line.low[at], line.high[at]]);
      const known = points.filter(([, low, high]) => ok(low) && ok(high));
      const edge = [...known.map(([x, low]) => [x, low]), ...known.reverse().map(([x, , high]) => [x, high])];
      const shape = edge.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" ");
      node("polygon", { points: shape, fill: style.stroke, opacity: 0.13 }, inside);
    }
    let path = "", drawing = false;
    line.y.forEach((y, at) => {
      if (!ok(y)) { drawing = false; return; }
      path += `${drawing ? "L" : "M"}${X(xOf(line.run, line.x[at])).toFixed(1)} ${Y(y).toFixed(1)}`;
      drawing = true;
      if (line.x.length <= 40)
        node("circle", { cx: X(xOf(line.run, line.x[at])), cy: Y(y), r: 2.2, fill: style.stroke }, inside);
    });
    node("path", { d: path, fill: "none", "stroke-width": 1.5, "stroke-linejoin": "round", ...style }, inside);
    for (const x of line.bad || [])
      text(inside, X(xOf(line.run, x)), H - BOTTOM, "×", "middle", { style: "fill:#c00;font-size:15px" });
  });
  node("line", { x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM, stroke: "#9aa3b2" }, svg);
  chart.cross = node("line", { y1: TOP, y2: H - BOTTOM, stroke: "#5c6577", visibility: "hidden" }, svg);
  chart.zoom = node("rect", { y: TOP, height: H - TOP - BOTTOM, fill: "#1f5fa8", opacity: 0.12, visibility: "hidden" }, svg);
}

function drawMarks(parent, X) {
  data.runs.forEach((run, index) => {
    run.phases.forEach(([step], at) => {
      const x = X(xOf(index, step)), color = several ? COLORS[index % COLORS.length] : "#8b94a5";
      if (at > 0)
        node("line", { x1: x, x2: x, y1: TOP, y2: H - BOTTOM, stroke: color, "stroke-dasharray": "4 3", opacity: 0.8 }, parent);
    });
    for (const [step, kind] of run.marks) {
      const x = X(xOf(index, step)), color = data.kinds[kind][1];
      if (kind === "restart")
        node("line", { x1: x, x2: x, y1: TOP, y2: H - BOTTOM, stroke: color, "stroke-dasharray": "1 3", "stroke-width": 1.5 }, parent);
      const y = several ? H - BOTTOM - 5 - 4 * index : H - BOTTOM - 5;
      node("rect", { x: x - 1.5, y, width: 3, height: several ? 4 : 7, fill: color }, parent);
    }
  });
}

function namePhases(parent, X) {
  const run = data.runs[0], starts = run.phases.map(([step]) => X(xOf(0, step)));
  run.phases.forEach(([, name], at) => {
    const ends = at + 1 < starts.length ? starts[at + 1] : X(xOf(0, run.last));
    if (ends <= LEFT + 1 || starts[at] >= W - RIGHT) return;
    const from = Math.max(starts[at], LEFT) + 3, fits = Math.floor((ends - from) / LETTER);
    const isLast = at + 1 === starts.length;  // nothing follows it
    if (isLast || name.length <= fits) text(parent, from, TOP - 5, name);
    else if (fits > 2) text(parent, from, TOP - 5, name.slice(0, fits - 1) + "…");
  });
}

function nearest(line, x) {
  const values = line.x, target = stepAt(line.run, x);
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1; else high = middle;
  }
  if (low > 0 && Math.abs(values[low - 1] - target) < Math.abs(values[low] - target)) low--;
  return low;
}

function pointerX(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * W;
  const share = Math.min(1, Math.max(0, (at - LEFT) / (W - LEFT - RIGHT)));
  return chart.xs[0] + share * (chart.xs[1] - chart.xs[0]);
}

function hover(chart, event) {
  const x = pointerX(chart, event);
  for (const each of charts) {
    const at = each.X(x);
    each.cross.setAttribute("x1", at);
    each.cross.setAttribute("x2", at);
    each.cross.setAttribute("visibility", "visible");
  }
  if (chart.from !== undefined) {
    const [a, b] = [chart.X(chart.from), chart.X(x)].sort((one, other) => one - other);
    for (const [name, value] of [["x", a], ["width", b - a], ["visibility", "visible"]]) chart.zoom.setAttribute(name, value);
  }
  const percent = chart.panel.scale === "percent" || chart.panel.scale === "share";
  chart.tip.replaceChildren();
  html("div", "soft", chart.tip, `${view.axis} ${short(x)}`);
  chart.panel.series.forEach((line, index) => {
    const at = nearest(line, x), row = html("div", "key", chart.tip);
    html("i", "", row).style.borderTopColor = look(line, index).stroke;
    const value = line.y[at] === null ? "–" : short(line.y[at], percent);
    const band = line.low && line.low[at] !== null ? ` (${short(line.low[at])} to ${short(line.high[at])})` : "";
    html("span", "", row, `${line.name} ${value}${band}`);
    html("br", "", chart.tip);
  });
  const box = chart.figure.getBoundingClientRect(), right = event.clientX - box.left > box.width / 2;
  chart.tip.style.display = "block";
  chart.tip.style.left = right ? "auto" : `${event.clientX - box.left + 14}px`;
  chart.tip.style.right = right ? `${box.right - event.clientX + 14}px` : "auto";
  chart.tip.style.top = "34px";
}

function leave() {
  for (const each of charts) {
    each.cross.setAttribute("visibility", "hidden");
    each.tip.style.display = "none";
  }
}

function addChart(panel) {
  const figure = html("figure", "", document.getElementById(`plots-${panel.section}`));
  html("figcaption", "", figure, panel.label);
  const svg = node("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": panel.label }, figure);
  const legend = html("div", "legend", figure), tip = html("div", "tip", figure);
  tip.style.display = "none";
  const chart = { panel, figure, svg, tip, number: charts.length };
  if (panel.series.length > 1 || several)
    panel.series.forEach((line, index) => {
      const style = look(line, index), key = html("span", "key", legend), sample = html("i", "", key);
      sample.style.borderTopColor = style.stroke;
      const dash = DASHES.indexOf(style["stroke-dasharray"]);
      sample.style.borderTopStyle = ["solid", "dashed", "dotted", "dashed"][dash];
      html("span", "", key, line.name);
    });
  svg.addEventListener("pointermove", (event) => hover(chart, event));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointerdown", (event) => { chart.from = pointerX(chart, event); });
  svg.addEventListener("pointerup", (event) => {
    const range = [chart.from, pointerX(chart, event)].sort((one, other) => one - other);
    chart.from = undefined;
    chart.zoom.setAttribute("visibility", "hidden");
    if (range[1] - range[0] > (chart.xs[1] - chart.xs[0]) / 100) show({ range });
  });
  svg.addEventListener("dblclick", () => show({ range: null }));
  charts.push(chart);
}

const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis

function color(share) {
  const at = Math.min(1, Math.max(0, share)) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[low].map((each, part) => Math.round(each + (SCALE[low + 1][part] - each) * (at - low)));
}

function addLayers({ run, label, low, high, rows, first, last }) {
  const figure = html("figure", "", document.getElementById("plots-gsa"));
  const of = several ? ` · ${data.runs[run].name}` : "";
  html("figcaption", "", figure, `${label} by layer (down) and step (across)${of}`);
  const canvas = html("canvas", "", figure);
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  rows.flat().forEach((value, at) => {
    const pixel = value === null ? [238, 240, 244] : color((value - low) / (high - low || 1));
    image.data.set([...pixel, 255], 4 * at);
  });
  context.putImageData(image, 0, 0);
  html("div", "legend", figure, `steps ${first} to ${last}; dark ${short(low)}, bright ${short(high)}`);
}

function show(change) {
  Object.assign(view, change);
  charts.forEach(draw);
  for (const button of document.querySelectorAll("[data-axis]"))
    button.setAttribute("aria-pressed", String(button.dataset.axis === view.axis));
}

data.panels.forEach(addChart);
data.layers.forEach(addLayers);
for (const button of document.querySelectorAll("[data-axis]"))
  button.addEventListener("click", () => show({ axis: button.dataset.axis, range: null }));
document.getElementById("reset").addEventListener("click", () => show({ range: null }));
show({});
