// The report's charts, the choice of runs in them, and the sorting of its tables. All text goes in as textContent.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const shown = data.runs.map(() => true);
const charts = [];
const HEIGHT = 300, MARGIN = { top: 8, right: 12, bottom: 40, left: 56 }, LISTED = 12;

function make(parent, tag, attributes = {}, text) {
  const isSvg = ["svg", "g", "path", "line", "circle", "text", "clipPath", "rect"].includes(tag);
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function paint(node, run) {
  node.style.setProperty("--color", run.color);
  node.style.strokeDasharray = run.dash;
  return node;
}

function swatch(parent, run) {
  const svg = make(parent, "svg", { width: 26, height: 10, "aria-hidden": "true" });
  paint(make(svg, "line", { x1: 0, x2: 26, y1: 5, y2: 5, class: "swatch", "stroke-width": run.width + 0.4 }), run);
}

const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: value >= 1000 ? 7 : 4 });
const short = (value) => value.toLocaleString("en", { notation: value >= 1e5 ? "compact" : "standard", maximumFractionDigits: 6 });
const rising = (values) => [...values].sort((a, b) => a - b);
const median = (values) => rising(values)[Math.floor(values.length / 2)];

function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step), ticks = [];
  for (let k = first; k * step <= high * (1 + 1e-9); k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count) {
  const first = Math.ceil(Math.log2(low) - 1e-9), last = Math.floor(Math.log2(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / count)), ticks = [];
  for (let k = last; k >= first; k -= every) ticks.unshift(2 ** k);
  return ticks;
}

