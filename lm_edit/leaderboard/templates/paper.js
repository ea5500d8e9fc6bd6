// The table on screen, with its rows, columns and order, as LaTeX and as Markdown.

const latexText = (text) => [...text.replace(/\s+/g, " ")].map((character) => board.latex[character] || character).join("");
const markdownText = (text) => text.replace(/\s+/g, " ").replace(/([\\|<>[\]`])/g, "\\$1");

function valueText(row, index, bold, escaped) {
  const cell = row.cells[index];
  if (!cell) return "";
  if (cell.marks === undefined) return isCost(index) ? cost(cell.value) : number(cell.value); // neither ranked nor tested
  const value = number(cell.value);
  return (cell.bold ? bold(value) : escaped(value)) + escaped(cell.marks);
}

function paper(section, ordered, columns) {
  if (!columns.length) return "";
  const names = columns.map((index) => (isCost(index) ? board.columns[index].metric : board.columns[index].name));
  const cells = (bold, escaped) => ordered.map((row) => [escaped(row.label), ...columns.map((index) => valueText(row, index, bold, escaped))]);
  const latex = ["% \\usepackage{booktabs}", "\\begin{table}", `\\caption{${latexText(section.title)}}`, `\\begin{tabular}{l${"r".repeat(columns.length)}}`, "\\toprule",
    `${["Editor", ...names].map(latexText).join(" & ")} \\\\`, "\\midrule",
    ...cells((value) => `\\textbf{${latexText(value)}}`, latexText).map((row) => `${row.join(" & ")} \\\\`), "\\bottomrule", "\\end{tabular}", "\\end{table}"];
  const markdown = [["editor", ...names].map(markdownText), ["---", ...columns.map(() => "---:")], ...cells((value) => `**${markdownText(value)}**`, markdownText)].map((row) => `| ${row.join(" | ")} |`);
  const block = (name, lines) => el("label", { class: "paper" }, name, el("textarea", { readOnly: true, rows: Math.min(lines.length, 14), spellcheck: "false", onfocus: (event) => event.target.select() }, lines.join("\n")));
  return el("details", {}, el("summary", {}, "This table as LaTeX and Markdown"), block("LaTeX", latex), block("Markdown", markdown));
}
