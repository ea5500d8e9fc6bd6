// A score of a section's editors against what their edits cost.

const chosenPlots = {}; // title of a section -> indices of score and cost

function frontier(section, kept, columns) {
  const editors = kept.filter((row) => !row.reference);
  const scores = columns.filter((index) => !isCost(index) && board.columns[index].higher !== null);
  const costs = board.columns.flatMap((_, index) => (isCost(index) && editors.some((row) => row.cells[index]) ? [index] : []));
  if (editors.length < 2 || !scores.length || !costs.length) return "";
  const chosen = chosenPlots[section.title] || {};
  const score = scores.includes(chosen.score) ? chosen.score : scores[0];
  const price = costs.includes(chosen.price) ? chosen.price : costs[0];
  const pick = (name) => (value) => { chosenPlots[section.title] = { score, price, open: true, [name]: Number(value) }; draw(); };
  const options = (list, name) => list.map((index) => [String(index), name(board.columns[index])]);
  const points = editors.map((row) => ({ name: row.label, x: row.cells[price] && row.cells[price].value, y: row.cells[score] && real(row.cells[score].value) }))
    .filter((point) => point.x > 0 && point.y !== null && point.y !== undefined && Number.isFinite(point.y));
  const remember = (event) => { chosenPlots[section.title] = { score, price, open: event.target.open }; };
  return el("details", { class: "frontier", open: Boolean(chosen.open), ontoggle: remember }, el("summary", {}, "Score against cost"),
    el("div", { class: "pick" }, select("Score", options(scores, (column) => column.name), String(score), pick("score"), `score-${board.sections.indexOf(section)}`), select("Cost", options(costs, (column) => column.metric), String(price), pick("price"), `cost-${board.sections.indexOf(section)}`)),
    points.length < 2 ? el("p", { class: "note" }, "Fewer than two editors have both.") : plot(points, board.columns[score], board.columns[price]));
}

// Of the points that no other one beats in both, from the cheapest on.
function best(points, higher) {
  const better = (a, b) => (higher ? a > b : a < b);
  return [...points].sort((a, b) => a.x - b.x || (better(a.y, b.y) ? -1 : 1)).reduce((kept, point) => (kept.length && !better(point.y, kept[kept.length - 1].y) ? kept : [...kept, point]), []);
}

function plot(points, score, price) {
  const [left, right, top, bottom] = [56, 560, 14, 250];
  const logs = points.map((point) => Math.log10(point.x));
  const [low, high] = [Math.min(...logs), Math.max(...logs)];
  const values = points.map((point) => point.y);
  const [least, most] = [Math.min(0, ...values), Math.max(1, ...values)];
  const x = (value) => left + ((Math.log10(value) - low) / (high - low || 1)) * (right - left);
  const y = (value) => bottom - ((value - least) / (most - least || 1)) * (bottom - top);
  const image = svg("svg", { viewBox: "0 0 720 292", role: "img", "aria-label": `${score.name} against ${price.metric}, as listed below` });
  const line = (x1, y1, x2, y2, style) => image.append(svg("line", { x1, y1, x2, y2, class: style || "" }));
  line(left, bottom, right, bottom);
  line(left, top, left, bottom);
  for (const value of [least, (least + most) / 2, most]) image.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  for (const value of [10 ** low, 10 ** ((low + high) / 2), 10 ** high]) image.append(svg("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, cost(value)));
  image.append(svg("text", { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, `${price.metric}, logarithmic`));
  const front = best(points, score.higher);
  front.slice(1).forEach((point, index) => {
    line(x(front[index].x), y(front[index].y), x(point.x), y(front[index].y), "edge");
    line(x(point.x), y(front[index].y), x(point.x), y(point.y), "edge");
  });
  points.forEach((point) => {
    const mark = svg("circle", { cx: x(point.x), cy: y(point.y), r: 5, class: front.includes(point) ? "front" : "" });
    mark.append(svg("title", {}, `${point.name}: ${number(point.y)} at ${cost(point.x)}`));
    image.append(mark, svg("text", { x: x(point.x) + 8, y: y(point.y) - 5 }, fitted(point.name, 150)));
  });
  return el("figure", { class: "ranks" }, image, el("figcaption", { class: "note" }, `Not beaten in both, from the cheapest on: ${front.map((point) => `${point.name} (${number(point.y)} at ${cost(point.x)})`).join(", ")}. Costs are of the machine that made the edits.`));
}
