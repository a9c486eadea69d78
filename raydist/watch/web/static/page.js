// The page of a run: sections of JSON from one stream, or, exported, from the element #data.

// --- what is known of the run

let state = {}, lanes = { times: [], shares: {} }, marks = [];
const curves = Object.create(null);  // a metric may be named constructor
let fileNumber = 0;

const jobLink = ([id, dashboard]) => !id || !dashboard ? id : h("a", { href: `http://${dashboard}/#/jobs/${encodeURIComponent(id)}`, title: "in Ray's dashboard" }, id);
const fileName = (text) => text.replace(/[^\w.-]+/g, "_");

const sections = {
  file({ silent_s: s, number }) {
    hear(s);
    if (fileNumber && number !== fileNumber) forget();
    fileNumber = number;
  },
  state(news) {
    if (state.run_began && news.run_began !== state.run_began) readSettings();
    state = news;
    document.title = `${news.name} · ${news.status}`;
    $("#trace").download = fileName(`${news.name}-trace.json`);
    fill($("#name"), news.name, h("span", { className: "faint" }, ` ${news.dir.split("/").pop()}`));
    const health = news.health.concat(news.evaluation).map((text) => { const at = text.search(/ [^ ]*$/), rate = text.match(/^(\S+) (\S+\/s)$/);
      return rate ? [rate[2], rate[1]] : [text.slice(0, at), text.slice(at + 1)]; });
    const figures = [...news.position.map((text) => text.split(" ")), ...health, ["left", (news.left[0] || "").replace(" left", "")],
      ["attempt", news.attempt], ["goodput", news.goodput === null ? "" : share(news.goodput)], ["ranks", news.world_size], ["run time", clock(news.wall_s)], ["Ray's job", jobLink(news.job)]];
    fill($("#state dl"), figures.filter(([, value]) => value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    say($("#alarm"), [news.failure, news.status === "running" ? news.slow : ""].filter(Boolean).join("\n"));
    say($("#checked"), news.checked);
    tick(); openSeenLog();
  },
  note({ text, tags }) { fill(noteLine, tagsOf(tags), text); },
  ranks({ ranks }) {
    const rows = Object.entries(ranks);
    const hidden = (state.world_size || 0) - rows.length;
    fill($("#more"), hidden > 0 ? `The ${rows.length} ranks in trouble or with the most work of their own, of ${state.world_size}.` : "");
    rows.sort(([a, x], [b, y]) => y[3] - x[3] || a - b);
    table($("#ranks table"), [["rank"], ["host"], ["state"], ["step", "n"], ["own work", "n"], ["step time", "n"], ["over time"]],
      rows.map(([rank, [step, host, pid, own, whole, how]]) => [
        h("button", { className: "link", title: `process ${pid}: show its log`, onclick: () => { $("#rank").value = rank; openLog(); $("#logs").scrollIntoView(); } }, rank),
        host, [h("span", { className: /^(|started|runs|finished|stopped)$/.test(how) ? "" : "bad" }, how), how === "hangs" ? [" ", stacksLink(rank)] : ""], step || "", ms(own), ms(whole), lane(rank)]),
      rows.map(([rank]) => rank));
  },
  lanes(news) { lanes = news; drawLanes(); },
  marks(news) { marks = news.marks; drawLanes(); redraw(); nodeFigures.redraw(); showOperated(); },
  buttons({ shown: some, why }) {
    $("#operate").hidden = !some;
    allow(why);
  },
  failures({ failures }) {
    fill($("#failures div"), failures.length ? failures.slice().reverse().map((one) => h("article", {},
      h("p", {}, h("strong", {}, `rank ${one.rank} on ${one.host}, step ${one.step}: ${one.how}`), ` · ${new Date(one.at * 1000).toLocaleString()}`),
      h("p", {}, one.text), h("p", { className: "faint" }, one.reason),
      h("p", {}, one.status === "restarted" && one.s !== null ? one.repeated === null ? `ran again after ${four(one.s)} s · ` : `next step after ${four(one.s)} s, ${one.repeated} step${one.repeated === 1 ? "" : "s"} repeated · ` : `${one.status} · `,
        h("button", { className: "link", onclick: () => openPage(one.page) }, one.page), one.how === "hung" ? [" · ", stacksLink(one.rank)] : ""))) : h("p", { className: "faint" }, "none"));
  },
  nodes({ nodes }) {
    const memory = (pair) => pair ? `${bytes(pair[0])} of ${bytes(pair[1])}` : "";
    const gpu = (one, i) => h("div", {}, `${i}: `, one.util === null ? "" : meter(one.util), ` ${memory(one.memory)}`, one.power_w === null ? "" : ` ${one.power_w} W`, one.temp_c === null ? "" : ` ${one.temp_c} °C`);
    const port = ([name, rates]) => h("div", {}, `${name} ${rates ? `↓ ${bytes(rates[0])}/s ↑ ${bytes(rates[1])}/s` : "…"}`);
    table($("#nodes table"), [["host"], ["CPU"], ["memory"], ["GPUs"], ["network ports"]], Object.entries(nodes).map(([host, load]) =>
      [host, meter(load.cpu), [meter(load.memory[0] / load.memory[1]), ` ${memory(load.memory)}`], load.gpus.map(gpu), Object.entries(load.ports).map(port)]), Object.keys(nodes));
    if (!Object.keys(nodes).length) fill($("#nodes table"), h("caption", { className: "faint" }, "no figures yet: the first come after ten seconds"));
    nodeFigures.take(Object.keys(nodes));
  },
  checkpoints(news) { saved = news.checkpoints; showCheckpoints(); readSizes(); },
  launch({ launch, spent }) {
    const [first, second] = document.querySelectorAll("#launch .bars");
    bars(first, launch); bars(second, spent);
  },
  warnings({ warnings }) { fill($("#warnings"), warnings.map((text) => h("li", {}, text))); },
  read({ share: part }) { say($("#link"), part < 1 ? `reading the events: ${share(part)}` : data ? "a copy" : state.status === "running" ? "live" : ""); },
  curves(news) {
    for (const [name, [replace, [steps, times, values, means]]] of Object.entries(news)) {
      const own = curves[name] = replace || !curves[name] ? { steps: [], times: [], values: [], means: [] } : curves[name];
      const last = own.steps.length ? own.steps[own.steps.length - 1] : -Infinity;
      steps.forEach((step, i) => { if (step > last || replace) { own.steps.push(step); own.times.push(times[i]); own.values.push(values[i]); own.means.push(means.length ? means[i] : values[i]); } });
    }
    redraw();
  },
};
// The run folder was made anew: what was read of the run before is no longer true.
function forget() {
  for (const name of Object.keys(curves)) delete curves[name];
  clearCharts(); readSettings();
}
// Once a second: what changes without an event.
function tick() {
  if (!state.status) return;
  const silent = state.status === "running" && silence() > state.quiet_s;
  const kind = { running: "busy", finished: "good" }[state.status] || "bad";
  say($("#status"), silent ? "no events" : state.status); $("#status").className = `badge ${silent ? "bad" : kind}`;
  say($("#waits"), (silent ? `No event for ${clock(silence())}: the driver has ended without a result, or waits. ` : "")
    + (state.waits ? `${state.attempt > 1 ? `attempt ${state.attempt}: ` : ""}waits ${state.waits.startsWith("for ") || state.waits.startsWith("until ") ? "" : "for: "}${state.waits}` : ""));
}

const nodeFigures = nodeCharts({ began: () => state.began, restarts: () => marks.filter(({ kind }) => kind === "restart").map(({ t }) => t) });

// --- lanes

const lane = (rank) => { const made = h("canvas", { className: "lane", width: 600, height: 32 }); made.dataset.rank = rank; made.setAttribute("role", "img"); drawLane(made); return made; };
const drawLanes = () => document.querySelectorAll("canvas.lane").forEach(drawLane);
function drawLane(canvas) {
  const shares = lanes.shares[canvas.dataset.rank] || [], context = canvas.getContext("2d"), { width, height } = canvas;
  const known = shares.filter((one) => one >= 0);
  canvas.setAttribute("aria-label", known.length ? `own work: ${known[known.length - 1]}% of a step` : "not timed");
  context.clearRect(0, 0, width, height);
  const step = width / Math.max(1, shares.length);
  shares.forEach((own, i) => {
    if (own < 0) return;
    context.fillStyle = colour("wait"); context.fillRect(i * step, 0, step + 1, height);
    context.fillStyle = colour("blue"); context.fillRect(i * step, height * (1 - own / 100), step + 1, height * own / 100);
  });
  context.fillStyle = colour("red");
  // In its column: all are equally wide, however long the time between them.
  for (const mark of marks) if (mark.kind === "restart") context.fillRect(lanes.times.findLastIndex((t) => t <= mark.t) * step, 0, 4, height);
}

// --- buttons: what the driver of the run is asked

let cannot = "", pressing = false;
// A button that can't be pressed keeps the focus, and says why.
function allow(why = cannot) {
  cannot = why;
  for (const one of $("#operate").elements) if (one.type === "submit") Object.assign(one, { title: cannot, ariaDisabled: String(pressing || Boolean(cannot)) });
}
$("#operate").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (pressing || cannot) return;
  pressing = true; allow();
  $("#answer").hidden = true;
  say($("#pressed"), "asking the ranks …");
  // Not asked again if the network breaks: the driver may be at it already.
  const reply = await fetch(url("press", { button: event.submitter.value }), { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }).catch(() => null);
  await (reply?.ok ? showAnswers(reply.body.pipeThrough(new TextDecoderStream()).getReader()) : Promise.reject()).catch(() => say($("#pressed"), "the page's server has not answered"));
  pressing = false; allow();
});
async function showAnswers(reader) {
  let rest = "", answered = false;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const { lines: said, file, error } of lines.map((line) => JSON.parse(line))) if (said || error) { answered = true; showAnswer(error ? [error] : said, file); }
  }
  if (!answered) say($("#pressed"), "the run has ended");
}
// One line as a sentence, more as a text.
function showAnswer(lines, file) {
  $("#answer").hidden = lines.length < 2;
  fill($("#answer"), lines.join("\n"));
  fill($("#pressed"), lines.length > 1 ? "" : lines[0] || "", file ? [" ", operatedFile(file)] : "");
}
const operatedFile = (name) => name.endsWith(".gz") ? h("a", { href: url("file", { name }), download: name.split("/").pop(), title: "open it at https://ui.perfetto.dev" }, name)
  : h("button", { className: "link", type: "button", onclick: () => openPage(name) }, name);
