// The page of a sweep: its trials as lines over their settings and results, as a table, as curves over each other.

let sweep = null, lit = null, plot = null, zoomed = false;
const brushes = new Map();  // by the name of an axis: the part of it that counts, as [from, to], 0 below and 1 above
const within = $("#parallel").parentElement;
const brief = (text) => /^-?\d*\.?\d+(e[-+]?\d+)?$/i.test(text) && text.length > 6 ? four(text) : text;
const label = (trial) => `trial ${trial.trial}: ${sweep.keys.filter((key) => key in trial.settings).map((key) => `${key}=${brief(trial.settings[key])}`).join(" ")}`;
const value = (trial, axis) => axis.objective ? trial.values[axis.name] : axis.kind === "choice" ? trial.settings[axis.name] : Number(trial.settings[axis.name]);

// --- colours: the best stands out, the others are the paler the worse they are

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (one, other, part) => `rgb(${rgb(colour(one)).map((v, i) => Math.round(v + part * (rgb(colour(other))[i] - v)))})`;
function tint(trial) {
  const ranked = sweep.trials.filter((one) => first(one) !== null), at = ranked.indexOf(trial);
  return trial.best ? colour("orange") : at < 0 ? colour("faint") : mixed("blue", "wait", .8 * at / Math.max(1, ranked.length - 1));
}
const first = (trial) => sweep.objectives.length ? trial.values[sweep.objectives[0].name] : null;

// --- a line for each trial

