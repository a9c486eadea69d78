// The list of runs: a table to sort and filter, with the settings that differ between them and their last values.

// What somebody typed, as a test of a row: each word must be in it, and `lr<0.1` or `status=failed` hold for its settings and values.
function rowFilter(typed) {
  const tests = typed.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, right] = word.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
    if (!name) return ({ run, status, text, settings }) => [run, status, text, ...Object.entries(settings).map((pair) => pair.join("="))].some((one) => one.toLowerCase().includes(word.toLowerCase()));
    return (row) => namedValues(row, name).some((left) => compare(left, sign, right));
  });
  return (row) => tests.every((test) => test(row));
}
// The values of a row under a name, or under the end of one: `lr` is `optim.lr`, too.
const namedValues = ({ status, run, settings, values }, name) => Object.entries({ status, run, ...settings, ...values })
  .filter(([key]) => key === name || key.endsWith(`.${name}`) || key.endsWith(`/${name}`)).map(([, value]) => value);
function compare(left, sign, right) {
  const [a, b] = [Number(left), Number(right)], text = String(left).toLowerCase() === right.toLowerCase();
  return { "=": text || a === b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
}
// Sorts numbers by value and before text; what is missing is last, whatever the direction.
function sorted(rows, value, down) {
  const missing = (one) => one === undefined || one === null || one === "", number = (one) => missing(one) ? NaN : Number(one);
  return [...rows].sort((x, y) => {
    const [a, b] = [value(x), value(y)];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const [m, n] = [number(a), number(b)], order = Number.isNaN(m) || Number.isNaN(n) ? String(a).localeCompare(String(b), "en", { numeric: true }) : m - n;
    return down ? -order : order;
  });
}

const SETTINGS_SHOWN = 6, VALUES_SHOWN = 5;
// Shows rows in the section #runs. `here`: the run of this page, "" in a list; `link(row)`: the address of a row's page;
// `picked(run)`, `pick(run, yes)`: whether it is chosen to be drawn, and what chooses it.
function runsList({ here, link, picked, pick }) {
  const box = $("#runs"), chosen = new Map();  // by the name of a column: whether it is shown, if somebody said so
  let rows = [], by = "last event", down = true, most = here ? 12 : 500;
  const columns = () => {
    const keys = [...new Set(rows.flatMap((row) => Object.keys(row.settings)))], names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))].sort();
    const having = (name) => rows.filter((row) => name in row.values).length, often = new Set([...names].sort((a, b) => having(b) - having(a)).slice(0, VALUES_SHOWN));
    const shown = (column, usual) => ({ ...column, shown: chosen.get(column.name) ?? usual });
    return [
      { name: "run", value: (row) => row.run, cell: nameCell, shown: true },
      { name: "status", value: (row) => row.status, cell: ({ status }) => h("span", { className: { finished: "good", running: "busy", stopped: "" }[status] ?? "bad" }, status), shown: true },
      { name: "last event", value: (row) => row.changed, cell: ({ changed }) => new Date(changed * 1000).toLocaleString(), shown: true },
      ...names.map((name) => shown({ name, kind: "n", value: (row) => row.values[name], cell: (row) => four(row.values[name]), optional: true }, often.has(name))),
      ...keys.map((name, i) => shown({ name, value: (row) => row.settings[name], cell: (row) => h("span", { className: "setting" }, row.settings[name] ?? ""), optional: true }, i < SETTINGS_SHOWN)),
      { name: "result", value: (row) => row.text, cell: ({ text }) => h("span", { className: "why" }, text), shown: true },
    ];
  };
  const nameCell = (row) => [
    row.sweep || row.run === here ? "" : h("input", { type: "checkbox", ariaLabel: `draw ${row.run}`, value: row.run }), " ",
    row.run === here ? h("strong", {}, row.run) : h("a", { href: link(row) }, row.run)];
  const head = ({ name, kind = "" }) => [h("button", { className: "link", type: "button", onclick: () => sortBy(name) }, name), kind, name === by ? down ? "descending" : "ascending" : "none"];
  function sortBy(name) {
    [by, down] = [name, name === by ? !down : name === "last event"];
    draw();
    [...box.querySelectorAll("th button")].find((one) => one.textContent === name).focus();
  }
  function draw() {
    const all = columns(), shown = all.filter((one) => one.shown), state = $("#status-wanted").value;
    const found = rows.filter(rowFilter($("#wanted").value)).filter((row) => !state || row.status === state);
    const ordered = sorted(found, (all.find(({ name }) => name === by) || all[2]).value, down), seen = ordered.slice(0, most);
    table($("#runs table"), shown.map(head), seen.map((row) => shown.map((one) => one.cell(row))), seen.map(({ run }) => run));
    for (const tick of box.querySelectorAll("tbody input")) tick.checked = picked(tick.value);
    say($("#count"), `${seen.length} of ${rows.length}`);
    $("#all-runs").hidden = seen.length === found.length;
  }
  function drawChoices() {
    const states = [...new Set(rows.map((row) => row.status))].sort(), select = $("#status-wanted"), before = select.value;
    if ([...select.options].slice(1).map((one) => one.value).join() !== states.join()) fill(select, h("option", { value: "" }, "any"), states.map((one) => h("option", { value: one }, one)));
    select.value = states.includes(before) ? before : "";
    const optional = columns().filter((one) => one.optional), known = [...box.querySelectorAll("#columns label")].map((one) => one.textContent.trim());
    $("#columns").hidden = !optional.length;
    if (known.join() !== optional.map(({ name }) => name).join()) fill($("#columns div"), optional.map(({ name, shown }) => h("label", {}, h("input", { type: "checkbox", checked: shown, value: name }), ` ${name}`)));
  }
  $("#columns").addEventListener("change", ({ target }) => { chosen.set(target.value, target.checked); draw(); });
  $("#wanted").addEventListener("input", draw);
  $("#status-wanted").addEventListener("change", draw);
  $("#all-runs").addEventListener("click", () => { most = 500; draw(); });
  $("#runs form").addEventListener("submit", (event) => event.preventDefault());
  $("#runs table").addEventListener("change", ({ target }) => { pick(target.value, target.checked); draw(); });
  return { draw, show(news) { rows = news; drawChoices(); draw(); } };
}
