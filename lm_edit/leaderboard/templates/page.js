"use strict";
// All texts of results become text nodes (el, textContent): nothing is parsed as HTML.
(() => {
  const board = JSON.parse(document.getElementById("board").textContent);
  const cases = JSON.parse(document.getElementById("cases").textContent);
  const byId = (id) => document.getElementById(id);
  const names = board.columns.map((column) => column.name);
  const defaults = board.columns.flatMap((column, number) => (column.shown ? [number] : []));
  // Cases are those of one run per task: a row of several seeds is looked at seed by seed.
  const bySeed = (row) => row.seeds.map(([seed, runs]) => ({ ...row, label: row.seeds.length > 1 ? `${row.label}, seed ${seed}` : row.label, runs }));
  const rows = [...new Map(board.sections.flatMap((section) => section.rows.flatMap(bySeed)).map((row) => [row.runs[0], row])).values()];
  const PRINTED = "printed";
  let state = fresh();

  function fresh() {
    return { find: "", section: "", columns: new Set(defaults), sort: null, down: true, view: null };
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

  // Numbers

  function number(value) {
    if (value === null || value === undefined) return "–";
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
    if (cell.seeds.length) lines.push(`Mean of ${cell.seeds.length} seeds: ${cell.seeds.map(([seed, value]) => `${number(value)} (seed ${seed})`).join(", ")}.`);
    if (cell.interval) lines.push(`95% interval: ${number(cell.interval[0])} to ${number(cell.interval[1])}.`);
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
      state.view = { task: address.get("task"), doc: address.get("doc") || "", a: address.get("a") || "", b: address.get("b") || "" };
    }
  }

  function writeAddress() {
    const address = new URLSearchParams();
    if (state.find) address.set("find", state.find);
    if (state.section) address.set("section", state.section);
    const chosen = names.filter((_, index) => state.columns.has(index));
    if (chosen.join() !== defaults.map((index) => names[index]).join()) address.set("columns", chosen.join("|"));
    if (state.sort !== null) address.set("sort", (state.down ? "-" : "+") + (state.sort === "editor" ? "editor" : names[state.sort]));
    for (const [name, value] of Object.entries(state.view || {})) if (value) address.set(name, value);
    history.replaceState(null, "", `#${address}`);
  }

  // Tables

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
    return [...state.columns].sort((a, b) => a - b).filter((index) => (editors.length ? editors : list).some((row) => row.cells[index]));
  }

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
      const arrow = column.higher === null ? "" : column.higher ? "" : " (lower is better)";
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
    const interval = cell.interval ? `${number(cell.interval[0])}–${number(cell.interval[1])}` : "";
    const counts = cell.of === null ? "" : el("span", { class: cell.n < cell.of ? "partial" : "" }, `${cell.n}/${cell.of}`);
    const open = () => show({ task: board.columns[index].task, doc: "", a: row.seeds[0][1][0], b: "" });
    return el("td", { class: style }, el("button", { type: "button", class: "cell", title: describe(cell).join("\n"), onclick: open },
      el("span", { class: cell.bold ? "value best" : "value" }, number(cell.value)),
      el("span", { class: "marks" }, cell.marks),
      el("span", { class: "sub" }, interval, interval && counts ? " · " : "", counts)));
  }

  function rowOf(row, columns) {
    const untuned = row.origin.startsWith("untuned");
    const origin = row.origin ? el("span", { class: untuned ? "untuned" : "" }, untuned ? "untuned settings" : `${row.origin} settings`) : "";
    const style = firsts(columns);
    return el("tr", { class: row.reference ? "reference" : "" },
      el("th", { scope: "row", title: row.names.join("\n") }, row.label, row.reference ? "" : el("span", { class: "sub" }, origin, row.seeds.length > 1 ? `, ${row.seeds.length} seeds` : "")),
      columns.map((index, position) => cellOf(row, index, style(position))));
  }

  function sectionOf(section) {
    const kept = section.rows.filter((row) => row.reference || matches([row.label, row.model, row.origin, section.title, ...row.names]));
    if (kept.every((row) => row.reference) && section.rows.some((row) => !row.reference)) return null;
    const columns = shownColumns(section.rows);
    const value = (row, index) => (row.cells[index] ? row.cells[index].value : null);
    const ordered = [...kept.filter((row) => row.reference), ...sorted(kept.filter((row) => !row.reference), (row) => row.label, value)];
    const table = el("table", {}, heading(columns, "editor"), el("tbody", {}, ordered.map((row) => rowOf(row, columns))));
    return el("section", { class: "block" }, el("h2", {}, section.title),
      columns.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title }, table)
        : el("p", { class: "note" }, "None of the chosen columns was evaluated here."),
      section.coverage ? el("p", { class: "note partial" }, section.coverage) : "",
      section.ranking ? ranks(section.ranking) : "", el("p", { class: "note" }, section.note));
  }

  function printedSection() {
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

  function ranks(ranking) {
    const count = ranking.names.length;
    const [left, right, top] = [150, 450, 46];
    const half = Math.ceil(count / 2);
    const x = (rank) => left + ((rank - 1) / (count - 1)) * (right - left);
    const lines = ranking.groups.length * 8;
    const height = top + 20 + lines + half * 20;
    const image = svg("svg", { viewBox: `0 0 640 ${height}`, role: "img", "aria-label": "mean ranks" });
    const line = (x1, y1, x2, y2, style) => image.append(svg("line", { x1, y1, x2, y2, class: style || "" }));
    const width = Math.min(x(1 + ranking.difference) - x(1), 600 - left);
    line(left, 14, left + width, 14);
    line(left, 10, left, 18);
    line(left + width, 10, left + width, 18);
    image.append(svg("text", { x: left - 8, y: 18, "text-anchor": "end" }, `critical difference ${ranking.difference.toFixed(2)}`));
    line(left, top, right, top);
    for (let rank = 1; rank <= count; rank += count > 20 ? 5 : 1) {
      line(x(rank), top - 5, x(rank), top);
      image.append(svg("text", { x: x(rank), y: top - 9, "text-anchor": "middle" }, String(rank)));
    }
    ranking.groups.forEach(([first, last], index) => {
      const y = top + 10 + index * 8;
      line(x(ranking.ranks[first]) - 4, y, x(ranking.ranks[last]) + 4, y, "group");
    });
    ranking.names.forEach((name, index) => {
      const atLeft = index < half;
      const y = top + 18 + lines + (atLeft ? index : count - 1 - index) * 20;
      const end = atLeft ? left - 8 : right + 8;
      line(x(ranking.ranks[index]), top, x(ranking.ranks[index]), y);
      line(x(ranking.ranks[index]), y, end, y);
      const label = `${name.length > 16 ? `${name.slice(0, 14)}…` : name} ${ranking.ranks[index].toFixed(2)}`;
      const text = svg("text", { x: end + (atLeft ? -4 : 4), y: y + 4, "text-anchor": atLeft ? "end" : "start" }, label);
      text.append(svg("title", {}, name));
      image.append(text);
    });
    return el("figure", { class: "ranks" }, el("figcaption", { class: "note" },
      `Mean ranks; 1 is best. Friedman p ${share(ranking.p)} over ${ranking.columns} columns. A bar joins editors that Nemenyi's test does not separate.`), image);
  }

  function draw() {
    const parts = board.sections.filter((section) => !state.section || section.title === state.section).map(sectionOf);
    if (!state.section || state.section === PRINTED) parts.push(printedSection());
    const shown = parts.filter(Boolean);
    byId("tables").replaceChildren(...shown);
    const count = byId("tables").querySelectorAll("tbody tr:not(.reference)").length;
    byId("status").textContent = shown.length ? `${count} ${count === 1 ? "row" : "rows"} in ${shown.length} ${shown.length === 1 ? "table" : "tables"}. ${board.thinned}` : "Nothing matches.";
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
    const options = differs(2) && row.identity[2] ? `, ${row.identity[2]}` : "";
    const model = differs(0) || hash || options ? `${row.model}${hash}${options}, ` : "";
    return `${row.label} (${model}${row.reference ? "unedited" : row.regime})`;
  };

  function show(view) {
    state.view = view;
    drawViewer();
    if (!byId("viewer").open) byId("viewer").showModal();
    writeAddress();
  }

  function select(label, options, value, change, id) {
    return el("label", {}, label, el("select", { id, onchange: (event) => change(event.target.value) },
      options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
  }

  function drawViewer() {
    const view = state.view;
    const tasks = Object.keys(cases.questions);
    if (!tasks.includes(view.task) && tasks.length && !board.columns.some((column) => column.task === view.task)) view.task = tasks[0];
    const first = rowById(view.a) || rows.find((row) => !row.reference) || rows[0];
    const second = rowById(view.b);
    const documents = cases.questions[view.task] || {};
    const ids = Object.keys(documents);
    if (!ids.includes(view.doc)) view.doc = ids[0] || "";
    [view.a, view.b] = [first.runs[0], second ? second.runs[0] : ""];
    byId("viewertitle").textContent = `${nameOf(first)}${second ? ` and ${nameOf(second)}` : ""}: ${view.task}`;
    const change = (name) => (value) => show({ ...view, [name]: value });
    const editors = rows.map((row) => [row.runs[0], nameOf(row)]);
    const position = ids.indexOf(view.doc);
    const step = (by) => el("button", { type: "button", id: by < 0 ? "before" : "next", disabled: !ids[position + by], onclick: () => show({ ...view, doc: ids[position + by] }) }, by < 0 ? "Previous" : "Next");
    const labels = ids.map((id) => {
      const edit = documents[id].edits[0];
      return [id, `${documents[id].case}${edit ? `: ${edit.subject || ""} → ${edit.target_new || ""}`.slice(0, 60) : ""}`];
    });
    byId("viewerbody").replaceChildren(
      el("div", { class: "pick" },
        select("Task", tasks.map((task) => [task, task]), view.task, change("task"), "viewtask"),
        select("Editor", editors, view.a, change("a"), "viewa"),
        select("beside", [["", "nothing"], ...editors.filter(([run]) => run !== view.a)], view.b, change("b"), "viewb")),
      numbers(view.task, [first, second].filter(Boolean)),
      ...(ids.length ? [el("div", { class: "pick" }, select("Case", labels, view.doc, change("doc"), "viewdoc"), step(-1), step(1)), caseOf(view, first, second)]
        : [el("p", { class: "note" }, board.thinned || "There are no samples of this task; run lm_eval with --log_samples.")]));
  }

  function numbers(task, chosen) {
    const own = board.columns.flatMap((column, index) => (column.task === task && chosen.some((row) => row.cells[index]) ? [index] : []));
    const list = own.map((index) => el("div", { class: "facts" }, el("p", {}, el("b", {}, board.columns[index].metric), ` · ${board.columns[index].about}`),
      chosen.map((row) => (row.cells[index] ? el("p", {}, el("b", {}, `${nameOf(row)}: ${number(row.cells[index].value)} `), describe(row.cells[index]).join(" ")) : ""))));
    return el("details", {}, el("summary", {}, `${own.length} ${own.length === 1 ? "score" : "scores"} of this task`), list);
  }

  function caseOf(view, first, second) {
    const chosen = [first, second].filter(Boolean);
    const answered = chosen.map((row) => (answersOf(row, view.task) || {})[view.doc]);
    const asked = (answered.find((answer) => answer && answer.asked) || { asked: cases.questions[view.task][view.doc] }).asked;
    const unedited = rows.find((row) => row.reference && row.identity.every((part, index) => part === first.identity[index]));
    const reference = chosen.includes(unedited) ? null : (answersOf(unedited, view.task) || {})[view.doc];
    const before = (index) => {
      const own = answered.map((answer) => answer && answer.answers[index] && answer.answers[index].unedited).find(Boolean);
      return own || (reference && !reference.asked && reference.answers[index] ? reference.answers[index]["@"] : null);
    };
    const sides = chosen.map((row, side) => ({ name: nameOf(row), answer: (index) => answered[side] && answered[side].answers[index] }));
    return el("div", {},
      asked.edits.map((edit) => el("div", { class: "facts" }, el("p", {}, el("b", {}, "Edit: "), (edit.prompt || "").replace("{}", edit.subject || "{}"),
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
      const logprobs = parts.map(([part]) => part.logprob).filter((value) => typeof value === "number");
      const most = Math.max(...logprobs);
      const best = parts.length > 1 && logprobs.filter((value) => value === most).length === 1 ? most : NaN;
      return [label, ...parts.map(([part, target]) => responseOf(part, target, best))];
    });
  }

  function responseOf(part, target, best) {
    if (part.failure !== undefined) return el("p", { class: "failure" }, `no answer: ${part.failure}`);
    if (part.cosine !== undefined) return el("div", {}, `cosine ${number(part.cosine)} with the unedited model's state`);
    if (part.text !== undefined) {
      return el("div", {}, part.thought ? el("details", {}, el("summary", {}, "thought"), el("pre", {}, part.thought)) : "",
        el("pre", {}, part.text || el("span", { class: "none" }, "(empty)"), part.follows ? el("span", { class: "follows", title: "after the stop; not scored" }, part.follows) : ""));
    }
    const per = part.tokens > 1 && part.logprob !== null ? ` (${number(part.logprob / part.tokens)} per token of ${part.tokens})` : "";
    return el("div", { class: part.logprob === best ? "prefers" : "" }, target, el("span", { class: "sub" }, `log-probability ${number(part.logprob)}${per}${part.greedy ? ", most likely" : ""}`));
  }

  function scoresOf(chosen, answered) {
    const keys = [...new Set(answered.flatMap((answer) => (answer ? Object.keys(answer.scores) : [])))];
    const text = (answer, key) => {
      if (!answer || !(key in answer.scores)) return "";
      const value = answer.scores[key];
      if (value === null) return `unscored${answer.reasons[key] ? `: ${answer.reasons[key]}` : ""}`;
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

  // Start

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
    draw();
    if (state.view) show(state.view);
    else if (byId("viewer").open) byId("viewer").close();
  }

  byId("title").textContent = board.title;
  byId("methods").append(...board.methods.map((text) => el("p", {}, text)));
  byId("section").append(el("option", { value: "" }, "all tables"), ...board.sections.map((section) => el("option", { value: section.title }, section.title)),
    ...(board.published.length ? [el("option", { value: PRINTED }, "Printed in papers")] : []));
  byId("section").addEventListener("change", (event) => { state.section = event.target.value; draw(); });
  byId("find").addEventListener("input", (event) => { state.find = event.target.value; draw(); });
  byId("findcolumn").addEventListener("input", drawChooser);
  byId("defaults").addEventListener("click", () => choose(defaults));
  byId("none").addEventListener("click", () => choose([]));
  byId("compare").addEventListener("click", () => {
    const editors = rows.filter((row) => !row.reference);
    show({ task: Object.keys(cases.questions)[0] || board.columns[0].task, doc: "", a: (editors[0] || rows[0]).runs[0], b: editors[1] ? editors[1].runs[0] : "" });
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
  window.addEventListener("hashchange", start);
  applyTheme("");
  start();
})();