const svg = (tag, props = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, text] of Object.entries(props)) made.setAttribute(name, text);
  made.append(...children); return made;
};
const share_of = (axis, v) => {  // 0 at the bottom of the axis, 1 at its top; null where the trial has no value
  if (v === null || v === undefined) return null;
  if (axis.kind === "choice") return axis.values.includes(v) ? (axis.values.indexOf(v) + .5) / axis.values.length : null;
  if (Number.isNaN(v)) return null;
  const [low, high, at] = axis.kind === "log" ? [...axis.values, v].map(Math.log) : [...axis.values, v];
  return high > low ? (at - low) / (high - low) : .5;
};
const ticks = (axis) => {
  if (axis.kind === "choice") return axis.values.map((text, i) => [text, (i + .5) / axis.values.length]).filter((_, i, all) => i % Math.ceil(all.length / 12) === 0);
  const [low, high] = axis.values;
  if (low === high) return [[four(low), .5]];
  return [[four(low), 0], [four(axis.kind === "log" ? Math.sqrt(low * high) : (low + high) / 2), .5], [four(high), 1]];
};
const TOP = 30, BOTTOM = 14, HEIGHT = 300, SIDE = 44, APART = 86;
let shown = [];  // what is drawn: [trial, points, element]
function drawParallel() {
  const axes = sweep.axes, width = Math.max(within.clientWidth, 2 * SIDE + APART * (axes.length - 1)), box = $("#parallel");
  const x = (i) => axes.length < 2 ? width / 2 : SIDE + i * (width - 2 * SIDE) / (axes.length - 1);
  const y = (part) => HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM);
  const room = Math.floor((axes.length < 2 ? width : (width - 2 * SIDE) / (axes.length - 1)) / 6.5);
  box.setAttribute("width", width); box.setAttribute("height", HEIGHT);
  shown = [...sweep.trials].reverse().map((trial) => {
    const points = axes.map((axis, i) => [x(i), share_of(axis, value(trial, axis))]).filter(([, part]) => part !== null).map(([at, part]) => [at, y(part)]);
    const line = svg("polyline", { points: points.map((point) => point.join()).join(" "), stroke: tint(trial), class: trial.best ? "best" : first(trial) === null && sweep.objectives.length ? "dashed" : "" });
    line.dataset.trial = trial.trial;
    return [trial, points, line];
  });
  const scales = axes.map((axis, i) => {
    const name = axis.name.length > room ? `…${axis.name.slice(1 - room)}` : axis.name, brush = brushes.get(axis.name);
    const anchor = i === 0 && axes.length > 1 ? "start" : i === axes.length - 1 && i ? "end" : "middle", at = anchor === "start" ? 2 : anchor === "end" ? width - 2 : x(i);
    return svg("g", { class: axis.objective ? "objective" : "" }, svg("title", {}, axis.name), svg("line", { x1: x(i), x2: x(i), y1: y(0), y2: y(1) }),
      svg("text", { x: at, y: 14, "text-anchor": anchor, class: "name" }, name),
      ...ticks(axis).map(([text, part]) => svg("text", { x: x(i) + (anchor === "end" ? -5 : 5), y: y(part) + 4, "text-anchor": anchor === "end" ? "end" : "start" }, brief(text).slice(0, 14))),
      ...brush ? [svg("rect", { x: x(i) - 7, width: 14, y: y(brush[1]), height: y(brush[0]) - y(brush[1]) })] : []);
  });
  box.replaceChildren(...shown.map(([, , line]) => line), ...scales);
  box.place = { x, part: (py) => (HEIGHT - BOTTOM - py) / (HEIGHT - TOP - BOTTOM) };
  mark();
}
const counts = (trial) => [...brushes].every(([name, [from, to]]) => {
  const axis = sweep.axes.find((one) => one.name === name), part = axis && share_of(axis, value(trial, axis));
  return !axis || (part !== null && part >= from && part <= to);
});
// Shows which trial is lit, and which the brushes leave.
function mark() {
  for (const [trial, , line] of shown) { line.classList.toggle("lit", trial.trial === lit); line.classList.toggle("out", !counts(trial)); }
  const found = shown.find(([trial]) => trial.trial === lit);
  if (found) found[2].parentElement.insertBefore(found[2], found[2].parentElement.querySelector("g"));  // above the others
  for (const row of document.querySelectorAll("#trials tbody tr")) {
    const trial = sweep.trials.find((one) => one.trial === Number(row.dataset.trial));
    row.classList.toggle("lit", trial.trial === lit); row.hidden = !counts(trial);
  }
  const left = sweep.trials.filter(counts).length;
  say($("#chosen"), found ? label(found[0]) : brushes.size ? `${left} of ${sweep.trials.length} trials` : "");
}
function light(trial) {
  if (lit === trial) return;
  lit = trial; mark();
  const at = plot ? plot.series.findIndex((one) => one.trial === trial) : -1;
  if (plot) plot.setSeries(at > 0 ? at : null, { focus: true });
}
const spot = (event) => { const { left, top } = $("#parallel").getBoundingClientRect(); return [event.clientX - left, event.clientY - top]; };
function nearest([px, py]) {
  let best = [14, null];
  for (const [trial, points] of shown) for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    if (px < x0 || px > x1 || !counts(trial)) continue;
    const off = Math.abs(y0 + (y1 - y0) * (px - x0) / (x1 - x0 || 1) - py);
    if (off < best[0]) best = [off, trial.trial];
  }
  return best[1];
}
let dragged = null;  // [name of the axis, where it began]
$("#parallel").addEventListener("pointerdown", (event) => {
  const [px, py] = spot(event), { x, part } = $("#parallel").place, at = sweep.axes.findIndex((_, i) => Math.abs(px - x(i)) < 16);
  if (at < 0 || event.pointerType === "touch") return;
  event.preventDefault(); $("#parallel").setPointerCapture(event.pointerId);
  dragged = [sweep.axes[at].name, part(py)]; brushes.delete(dragged[0]); drawParallel();
});
$("#parallel").addEventListener("pointermove", (event) => {
  if (!dragged) { light(nearest(spot(event))); return; }
  const ends = [dragged[1], $("#parallel").place.part(spot(event)[1])].sort((a, b) => a - b);
  if (ends[1] - ends[0] > .01) brushes.set(dragged[0], ends);
  drawParallel();
});
$("#parallel").addEventListener("pointerup", () => { dragged = null; });
$("#parallel").addEventListener("pointerleave", () => light(null));
new ResizeObserver(() => sweep && drawParallel()).observe(within);

// --- the table