let operated = "";  // a list that is the same stays as it is, with the focus
function showOperated() {
  const found = marks.filter(({ kind }) => kind === "operated").slice(-10).reverse();
  if (operated === JSON.stringify(found)) return;
  operated = JSON.stringify(found);
  fill($("#operated"), found.map(({ t, text, file }) =>
    h("li", {}, `${new Date(t * 1000).toLocaleTimeString()} ${text} `, file && (!data || data.pages[file]) ? operatedFile(file) : file)));
}

// --- curves

const charts = Object.create(null);
const others = new Map();  // by run: another run whose curves are drawn, too, as { began, curves, colour }
const drawn = () => [...others.values()].filter((one) => one.curves);  // the others have not arrived yet
const COLOURS = ["purple", "orange", "green", "red", "text", "faint"];
let by = "step", waiting = 0;
let smoothing = Number($("#smoothing").value);  // a browser may keep it over a reload
const xs = (curve, began) => by === "step" ? curve.steps : curve.times.map((t) => t - began);
function redraw() {  // at most once a frame, however many sections came
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; Object.keys(curves).sort(order).forEach(draw); document.body.dataset.drawn = Object.keys(charts).length; window.raydist.drawn ??= performance.now(); });
}
const groupOrder = (a, b) => (a === "") - (b === "") || a.localeCompare(b);
const order = (a, b) => groupOrder(groupOf(a), groupOf(b)) || (b === "loss") - (a === "loss") || (a === "steps/s") - (b === "steps/s") || a.localeCompare(b);
const points = (curve, began) => ({ x: xs(curve, began), values: curve.values, means: curve.means });
const fromPiece = ([steps, times, values, means], began) => points({ steps, times, values, means: means.length ? means : values }, began);
// All points of a curve, by run: this one, then the others; undefined if a run has no such curve.
const allPoints = (name) => [points(curves[name], state.began), ...drawn().map((one) => one.curves[name] && fromPiece(one.curves[name][1], one.began))];
// The columns of a chart: the values of each run, and then, if wanted, those values smoothed.
function columns(name, runs) {
  const lines = runs.map((one) => one || { x: [], values: [], means: [] }), whole = xs(curves[name], state.began);
  const tables = lines.map(({ x, values }) => [x, values]);
  if (smoothing) tables.push(...lines.map(({ x, means }) => [x, smooth(x, means, smoothing, whole.at(-1) - whole[0])]));
  const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
  if (!charts[name].log) return joined;
  const [x, ...values] = joined;
  return [x, ...values.map((column) => column.map((value) => value > 0 || value === undefined ? value : null))];
}
const wantsLog = (name) => $("#logarithmic").checked && curves[name].values.some((value) => value > 0);
function draw(name) {
  if (charts[name] && charts[name].log !== wantsLog(name)) removeChart(name);
  const chart = charts[name] || (charts[name] = makeChart(name));
  if (chart.zoomed || chart.figure.hidden || !chart.figure.closest("details").open) return;
  chart.plot.setData(columns(name, allPoints(name)));
  readOut(chart.plot, name, chart.value);
}
function makeChart(name) {
  const value = h("span", { className: "read" }), box = h("div"), chart = { value, zoomed: null, log: wantsLog(name) };
  const save = h("button", { className: "link", type: "button", title: `the points of ${name} as CSV`, onclick: () => saveCurve(name) }, "CSV");
  const figure = h("figure", {}, h("figcaption", {}, h("span", {}, name), value, save), box);
  figure.dataset.name = name;
  const within = groupBox(groupOf(name)), after = [...within.children].find((one) => order(one.dataset.name, name) > 0);
  after ? after.before(figure) : within.append(figure);
  const runs = ["blue", ...drawn().map((one) => one.colour)], faint = smoothing ? "40" : "";
  const line = (of, more = "") => ({ stroke: () => colour(of) + more, width: more ? 1 : 1.5, points: { size: 4, ...more ? { show: false } : {} } });
  chart.plot = new uPlot({
    width: box.clientWidth || 420, height: 200, scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1 } },
    series: [{}, ...runs.map((of) => line(of, faint)), ...faint ? runs.map((of) => line(of)) : []],
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((t) => by === "time" ? clock(t) : t) }, chart.log ? { ...axis, values: (_, ticks) => ticks.map((t) => t === null ? null : four(t)) } : axis],
    cursor: { drag: { x: true, y: false }, sync: { key: "x" } },
    hooks: { draw: [drawMarks], setSelect: [(plot) => zoomTo(name, chart, plot)], setCursor: [(plot) => readOut(plot, name, value)] },
  }, [[], ...runs.map(() => []), ...faint ? runs.map(() => []) : []], box);
  new ResizeObserver(() => box.clientWidth && chart.plot.setSize({ width: box.clientWidth, height: 200 })).observe(box);
  const all = () => { chart.zoomed = null; draw(name); };
  box.addEventListener("dblclick", all);
  chartKeys(box, name, chart.plot, () => { const x = xs(curves[name], state.began); return [x[0], x.at(-1)]; }, (from, to) => stretch(name, chart, from, to), all);
  figure.hidden = !isWanted(name);
  return Object.assign(chart, { figure });
}
// What the chart shows under the pointer, else its newest values: of each run, smoothed if that is wanted.
function readOut(plot, name, where) {
  const i = plot.cursor.idx, at = i ?? plot.data[0].length - 1, count = 1 + drawn().length, last = i === null || i === undefined;
  const column = (run) => plot.data[run + 1 + (smoothing ? count : 0)];
  const value = (run) => last ? column(run)?.findLast((one) => one !== undefined) : column(run)?.[at];
  const text = (one) => one !== null ? four(one) : charts[name]?.log ? "not above 0" : "not a number";
  const x = plot.data[0][at];
  fill(where, last ? "" : `${by === "time" ? clock(x) : `step ${x}`}: `,
    ["blue", ...drawn().map((one) => one.colour)].map((of, run) => h("span", { className: drawn().length ? of : "" }, text(value(run)), " ")));
}
function zoomTo(name, chart, plot) {
  if (plot.select.width >= 3) stretch(name, chart, plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
}
// Zooms: the points of the stretch come in full, as far as a screen can show them.
async function stretch(name, chart, from, to) {
  const zoomed = chart.zoomed = { from, to, points: null };
  chart.plot.setScale("x", { min: from, max: to });
  if (data) return;
  const read = async (run, began) => {
    const offset = by === "time" ? began : 0, { curves: found } = await json("curves", { ...run, by, from: from + offset, to: to + offset });
    return found[name] && fromPiece(found[name][1], began);
  };
  const arrived = [...others].filter(([, one]) => one.curves);
  const runs = await Promise.all([read({}, state.began), ...arrived.map(([run, { began }]) => read({ run }, began))])
    .catch(() => []);  // the server has ended: what is here stays
  if (chart.zoomed !== zoomed || !runs[0]?.x.length) return;
  zoomed.points = runs;
  drawStretch(name, chart);
}
function drawStretch(name, { plot, zoomed: { from, to, points: runs } }) {
  plot.setData(columns(name, runs || allPoints(name)), false);
  plot.setScale("x", { min: from, max: to });
}
function drawMarks(plot) {
  const { ctx: context, bbox } = plot, kinds = { restart: ["red", 1, 0], save: ["green", .06, .94], evaluation: ["orange", .06, 0], operated: ["purple", .06, .47] };
  context.save();
  for (const mark of marks) {
    const x = plot.valToPos(by === "step" ? mark.step : mark.t - state.began, "x", true), [name, part, from] = kinds[mark.kind];
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    context.fillStyle = colour(name);
    context.fillRect(Math.round(x) - 1, bbox.top + bbox.height * from, 2, bbox.height * part);
  }
  context.restore();
}
async function saveCurve(name) {
  const { steps, times, values } = curves[name], lines = steps.map((step, i) => `${step},${times[i]},${values[i] ?? "nan"}\n`);
  const copy = () => URL.createObjectURL(new Blob(["step,time,value\n", ...lines], { type: "text/csv" }));
  h("a", { href: data ? copy() : url("csv", { name }), download: fileName(`${state.name}-${name}.csv`) }).click();
}

// --- which charts are shown, and how

// The charts of one group, by the part of their names before the slash, in a box that can be closed.
function groupBox(group) {
  const boxes = [...$("#charts").children], found = boxes.find((one) => one.dataset.group === group);
  if (found) return found.lastChild;
  const made = h("details", { open: true, ontoggle: redraw }, h("summary", {}, group || "others"), h("div", { className: "grid" }));
  made.dataset.group = group;
  const after = boxes.find((one) => groupOrder(one.dataset.group, group) > 0);
  after ? after.before(made) : $("#charts").append(made);
  $("#charts").classList.toggle("one", boxes.length === 0 && !group);
  return made.lastChild;
}
const isWanted = (name) => matches($("#find").value)(name);
function find() {
  for (const [name, { figure }] of Object.entries(charts)) figure.hidden = !isWanted(name);
  for (const box of $("#charts").children) box.hidden = ![...box.lastChild.children].some((one) => !one.hidden);
  say($("#none"), Object.keys(charts).some(isWanted) ? "" : "no curve has such a name");
  redraw();
}
// Makes the charts anew, with other lines or another axis; what is zoomed or closed stays so, and the page stays where it is.
function remake() {
  const box = $("#charts"), zoomed = zoomedCharts().map(([name, chart]) => [name, chart.zoomed]);
  const closed = [...box.children].filter((one) => !one.open).map((one) => one.dataset.group);
  box.style.minHeight = `${box.offsetHeight}px`;
  clearCharts();
  Object.keys(curves).sort(order).forEach(draw);
  for (const one of box.children) one.open = !closed.includes(one.dataset.group);
  find();
  box.style.minHeight = "";
  for (const [name, { from, to }] of zoomed) stretch(name, charts[name], from, to);
}
const zoomedCharts = () => Object.entries(charts).filter(([, chart]) => chart.zoomed);
// What is still being read for a removed chart comes to nothing.
function removeChart(name) { charts[name].zoomed = null; charts[name].figure.remove(); charts[name].plot.destroy(); delete charts[name]; }
function clearCharts() { Object.keys(charts).forEach(removeChart); fill($("#charts")); }

document.querySelectorAll("[name=by]").forEach((button) => button.addEventListener("change", () => {
  by = button.value; Object.values(charts).forEach((chart) => { chart.zoomed = null; }); redraw();
}));
$("#find").addEventListener("input", find);
$("#logarithmic").addEventListener("change", remake);
say($("#smoothed"), String(smoothing));
$("#smoothing").addEventListener("input", ({ target }) => {
  const before = smoothing;
  smoothing = Number(target.value);
  say($("#smoothed"), target.value);
  if (before > 0 !== smoothing > 0) { remake(); return; }  // with the original beside it a chart has more lines
  redraw();
  for (const [name, chart] of zoomedCharts()) drawStretch(name, chart);
});

// --- other runs in the same charts

const isFull = () => others.size === COLOURS.length;
async function addOther(run) {
  if (others.has(run) || isFull()) return;
  const used = [...others.values()].map((one) => one.colour);
  others.set(run, { began: 0, curves: null, settings: {}, colour: COLOURS.find((one) => !used.includes(one)), changed: list?.row(run)?.changed });
  if (!await readOther(run)) others.delete(run);
  showOthers();
}
// Reads the curves and settings of another run; returns whether they have arrived.
async function readOther(run) {
  const found = data ? data.others[run] : await Promise.all([json("curves", { run }), json("settings", { run })]).catch(() => null), other = others.get(run);
  if (found && other) Object.assign(other, found[0], { settings: found[1].values });
  return found !== null;
}
function dropOther(run) { others.delete(run); showOthers(); }
function showOthers() {
  fill($("#others"), [...others].map(([run, { colour: of }]) => h("span", { className: of }, h("i"), " ", run, " ",
    h("button", { className: "link", type: "button", title: `without ${run}`, onclick: () => dropOther(run) }, "×"))));
  if (!data) rememberOthers();  // a file has no address of its own
  $("#other").disabled = isFull();
  remake(); showSettings(); list?.draw();
}
function rememberOthers() {
  const words = new URLSearchParams(location.search);
  words.delete("with");
  for (const run of others.keys()) words.append("with", run);
  history.replaceState(null, "", `?${words}${location.hash}`);
}
const offer = (runs) => $("#other").append(...runs.map((run) => h("option", { value: run }, run)));
$("#other").addEventListener("change", async ({ target }) => { const run = target.value; target.value = ""; if (run) await addOther(run); });

// --- checkpoints, note

let saved = [], sizes = null;
async function readSizes() {
  sizes = data ? data.sizes : await json("sizes").catch(() => sizes);
  showCheckpoints();
}
function showCheckpoints() {
  table($("#checkpoints table"), [["step", "n"], ["saved"], ["took", "n"], ["size", "n"], ["where"]], saved.map(({ step, t, s, path }) =>
    [step, new Date(t * 1000).toLocaleString(), s ? `${s.toFixed(2)} s` : "", sizes?.[path] ? bytes(sizes[path]) : "", path]), saved.map(({ path }) => path));
  if (!saved.length) fill($("#checkpoints table"), h("caption", { className: "faint" }, "none yet"));
  say($("#unsized"), sizes && saved.some(({ path }) => !sizes[path]) ? "Without a size: on another machine, or removed since." : "");
}
const noteLine = h("p", { id: "note" });
noteLine.setAttribute("role", "status");
$("#state h2").after(noteLine);

// --- pages of failures, logs

async function openPage(name) {
  const why = { stacks: ": stacks are written when ranks hang", nccl: ": fabric.debug=true has NCCL write it" }[name.split(".").pop()] || "";
  const text = data ? data.pages[name] : await get("file", { name }).then((reply) => reply.ok ? reply.text() : `${name} is not there${why}`);
  fill($("#page pre"), text || `${name} is not in this copy${why}`); $("#page").showModal();
}
const stacksLink = (rank) => h("button", { className: "link", title: `stacks of rank ${rank}`, onclick: () => openPage(`logs/rank-${rank}.stacks`) }, "stacks");
for (const [button, of] of [["#stacks", "stacks"], ["#nccl", "nccl"]]) $(button).addEventListener("click", () => openPage(`logs/rank-${$("#rank").value || 0}.${of}`));
let log = null;
const show = (text) => { $("#log").append(text); if ($("#log").textContent.length > 2e6) $("#log").textContent = $("#log").textContent.slice(-1e6);
  if ($("#follow").checked) $("#log").scrollTop = $("#log").scrollHeight; };
function openLog() {
  if (log) log.end();
  fill($("#log"));
  const rank = $("#rank").value || 0;
  if (data) { show(data.logs[rank] || "this copy has no log of the rank"); return; }
  let from = -1;  // a stream that is opened again continues where it was
  log = follow(() => url("log", { rank, from }), { log({ text, at, anew }) { if (anew) fill($("#log")); from = at; show(text); } });
}
$("#rank").addEventListener("change", openLog);
$("#logs form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("#text").value;
  const { lines: found, absent } = !text ? { lines: [] } : data ? { lines: searchCopy(text.toLowerCase()) } : await json("search", { text });
  fill($("#found"), found.map(([rank, number, line]) => h("li", {}, h("button", { className: "link", onclick: () => { $("#rank").value = rank; openLog(); } }, `rank ${rank}, line ${number}`), ` ${line}`)));
  if (text && !found.length) fill($("#found"), h("li", {}, "in no log"));
  if (absent) $("#found").append(h("li", { className: "bad" }, `${absent} log${absent === 1 ? " has" : "s have"} not arrived: search again`));
});
const searchCopy = (text) => Object.entries(data.logs).flatMap(([rank, lines]) => lines.split("\n").map((line, i) => [rank, i + 1, line])).filter(([, , line]) => line.toLowerCase().includes(text)).slice(0, 300);
let logSeen = false;  // on a large screen it is before the first news
const openSeenLog = () => { if (logSeen && !log && state.status) openLog(); };
new IntersectionObserver(([seen]) => { logSeen = seen.isIntersecting; openSeenLog(); }).observe($("#log"));

