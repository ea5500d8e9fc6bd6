// Data, state and address of the page, and elements made of texts.
// All texts of results become text nodes (el, textContent): nothing is parsed as HTML.
const board = JSON.parse(document.getElementById("board").textContent);
const packed = JSON.parse(document.getElementById("cases").textContent); // compressed, by task
const cases = { questions: {}, answers: {} }; // of the tasks that were looked at
const byId = (id) => document.getElementById(id);
// A column of the page alone, whose cells follow from the columns on screen.
const MEAN_RANK = board.columns.push({ name: "mean rank", task: "", metric: "mean rank", score: "", benchmark: "rank", higher: null, shown: false, group: false,
  about: "mean of the ranks over the scores on screen that all editors of the table have; not tested" }) - 1;
const names = board.columns.map((column) => column.name);
const defaults = board.columns.flatMap((column, number) => (column.shown ? [number] : []));
// Cases are those of one run per task: a row of several seeds is looked at seed by seed.
const bySeed = (row) => row.seeds.map(([seed, runs]) => ({ ...row, ...(row.seeds.length > 1 ? { label: `${row.label}, seed ${seed}`, seed } : {}), runs }));
const rows = [...new Map(board.sections.flatMap((section) => section.rows.flatMap(bySeed)).map((row) => [row.runs[0], row])).values()];
const PRINTED = "printed";
// Of the viewer: task, case, two editors, their scores, filter, text, order, and the further column of the table.
const VIEW = ["task", "doc", "a", "b", "score", "second", "filter", "text", "order", "more"];
let state = fresh();

// Filters of rows and columns; "" keeps all.
function noChoice() {
  return { kind: "", tier: "", mode: "", model: "", benchmark: "" };
}

function fresh() {
  return { find: "", section: "", chosen: noChoice(), columns: new Set(defaults), sort: null, down: true, view: null };
}

function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// The control that has the focus is replaced, too; the new one of its name takes the focus, or the one with this id.
function redraw(node, parts, otherwise) {
  const had = node.contains(document.activeElement) ? document.activeElement : null;
  const name = had ? nameOfControl(had) : "";
  node.replaceChildren(...parts);
  if (!had) return;
  const controls = [...node.querySelectorAll("button, select, summary, [tabindex]")].filter((control) => !control.disabled);
  const next = controls.find((control) => name && nameOfControl(control) === name) || byId(otherwise);
  if (next) next.focus();
}

function nameOfControl(node) {
  const block = node.closest(".block");
  return node.id || (block ? `${block.querySelector("h2").textContent}\n${node.dataset.sort || node.dataset.cell || ""}` : "");
}

// Numbers; JSON lacks infinity, which is a text here.

const real = (value) => (value === null || value === undefined ? null : Number(value));

function number(given) {
  const value = real(given);
  if (value === null) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return Math.abs(value) < 100 ? value.toFixed(3) : value.toFixed(1);
}

function share(p) {
  return p < 0.001 ? "< 0.001" : `= ${p.toFixed(3)}`;
}

function describe(cell) {
  const lines = cell.of === null ? [] : [`${cell.n} of ${cell.of} cases have a score.`];
  const left = Object.entries(cell.left).map(([reason, count]) => `${reason}: ${count}`);
  if (left.length) lines.push(`Without a score: ${left.join("; ")}.`);
  if (cell.or_0 !== null) lines.push(`${number(cell.or_0)} if cases without a usable answer count as 0.`);
  if (cell.seeds.length === 1) lines.push(`Evaluated with seed ${cell.seeds[0][0]} alone.`);
  else if (cell.seeds.length) lines.push(`Mean of ${cell.seeds.length} seeds: ${cell.seeds.map(([seed, value]) => `${number(value)} (seed ${seed})`).join(", ")}.`);
  if (cell.interval) lines.push(`95% interval (${cell.interval[2]}): ${number(cell.interval[0])} to ${number(cell.interval[1])}.`);
  if (cell.note) lines.push(`${cell.note[0].toUpperCase()}${cell.note.slice(1)}.`);
  if (cell.rank) lines.push(`Rank ${cell.rank} in its section.`);
  for (const [name, test] of [["the unedited model", cell.unedited], ["the best editor", cell.best]]) {
    if (!test) continue;
    const [method, pairs, difference, p] = test;
    const sign = difference > 0 ? "+" : "";
    const title = method === "mcnemar" ? "exact McNemar test" : "permutation test";
    lines.push(`Against ${name}: ${sign}${number(difference)} on ${pairs} cases, p ${share(p)} (${title}, Holm).`);
  }
  return lines;
}

// The address of the page holds the state, so that a copied link shows the same.

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  state = fresh();
  state.find = address.get("find") || "";
  state.section = address.get("section") || "";
  for (const name of Object.keys(state.chosen)) state.chosen[name] = address.get(name) || "";
  if (address.has("columns")) {
    const wanted = address.get("columns").split("|");
    state.columns = new Set(names.flatMap((name, index) => (wanted.includes(name) ? [index] : [])));
  }
  const sorted = (address.get("sort") || "").match(/^([+-])(.*)$/);
  if (sorted) {
    state.down = sorted[1] === "-";
    state.sort = sorted[2] === "editor" ? "editor" : names.indexOf(sorted[2]);
    if (state.sort === -1) state.sort = null;
  }
  if (address.has("task")) {
    state.view = Object.fromEntries(VIEW.map((name) => [name, address.get(name) || ""]));
  }
}

function writeAddress() {
  const address = new URLSearchParams();
  if (state.find) address.set("find", state.find);
  if (state.section) address.set("section", state.section);
  for (const [name, value] of Object.entries(state.chosen)) if (value) address.set(name, value);
  const chosen = names.filter((_, index) => state.columns.has(index));
  if (chosen.join() !== defaults.map((index) => names[index]).join()) address.set("columns", chosen.join("|"));
  if (state.sort !== null) address.set("sort", (state.down ? "-" : "+") + (state.sort === "editor" ? "editor" : names[state.sort]));
  for (const [name, value] of Object.entries(state.view || {})) if (value) address.set(name, value);
  history.replaceState(null, "", `#${address}`);
}
