// The page of a run: sections of JSON from one stream, or, exported, from the element #data.

// --- what is known of the run

let state = {}, lanes = { times: [], shares: {} }, marks = [], other = null;
const curves = Object.create(null);  // a metric may be named constructor
let fileNumber = 0;

const sections = {
  file({ silent_s: s, number }) {
    hear(s);
    if (fileNumber && number !== fileNumber) forget();
    fileNumber = number;
  },
  state(news) {
    state = news;
    document.title = `${news.name} · ${news.status}`;
    fill($("#name"), news.name, h("span", { className: "faint" }, ` ${news.dir.split("/").pop()}`));
    const health = news.health.concat(news.evaluation).map((text) => { const at = text.search(/ [^ ]*$/), rate = text.match(/^(\S+) (\S+\/s)$/);
      return rate ? [rate[2], rate[1]] : [text.slice(0, at), text.slice(at + 1)]; });
    const figures = [...news.position.map((text) => text.split(" ")), ...health, ["left", (news.left[0] || "").replace(" left", "")],
      ["attempt", news.attempt], ["goodput", share(news.goodput)], ["ranks", news.world_size], ["run time", clock(news.wall_s)]];
    fill($("#state dl"), figures.filter(([, value]) => value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    say($("#alarm"), [news.failure, news.status === "running" ? news.slow : ""].filter(Boolean).join("\n"));
    tick(); openSeenLog();
  },
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
  marks(news) { marks = news.marks; drawLanes(); redraw(); },
  failures({ failures }) {
    fill($("#failures div"), failures.length ? failures.slice().reverse().map((one) => h("article", {},
      h("p", {}, h("strong", {}, `rank ${one.rank} on ${one.host}, step ${one.step}: ${one.how}`), ` · ${new Date(one.at * 1000).toLocaleString()}`),
      h("p", {}, one.text), h("p", { className: "faint" }, one.reason),
      h("p", {}, one.status === "restarted" && one.s !== null ? `next step after ${four(one.s)} s, ${one.repeated} step${one.repeated === 1 ? "" : "s"} repeated · ` : `${one.status} · `,
        h("button", { className: "link", onclick: () => openPage(one.page) }, one.page), one.how === "hung" ? [" · ", stacksLink(one.rank)] : ""))) : h("p", { className: "faint" }, "none"));
  },
  nodes({ nodes }) {
    const memory = (pair) => pair ? `${bytes(pair[0])} of ${bytes(pair[1])}` : "";
    const gpu = (one, i) => h("div", {}, `${i}: `, one.util === null ? "" : meter(one.util), ` ${memory(one.memory)}`, one.power_w === null ? "" : ` ${one.power_w} W`, one.temp_c === null ? "" : ` ${one.temp_c} °C`);
    const port = ([name, rates]) => h("div", {}, `${name} ${rates ? `↓ ${bytes(rates[0])}/s ↑ ${bytes(rates[1])}/s` : "…"}`);
    table($("#nodes table"), [["host"], ["CPU"], ["memory"], ["GPUs"], ["network ports"]], Object.entries(nodes).map(([host, load]) =>
      [host, meter(load.cpu), [meter(load.memory[0] / load.memory[1]), ` ${memory(load.memory)}`], load.gpus.map(gpu), Object.entries(load.ports).map(port)]), Object.keys(nodes));
    if (!Object.keys(nodes).length) fill($("#nodes table"), h("caption", { className: "faint" }, "no figures yet: the first come after ten seconds"));
  },
  launch({ launch, spent }) {
    const [first, second] = document.querySelectorAll("#launch .bars");
    bars(first, launch); bars(second, spent);
  },
  warnings({ warnings }) { fill($("#warnings"), warnings.map((text) => h("li", {}, text))); },
  read({ share: part }) { say($("#link"), part < 1 ? `reading the events: ${share(part)}` : data ? "a copy" : state.status === "running" ? "live" : ""); },
  curves(news) {
    for (const [name, [replace, [steps, times, values]]] of Object.entries(news)) {
      const own = curves[name] = replace || !curves[name] ? { steps: [], times: [], values: [] } : curves[name];
      const last = own.steps.length ? own.steps[own.steps.length - 1] : -Infinity;
      steps.forEach((step, i) => { if (step > last || replace) { own.steps.push(step); own.times.push(times[i]); own.values.push(values[i]); } });
    }
    redraw();
  },
};
// The run folder was made anew: what was read of the run before is no longer true.
function forget() {
  for (const name of Object.keys(curves)) delete curves[name];
  clearCharts();
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

// --- lanes

const lane = (rank) => { const made = h("canvas", { className: "lane", width: 600, height: 32 }); made.dataset.rank = rank; made.setAttribute("role", "img"); drawLane(made); return made; };
const drawLanes = () => document.querySelectorAll("canvas.lane").forEach(drawLane);
function drawLane(canvas) {
  const shares = lanes.shares[canvas.dataset.rank] || [], context = canvas.getContext("2d"), { width, height } = canvas;
  const known = shares.filter((one) => one >= 0);
  canvas.setAttribute("aria-label", known.length ? `own work: ${known[known.length - 1]}% of a step` : "not timed");
  context.clearRect(0, 0, width, height);
  const [first, last] = [lanes.times[0], lanes.times[lanes.times.length - 1]], step = width / Math.max(1, shares.length);
  shares.forEach((own, i) => {
    if (own < 0) return;
    context.fillStyle = colour("wait"); context.fillRect(i * step, 0, step + 1, height);
    context.fillStyle = colour("blue"); context.fillRect(i * step, height * (1 - own / 100), step + 1, height * own / 100);
  });
  context.fillStyle = colour("red");
  for (const mark of marks) if (mark.kind === "restart" && mark.t >= first && last > first) context.fillRect((mark.t - first) / (last - first) * (width - 4), 0, 4, height);
}

// --- curves

const charts = Object.create(null);
let by = "step", waiting = 0;
const xs = (curve, began) => by === "step" ? curve.steps : curve.times.map((t) => t - began);
function redraw() {  // at most once a frame, however many sections came
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; Object.keys(curves).sort(order).forEach(draw); document.body.dataset.drawn = Object.keys(charts).length; window.raydist.drawn ??= performance.now(); });
}
const order = (a, b) => (b === "loss") - (a === "loss") || (a === "steps/s") - (b === "steps/s") || a.localeCompare(b);
const series = ([steps, times, values], began) => [xs({ steps, times }, began), values];
const pair = (mine, theirs) => theirs ? uPlot.join([mine, theirs]) : [...mine, mine[0].map(() => null)];
function columns(name) {
  const { steps, times, values } = curves[name], theirs = other && other.curves[name];
  return pair(series([steps, times, values], state.began), theirs && series(theirs[1], other.began));
}
function draw(name) {
  const chart = charts[name] || (charts[name] = makeChart(name));
  const values = curves[name].values, last = values[values.length - 1];
  chart.value.textContent = last === null ? "not a number" : four(last);
  if (!chart.zoomed) chart.plot.setData(columns(name));
}
function makeChart(name) {
  const value = h("span", { className: "faint" }), box = h("div"), chart = { value, zoomed: null };
  const figure = h("figure", {}, h("figcaption", {}, h("span", {}, name), value), box);
  figure.dataset.name = name;
  const after = Object.keys(charts).filter((one) => order(one, name) > 0).sort(order)[0];
  after ? charts[after].figure.before(figure) : $("#charts").append(figure);
  const line = (name) => ({ stroke: () => colour(name), width: 1.5, points: { size: 4 }, spanGaps: name === "purple" || !!other });
  chart.plot = new uPlot({
    width: box.clientWidth || 420, height: 200, scales: { x: { time: false } }, series: [{}, line("blue"), line("purple")],
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((t) => by === "time" ? clock(t) : t) }, axis],
    cursor: { drag: { x: true, y: false }, sync: { key: "x" } },
    hooks: { draw: [drawMarks], setSelect: [(plot) => zoomTo(name, chart, plot)], setCursor: [(plot) => readOut(plot, name, value)] },
  }, [[], [], []], box);
  new ResizeObserver(() => chart.plot.setSize({ width: box.clientWidth, height: 200 })).observe(box);
  const all = () => { chart.zoomed = null; draw(name); };
  box.addEventListener("dblclick", all);
  chartKeys(box, name, chart.plot, () => { const x = xs(curves[name], state.began); return [x[0], x.at(-1)]; }, (from, to) => stretch(name, chart, from, to), all);
  return Object.assign(chart, { figure });
}
function readOut(plot, name, value) {
  const i = plot.cursor.idx;
  if (i === null || i === undefined) { value.textContent = four(curves[name].values.at(-1)); return; }
  const x = plot.data[0][i];
  value.textContent = `${by === "time" ? clock(x) : `step ${x}`}: ${four(plot.data[1][i])}${other ? ` / ${four(plot.data[2][i])}` : ""}`;
}
function zoomTo(name, chart, plot) {
  if (plot.select.width >= 3) stretch(name, chart, plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
}
// A stretch of a curve: its points come in full, as far as a screen can show them.
async function stretch(name, chart, from, to) {
  const { plot } = chart, wanted = chart.zoomed = {};
  plot.setScale("x", { min: from, max: to });
  if (data) return;
  const read = async (run, began) => {
    const offset = by === "time" ? began : 0, { curves: found } = await json("curves", { ...run, by, from: from + offset, to: to + offset });
    return found[name] && series(found[name][1], began);
  };
  const [mine, theirs] = await Promise.all([read({}, state.began), other && read({ run: $("#other").value }, other.began)]);
  if (chart.zoomed === wanted && mine[0].length) { plot.setData(pair(mine, theirs), false); plot.setScale("x", { min: from, max: to }); }
}
function drawMarks(plot) {
  const { ctx: context, bbox } = plot, kinds = { restart: ["red", 1, 0], save: ["green", .06, .94], evaluation: ["orange", .06, 0] };
  context.save();
  for (const mark of marks) {
    const x = plot.valToPos(by === "step" ? mark.step : mark.t - state.began, "x", true), [name, part, from] = kinds[mark.kind];
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    context.fillStyle = colour(name);
    context.fillRect(Math.round(x) - 1, bbox.top + bbox.height * from, 2, bbox.height * part);
  }
  context.restore();
}
document.querySelectorAll("[name=by]").forEach((button) => button.addEventListener("change", () => {
  by = button.value; Object.values(charts).forEach((chart) => { chart.zoomed = null; }); redraw();
}));
$("#other").addEventListener("change", async ({ target }) => {
  other = target.value ? await json("curves", { run: target.value }) : null;
  $("#legend-other").hidden = !other;
  clearCharts(); redraw();
});
function clearCharts() {
  for (const name of Object.keys(charts)) { charts[name].figure.remove(); charts[name].plot.destroy(); delete charts[name]; }
}

// --- pages of failures, logs

async function openPage(name) {
  const why = { stacks: ": stacks are written when ranks hang", nccl: ": fabric.debug=true has NCCL write it" }[name.split(".").pop()] || "";
  const text = data ? data.pages[name] : await fetch(url("file", { name })).then((reply) => reply.ok ? reply.text() : `${name} is not there${why}`);
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

// --- the list of runs

const sweepPage = (run) => `sweep.html?sweep=${encodeURIComponent(run)}`;
async function listRuns() {
  const { runs, first, folder, sweep } = await json("runs"), here = query.get("run") || first;
  const whole = sweep ? "sweep.html" : runs.filter((row) => row.sweep && here.startsWith(`${row.run}/`)).map((row) => sweepPage(row.run))[0];
  if (here && runs.length > 1) $("nav").append(h("a", { href: "#runs" }, "Runs"));
  if (whole) $("nav").append(h("a", { href: whole }, "the sweep"));
  $("#other").append(...runs.filter((row) => row.run !== here && !row.sweep).map(({ run }) => h("option", { value: run }, run)));
  $("#beside").hidden = runs.length < 2;
  $("#runs").hidden = runs.length < 2;
  if (!here) { document.querySelectorAll("main > section:not(#runs), nav, footer").forEach((one) => { one.hidden = true; }); $("#link").textContent = folder; $("#runs").hidden = false; }
  showRuns(runs, here);
  setInterval(async () => { if (!document.hidden) showRuns((await json("runs")).runs, here); }, 10000);
  return here;
}
function showRuns(runs, here) {
  table($("#runs table"), [["run"], ["status"], ["last event"], ["result"]], runs.slice(0, here ? 12 : 500).map(({ run, status, changed, text, sweep: many }) =>
    [run === here ? h("strong", {}, run) : h("a", { href: many ? sweepPage(run) : `?run=${encodeURIComponent(run)}` }, run), status, new Date(changed * 1000).toLocaleString(), text]),
    runs.slice(0, here ? 12 : 500).map(({ run }) => run));
}

// --- keys, start

const shown = [...document.querySelectorAll("main > section:not(#runs)")];
fill($("nav"), shown.map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  if (event.key >= "1" && event.key <= String(shown.length)) shown[event.key - 1].scrollIntoView();
  else if (event.key === "x") $(`[name=by]:not(:checked)`).click();
  else if (event.key === "/") { event.preventDefault(); $("#text").focus(); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLanes(); Object.values(charts).forEach(({ plot }) => plot.redraw()); });

if (data) {
  $("#beside").hidden = true;
  for (const [name, section] of Object.entries(data.sections)) sections[name](section);
} else {
  const stream = () => {
    follow(() => url("stream"), sections, "state");
    setInterval(tick, 1000);
  };
  if (query.get("run")) { stream(); listRuns(); } else listRuns().then((here) => here && stream());
}
window.raydist = { curves, charts };  // for whoever wants the numbers in the browser's console