class Chart {
  constructor(figure) {
    Object.assign(this, data.charts[figure.dataset.chart], { figure, whole: false });
    const name = figure.querySelector("figcaption").textContent;
    this.isLoss = this.y.startsWith("loss");
    if (this.isLoss) this.offerWhole(figure);
    this.svg = make(figure, "svg", { role: "img", tabindex: 0, height: HEIGHT });
    this.svg.setAttribute("aria-label", `${name}: ${this.y} over ${this.x}. The arrow keys read the values.`);
    this.above = make(figure, "div", { class: "above" });
    this.tip = make(figure, "div", { class: "tip", hidden: "", "aria-live": "polite" });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    for (const leave of ["pointerleave", "blur"]) this.svg.addEventListener(leave, () => this.hide());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  offerWhole(figure) {
    const label = make(figure, "label", { class: "whole" });
    const box = make(label, "input", { type: "checkbox" });
    label.append(" whole range");
    box.addEventListener("change", () => { this.whole = box.checked; this.draw(); });
  }

  get visible() { return this.series.filter((one) => shown[one.run]); }

  // The y axis ends at what the middle curve does after a fifth of its way, so that a start or an outlier far above
  // doesn't press the others together.
  limits(series) {
    let low = this.isLoss ? Math.min(...series.map((one) => Math.min(...one.y))) : 0;
    let high = Math.max(...series.map((one) => Math.max(...one.y)));
    if (this.isLoss && !this.whole) {
      const early = median(series.map((one) => one.y[Math.min(Math.max(1, Math.floor(one.y.length / 5)), one.y.length - 1)]));
      const last = median(series.map((one) => one.y.at(-1)));
      high = Math.min(high, Math.max(early, last, low * 1.02));
    }
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [this.isLoss ? low - margin : low, high + margin];
  }

  scales(series) {
    const width = this.width = Math.max(240, this.figure.clientWidth);
    const place = this.log ? Math.log2 : (x) => x, [low, high] = this.limits(series);
    const from = Math.min(...series.map((one) => one.x[0])), to = Math.max(...series.map((one) => one.x.at(-1)));
    const padding = this.log ? 0.03 : 0.01, span = place(to) - place(from) || 1;
    const right = width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom, inner = right - MARGIN.left;
    this.px = (x) => MARGIN.left + inner * (padding + (1 - 2 * padding) * (place(x) - place(from)) / span);
    this.py = (y) => bottom - (bottom - MARGIN.top) * (y - low) / (high - low);
    return { from, to, low, high, right, bottom };
  }

  draw() {
    this.hide();
    this.svg.replaceChildren();
    this.above.textContent = "";
    const series = this.visible;
    if (!series.length) { this.above.textContent = "No run is chosen."; return; }
    const box = this.scales(series);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.axes(box);
    const clip = make(make(this.svg, "clipPath", { id: `clip-${this.id}` }), "rect", { x: MARGIN.left, y: 0 });
    clip.setAttribute("width", box.right - MARGIN.left + MARGIN.right);
    clip.setAttribute("height", box.bottom);
    const curves = make(this.svg, "g", { "clip-path": `url(#clip-${this.id})` });
    for (const one of series) this.curve(curves, one);
    this.marks = make(this.svg, "g");
    this.nameGone(series.filter((one) => one.y.at(-1) > box.high));
  }

  nameGone(gone) {
    const ends = new Map();
    for (const one of gone) ends.set(data.runs[one.run].group, Math.max(one.y.at(-1), ends.get(data.runs[one.run].group) ?? 0));
    const names = [...ends].map(([group, y]) => `${group} at ${number(y)}`);
    if (names.length) this.above.textContent = `Ends above: ${names.join(", ")}`;
  }

  get places() { return rising(new Set(this.visible.flatMap((one) => one.x))); }

  axes({ from, to, low, high, right, bottom }) {
    const axis = make(this.svg, "g", { class: "axis" });
    for (const y of linearTicks(low, high, 6)) {
      make(axis, "line", { x1: MARGIN.left, x2: right, y1: this.py(y), y2: this.py(y) });
      make(axis, "text", { x: MARGIN.left - 6, y: this.py(y) + 4, "text-anchor": "end" }, short(y));
    }
    const count = Math.floor(this.width / 75);
    const marked = this.places;
    const ticks = !this.log ? linearTicks(from, to, count) : marked.length <= count ? marked : logTicks(from, to, count);
    for (const x of ticks) {
      make(axis, "line", { x1: this.px(x), x2: this.px(x), y1: MARGIN.top, y2: bottom });
      make(axis, "text", { x: this.px(x), y: bottom + 16, "text-anchor": "middle" }, short(x));
    }
    make(axis, "text", { x: (MARGIN.left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, this.x);
    const middle = (MARGIN.top + bottom) / 2;
    make(axis, "text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, this.y);
  }

  curve(parent, one) {
    const run = data.runs[one.run];
    const points = one.x.map((x, k) => `${this.px(x).toFixed(1)},${this.py(one.y[k]).toFixed(1)}`);
    const path = make(parent, "path", { d: `M${points.join("L")}`, class: "curve", "stroke-width": run.width });
    path.dataset.run = run.name;
    paint(path, run);
    if (one.x.length > 12) return;
    one.x.forEach((x, k) => paint(make(parent, "circle", { cx: this.px(x), cy: this.py(one.y[k]), r: 3, class: "dot" }), run));
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.show(event.clientX - box.left, event.clientY - box.top);
  }

  key(event) {
    if (event.key === "Escape") return this.hide();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], xs = this.places;
    if (!step || !xs.length) return;
    event.preventDefault();
    const at = this.at === undefined ? (step > 0 ? 0 : xs.length - 1) : xs.findIndex((x) => x >= this.at) + step;
    this.show(this.px(xs[Math.min(Math.max(at, 0), xs.length - 1)]), HEIGHT);
  }

  // The values of all curves at the x that is nearest to a place, the curve nearest to it first in weight.
  show(left, top) {
    const near = this.visible.map((one) => {
      const k = one.x.reduce((best, x, k) => Math.abs(this.px(x) - left) < Math.abs(this.px(one.x[best]) - left) ? k : best, 0);
      return { run: data.runs[one.run], x: one.x[k], y: one.y[k] };
    });
    if (!near.length) return;
    this.at = near.reduce((best, one) => Math.abs(this.px(one.x) - left) < Math.abs(this.px(best) - left) ? one.x : best, near[0].x);
    const here = near.filter((one) => Math.abs(this.px(one.x) - this.px(this.at)) < 8).sort((a, b) => a.y - b.y);
    const nearest = here.reduce((best, one) => Math.abs(this.py(one.y) - top) < Math.abs(this.py(best.y) - top) ? one : best);
    this.mark(here, nearest);
    this.list(here, nearest);
  }

  mark(here, nearest) {
    for (const path of this.svg.querySelectorAll(".curve")) path.classList.toggle("near", path.dataset.run === nearest.run.name);
    const x = this.px(this.at), bottom = HEIGHT - MARGIN.bottom;
    this.marks.replaceChildren();
    make(this.marks, "line", { x1: x, x2: x, y1: MARGIN.top, y2: bottom, class: "guide" });
    for (const one of here) {
      const y = this.py(one.y);
      if (y >= 0 && y <= bottom) make(this.marks, "circle", { cx: this.px(one.x), cy: y, r: 4, class: "dot" }).style.setProperty("--color", one.run.color);
    }
  }

  list(here, nearest) {
    const first = Math.min(Math.max(0, here.indexOf(nearest) - LISTED / 2), Math.max(0, here.length - LISTED));
    this.tip.replaceChildren();
    make(this.tip, "b", {}, `${this.x} ${number(this.at)}`);
    for (const one of here.slice(first, first + LISTED)) {
      const line = make(this.tip, "div", one === nearest ? { class: "now" } : {});
      swatch(line, one.run);
      make(line, "span", {}, one.run.name);
      make(line, "span", {}, number(one.y));
    }
    if (here.length > LISTED) make(this.tip, "div", {}, `and ${here.length - LISTED} more`);
    this.tip.hidden = false;
    const x = this.px(this.at), left = this.figure.getBoundingClientRect().left;
    const beyond = left + x + 14 + this.tip.offsetWidth > document.documentElement.clientWidth;
    this.tip.style.left = `${beyond ? Math.max(0, x - 14 - this.tip.offsetWidth) : x + 14}px`;
    this.tip.style.top = "28px";
  }

  hide() {
    this.tip.hidden = true;
    this.at = undefined;
    this.marks?.replaceChildren();
    this.svg.querySelector(".near")?.classList.remove("near");
  }
}

// A box a setting, and where it has several runs, one a run.
function buildChoices(parent) {
  const boxes = [];
  const update = () => {
    boxes.forEach((update) => update());
    charts.forEach((chart) => chart.draw());
  };
  const choice = (parent, text, runs, kind) => {
    const label = make(parent, "label", { class: kind });
    const name = kind === "one" ? data.runs[runs[0]].name : text;
    const box = make(label, "input", { type: "checkbox", "aria-label": name });
    if (kind === "all") swatch(label, data.runs[runs[0]]);
    make(label, "span", {}, text);
    box.addEventListener("change", () => { runs.forEach((run) => { shown[run] = box.checked; }); update(); });
    boxes.push(() => {
      box.checked = runs.every((run) => shown[run]);
      box.indeterminate = !box.checked && runs.some((run) => shown[run]);
    });
  };
  const groups = new Map(), drawn = new Set(charts.flatMap((chart) => chart.series.map((one) => one.run)));
  for (const run of rising(drawn)) groups.set(data.runs[run].group, [...(groups.get(data.runs[run].group) ?? []), run]);
  for (const [name, runs] of groups) {
    const field = make(parent, "fieldset", { "aria-label": name });
    choice(field, name, runs, "all");
    if (runs.length > 1) runs.forEach((run) => choice(field, data.runs[run].label, [run], "one"));
  }
  for (const [text, value] of [["all", true], ["none", false]]) {
    make(parent, "button", { type: "button" }, text).addEventListener("click", () => { shown.fill(value); update(); });
  }
  update();
}

function sortBy(table, column) {
  const heading = table.tHead.rows[0].cells[column], body = table.tBodies[0];
  const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const isNumber = heading.classList.contains("number"), sign = order === "ascending" ? 1 : -1;
  const key = (row) => isNumber ? parseFloat(row.cells[column].dataset.value) : row.cells[column].textContent.trim();
  const compare = (a, b) => {
    if (!isNumber) return sign * a.localeCompare(b, "en", { numeric: true });
    return Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : sign * (a - b); // without a value: last
  };
  const rows = [...body.rows].map((row) => [key(row), row]).sort(([a], [b]) => compare(a, b));
  body.append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const cell = event.target.closest("th");
    if (cell) sortBy(table, cell.cellIndex);
  });
}
for (const figure of document.querySelectorAll(".chart")) charts.push(new Chart(figure));
const choices = document.querySelector(".choices");
if (choices) buildChoices(choices);
