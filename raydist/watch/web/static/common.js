// What both pages share: elements, texts of numbers, charts and their keys. A page gets JSON from its server or,
// exported, from the element #data.
const $ = (id) => document.querySelector(id);
const query = new URLSearchParams(location.search);
const data = $("#data") && JSON.parse($("#data").textContent);
const url = (call, more = {}) => {
  const words = new URLSearchParams(more);
  for (const name of ["run", "sweep"]) if (query.get(name) && !words.has(name)) words.set(name, query.get(name));
  return `${call}?${words}`;
};
// A browser breaks requests off whenever the machine's network changes (a VPN, a container), so one that gets no answer is made again.
const PAUSES_MS = [300, 1000];
async function get(call, more, tries = 0) {
  try { return await fetch(url(call, more)); } catch (error) {
    if (tries === PAUSES_MS.length) throw error;
    await new Promise((done) => { setTimeout(done, PAUSES_MS[tries]); });
    return get(call, more, tries + 1);
  }
}
const json = (call, more) => get(call, more).then((reply) => reply.ok ? reply.json() : Promise.reject(reply.status));

// --- news

// Seconds without a new event, as the server sees it: the clock of this machine may be wrong.
let heard = null;  // [seconds without a new event, when the server said so]
const hear = (s) => { heard = [s, performance.now()]; };
const silence = () => heard ? heard[0] + (performance.now() - heard[1]) / 1000 : 0;

const AGAIN_MS = 3000, HIDDEN_MS = 10000;
// A stream of news while the page is shown; `on`: what takes each kind of news. A browser opens six connections to a server
// for all tabs together, so a hidden tab closes its own. It opens it from time to time until the news `glance`: for its title.
function follow(address, on, glance = "") {
  let source = null, timer = 0, ended = false;
  const close = () => { clearTimeout(timer); source?.close(); source = null; };
  const later = (ms) => { timer = setTimeout(open, ms); };
  const open = () => {
    close();
    const mine = source = new EventSource(address());
    for (const [name, take] of Object.entries(on)) mine.addEventListener(name, (event) => {
      if (mine !== source) return;
      take(JSON.parse(event.data));
      if (document.hidden && name === glance) { close(); later(HIDDEN_MS); }
    });
    mine.onerror = () => { if (mine === source) { close(); say($("#link"), "not connected"); later(AGAIN_MS); } };
  };
  const turn = () => {
    heard = null;  // until the server says it again
    if (ended) return;
    if (!document.hidden) { open(); return; }
    close();
    if (glance) later(HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", turn);
  if (glance || !document.hidden) open();  // a tab that was opened in the background has a title, too
  return { again: () => { if (source) open(); }, end: () => { ended = true; close(); document.removeEventListener("visibilitychange", turn); } };
}

// --- keys: one that prints a character is hit by accident or by a voice, too, so that they can be switched off (WCAG 2.1.4)

// A cookie remembers it: other stores are apart for each port, and each server has another one. A framed copy may have none.
const remember = (text) => { try { if (text) document.cookie = `${text}; path=/; max-age=31536000; SameSite=Strict`; return document.cookie; } catch { return ""; } };
$("#keys").checked = !remember().includes("raydist_keys=off");
$("#keys").addEventListener("change", ({ target }) => remember(`raydist_keys=${target.checked ? "on" : "off"}`));
const isShortcut = (event) => !event.ctrlKey && !event.altKey && !event.metaKey && !/INPUT|SELECT/.test(event.target.tagName)
  && ($("#keys").checked || event.key.length > 1);

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
  const head = h("thead", {}, h("tr", {}, heads.map(([text, kind, sort]) => h("th", { className: kind || "", scope: "col", ariaSort: sort || null }, text))));
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

const tagsOf = (tags) => tags.map((tag) => h("span", { className: "tag" }, tag));
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

const groupOf = (name) => name.endsWith("/s") ? "" : name.slice(0, Math.max(0, name.indexOf("/")));  // tokens/s is a rate
// Whether a text contains what somebody typed: a regular expression, or else the text itself.
function matches(typed) {
  try { const wanted = new RegExp(typed, "i"); return (text) => wanted.test(text); } catch { return (text) => text.toLowerCase().includes(typed.toLowerCase()); }
}
// A moving average whose memory is a part of `span`, the length of the whole axis: a value reported every step and one reported
// every epoch are smoothed over the same stretch. `part`: 0 nothing, 0.99 most, as in W&B. A point counts as much as the stretch
// before it is long, since a thinned curve has more points where it changes.
function smooth(x, values, part, span) {
  const keep = Math.sqrt(part);
  let sum = 0, weight = 0, before = 2 * x[0] - (x[1] ?? x[0] + 1);
  return values.map((value, i) => {
    if (value === null) return null;
    const kept = keep ** (1000 * (x[i] - before) / (span || 1));
    [sum, weight, before] = [sum * kept + value * (1 - kept), weight * kept + 1 - kept, x[i]];
    return weight ? sum / weight : value;
  });
}

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