// --- settings

let own = { overrides: [], values: {} };
async function readSettings() {
  own = data ? data.settings : await json("settings").catch(() => own);
  showSettings();
}
function showSettings() {
  fill($("#overrides"), own.overrides.length ? own.overrides.flatMap((text) => [h("code", {}, text), " "]) : "none");
  const arrived = [...others].filter(([, one]) => one.curves), compared = [own.values, ...arrived.map(([, one]) => one.settings)];
  const names = [...new Set(compared.flatMap((one) => Object.keys(one)))], isWanted = matches($("#setting").value);
  const differs = (name) => name !== "dir" && compared.some((one) => one[name] !== own.values[name]);
  const isFound = (name) => isWanted(name) || compared.some((one) => isWanted(one[name] ?? ""));
  const onlyDiffering = arrived.length && $("#differing").checked;
  const shown = names.filter((name) => (!onlyDiffering || differs(name)) && isFound(name));
  $("#differing").parentElement.hidden = !arrived.length;
  table($("#settings table"), [["setting"], ["this run"], ...arrived.map(([run]) => [run])],
    shown.map((name) => [name, ...compared.map((one) => one[name] ?? "")]), shown);
  const why = onlyDiffering && !$("#setting").value ? "no setting differs" : "no setting has such a name or value";
  say($("#same"), !names.length ? "the run folder has no settings" : shown.length ? "" : why);
}
$("#setting").addEventListener("input", showSettings);
$("#differing").addEventListener("change", showSettings);

