// A score of a section's streams over their checkpoints, with its intervals, beside the score right after each edit.

const chosenCurves = {}; // title of a section -> name of the score
const HUES = 8; // classes of colors; further editors have them again, dashed

// The scores with checkpoints that an editor of a section has: name -> columns by number of edits, and that right after each edit.
function scoresOverStreams(editors) {
  const found = new Map();
  board.columns.forEach((column, index) => {
    const parts = /^(.*)@(\d+|immediate),([^,]*)$/.exec(column.score);
    if (!parts || !editors.some((row) => row.cells[index])) return;
    const name = `${column.task} ${parts[1]}${["", "none"].includes(parts[3]) ? "" : `,${parts[3]}`}`;
    if (!found.has(name)) found.set(name, { stages: [], immediate: null });
    if (parts[2] === "immediate") found.get(name).immediate = index;
    else found.get(name).stages.push([Number(parts[2]), index]);
  });
  for (const [name, score] of found) {
    score.stages.sort(([a], [b]) => a - b);
    if (score.stages.length < 2) found.delete(name);
  }
  return found;
}

function curves(section, kept) {
  const editors = kept.filter((row) => !row.reference);
  const scores = scoresOverStreams(editors);
  if (!scores.size) return "";
  const names = [...scores.keys()];
  const usual = names.find((name) => board.columns.some((column) => column.shown && column.name === name)) || names[0];
  const chosen = chosenCurves[section.title] || {};
  const name = scores.has(chosen.name) ? chosen.name : usual;
  const lines = editors.map((row) => ({
    name: row.label,
    points: scores.get(name).stages.filter(([, index]) => row.cells[index] && row.cells[index].value !== null).map(([edits, index]) => ({ x: edits, y: real(row.cells[index].value), interval: row.cells[index].interval })),
    immediate: row.cells[scores.get(name).immediate] ? real(row.cells[scores.get(name).immediate].value) : null,
  })).filter((line) => line.points.length && line.points.every((point) => Number.isFinite(point.y)));
  const pick = (value) => { chosenCurves[section.title] = { name: value, open: true }; draw(); };
  return el("details", { class: "frontier", open: Boolean(chosen.open), ontoggle: (event) => { chosenCurves[section.title] = { name, open: event.target.open }; } },
    el("summary", {}, "Over the stream"),
    el("div", { class: "pick" }, select("Score", names.map((one) => [one, one]), name, pick, `curve-${board.sections.indexOf(section)}`)),
    lines.length ? curvePlot(lines, name) : el("p", { class: "note" }, "No editor has a value."));
}

function curvePlot(lines, name) {
  const [left, right, top, bottom] = [56, 520, 14, 250];
  const edits = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
  const isWide = edits[0] > 0 && edits[edits.length - 1] / edits[0] > 20;
  const scale = isWide ? Math.log10 : (value) => value;
  const [low, high] = [scale(edits[0]), scale(edits[edits.length - 1])];
  const values = lines.flatMap((line) => [line.immediate, ...line.points.flatMap((point) => [point.y, ...(point.interval || []).slice(0, 2).map(real)])]).filter((value) => value !== null && Number.isFinite(value));
  const [least, most] = [Math.min(0, ...values), Math.max(1, ...values)];
  const x = (value) => left + ((scale(value) - low) / (high - low || 1)) * (right - left);
  const y = (value) => bottom - ((value - least) / (most - least || 1)) * (bottom - top);
  const image = svg("svg", { viewBox: "0 0 720 292", role: "img", "aria-label": `${name} over the number of edits, as listed below` });
  image.append(svg("line", { x1: left, y1: bottom, x2: right, y2: bottom }), svg("line", { x1: left, y1: top, x2: left, y2: bottom }));
  for (const value of [least, (least + most) / 2, most]) image.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  const shown = edits.length <= 8 ? edits : edits.filter((_, index) => index % Math.ceil(edits.length / 8) === 0);
  for (const value of shown) image.append(svg("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, String(value)));
  image.append(svg("text", { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, `number of edits${isWide ? ", logarithmic" : ""}`));
  lines.forEach((line, index) => {
    const style = `hue${index % HUES}${index >= HUES ? " dashed" : ""}`;
    const known = line.points.filter((point) => point.interval);
    const ends = [...known.map((point) => [point.x, point.interval[1]]), ...[...known].reverse().map((point) => [point.x, point.interval[0]])];
    if (known.length > 1) image.append(svg("polygon", { points: ends.map(([at, value]) => `${x(at)},${y(value)}`).join(" "), class: `band ${style}` }));
    image.append(svg("polyline", { points: line.points.map((point) => `${x(point.x)},${y(point.y)}`).join(" "), class: `curve ${style}` }));
    if (line.points.length === 1) { // a line and a band need two
      const [{ x: at, y: value, interval }] = line.points;
      if (interval) image.append(svg("line", { x1: x(at), y1: y(interval[0]), x2: x(at), y2: y(interval[1]), class: `curve ${style}` }));
      image.append(svg("circle", { cx: x(at), cy: y(value), r: 4, class: `only ${style}` }));
    }
    if (line.immediate !== null) {
      const mark = svg("circle", { cx: right + 6, cy: y(line.immediate), r: 4, class: `immediate ${style}` });
      mark.append(svg("title", {}, `${line.name}, right after each edit: ${number(line.immediate)}`));
      image.append(mark);
    }
  });
  // Names beside the ends of the lines, from the top down, none over another.
  const names = lines.map((line, index) => ({ line, index, y: y(line.points[line.points.length - 1].y) })).sort((a, b) => a.y - b.y);
  names.forEach((one, place) => { if (place) one.y = Math.max(one.y, names[place - 1].y + 13); });
  const over = Math.max(0, names[names.length - 1].y - 286);
  for (const one of names) image.append(svg("text", { x: right + 16, y: Math.max(10, one.y - over) + 4, class: `name hue${one.index % HUES}` }, fitted(one.line.name, 180)));
  const list = lines.map((line) => `${line.name}: ${line.points.map((point) => `${number(point.y)} after ${point.x}`).join(", ")}${line.immediate === null ? "" : `; right after each edit ${number(line.immediate)}`}`);
  return el("figure", { class: "ranks" }, image, el("figcaption", { class: "note" }, `Lines: the cases edited by then, after that many edits, with 95% intervals. Circles at the right: all cases, each right after its own edit. ${list.join(". ")}. lm-edit figure stream_curves draws the latter over the same cases, and the drift of the model.`));
}
