// The figures of the nodes over time: a chart for each, with a line for each GPU or port of one node, or for those of all nodes.

const rate = (n) => `${bytes(n)}/s`;
const UNITS = { CPU: share, memory: bytes, "GPU utilisation": share, "GPU memory": bytes, "GPU power": (n) => `${four(n)} W`,
  "GPU temperature": (n) => `${four(n)} °C`, received: rate, sent: rate };
const LINE_COLOURS = ["blue", "orange", "green", "red", "purple", "text", "faint"];
const NAMED = 2 * LINE_COLOURS.length;  // with more lines, they have one colour, and the pointer names them

// `began()`: when the run began; `restarts()`: the times of its restarts.
function nodeCharts({ began, restarts }) {
  const select = $("#node"), box = $("#node-charts"), charts = new Map();
  let reading = false, again = false, hosts = [];

  // Reads the figures. What has changed meanwhile is read afterwards, so that slow answers do not pile up.
  async function read() {
    again = true;
    if (reading) return;
    reading = true;
    while (again) {
      again = false;
      const host = select.value, news = data ? data.nodes[host] : await json("nodes", { host }).catch(() => null);
      if (news && host === select.value) show(news);
    }
    reading = false;
  }
  function clear() {
    for (const chart of charts.values()) remove(chart);
    charts.clear();
  }
  function remove(chart) { chart.figure.remove(); chart.plot.destroy(); }
  function show({ times, figures }) {
    const x = times.map((t) => t - began());
    for (const [name, chart] of charts) if (!figures[name]) { remove(chart); charts.delete(name); }
    for (const name of Object.keys(UNITS).filter((one) => figures[one])) {
      const { lines, of } = figures[name], labels = lines.map(([label]) => label);
      let chart = charts.get(name);
      if (chart?.labels.join("\n") !== labels.join("\n")) {
        const made = makeChart(name, labels);
        if (chart) { chart.figure.replaceWith(made.figure); chart.plot.destroy(); } else box.append(made.figure);
        charts.set(name, chart = made);
      }
      chart.of = of;
      const { min, max } = chart.plot.scales.x;
      chart.plot.setData([x, ...lines.map(([, values]) => values)], !chart.zoomed);
      if (chart.zoomed) chart.plot.setScale("x", { min, max });
      readOut(chart);
    }
    document.body.dataset.nodes = charts.size;
  }
  function makeChart(name, labels) {
    const value = h("span", { className: "read" }), within = h("div"), many = labels.length > NAMED;
    const legend = h("p", { className: "legend lines" }), unit = UNITS[name];
    const figure = h("figure", {}, h("figcaption", {}, h("span", {}, name), value), within, legend);
    const chart = { name, labels, value, legend, figure, zoomed: false, focus: null, of: labels.length };
    const style = (i) => many ? { stroke: () => colour("blue"), alpha: .5, width: 1 }
      : { stroke: () => colour(LINE_COLOURS[i % LINE_COLOURS.length]), width: 1.5, dash: i < LINE_COLOURS.length ? [] : [6, 4] };
    chart.plot = new uPlot({
      width: box.clientWidth || 420, height: 160, scales: { x: { time: false }, y: { range: (_, low, high) => limits(name, low, high) } },
      series: [{}, ...labels.map((_, i) => ({ ...style(i), points: { size: 4 } }))], legend: { show: false },
      axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(unit) }],
      cursor: { drag: { x: true, y: false }, sync: { key: "nodes" }, focus: { prox: 16 } }, focus: { alpha: .25 },
      hooks: {
        draw: [drawRestarts], setSelect: [({ select: { width } }) => { chart.zoomed ||= width >= 3; }],
        setSeries: [(_, at) => { chart.focus = at; readOut(chart); }], setCursor: [() => readOut(chart)],
      },
    }, [[], ...labels.map(() => [])], within);
    new ResizeObserver(() => within.clientWidth && chart.plot.setSize({ width: within.clientWidth, height: 160 })).observe(within);
    const whole = () => [chart.plot.data[0][0], chart.plot.data[0].at(-1)];
    const stretch = (min, max) => { chart.zoomed = true; chart.plot.setScale("x", { min, max }); };
    const all = () => { chart.zoomed = false; chart.plot.setScale("x", { min: whole()[0], max: whole()[1] }); };
    within.addEventListener("dblclick", () => { chart.zoomed = false; });
    chartKeys(within, name, { get scales() { return chart.plot.scales; } }, whole, stretch, all);
    return chart;
  }
  // From zero, since most figures are parts of something; shares up to 100%.
  function limits(name, low, high) {
    if (UNITS[name] === share) return [0, 1];
    return name === "GPU temperature" ? [low - 2, high + 2] : [0, 1.05 * high || 1];
  }
  // Under the pointer the line next to it, else the newest values: of each line if they are few, else the lowest and the highest.
  function readOut({ plot, name, value, legend, labels, focus, of }) {
    if (!plot) return;  // uPlot calls its hooks while it is being made
    const unit = UNITS[name], i = plot.cursor.idx, text = (v) => v === null || v === undefined ? "unknown" : unit(v);
    const newest = labels.map((_, at) => plot.data[at + 1].findLast((v) => v !== null));
    const known = newest.filter((v) => v !== undefined && v !== null), few = labels.length <= NAMED;
    const range = known.length > 1 ? `${unit(Math.min(...known))} to ${unit(Math.max(...known))}` : text(known[0]);
    const at = focus ?? (labels.length === 1 ? 1 : null), hovers = i !== null && i !== undefined;
    say(value, hovers ? `${clock(plot.data[0][i])}${at ? ` ${labels[at - 1]}: ${text(plot.data[at][i])}` : ""}` : range);
    if (few) {
      fill(legend, labels.length === 1 ? labels : labels.map((label, n) => h("span", { className: LINE_COLOURS[n % LINE_COLOURS.length] },
        h("i", { className: n < LINE_COLOURS.length ? "" : "dashes" }), ` ${label} `, h("b", {}, text(newest[n])))));
    } else say(legend, of > labels.length ? `the ${labels.length} lowest and highest of ${of} lines` : `${of} lines: point at one for its name`);
  }
  function drawRestarts({ ctx: context, bbox, valToPos }) {
    context.save();
    context.fillStyle = colour("red");
    for (const t of restarts()) {
      const x = valToPos(t - began(), "x", true);
      if (x >= bbox.left && x <= bbox.left + bbox.width) context.fillRect(Math.round(x) - 1, bbox.top, 2, bbox.height);
    }
    context.restore();
  }
  // Takes the nodes that the run has, and reads their figures again.
  function take(names) {
    const wanted = data ? names.filter((name) => data.nodes[name]) : names;
    if (wanted.join("\n") !== hosts.join("\n")) {
      const before = select.value;
      hosts = wanted;
      fill(select, h("option", { value: "" }, "all nodes"), hosts.map((name) => h("option", { value: name }, name)));
      select.value = names.length === 1 && hosts.length ? hosts[0] : hosts.includes(before) ? before : "";
    }
    select.form.hidden = names.length < 2;
    if (names.length) read(); else clear();
  }
  select.addEventListener("change", read);
  select.form.addEventListener("submit", (event) => event.preventDefault());
  return { take, charts, redraw: () => { for (const { plot } of charts.values()) plot.redraw(); } };
}