function drawTable() {
  const focused = document.activeElement.closest?.("#trials tr")?.dataset.trial;
  const names = sweep.objectives.map((one) => one.name), prefix = query.get("sweep") ? `${query.get("sweep")}/` : "";
  const page = ({ trial, run }) => data ? data.links[trial] : `./?run=${encodeURIComponent(prefix + run)}`;
  table($("#trials table"), [["trial"], ...sweep.keys.map((key) => [key]), ["state"], ["step", "n"], ...names.map((name) => [name, "n"]), ["time", "n"]],
    sweep.trials.map((trial) => [
      [page(trial) ? h("a", { href: page(trial), tabIndex: -1 }, trial.trial) : String(trial.trial), trial.best ? h("strong", { className: "best", title: "best" }, " ★") : ""],
      ...sweep.keys.map((key) => brief(trial.settings[key] ?? "")),
      [h("span", { className: { finished: "good", failed: "bad", running: "busy" }[trial.state] || "" }, trial.state), trial.added ? h("div", { className: "faint" }, "added by hand") : "", trial.why ? h("div", { className: "faint why" }, trial.why.split("\n")[0]) : ""],
      trial.step || "", ...names.map((name) => four(trial.values[name])), trial.wall_s ? clock(trial.wall_s) : ""]));
  [...$("#trials tbody").children].forEach((row, i) => {
    const { trial } = sweep.trials[i];
    Object.assign(row, { tabIndex: 0, onfocus: () => light(trial), onmouseenter: () => light(trial), onmouseleave: () => light(null), onblur: () => light(null) });
    row.dataset.trial = trial;
    if (String(trial) === focused) row.focus();
  });
}
$("#trials table").addEventListener("keydown", (event) => {
  const rows = [...$("#trials tbody").children].filter((row) => !row.hidden), at = rows.indexOf(event.target.closest("tr"));
  const next = { ArrowDown: rows[at + 1], ArrowUp: rows[at - 1] }[event.key];
  if (next) { event.preventDefault(); next.focus(); } else if (event.key === "Enter") event.target.querySelector("a")?.click();
});

// --- curves

// Only the curves of one reported name are here, but all are in a copy. `among`: the trials whose curves are shown.
let curves = {}, names = [], metric = "", among = null;
const chosen = () => curves[metric] || {};
function takeCurves(part) {
  if (metric && part.name !== metric) return;  // of the name that was chosen before
  ({ name: metric, names } = part); among = new Set(part.shown);
  curves = { [metric]: { ...chosen(), ...part.trials } };
  drawCurves();
}
function drawCurves() {
  const select = $("#metric");
  if (select.options.length !== names.length) fill(select, names.map((name) => h("option", { value: name }, name)));
  select.value = metric;
  $("#curves").hidden = !names.length;
  const trials = sweep.trials.filter(({ trial }) => chosen()[trial] && (!among || among.has(trial))).reverse(), box = $("#chart");
  if (!trials.length) return;
  const known = trials.flatMap((trial) => chosen()[trial.trial][1]).filter((v) => v !== null), low = Math.min(...known);
  const log = low > 0 && Math.max(...known) > 100 * low;  // one trial that diverges must not flatten the others
  const before = plot && zoomed ? [plot.scales.x.min, plot.scales.x.max] : null;
  if (plot) plot.destroy();
  plot = new uPlot({
    width: box.clientWidth || 420, height: 320, scales: { x: { time: false }, y: { distr: log ? 3 : 1 } }, axes: [{ ...axis, size: 28, values: (_, all) => all }, axis],
    series: [{}, ...trials.map((trial) => ({ stroke: () => tint(trial), width: trial.best ? 2.5 : 1.5, spanGaps: true, points: { show: chosen()[trial.trial][0].length < 2 } }))],
    focus: { alpha: .25 }, cursor: { focus: { prox: 16 }, points: { show: false }, drag: { x: true, y: false } },
    hooks: {
      setSelect: [({ select: { width } }) => { zoomed ||= width >= 3; }],
      setSeries: [(made, at) => { const over = made.series[at]; if (over !== undefined || made.cursor.left >= 0) { lit = over ? over.trial ?? null : null; mark(); } }],
      setCursor: [readOut],
    },
  }, uPlot.join(trials.map((trial) => chosen()[trial.trial])), box);
  trials.forEach((trial, i) => { plot.series[i + 1].trial = trial.trial; });
  if (before) plot.setScale("x", { min: before[0], max: before[1] });
  fill($("#curves figcaption span"), metric, log ? " (logarithmic)" : ""); readOut(plot);
  document.body.dataset.drawn = trials.length;
}
function readOut(made) {
  const i = made.cursor.idx, at = made.series.findIndex((one) => one.trial !== undefined && one.trial === lit);
  $("#read").textContent = i === null || i === undefined ? "" : `step ${made.data[0][i]}${at > 0 ? `, trial ${lit}: ${four(made.data[at][i])}` : ""}`;
}
const whole = () => [plot.data[0][0], plot.data[0].at(-1)];
const all = () => { zoomed = false; plot.setScale("x", { min: whole()[0], max: whole()[1] }); };
$("#chart").addEventListener("dblclick", () => { zoomed = false; });
chartKeys($("#chart"), "curves of the trials", { get scales() { return plot.scales; } }, whole, (min, max) => { zoomed = true; plot.setScale("x", { min, max }); }, all);
new ResizeObserver(() => plot && plot.setSize({ width: $("#chart").clientWidth, height: 320 })).observe($("#chart"));
$("#metric").addEventListener("change", () => {
  metric = $("#metric").value; zoomed = false;
  if (data) drawCurves(); else stream.again();
});

