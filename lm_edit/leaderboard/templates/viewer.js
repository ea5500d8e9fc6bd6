// Cases, of one editor or of two side by side

const rowById = (run) => rows.find((row) => row.runs.includes(run));
const answersOf = (row, task) => {
  for (const run of row ? row.runs : []) if (cases.answers[run] && cases.answers[run][task]) return cases.answers[run][task];
  return null;
};
const nameOf = (row) => {
  const alike = rows.filter((other) => other !== row && other.label === row.label);
  if (!alike.length) return row.label;
  const differs = (index) => alike.some((other) => other.identity[index] !== row.identity[index]);
  const hash = alike.some((other) => other.model === row.model) && differs(1) ? ` ${row.identity[1]}` : "";
  const parts = alike.some((other) => other.model === row.model) && differs(3) && row.identity[3] ? ` ${row.identity[3]}` : "";
  const options = differs(2) && row.identity[2] ? `, ${row.identity[2]}` : "";
  const model = differs(0) || hash || parts || options ? `${row.model}${hash}${parts}${options}, ` : "";
  return `${row.label} (${model}${row.reference ? "unedited" : row.regime})`;
};

async function show(view) {
  state.view = { ...Object.fromEntries(VIEW.map((name) => [name, ""])), ...view };
  if (!tasksWithCases.includes(state.view.task) && !board.columns.some((column) => column.task === state.view.task)) state.view.task = tasksWithCases[0] || "";
  const asked = state.view;
  const [first, second] = chosenRows(asked);
  await unpack(asked.task, [first, second, uneditedOf(first)].filter(Boolean));
  if (state.view !== asked) return; // another view was asked for while files were read
  drawViewer(view);
  if (!byId("viewer").open) byId("viewer").showModal();
  writeAddress();
}

// What a link names and this page does not have, as after the results have changed.
function staleParts(asked, ids) {
  const exists = { task: tasksWithCases.includes(asked.task) || board.columns.some((column) => column.task === asked.task), doc: ids.includes(asked.doc), a: rowById(asked.a), b: rowById(asked.b) };
  const words = { task: "task", doc: "case", a: "editor", b: "editor" };
  return Object.keys(words).filter((name) => asked[name] && !exists[name]).map((name) => `${words[name]} ${asked[name]}`);
}