// --- the list of runs

const sweepPage = (run) => `sweep.html?sweep=${encodeURIComponent(run)}`;
const runPage = (run, others = []) => `?${new URLSearchParams([["run", run], ...others.map((one) => ["with", one])])}`;
let list = null;
const picks = new Set();  // in a list of runs: those to compare
async function listRuns() {
  const news = await json("runs").catch(() => null);
  if (!news) { say($("#link"), "not connected"); return ""; }
  const { runs, first, folder, sweep } = news, here = query.get("run") || first;
  const whole = sweep ? "sweep.html" : runs.filter((row) => row.sweep && here.startsWith(`${row.run}/`)).map((row) => sweepPage(row.run))[0];
  if (here && runs.length > 1) $("nav").append(h("a", { href: "#runs" }, "Runs"));
  if (whole) $("nav").append(h("a", { href: whole }, "the sweep"));
  offer(runs.filter((row) => row.run !== here && !row.sweep).map(({ run }) => run));
  $("#beside").hidden = runs.length < 2;
  $("#runs").hidden = Boolean(here) && runs.length < 2;
  if (!here) showOnlyRuns(folder);
  const link = ({ run, sweep: many }) => many ? sweepPage(run) : runPage(run);
  list = runsList(here
    ? { here, link, isPicked: (run) => others.has(run), isFull, pick: (run, yes) => yes ? addOther(run) : dropOther(run) }
    : { here, link, isPicked: (run) => picks.has(run), isFull: () => picks.size > COLOURS.length, pick: pickRun });
  list.show(runs);
  if (here) query.getAll("with").forEach(addOther);
  const refresh = () => { if (!document.hidden) json("runs").then(freshen, () => {}); };  // without its server, a page stays as it is
  setInterval(refresh, 10000);
  document.addEventListener("visibilitychange", refresh);
  return here;
}
function showOnlyRuns(folder) {
  document.querySelectorAll("main > section:not(#runs), nav, footer").forEach((one) => { one.hidden = true; });
  $("#runs").hidden = false;
  $("#link").textContent = folder;
}
function pickRun(run, yes) {
  if (yes) picks.add(run); else picks.delete(run);
  $("#compare").hidden = !picks.size;
}
// Shows the list as it is now, and reads other runs again that continue. Their charts stay, with the focus.
async function freshen({ runs }) {
  list.show(runs);
  const news = runs.filter(({ run, changed }) => others.get(run)?.curves && others.get(run).changed !== changed);
  for (const { run, changed } of news) others.get(run).changed = changed;
  await Promise.all(news.map(({ run }) => readOther(run)));
  if (!news.length) return;
  redraw(); showSettings();
  for (const [name, chart] of zoomedCharts()) stretch(name, chart, chart.zoomed.from, chart.zoomed.to);
}
$("#compare").addEventListener("click", () => { const [first, ...more] = picks; location.search = runPage(first, more); });