// --- the sweep

const silent = () => sweep.state === "running" && silence() > 60;
function tick() {
  if (!sweep) return;
  say($("#status"), silent() ? "no events" : sweep.state);
  $("#status").className = `badge ${silent() ? "bad" : { running: "busy", finished: "good" }[sweep.state] || "bad"}`;
}
function news(section) {
  sweep = section;
  document.title = `${sweep.name} · ${sweep.state}`;
  fill($("#name"), sweep.name, h("span", { className: "faint" }, ` ${sweep.dir}`));
  const states = {};
  for (const { state } of sweep.trials) states[state] = (states[state] || 0) + 1;
  const best = sweep.trials.filter((trial) => trial.best).slice(0, 1).flatMap((trial) => [["best", `trial ${trial.trial}`], ...Object.entries(trial.values).map(([name, v]) => [name, four(v)])]);
  fill($("#note"), tagsOf(sweep.note.tags), sweep.note.text);
  fill($("#state dl"), [["trials", sweep.trials.length], ...Object.entries(states), ...best, ["sampler", sweep.sampler], ["ends early", sweep.prune]]
    .map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
  const parts = Object.entries(sweep.importance);
  $("#state h3").hidden = !parts.length;
  fill($("#state .bars"), parts.flatMap(([name, part]) => { const bar = h("div", { className: "bar" }); bar.style.width = share(part); return [h("span", {}, name), h("div", {}, bar), h("span", {}, share(part))]; }));
  tick(); drawTable(); drawParallel();
  say($("#link"), data ? "a copy" : sweep.state === "running" ? "live" : "");
}

const parts = [...document.querySelectorAll("main > section")], home = data ? data.home : query.get("sweep") && ["./", "all runs"];
fill($("nav"), parts.map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)), home ? h("a", { href: home[0] }, home[1]) : []);
document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  if (event.key >= "1" && event.key <= "4") parts[event.key - 1].scrollIntoView();
  else if (event.key === "Escape" && sweep) { brushes.clear(); drawParallel(); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawParallel(); drawCurves(); });
let stream = null;
if (data) {
  ({ curves, name: metric } = data); names = Object.keys(curves).sort(); news(data.sweep); drawCurves();
} else {
  const on = { file: ({ silent_s: s }) => hear(s), sweep: news, curves: takeCurves };
  stream = follow(() => url("trials", { name: metric }), on, "sweep");
  setInterval(tick, 1000);
}
window.raydist = { get sweep() { return sweep; }, get curves() { return curves; }, get plot() { return plot; } };  // for the browser's console
