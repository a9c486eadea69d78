// The list of runs: a table to sort and filter, with the settings that differ between them and their last values.

// --- filter

// What somebody typed, as a test of a row: each word must be in it, and conditions such as `lr<0.1` must hold.
function rowFilter(typed) {
  const tests = typed.trim().split(/\s+/).filter(Boolean).map((word) => condition(word) || contains(word.toLowerCase()));
  return (row) => tests.every((test) => test(row));
}
function contains(word) {
  const texts = ({ run, status, text, note, tags, settings }) => [run, status, text, note, ...tags, ...Object.entries(settings).map((pair) => pair.join("="))];
  return (row) => texts(row).some((text) => text.toLowerCase().includes(word));
}
function condition(word) {
  const [, name, sign, right] = word.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
  return name && ((row) => namedValues(row, name).some((left) => compare(left, sign, right)));
}
// The values of a row under a name, or under the end of one: `lr` is `optim.lr`, too.
function namedValues({ status, run, note, tags, settings, values }, name) {
  if (name === "tag" || name === "tags") return tags;
  const isNamed = (key) => key === name || key.endsWith(`.${name}`) || key.endsWith(`/${name}`);
  return Object.entries({ status, run, note, ...settings, ...values }).filter(([key]) => isNamed(key)).map(([, value]) => value);
}
function compare(left, sign, right) {
  const [a, b] = [Number(left), Number(right)], sameText = String(left).toLowerCase() === right.toLowerCase();
  return { "=": sameText || a === b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
}

// --- order

// Sorts numbers by value and before text; what is missing is last, whatever the direction.
function sorted(rows, value, descending) {
  const isMissing = (one) => one === undefined || one === null || one === "";
  return [...rows].sort((x, y) => {
    const [a, b] = [value(x), value(y)];
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    const difference = Number(a) - Number(b);
    const order = Number.isNaN(difference) ? String(a).localeCompare(String(b), "en", { numeric: true }) : difference;
    return descending ? -order : order;
  });
}

// --- the table

const SETTINGS_SHOWN = 6, VALUES_SHOWN = 5, RUNS_SHOWN = 12;
// Shows rows in the section #runs. `here`: the run of this page, "" in a list; `link(row)`: the address of a row's page;
// `isPicked(run)`, `pick(run, yes)`: whether a run is chosen to be drawn, and what chooses it; `isFull()`: no further run can be chosen.
// In a copy no run can be chosen (no `pick`), and only runs with a page have a link.
function runsList({ here, link, isPicked, pick, isFull }) {
  const box = $("#runs"), select = $("#status-wanted");
  const chosen = new Map();  // by the name of a column: whether it is shown, if somebody said so
  let rows = [], by = "last event", descending = true, most = here ? RUNS_SHOWN : Infinity;

  const statusCell = ({ status }) => h("span", { className: { finished: "good", running: "busy", stopped: "" }[status] ?? "bad" }, status);
  function nameCell(row) {
    const space = h("span", { className: "space" });  // in place of the box
    if (row.run === here) return [space, h("strong", {}, row.run)];
    const name = link(row) ? h("a", { href: link(row) }, row.run) : row.run;
    if (!pick) return name;
    const tick = { type: "checkbox", ariaLabel: `draw ${row.run}`, value: row.run, disabled: isFull() && !isPicked(row.run) };
    return [row.sweep ? space : h("input", tick), name];
  }
  // All columns: those of every list, the last values of the runs, the settings that differ between them.
  function columns() {
    const names = (of) => [...new Set(rows.flatMap((row) => Object.keys(row[of])))];
    const metrics = names("values").sort(), settings = names("settings");
    const count = (name) => rows.filter((row) => name in row.values).length;
    const usual = [...[...metrics].sort((a, b) => count(b) - count(a)).slice(0, VALUES_SHOWN), ...settings.slice(0, SETTINGS_SHOWN)];
    const optional = (name, more) => ({ name, optional: true, shown: chosen.get(name) ?? usual.includes(name), ...more });
    return [
      { name: "run", value: (row) => row.run, cell: nameCell, shown: true },
      { name: "status", value: (row) => row.status, cell: statusCell, shown: true },
      { name: "last event", value: (row) => row.changed, cell: (row) => new Date(row.changed * 1000).toLocaleString(), shown: true },
      ...rows.some(({ tags }) => tags.length) ? [{ name: "tags", value: (row) => row.tags.join(" "), cell: (row) => tagsOf(row.tags), shown: true }] : [],
      ...rows.some(({ note }) => note) ? [{ name: "note", value: (row) => row.note, cell: (row) => h("span", { className: "why" }, row.note.slice(0, 200)), shown: true }] : [],
      ...metrics.map((name) => optional(name, { kind: "n", value: (row) => row.values[name], cell: (row) => four(row.values[name]) })),
      ...settings.map((name) => optional(name, {
        value: (row) => row.settings[name], cell: (row) => h("span", { className: "setting" }, row.settings[name] ?? "") })),
      { name: "result", value: (row) => row.text, cell: (row) => h("span", { className: "why result" }, row.text), shown: true },
    ];
  }
  function head({ name, kind }) {
    const order = name === by ? descending ? "descending" : "ascending" : "none";
    return [h("button", { className: "link", type: "button", onclick: () => sortBy(name) }, name), kind, order];
  }
  function sortBy(name) {
    descending = name === by ? !descending : name === "last event";
    by = name;
    draw();
    [...box.querySelectorAll("th button")].find((button) => button.textContent === name).focus();  // the head was made anew
  }
  function draw() {
    const all = columns(), shown = all.filter((column) => column.shown);
    const isFound = rowFilter($("#wanted").value), column = all.find(({ name }) => name === by) || all[2];
    const found = rows.filter((row) => isFound(row) && (!select.value || row.status === select.value));
    const seen = sorted(found, column.value, descending).slice(0, most);
    table($("#runs table"), shown.map(head), seen.map((row) => shown.map(({ cell }) => cell(row))), seen.map(({ run }) => run));
    for (const tick of box.querySelectorAll("tbody input")) tick.checked = isPicked(tick.value);
    say($("#count"), `${seen.length} of ${rows.length}`);
    $("#all-runs").hidden = seen.length === found.length;
  }
  // The choices above the table, touched only where they differ: somebody may be choosing.
  function drawChoices() {
    const states = [...new Set(rows.map((row) => row.status))].sort(), before = select.value;
    if ([...select.options].slice(1).map((option) => option.value).join() !== states.join()) {
      fill(select, h("option", { value: "" }, "any"), states.map((state) => h("option", { value: state }, state)));
      select.value = states.includes(before) ? before : "";
    }
    const optional = columns().filter((column) => column.optional), ticks = [...box.querySelectorAll("#columns input")];
    $("#columns").hidden = !optional.length;
    if (ticks.map((tick) => tick.value).join() === optional.map(({ name }) => name).join()) return;
    fill($("#columns div"), optional.map(({ name, shown }) => h("label", {}, h("input", { type: "checkbox", checked: shown, value: name }), ` ${name}`)));
  }
  $("#columns").addEventListener("change", ({ target }) => { chosen.set(target.value, target.checked); draw(); });
  $("#wanted").addEventListener("input", draw);
  select.addEventListener("change", draw);
  $("#all-runs").addEventListener("click", () => { most = Infinity; draw(); });
  $("#runs form").addEventListener("submit", (event) => event.preventDefault());
  $("#runs table").addEventListener("change", ({ target }) => { pick(target.value, target.checked); draw(); });
  return { draw, show(news) { rows = news; drawChoices(); draw(); }, row: (name) => rows.find(({ run }) => run === name) };
}
