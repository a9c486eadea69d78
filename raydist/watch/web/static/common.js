// What both pages share: elements, texts of numbers, charts and their keys. A page gets JSON from its server or,
// exported, from the element #data. It only reads.
const $ = (id) => document.querySelector(id);
const query = new URLSearchParams(location.search);
const data = $("#data") && JSON.parse($("#data").textContent);
const now = () => data ? data.now : Date.now() / 1000;
const url = (call, more = {}) => {
  const words = new URLSearchParams(more);
  for (const name of ["run", "sweep"]) if (query.get(name) && !words.has(name)) words.set(name, query.get(name));
  return `${call}?${words}`;
};
const json = (call, more) => fetch(url(call, more)).then((reply) => reply.ok ? reply.json() : Promise.reject(reply.status));

// --- small things

// An element with properties and children. Text is always text: logs and names come from programs.
function h(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined).map((c) => c instanceof Node ? c : String(c)));
  return made;
}
const fill = (where, ...children) => where.replaceChildren(...children.flat());
// The text of an element, touched only where it differs: a screen reader repeats each change of a live region.
const say = (where, text) => { if (where.textContent !== text) where.textContent = text; };
// Shows rows, each under its key (else its number). A cell that is the same stays as it is: with its focus, a click under way, selected text.
function table(where, heads, rows, keys = rows.map((_, i) => i)) {
  const head = h("thead", {}, h("tr", {}, heads.map(([text, kind]) => h("th", { className: kind || "", scope: "col" }, text))));
  if (!where.tHead?.isEqualNode(head)) fill(where, head, h("tbody"));
  const body = where.tBodies[0], known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = rows.map((cells, i) => {
    const row = known.get(String(keys[i])) || h("tr");
    row.dataset.key = keys[i];
    cells.forEach((cell, at) => {
      const made = h("td", { className: heads[at][1] || "" }, cell);
      if (!row.cells[at]) row.append(made);
      else if (!row.cells[at].isEqualNode(made)) row.cells[at].replaceWith(made);
    });
    return row;
  });
  [...known.values()].filter((row) => !wanted.includes(row)).forEach((row) => row.remove());
  inOrder(body, wanted);
}
// Puts rows in order. The one that has the focus stays, and the others move around it: moving it would take the focus away.
function inOrder(body, wanted) {
  if (wanted.every((row, i) => row === body.rows[i])) return;
  const held = wanted.findIndex((row) => row.contains(document.activeElement));
  wanted.forEach((row, i) => { if (i < held) wanted[held].before(row); else if (i > held) body.append(row); });
}
const four = (value) => value === null || value === undefined ? "" : String(+Number(value).toPrecision(4));
const ms = (s) => s ? `${four(s * 1e3)} ms` : "";
const bytes = (n) => { let i = 0; for (; n >= 1000 && i < 5; i++) n /= 1000; return `${n >= 100 || !i ? Math.round(n) : n.toFixed(1)} ${["B", "kB", "MB", "GB", "TB", "PB"][i]}`; };
const clock = (s) => { s = Math.max(0, Math.round(s)); const [hours, m, sec] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
  return hours ? `${hours}:${String(m).padStart(2, "0")}:${String(sec).padStart(2, "0")}` : `${m}:${String(sec).padStart(2, "0")}`; };
const share = (s) => `${Math.round(100 * s)}%`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const meter = (value) => [h("meter", { value, max: 1, title: share(value) }), ` ${share(value)}`];
function bars(where, parts) {
  const most = Math.max(...Object.values(parts), 1e-9);
  fill(where, Object.entries(parts).flatMap(([name, s]) => {
    const bar = h("div", { className: "bar" }); bar.style.width = `${100 * s / most}%`;
    return [h("span", {}, name), h("div", {}, bar), h("span", {}, s < 60 ? `${four(s)} s` : clock(s))];
  }));
}

// --- charts

const axis = { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 46 };
const KEYS = "+ and - zoom, left and right move, 0 shows all";

// Makes a chart's box take the keys. `whole()`: [first, last] of all its points; `show(from, to)`: shows a stretch; `all()`: everything.
function chartKeys(box, name, plot, whole, show, all) {
  Object.assign(box, { tabIndex: 0, ariaLabel: `${name}: ${KEYS}` });
  box.setAttribute("role", "application");
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const [first, last] = whole(), { min, max } = plot.scales.x, span = max - min;
    const by = { "+": [.25, -.25], "=": [.25, -.25], "-": [-.5, .5], ArrowLeft: [-.25, -.25], ArrowRight: [.25, .25], 0: [-1e9, 1e9] }[event.key];
    if (!by || !(span > 0)) return;
    event.preventDefault();
    let [from, to] = by.map((part, end) => [min, max][end] + part * span);
    if (to - from >= last - first) { all(); return; }
    const over = Math.max(0, first - from) - Math.max(0, to - last);  // no further than the points
    show(from + over, to + over);
  });
}