function select(label, options, value, change, id) {
  return el("label", {}, label, el("select", { id, onchange: (event) => change(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
}

const chosenRows = (view) => [rowById(view.a) || rows.find((row) => !row.reference) || rows[0], rowById(view.b)];
const uneditedOf = (row) => rows.find((other) => other.reference && other.identity.every((part, index) => part === row.identity[index]));

function drawViewer(asked = {}) {
  const view = state.view;
  const tasks = tasksWithCases;
  const [first, second] = chosenRows(view);
  const all = Object.keys(cases.questions[view.task] || {});
  const stale = staleParts(asked, all);
  [view.a, view.b] = [first.runs[0], second ? second.runs[0] : ""];
  byId("viewertitle").textContent = `${nameOf(first)}${second ? ` and ${nameOf(second)}` : ""}: ${view.task}`;
  const change = (name) => (value) => show({ ...view, [name]: value });
  const choose = (changes) => show({ ...view, ...changes });
  const editors = rows.map((row) => [row.runs[0], nameOf(row)]);
  const comparison = comparisonOf(view, first, second);
  const ids = shownCases(view, comparison).map((one) => one.id);
  if (!all.includes(view.doc) || (view.filter && !ids.includes(view.doc))) view.doc = ids[0] || all[0] || "";
  const position = ids.indexOf(view.doc);
  const step = (by) => el("button", { type: "button", id: by < 0 ? "before" : "next", disabled: !ids[position + by], onclick: () => choose({ doc: ids[position + by] }) }, by < 0 ? "Previous" : "Next");
  const scores = comparison.keys.map((key) => [key, plainScore(key)]);
  const list = el("div", { id: "caselist" }, caseTable(view, comparison, choose));
  const find = el("input", { type: "search", id: "viewtext", placeholder: "text of case or answer ( / )", "aria-label": "text of case or answer", autocomplete: "off", oninput: (event) => {
    view.text = event.target.value;
    list.replaceChildren(...caseTable(view, comparison, choose));
    writeAddress();
  } });
  find.value = view.text;
  redraw(byId("viewerbody"), [
    stale.length ? el("p", { class: "note", id: "stale" }, `The link names what this page does not have: ${stale.join(", ")}. The results have changed since.`) : "",
    el("div", { class: "pick" },
      select("Task", (tasks.includes(view.task) ? tasks : [view.task, ...tasks]).map((task) => [task, task]), view.task, change("task"), "viewtask"),
      select("Editor", editors, view.a, change("a"), "viewa"),
      select("beside", [["", "nothing"], ...editors.filter(([run]) => run !== view.a)], view.b, change("b"), "viewb")),
    numbers(view.task, [first, second].filter(Boolean)), second ? differences(first, second) : "",
    ...(all.length ? [
      el("div", { class: "pick" },
        select("Score", scores, comparison.chosen[0], change("score"), "viewscore"),
        select("against", [["", "the same"], ...scores.filter(([key]) => key !== comparison.chosen[0])], comparison.chosen[1] === comparison.chosen[0] ? "" : comparison.chosen[1], change("second"), "viewsecond"),
        select("Show", filtersOf(comparison, view.filter), view.filter, change("filter"), "viewfilter"),
        select("with", [["", "no fact of the edit"], ...comparison.facts.map((name) => [name, name.replaceAll("_", " ")])], view.more, change("more"), "viewmore"), find),
      comparison.isOne ? "" : summaryOf(comparison), list,
      el("div", { class: "pick" }, step(-1), step(1), el("span", { class: "note" }, `case ${position + 1} of ${ids.length}; keys j and k`)),
      caseOf(view, first, second)]
      : [el("p", { class: "note" }, withoutCases(view.task))])].filter((part) => part !== ""), "before");
}

function withoutCases(task) {
  if (board.columns.some((column) => column.task === task && column.group)) return "A group has no cases of its own; its tasks have them.";
  return unreachable || thinned || "There are no samples of this task; run lm_eval with --log_samples.";
}

function numbers(task, chosen) {
  const own = board.columns.flatMap((column, index) => (column.task === task && chosen.some((row) => row.cells[index]) ? [index] : []));
  const list = own.map((index) => el("div", { class: "facts" }, el("p", {}, el("b", {}, board.columns[index].metric), ` · ${board.columns[index].about}`),
    chosen.map((row) => (row.cells[index] ? numberLine(row, row.cells[index]) : ""))));
  return el("details", {}, el("summary", { id: "viewscores" }, `${own.length} ${own.length === 1 ? "score" : "scores"} of this task`), list);
}

// The number is that of the seed whose cases are shown; intervals and tests are over all seeds.
function numberLine(row, cell) {
  const [, own] = cell.seeds.find(([seed]) => seed === row.seed) || [null, row.seed === undefined ? cell.value : null];
  const all = cell.seeds.length > 1 ? `Over all seeds, mean ${number(cell.value)}: ` : "";
  return el("p", {}, el("b", {}, `${nameOf(row)}: ${number(own)} `), all, describe(cell).join(" "));
}

function caseOf(view, first, second) {
  const chosen = [first, second].filter(Boolean);
  const answered = chosen.map((row) => (answersOf(row, view.task) || {})[view.doc]);
  const asked = (answered.find((answer) => answer && answer.asked) || { asked: cases.questions[view.task][view.doc] }).asked;
  const unedited = uneditedOf(first);
  const reference = chosen.includes(unedited) ? null : (answersOf(unedited, view.task) || {})[view.doc];
  const before = (index) => {
    const own = answered.map((answer) => answer && answer.answers[index] && answer.answers[index].unedited).find(Boolean);
    return own || (reference && !reference.asked && reference.answers[index] ? reference.answers[index]["@"] : null);
  };
  const sides = chosen.map((row, side) => ({ name: nameOf(row), answer: (index) => answered[side] && answered[side].answers[index] }));
  return el("div", {},
    asked.edits.map((edit) => el("div", { class: "facts" }, el("p", {}, el("b", {}, "Edit: "), (edit.prompt || "").replace("{}", () => edit.subject || "{}"),
      " ", el("b", {}, edit.target_new || ""), edit.target_true ? ` (before: ${edit.target_true})` : ""))),
    grouped(asked.questions).map((group) => questionOf(group, before, sides)),
    scoresOf(chosen, answered),
    el("h3", {}, "Edit diagnostics"),
    el("div", { class: "sides" }, chosen.map((row, side) => el("div", { class: "side" }, el("b", {}, nameOf(row)), facts(answered[side] && answered[side].edit)))));
}

// Continuations of one prompt are one question with several candidates.
function grouped(questions) {
  const groups = [];
  questions.forEach(([kind, prompt, wanted, target, draw], index) => {
    const last = groups[groups.length - 1];
    if (last && target !== null && last.target !== null && last.kind === kind && last.prompt === prompt) last.parts.push([index, target]);
    else groups.push({ kind, prompt, wanted, target, draw, parts: [[index, target]] });
  });
  return groups;
}

function questionOf(group, before, sides) {
  const all = [["before the edit", (index) => ({ "@": before(index) })], ...sides.map((side) => [side.name, side.answer])];
  return el("div", { class: "question" },
    el("div", {}, el("span", { class: "kind" }, group.kind.replaceAll("_", " ") || "question"), group.draw ? `, draw ${group.draw + 1}` : "", group.wanted ? [" · wanted: ", el("b", {}, group.wanted)] : ""),
    el("pre", { class: "prompt" }, group.prompt),
    el("div", { class: all.length > 2 ? "sides three" : "sides" }, all.map(([name, answer]) => el("div", { class: "side" }, el("b", {}, name), ...stagesOf(group, answer)))));
}

function stagesOf(group, answer) {
  const found = group.parts.map(([index]) => answer(index) || {});
  const stages = [...new Set(found.flatMap((part) => Object.keys(part).filter((name) => name.startsWith("@") && part[name])))];
  if (!stages.length) return [el("span", { class: "none" }, "not asked")];
  return stages.flatMap((stage) => {
    const parts = found.map((part) => part[stage]).map((part, index) => [part, group.parts[index][1]]).filter(([part]) => part);
    const label = stage === "@" ? "" : el("span", { class: "badge" }, /^@\d+$/.test(stage) ? `after ${stage.slice(1)} edits` : stage.slice(1));
    const [best, criterion] = preferred(parts.map(([part]) => part), group.kind !== "");
    return [label, ...parts.map(([part, target]) => responseOf(part, target, part === best)),
      best ? el("div", { class: "sub" }, `Bold: ${criterion}.`) : ""];
  });
}

// Editing tasks compare candidates per token, tasks of lm-eval by the whole continuation.
function preferred(parts, isEditing) {
  if (parts.length < 2 || parts.some((part) => typeof part.logprob !== "number")) return [null, ""];
  const perToken = isEditing && parts.every((part) => part.tokens > 0);
  const values = parts.map((part) => (perToken ? part.logprob / part.tokens : part.logprob));
  const most = Math.max(...values);
  const best = values.filter((value) => value === most).length === 1 ? parts[values.indexOf(most)] : null;
  return [best, `highest log-probability ${perToken ? "per token" : "of the whole text"}`];
}

function responseOf(part, target, isBest) {
  if (part.failure !== undefined) return el("p", { class: "failure" }, `no answer: ${part.failure}`);
  if (part.similarity !== undefined) return el("div", {}, `edited and unedited model: ${part.similarity}`);
  if (part.text !== undefined) {
    return el("div", {}, part.thought ? el("details", {}, el("summary", {}, "thought"), el("pre", {}, part.thought)) : "",
      el("pre", {}, part.text || el("span", { class: "none" }, "(empty)"), part.follows ? el("span", { class: "follows", title: "after the stop; not scored" }, part.follows) : ""));
  }
  const per = part.tokens > 1 && part.logprob !== null ? ` (${number(part.logprob / part.tokens)} per token of ${part.tokens})` : "";
  return el("div", { class: isBest ? "prefers" : "" }, target, el("span", { class: "sub" }, `log-probability ${number(part.logprob)}${per}${part.greedy ? ", each token the likeliest" : ""}`));
}

function scoresOf(chosen, answered) {
  const keys = [...new Set(answered.flatMap((answer) => (answer ? Object.keys(answer.scores) : [])))];
  const text = (answer, key) => {
    if (!answer || !(key in answer.scores)) return "";
    const value = answer.scores[key];
    if (value === null) return answer.reasons[key] ? `unscored: ${answer.reasons[key]}` : "no score"; // excluded, or not edited yet
    return typeof value === "number" ? number(value) : JSON.stringify(value);
  };
  const body = keys.map((key) => {
    const values = answered.map((answer) => text(answer, key));
    return el("tr", { class: values.length > 1 && values[0] !== values[1] ? "differs" : "" }, el("th", { scope: "row" }, key.replace(/,none$/, "")), values.map((value) => el("td", {}, value)));
  });
  return el("div", {}, el("h3", {}, "Scores of this case"), el("table", { class: "scores" },
    el("thead", {}, el("tr", {}, el("th", {}, ""), chosen.map((row) => el("th", { scope: "col" }, nameOf(row))))), el("tbody", {}, body)));
}

function facts(report) {
  const entries = Object.entries(report || {});
  if (!entries.length) return el("p", { class: "none" }, "no edit");
  return el("table", { class: "scores" }, el("tbody", {}, entries.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name.replaceAll("_", " ")), el("td", {}, typeof value === "object" && value !== null ? JSON.stringify(value) : String(value))))));
}

// Model, options and editor settings in which two rows differ

function differences(first, second) {
  const text = (value) => (value === undefined ? "–" : typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
  const keys = [...new Set([first, second].flatMap((row) => Object.keys(row.facts)))].sort().filter((key) => text(first.facts[key]) !== text(second.facts[key]));
  const line = (key) => el("tr", {}, el("th", { scope: "row" }, key.replaceAll("_", " ")), [first, second].map((row) => el("td", {}, text(row.facts[key]))));
  return el("details", {}, el("summary", { id: "viewdiffers" }, `What differs (${keys.length})`),
    el("div", { class: "scroll" }, el("table", { class: "scores differing" },
      el("thead", {}, el("tr", {}, ["", nameOf(first), nameOf(second)].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, keys.map(line)))));
}
