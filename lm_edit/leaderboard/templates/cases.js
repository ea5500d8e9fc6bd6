// The cases of a task as a table: two scores of each, the answers, and one fact about the edit

// All cases of a page that cannot hold them are in files beside it, one per task and run, which browsers read from web
// servers alone.
const isServed = Object.keys(board.parts).length > 0 && location.protocol.startsWith("http");
const thinned = isServed ? "" : board.thinned;
const tasksWithCases = Object.keys(isServed ? board.parts : packed);
let unreachable = "";

async function unpack(task, chosen) {
  unreachable = "";
  if (!isServed) {
    if (!cases.questions[task] && packed[task]) take(task, await unzipped(packed[task]));
    return;
  }
  const runs = chosen.flatMap((row) => row.runs).filter((run) => (board.parts[task] || {})[run] && !(cases.answers[run] || {})[task]);
  await Promise.all([...new Set(runs)].map(async (run) => {
    try {
      const response = await fetch(board.parts[task][run]);
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      take(task, await unzipped(await response.text()));
    } catch (error) {
      unreachable = `The cases of this task cannot be read from ${board.parts[task][run]}: ${error.message}.`;
    }
  }));
}

async function unzipped(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function take(task, content) {
  for (const [run, documents] of Object.entries(content.answers)) (cases.answers[run] = cases.answers[run] || {})[task] = documents;
  cases.questions[task] = { ...content.questions, ...cases.questions[task] };
}

const FILTERS = {
  "": ["all cases", () => true],
  first: ["first better", (gap) => gap > 0],
  second: ["second better", (gap) => gap < 0],
  equal: ["equal", (gap) => gap === 0],
  unscored: ["one of them unscored", (gap) => gap === null],
};
const BECAUSE = "because ";
// The chosen reason stays, also where the editors of now have no such case.
const filtersOf = (comparison, chosen) => [...Object.entries(FILTERS).map(([key, [text]]) => [key, text]),
  ...[...new Set([...comparison.list.flatMap((one) => one.reasons), ...(chosen.startsWith(BECAUSE) ? [chosen.slice(BECAUSE.length)] : [])])].sort().map((reason) => [BECAUSE + reason, `unscored: ${reason}`.slice(0, 100)])];
const plainScore = (key) => key.replace(/,none$/, "");

// What is compared: a score of the first editor, and the same or another one of the second editor, or of the first.
function comparisonOf(view, first, second) {
  const sides = [first, second || first];
  const documents = sides.map((row) => answersOf(row, view.task) || {});
  const keys = [...new Set(documents.flatMap((own) => Object.values(own).flatMap((answer) => Object.keys(answer.scores))))];
  const columns = board.columns.filter((column) => column.task === view.task);
  const usual = columns.find((column) => keys.includes(column.score));
  const score = keys.includes(view.score) ? view.score : usual ? usual.score : keys[0] || "";
  const chosen = [score, keys.includes(view.second) ? view.second : score];
  const column = columns.find((one) => one.score === score);
  const names = sides.map((row, side) => `${nameOf(row)}${chosen[0] === chosen[1] ? "" : ` ${plainScore(chosen[side])}`}`);
  const sign = column && column.higher === false ? -1 : 1;
  const isOne = !second && chosen[0] === chosen[1];
  const list = Object.entries(cases.questions[view.task] || {}).map(([id, asked]) => {
    const answers = documents.map((own) => own[id]);
    const [left, right] = answers.map((answer, side) => (answer && typeof answer.scores[chosen[side]] === "number" ? answer.scores[chosen[side]] : null));
    const edit = asked.edits[0];
    const fact = edit ? `${edit.subject || ""} → ${edit.target_new || ""}` : "";
    const texts = (second ? answers : answers.slice(0, 1)).map(answerOf);
    const more = answers[0] && answers[0].edit ? answers[0].edit[view.more] : undefined;
    const gap = isOne ? (left === null ? null : 0) : left === null || right === null ? null : sign * (left - right);
    const reasons = answers.flatMap((answer, side) => (answer && answer.reasons[chosen[side]]) || []);
    return { id, reasons, name: asked.case, category: asked.category || "", fact, left, right, gap, texts, more };
  });
  const facts = [...new Set(Object.values(documents[0]).flatMap((answer) => Object.keys(answer.edit || {})))];
  return { keys, chosen, names, list, facts, isOne };
}

// The first generated text, or why there is none.
function answerOf(answer) {
  for (const parts of answer ? answer.answers : []) {
    const part = parts["@"];
    if (part && part.text !== undefined) return part.text;
    if (part && part.failure !== undefined) return `no answer: ${part.failure}`;
  }
  return "";
}

function shownCases(view, comparison) {
  const reason = view.filter.startsWith(BECAUSE) ? view.filter.slice(BECAUSE.length) : null;
  const [, named] = FILTERS[view.filter] || FILTERS[""];
  const fits = (one) => (reason === null ? named(one.gap) : one.reasons.includes(reason));
  const word = view.text.toLowerCase();
  const found = comparison.list.filter((one) => (!view.filter || fits(one))
    && (!word || [one.name, one.category, one.fact, ...one.texts].some((text) => String(text).toLowerCase().includes(word))));
  const key = view.order.slice(1);
  if (!["left", "right", "gap", "more", "fact", "category"].includes(key)) return found;
  const down = view.order[0] === "-";
  const absent = (value) => value === null || value === undefined || value === "";
  return found.sort((one, other) => {
    const [a, b] = [one[key], other[key]];
    if (absent(a) || absent(b)) return absent(a) - absent(b);
    return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
  });
}

// Two-sided exact sign test; of scores of 0 and 1 it is the exact McNemar test.
function signTest(wins, losses) {
  const count = wins + losses;
  if (!count) return 1;
  let [term, sum] = [-count * Math.LN2, 0];
  for (let index = 0; index <= Math.min(wins, losses); index += 1) {
    sum += Math.exp(term);
    term += Math.log((count - index) / (index + 1));
  }
  return Math.min(1, 2 * sum);
}

function countsOf(list) {
  const scored = list.filter((one) => one.gap !== null);
  const mean = (name) => (scored.length ? scored.reduce((sum, one) => sum + one[name], 0) / scored.length : null);
  const [wins, losses] = [scored.filter((one) => one.gap > 0).length, scored.filter((one) => one.gap < 0).length];
  return { count: list.length, scored: scored.length, left: mean("left"), right: mean("right"), wins, losses, p: signTest(wins, losses) };
}

function summaryOf(comparison) {
  const [first, second] = comparison.names;
  const all = countsOf(comparison.list);
  const kinds = [...new Set(comparison.list.map((one) => one.category))].sort();
  const line = (name, one) => el("tr", {}, el("th", { scope: "row" }, name || "(none)"), [one.scored, number(one.left), number(one.right), one.wins, one.losses, one.scored ? share(one.p).replace("= ", "") : ""].map((value) => el("td", {}, String(value))));
  return el("div", {},
    el("p", { id: "viewsummary" }, `Of ${all.scored} cases with both scores: ${first} better on ${all.wins}, ${second} better on ${all.losses}, equal on ${all.scored - all.wins - all.losses}; exact sign test, p ${share(all.p)}.`),
    kinds.length > 1 ? el("details", { open: kinds.length <= 8 }, el("summary", { id: "viewkinds" }, `By kind of fact (${kinds.length})`),
      el("div", { class: "scroll" }, el("table", { class: "scores kinds" }, el("thead", {}, el("tr", {}, ["kind", "cases", first, second, `better: ${first}`, `better: ${second}`, "p"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, kinds.map((kind) => line(kind, countsOf(comparison.list.filter((one) => one.category === kind)))))))) : "");
}

function caseTable(view, comparison, choose) {
  const isTwo = !comparison.isOne;
  const hasKinds = comparison.list.some((one) => one.category);
  const heads = [["fact", "case"], ...(hasKinds ? [["category", "kind"]] : []), ["left", comparison.names[0]], ...(isTwo ? [["right", comparison.names[1]]] : []), ["", "answer"], ...(comparison.list.some((one) => one.texts.length > 1) ? [["", "second answer"]] : []), ...(view.more ? [["more", view.more.replaceAll("_", " ")]] : [])];
  const sorted = (key) => (key && view.order.slice(1) === key ? (view.order[0] === "-" ? "descending" : "ascending") : "none");
  const order = (key) => choose({ order: view.order === `-${key}` ? `+${key}` : view.order === `+${key}` ? "" : `-${key}` });
  const value = (given) => (given === null || given === undefined ? "–" : typeof given === "number" ? number(given) : typeof given === "object" ? JSON.stringify(given) : String(given));
  const cells = (one) => [...(hasKinds ? [one.category] : []), value(one.left), ...(isTwo ? [value(one.right)] : []), ...one.texts.map((text) => text.slice(0, 90)), ...(view.more ? [value(one.more)] : [])];
  const list = shownCases(view, comparison);
  return [
    el("p", { class: "note", id: "viewcount", role: "status" }, `${list.length} of ${comparison.list.length} cases`),
    el("div", { class: "scroll caselist" }, el("table", { class: "scores" },
      el("thead", {}, el("tr", {}, heads.map(([key, name]) => el("th", { scope: "col", "aria-sort": sorted(key) }, key ? el("button", { type: "button", id: `order-${key}`, onclick: () => order(key) }, name, { ascending: " ▲", descending: " ▼", none: "" }[sorted(key)]) : name)))),
      el("tbody", {}, list.map((one) => el("tr", { "data-doc": one.id, class: one.id === view.doc ? "current" : "" },
        el("th", { scope: "row" }, el("button", { type: "button", class: "cell", "aria-current": one.id === view.doc ? "true" : "false", onclick: () => choose({ doc: one.id }) }, `${one.name}: ${one.fact}`.slice(0, 80))),
        cells(one).map((text) => el("td", {}, text))))))),
  ];
}