// --- keys, start

const shown = [...document.querySelectorAll("main > section:not(#runs)")];
fill($("nav"), shown.map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  if (event.key >= "1" && event.key <= String(shown.length)) shown[event.key - 1].scrollIntoView();
  else if (event.key === "x") $(`[name=by]:not(:checked)`).click();
  else if (event.key === "/") { event.preventDefault(); $("#text").focus(); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLanes(); nodeFigures.redraw(); Object.values(charts).forEach(({ plot }) => plot.redraw()); });

// A copy has the trace packed, and unpacks it at the first click.
$("#trace").addEventListener("click", async (event) => {
  if (!data || $("#trace").href.startsWith("blob:")) return;
  event.preventDefault();
  const packed = new Blob([Uint8Array.from(atob(data.trace), (letter) => letter.charCodeAt(0))]);
  const trace = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).blob();
  $("#trace").href = URL.createObjectURL(trace);
  $("#trace").click();
});
$("#trace").href = data ? "#trace" : url("trace"); $("#trace").parentElement.hidden = Boolean(data) && !data.trace;
if (data?.list) {
  showOnlyRuns(`a copy of ${data.list.folder}`);
  runsList({ here: "", link: ({ page }) => page, isPicked: () => false, isFull: () => false }).show(data.list.runs);
} else if (data) {
  const runs = Object.keys(data.others);
  if (data.home) $("nav").append(h("a", { href: data.home[0] }, data.home[1]));
  $("#beside").hidden = !runs.length;
  offer(runs);
  for (const [name, section] of Object.entries(data.sections)) sections[name](section);
  readSettings();
  runs.forEach(addOther);
} else {
  const stream = () => {
    readSettings();
    follow(() => url("stream"), sections, "state");
    setInterval(tick, 1000);
  };
  if (query.get("run")) { stream(); listRuns(); } else listRuns().then((here) => here && stream());
}
window.raydist = { curves, charts, nodes: nodeFigures.charts };  // for whoever wants the numbers in the browser's console
