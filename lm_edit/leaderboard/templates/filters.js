// Filters of rows and columns, beside the search. A filter that would keep everything is not offered.

const TIERS = { core: "core", more: "more", installed: "of another package", "": "not installed" };
const ofEditors = (value) => board.sections.flatMap((section) => section.rows.filter((row) => !row.reference).flatMap(value));
// name in the address -> label, values, text of a value, whether a row has one
const CHOICES = {
  kind: ["Kind", ofEditors((row) => row.changes), (value) => value, (row, value) => row.changes.includes(value)],
  tier: ["Set", ofEditors((row) => row.tier || "unknown"), (value) => TIERS[value] || TIERS[""], (row, value) => (row.tier || "unknown") === value],
  mode: ["Mode", ofEditors((row) => row.mode), (value) => value, (row, value) => row.mode === value],
  model: ["Model", board.sections.flatMap((section) => section.rows.map((row) => row.model)), (value) => value, (row, value) => row.model === value],
  benchmark: ["Benchmark", board.columns.map((column) => column.benchmark).filter((name) => !["cost", "rank"].includes(name)), (value) => value, () => true],
};
const CHOICE_NAMES = Object.keys(CHOICES);

// The unedited model is a row of its model, whatever the kind of the editors.
const passes = (row) => CHOICE_NAMES.every((name) => !state.chosen[name] || (row.reference && name !== "model") || CHOICES[name][3](row, state.chosen[name]));
const filtersRows = (names) => names.some((name) => state.chosen[name]);
const ofBenchmark = (index) => !state.chosen.benchmark || ["cost", "rank", state.chosen.benchmark].includes(board.columns[index].benchmark);

function drawFilters() {
  const controls = CHOICE_NAMES.flatMap((name) => {
    const [label, values, text] = CHOICES[name];
    const chosen = state.chosen[name];
    const options = [...new Set([...values, ...(chosen ? [chosen] : [])])].sort(); // a link may name what is gone
    if (options.length < 2) return [];
    return [select(label, [["", "all"], ...options.map((value) => [value, text(value)])], chosen, (value) => { state.chosen[name] = value; drawFilters(); draw(); }, `filter-${name}`)];
  });
  const clear = () => { state.chosen = noChoice(); drawFilters(); draw(); };
  if (CHOICE_NAMES.some((name) => state.chosen[name])) controls.push(el("button", { type: "button", id: "nofilters", onclick: clear }, "Clear filters"));
  redraw(byId("filters"), controls, "find");
}
