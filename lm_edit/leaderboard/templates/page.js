// What can be chosen, and the start of the page. The last of the scripts.

function draw() {
  const parts = board.sections.filter((section) => !state.section || section.title === state.section).map(sectionOf);
  if (!state.section || state.section === PRINTED) parts.push(printedSection());
  const shown = parts.filter(Boolean);
  redraw(byId("tables"), shown);
  const count = byId("tables").querySelectorAll(".block > .scroll tbody tr:not(.reference)").length;
  byId("status").textContent = shown.length ? `${count} ${count === 1 ? "row" : "rows"} in ${shown.length} ${shown.length === 1 ? "table" : "tables"}. ${thinned}` : "Nothing matches.";
  byId("count").textContent = `(${state.columns.size} of ${names.length})`;
  writeAddress();
}

// Choosing columns

function drawChooser() {
  const word = byId("findcolumn").value.toLowerCase();
  const groups = new Map();
  board.columns.forEach((column, index) => {
    if (!column.name.toLowerCase().includes(word)) return;
    if (!groups.has(column.benchmark)) groups.set(column.benchmark, el("fieldset", {}, el("legend", {}, column.benchmark)));
    const toggle = (event) => {
      state.columns[event.target.checked ? "add" : "delete"](index);
      draw();
    };
    groups.get(column.benchmark).append(el("label", { title: column.about },
      el("input", { type: "checkbox", checked: state.columns.has(index), onchange: toggle, "data-column": column.name }), el("span", {}, breakable(column.name))));
  });
  byId("columns").replaceChildren(...groups.values());
}

function choose(columns) {
  state.columns = new Set(columns);
  drawChooser();
  draw();
}

// Start

// A large page is drawn when typing pauses, a small one at every letter.
const PAUSE = 200; // milliseconds
const isLarge = board.sections.reduce((sum, section) => sum + section.rows.length, 0) * board.columns.length > 2000;
let pending;

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = isDark() ? "Light" : "Dark";
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function start() {
  readAddress();
  byId("find").value = state.find;
  byId("section").value = state.section;
  drawChooser();
  drawFilters();
  draw();
  if (state.view) show(state.view);
  else if (byId("viewer").open) byId("viewer").close();
}

byId("title").textContent = board.title;
byId("methods").append(...board.methods.map((text) => el("p", {}, text)));
byId("section").append(el("option", { value: "" }, "all tables"), ...board.sections.map((section) => el("option", { value: section.title }, section.title)),
  ...(board.published.length ? [el("option", { value: PRINTED }, "Printed in papers")] : []));
byId("section").addEventListener("change", (event) => { state.section = event.target.value; draw(); });
byId("find").addEventListener("input", (event) => {
  state.find = event.target.value;
  clearTimeout(pending);
  if (isLarge) pending = setTimeout(draw, PAUSE);
  else draw();
});
byId("findcolumn").addEventListener("input", drawChooser);
byId("defaults").addEventListener("click", () => choose(defaults));
byId("none").addEventListener("click", () => choose([]));
byId("compare").addEventListener("click", () => {
  const task = tasksWithCases[0] || board.columns[0].task;
  const others = rows.filter((row) => !row.reference);
  const asked = others.filter((row) => board.columns.some((column, index) => column.task === task && row.cells[index]));
  const editors = asked.length ? asked : others; // those that were asked the task, if any
  show({ task, doc: "", a: (editors[0] || rows[0]).runs[0], b: editors[1] ? editors[1].runs[0] : "" });
});
byId("close").addEventListener("click", () => byId("viewer").close());
byId("viewer").addEventListener("close", () => { state.view = null; writeAddress(); });
byId("theme").addEventListener("click", () => applyTheme(isDark() ? "light" : "dark"));
byId("link").addEventListener("click", async () => {
  const done = (text) => { byId("link").textContent = text; setTimeout(() => { byId("link").textContent = "Copy link"; }, 1500); };
  try { await navigator.clipboard.writeText(location.href); done("Copied"); } catch { done("See address bar"); }
});
document.addEventListener("click", (event) => { if (!byId("chooser").contains(event.target)) byId("chooser").open = false; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") byId("chooser").open = false; });
document.addEventListener("keydown", (event) => {
  if (!byId("viewer").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (event.key === "/" && byId("viewtext")) { event.preventDefault(); byId("viewtext").focus(); }
  const button = byId({ j: "next", ArrowRight: "next", k: "before", ArrowLeft: "before" }[event.key] || "");
  if (button && !button.disabled) button.click();
});
window.addEventListener("hashchange", start);
applyTheme("");
start();
// Of a page that is made again while runs go on; the address keeps what is shown.
if (board.reload) setInterval(() => { if (!byId("viewer").open) location.reload(); }, board.reload * 1000);
