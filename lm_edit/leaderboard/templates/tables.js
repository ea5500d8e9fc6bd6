// Tables of scores.

function matches(texts) {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const text = texts.join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function sorted(list, label, value) {
  if (state.sort === null) return list;
  const direction = state.down ? -1 : 1;
  const key = (row) => (state.sort === "editor" ? label(row).toLowerCase() : value(row, state.sort));
  const missing = (item) => item === null || item === undefined;
  return list
    .map((row, position) => [key(row), position, row])
    .sort(([a, i], [b, j]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b) || i - j; // what has no number comes last
      return a === b ? i - j : direction * (a < b ? -1 : 1);
    })
    .map(([, , row]) => row);
}

function shownColumns(list) {
  const editors = list.filter((row) => !row.reference); // the unedited model alone makes no comparison
  return [...state.columns].sort((a, b) => a - b).filter((index) => ofBenchmark(index) && (editors.length ? editors : list).some((row) => row.cells[index]));
}

const isCost = (index) => board.columns[index].benchmark === "cost";
const cost = (value) => (value === null ? "–" : value >= 100 ? value.toFixed(0) : value.toPrecision(2));

function heading(columns, first) {
  const groups = el("tr", { class: "groups" }, el("th", {}, ""));
  let last = null;
  for (const index of columns) {
    const benchmark = board.columns[index].benchmark;
    if (last && last.benchmark === benchmark) last.node.colSpan += 1;
    else {
      last = { benchmark, node: el("th", { scope: "colgroup" }, benchmark) };
      groups.append(last.node);
    }
  }
  return el("thead", {}, groups, el("tr", {}, sortable("editor", [first], ""), columns.map((index, position) => {
    const column = board.columns[index];
    const arrow = column.higher === false && !isCost(index) ? " (lower is better)" : "";
    const before = position ? board.columns[columns[position - 1]].benchmark : "";
    const label = [breakable(column.metric + arrow), el("span", { class: "task" }, breakable(column.task))];
    return sortable(index, label, column.about, before !== column.benchmark && position ? "first" : "");
  })));
}

function breakable(text) {
  return text.split(/(?<=[_@,])/).flatMap((part, index) => (index ? [el("wbr"), part] : [part]));
}

function sortable(key, label, about, style) {
  const active = state.sort === key;
  const order = active ? (state.down ? "descending" : "ascending") : "none";
  const arrow = active ? (state.down ? " ▼" : " ▲") : "";
  const toggle = () => {
    if (state.sort !== key) [state.sort, state.down] = [key, key !== "editor"];
    else if (state.down === (key !== "editor")) state.down = !state.down;
    else state.sort = null;
    draw();
  };
  return el("th", { scope: "col", "aria-sort": order, class: style || "" },
    el("button", { type: "button", title: about, onclick: toggle, "data-sort": String(key) }, label, arrow));
}

function firsts(columns) {
  return (position) => (position && board.columns[columns[position]].benchmark !== board.columns[columns[position - 1]].benchmark ? "first" : "");
}

function cellOf(row, index, style) {
  const cell = row.cells[index];
  if (!cell) return el("td", { class: `none ${style}`, title: "not evaluated" }, "");
  if (isCost(index)) return el("td", { class: style }, el("span", { class: "value" }, cost(cell.value)));
  if (index === MEAN_RANK) return el("td", { class: style }, el("span", { class: "value" }, cell.value.toFixed(2)));
  const interval = cell.interval ? `${cell.interval[2] === "normal approximation" ? "~" : ""}${number(cell.interval[0])}–${number(cell.interval[1])}` : "";
  const counts = cell.of === null ? "" : el("span", { class: cell.n < cell.of ? "partial" : "" }, `${cell.n}/${cell.of}`);
  const open = () => show({ task: board.columns[index].task, doc: "", a: row.seeds[0][1][0], b: "" });
  return el("td", { class: style }, el("button", { type: "button", class: "cell", title: describe(cell).join("\n"), onclick: open, "data-cell": `${row.names[0]} ${index}` },
    el("span", { class: cell.bold ? "value best" : "value" }, number(cell.value)),
    el("span", { class: "marks" }, cell.marks),
    el("span", { class: "sub" }, interval, interval && counts ? " · " : "", counts)));
}

function rowOf(row, columns) {
  const untuned = row.origin.startsWith("untuned");
  const origin = row.origin ? el("span", { class: untuned ? "untuned" : "" }, untuned ? "untuned settings" : `${row.origin} settings`) : "";
  const style = firsts(columns);
  return el("tr", { class: row.reference ? "reference" : "" },
    el("th", { scope: "row", title: row.names.join("\n") }, row.label, row.reference ? "" : el("span", { class: "sub" }, origin, row.seeds.length > 1 ? `${row.origin ? ", " : ""}${row.seeds.length} seeds` : "")),
    columns.map((index, position) => cellOf(row, index, style(position))));
}

function sectionOf(section) {
  const kept = section.rows.filter((row) => passes(row) && (row.reference || matches([row.label, row.model, row.origin, section.title, ...row.names])));
  if (kept.every((row) => row.reference) && (!kept.length || filtersRows(["kind", "tier", "mode"]) || section.rows.some((row) => !row.reference))) return null;
  addMeanRanks(section.rows);
  const columns = shownColumns(section.rows);
  const value = (row, index) => (row.cells[index] ? real(row.cells[index].value) : null);
  const ordered = [...kept.filter((row) => row.reference), ...sorted(kept.filter((row) => !row.reference), (row) => row.label, value)];
  const table = el("table", {}, heading(columns, "editor"), el("tbody", {}, ordered.map((row) => rowOf(row, columns))));
  return el("section", { class: "block" }, el("h2", {}, section.title),
    columns.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title }, table)
      : el("p", { class: "note" }, "None of the chosen columns was evaluated here."),
    section.coverage ? el("p", { class: "note partial" }, section.coverage) : "",
    curves(section, kept), frontier(section, kept, columns), pairs(section, ordered, columns), paper(section, ordered, columns),
    section.ranking ? ranks(section.ranking) : "", el("p", { class: "note" }, section.note));
}

function printedSection() {
  if (filtersRows(["kind", "tier", "mode", "model"])) return null; // these are of runs
  const kept = board.published.filter((row) => matches([row.editor, row.model, row.source, row.regime]));
  const columns = shownColumns(board.published);
  if (!kept.length || !columns.length) return null;
  const ordered = sorted(kept, (row) => row.editor, (row, index) => (row.cells[index] ? row.cells[index][0] : null));
  const style = firsts(columns);
  const body = ordered.map((row) => el("tr", {},
    el("th", { scope: "row" }, row.editor, " ", el("span", { class: "badge" }, "printed"), el("span", { class: "sub" }, `${row.model}, ${row.regime}, ${row.source}`)),
    columns.map((index, position) => {
      const cell = row.cells[index];
      if (!cell) return el("td", { class: style(position) }, "");
      const [value, agreement, column, differs] = cell;
      return el("td", { class: `printed ${style(position)}`, title: `${row.source}, column ${column}. ${differs}` }, number(value), el("span", { class: "sub" }, agreement));
    })));
  return el("section", { class: "block" }, el("h2", {}, "Printed in papers"),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Printed in papers" }, el("table", {}, heading(columns, "editor"), el("tbody", {}, body))),
    el("p", { class: "note" }, "Other models, data and code than ours. same: the same definition, as far as paper and code state it; near: the same up to what the tooltip names."));
}
