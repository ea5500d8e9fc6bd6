// Mean ranks of a section.

function ranks(ranking) {
  const count = ranking.names.length;
  const [left, right, top] = [190, 450, 46];
  const room = 640 - right - 12;
  const half = Math.ceil(count / 2);
  const x = (rank) => left + ((rank - 1) / (count - 1)) * (right - left);
  const lines = ranking.groups.length * 8;
  const height = top + 20 + lines + half * 20;
  const image = svg("svg", { viewBox: `0 0 640 ${height}`, role: "img", "aria-label": "mean ranks, which are listed below" });
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
    const [place, rank] = [`${index + 1}. `, ` ${ranking.ranks[index].toFixed(2)}`];
    const label = place + fitted(name, room - widthOf(place + rank)) + rank;
    const text = svg("text", { x: end + (atLeft ? -4 : 4), y: y + 4, "text-anchor": atLeft ? "end" : "start" }, label);
    text.append(svg("title", {}, name));
    image.append(text);
  });
  return el("figure", { class: "ranks" }, el("figcaption", { class: "note" },
    `Mean ranks; 1 is best. Friedman p ${share(ranking.p)} over ${ranking.benchmarks} benchmarks. A bar joins editors that Nemenyi's test does not separate.`), image,
    el("ol", { class: "note" }, ranking.names.map((name, index) => el("li", {}, `${name}: ${ranking.ranks[index].toFixed(2)}`))));
}

// Each score on screen counts once, whatever its benchmark.
function addMeanRanks(list) {
  const editors = list.filter((row) => !row.reference);
  const rank = (row, index) => (row.cells[index] ? row.cells[index].rank : null);
  for (const row of editors) delete row.cells[MEAN_RANK];
  const scores = [...state.columns].filter((index) => index !== MEAN_RANK && ofBenchmark(index) && editors.every((row) => rank(row, index)));
  if (!scores.length || editors.length < 2) return;
  for (const row of editors) row.cells[MEAN_RANK] = { value: scores.reduce((sum, index) => sum + rank(row, index), 0) / scores.length };
}

// Width in the units of the picture, whose texts have 12 px.
function widthOf(text) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return context.measureText(text).width;
}

// The number before a shortened name keeps it unique.
function fitted(name, width) {
  if (name.length <= 100 && widthOf(name) <= width) return name;
  const kept = [...name.slice(0, 100)];
  while (kept.length && widthOf(`${kept.join("")}…`) > width) kept.pop();
  return `${kept.join("")}…`;
}
