"use strict";

// Each setting: its words, the ends of its slider and where it begins. Sliders of numbers above zero move by factors.
const SETTINGS = [
  { name: "dataset_size", label: "Training records N", low: 100, high: 1e7, start: 60000, whole: true },
  { name: "batch_size", label: "Expected batch size", low: 1, high: 1e5, start: 1024, whole: true },
  { name: "releases", label: "Releases (accepted updates)", low: 1, high: 20000, start: 1000, whole: true },
  { name: "delta", label: "Delta", low: 1e-12, high: 0.1, start: 1e-5 },
  { name: "target_epsilon", label: "Target epsilon", low: 0.05, high: 20, start: 3, given: true },
  { name: "noise_multiplier", label: "Noise multiplier", low: 0.3, high: 50, start: 1.5, given: true },
  { name: "beta", label: "Gate threshold beta", low: -2, high: 6, start: 3, linear: true, gate: true },
];
const STEPS = 1000;
const WAIT = 120; // milliseconds without a change before the server is asked

const byId = (id) => document.getElementById(id);
const form = byId("settings");
let asked = 0;
let timer = 0;

const toSlider = (s, value) =>
  Math.round(STEPS * (s.linear ? (value - s.low) / (s.high - s.low) : Math.log(value / s.low) / Math.log(s.high / s.low)));

function fromSlider(s, position) {
  const share = position / STEPS;
  const value = s.linear ? s.low + share * (s.high - s.low) : s.low * (s.high / s.low) ** share;
  return s.whole ? Math.round(value) : Number(value.toPrecision(3));
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function addSlider(s) {
  const label = element("label", { htmlFor: s.name }, s.label);
  const slider = element("input", { type: "range", min: 0, max: STEPS, id: `${s.name}-slider` });
  const number = element("input", { type: "number", id: s.name, name: s.name, step: "any", required: true });
  slider.setAttribute("aria-label", s.label);
  const show = () => slider.setAttribute("aria-valuetext", number.value);
  slider.addEventListener("input", () => { number.value = fromSlider(s, slider.valueAsNumber); show(); change(); });
  number.addEventListener("input", () => {
    if (number.value !== "") { slider.value = toSlider(s, number.valueAsNumber); show(); }
    change();
  });
  s.set = (value) => { number.value = value; slider.value = toSlider(s, value); show(); };
  s.read = () => number.value;
  s.row = element("div", { className: "slider" }, label, slider, number);
  byId("sliders").append(s.row);
  s.set(s.start);
}

function chosen() {
  const given = form.elements.given.value;
  const gate = form.elements.gate.value;
  const query = new URLSearchParams({ gate });
  for (const s of SETTINGS) {
    const used = s.given ? s.name === given : !s.gate || gate !== "none";
    s.row.hidden = !used;
    if (used) query.set(s.name, s.read());
  }
  return query;
}

function change() {
  chosen();
  clearTimeout(timer);
  timer = setTimeout(ask, WAIT);
}

async function ask() {
  const query = chosen();
  const number = ++asked;
  document.body.classList.add("busy");
  let answer;
  try {
    const response = await fetch(`plan?${query}`);
    answer = await response.json();
  } catch {
    answer = { error: "The planner does not answer. Is 'sluice serve' still running?" };
  }
  if (number !== asked) return; // a later question is under way
  document.body.classList.remove("busy");
  show(answer);
  if (!answer.error) history.replaceState(null, "", `?${query}`);
}

function show(answer) {
  const error = byId("error");
  error.hidden = !answer.error;
  error.textContent = answer.error || "";
  byId("result").hidden = Boolean(answer.error);
  byId("plot").hidden = byId("figures").hidden = Boolean(answer.error);
  byId("command").textContent = answer.command || "";
  const warnings = byId("warnings");
  warnings.hidden = !(answer.warnings || []).length;
  warnings.replaceChildren(...(answer.warnings || []).map((text) => element("li", {}, text)));
  if (answer.error) return;
  byId("result").textContent = `epsilon = ${answer.epsilon} with noise multiplier ${answer.figures[1][1]}`;
  const rows = answer.figures.map(([name, value]) => {
    const head = element("th", {}, name);
    head.scope = "row";
    return element("tr", {}, head, element("td", {}, value));
  });
  byId("figures").tBodies[0].replaceChildren(...rows);
  const svg = new DOMParser().parseFromString(answer.svg, "image/svg+xml").documentElement;
  byId("plot").replaceChildren(svg);
  byId("plot").setAttribute("aria-label", `Epsilon over releases, rising to ${answer.epsilon}`);
}

function restore() {
  const query = new URLSearchParams(location.search);
  for (const s of SETTINGS) {
    const value = Number(query.get(s.name));
    if (query.has(s.name) && Number.isFinite(value)) s.set(value);
  }
  if (query.has("noise_multiplier")) form.elements.given.value = "noise_multiplier";
  if (query.has("gate")) form.elements.gate.value = query.get("gate") === "none" ? "none" : "clipping-bias";
}

SETTINGS.forEach(addSlider);
restore();
form.addEventListener("change", (event) => { if (event.target.type === "radio") change(); });
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
ask();
