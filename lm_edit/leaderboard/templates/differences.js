// Model, options and editor settings in which two rows differ

function differences(first, second) {
  const text = (value) => (value === undefined ? "–" : typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
  const keys = [...new Set([first, second].flatMap((row) => Object.keys(row.facts)))].sort().filter((key) => text(first.facts[key]) !== text(second.facts[key]));
  const line = (key) => el("tr", {}, el("th", { scope: "row" }, key.replaceAll("_", " ")), [first, second].map((row) => el("td", {}, text(row.facts[key]))));
  return el("details", {}, el("summary", { id: "viewdiffers" }, `What differs (${keys.length})`),
    el("div", { class: "scroll" }, el("table", { class: "scores differing" },
      el("thead", {}, el("tr", {}, ["", nameOf(first), nameOf(second)].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, keys.map(line)))));
}
