// Every two editors of a section in one column: wins, ties and losses, and the paired test.

const chosenPairs = {}; // title of a section -> index of the column, and whether the matrix is open

function pairs(section, ordered, columns) {
  const kept = ordered.filter((row) => !row.reference);
  const tested = columns.filter((index) => section.pairs[index]);
  if (kept.length < 2 || !tested.length) return "";
  const chosen = chosenPairs[section.title] || {};
  const index = tested.includes(chosen.index) ? chosen.index : tested[0];
  const keep = (changes) => { chosenPairs[section.title] = { index, open: true, ...changes }; };
  const pick = (value) => { keep({ index: Number(value) }); draw(); };
  const options = tested.map((one) => [String(one), board.columns[one].name]);
  // Its cells, of which there can be hundreds, are made while it is open.
  const toggle = (event) => {
    if (event.target.open === Boolean(chosen.open)) return;
    keep({ open: event.target.open });
    draw();
  };
  return el("details", { class: "pairs", open: Boolean(chosen.open), ontoggle: toggle }, el("summary", { "data-sort": "pairs" }, "Every two editors"),
    chosen.open ? [el("div", { class: "pick" }, select("Column", options, String(index), pick, `pairs-${board.sections.indexOf(section)}`)), ...matrix(section, kept, index)] : "");
}

function matrix(section, kept, index) {
  const editors = section.rows.filter((row) => !row.reference);
  const found = new Map();
  for (const [first, second, wins, ties, losses, [method, cases, difference, p]] of section.pairs[index]) {
    const [a, b] = [editors[first], editors[second]];
    found.set(a, (found.get(a) || new Map()).set(b, { wins, ties, losses, method, cases, difference, p }));
    found.set(b, (found.get(b) || new Map()).set(a, { wins: losses, ties, losses: wins, method, cases, difference: -difference, p }));
  }
  const family = section.pairs[index].length;
  const body = kept.map((row) => el("tr", {}, el("th", { scope: "row" }, row.label), kept.map((other) => pairCell(row, other, found, index, family))));
  const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "editor"), kept.map((row) => el("th", { scope: "col" }, breakable(row.label)))));
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `every two editors, ${board.columns[index].name}` }, el("table", {}, head, el("tbody", {}, body))),
    el("p", { class: "note" }, `Cases in which the editor of the row wins / ties / loses against that of the column; bold: p < ${board.alpha}, Holm's correction over the ${family} pairs of this column. `,
      "Scores that single cases lack, such as edit scores, show their difference. The p-values of ‡ are upper bounds of these. A cell opens the cases of both editors. Pairs are computed for the columns shown first; lm-edit leaderboard --columns chooses them.")];
}

function pairCell(row, other, found, index, family) {
  if (row === other) return el("td", { class: "none" }, "");
  const pair = found.get(row) && found.get(row).get(other);
  if (!pair) return el("td", { class: "none", title: "no test: they have no scored case in common, or the scores of single cases are missing" }, "–");
  const sign = pair.difference > 0 ? "+" : "";
  const counts = pair.wins === null ? "" : `${pair.wins} wins, ${pair.ties} ties, ${pair.losses} losses; `;
  const test = pair.method === "mcnemar" ? "exact McNemar test" : "permutation test";
  const text = `${row.label} against ${other.label}: ${counts}${sign}${number(pair.difference)} on ${pair.cases} cases, p ${share(pair.p)} (${test}, Holm over ${family} pairs)`;
  const { task, score } = board.columns[index];
  const open = () => show({ task, score, a: row.seeds[0][1][0], b: other.seeds[0][1][0] });
  return el("td", {}, el("button", { type: "button", class: "cell", title: text, "aria-label": text, onclick: open, "data-cell": `pair ${row.names[0]} ${other.names[0]}` },
    el("span", { class: pair.p < board.alpha ? "value best" : "value" }, pair.wins === null ? `${sign}${number(pair.difference)}` : `${pair.wins}/${pair.ties}/${pair.losses}`),
    el("span", { class: "sub" }, `p ${share(pair.p)}`)));
}
