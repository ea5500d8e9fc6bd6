"""A passport as rows of a terminal, as a model card in Markdown, and as an HTML page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edit_hooks.utils.storage.files import packaged_file, read_text
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.passport.record import Part, Passport, PassportScore
from lm_edit.results.markdown import escape_cell, markdown_table

HEADER = ["part", "score", "value", "95% interval", "n", "unscored", "before"]
CONTENT_POLICY = "default-src 'none'; style-src '{}'"


def terminal_rows(passport: Passport) -> list[list[str]]:
    """A header and a row per score; parts as a whole unscored have no row."""
    return [HEADER, *([part.name, *row] for part in passport.parts for row in _rows(part))]


def _rows(part: Part) -> list[list[str]]:
    """A row per score; names that several tasks of the part have follow those of their tasks."""
    names = [score.name for score in part.scores]
    return [
        _cells(score, score.name if names.count(score.name) == 1 else f"{score.task} {score.name}")
        for score in part.scores
    ]


def _cells(score: PassportScore, name: str) -> list[str]:
    value = "-" if score.value is None else f"{score.value:.3f}"
    interval = "-" if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"
    before = "-" if score.before is None else f"{score.before:.3f}"
    return [name, value, interval, str(score.n), str(score.unscored), before]


def json_page(passport: Passport) -> str:
    """``passport.json``."""
    return json_text(passport.to_json(), indent=2) + "\n"


def _title(passport: Passport) -> str:
    return f"Passport of {passport.edit['name']}"


def _summary(passport: Passport) -> Iterator[tuple[str, str]]:
    """What was measured on what: pairs of a name and a text."""
    edit, model, facts = passport.edit, passport.model, passport.facts
    yield "editor", str(edit["editor"] or "unknown")
    yield "changes", f"{', '.join(edit['writes']) or 'nothing'} (parameters changed: {edit['parameters']})"
    yield "model", f"{model['name']} ({model['type']}, {model['dtype']}, on {model['device']})"
    lost = f", {facts['requests_not_in_source']} of the edit's not in it" if facts["requests_not_in_source"] else ""
    yield "facts", f"{facts['asked']} asked, from {facts['source']} ({facts['facts']} facts{lost})"
    yield "checksum", str(edit["checksum"])
    given = {name: value for name, value in passport.settings.items() if name != "parts" and value is not None}
    yield "settings", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
    yield "versions", ", ".join(f"{name} {value}" for name, value in passport.versions.items())
    yield "made", f"{passport.date}, in {passport.seconds:.0f} s"


def _notes(part: Part) -> Iterator[str]:
    """Why values or intervals are missing, and what the analyses of a part did."""
    for score in part.scores:
        reasons = [f"{reason} ({count})" for reason, count in score.reasons.items()]
        if reasons or score.note:
            yield f"{score.name}: {'; '.join([*reasons, score.note] if score.note else reasons)}"
    for name, value in part.details.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        yield f"{name.replace('_', ' ')}: {', '.join(map(str, value)) if isinstance(value, list) else shown}"


# -- Markdown ------------------------------------------------------------------------------------------------------


def markdown_page(passport: Passport) -> str:
    """``passport.md``: a model card with the scores as evaluation results in its metadata."""
    return "\n".join(["---", card_metadata(passport).rstrip("\n"), "---", "", *_markdown_lines(passport), ""])


def card_metadata(passport: Passport) -> str:
    """YAML of a model card: base model, tags, and the ``model-index`` that the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    name = str(passport.edit["name"])
    results = [
        EvalResult(
            task_type="text-generation",
            task_name=f"{part.name}: {part.question}",
            dataset_type=str(passport.facts["benchmark"] or "facts"),
            dataset_name=str(passport.facts["source"]),
            metric_type=f"{score.task}/{score.name}" if score.task else score.name,
            metric_name=score.name,
            metric_value=score.value,
            metric_args={"n": score.n, "unscored": score.unscored}
            | ({} if score.low is None else {"interval_95": [score.low, score.high]}),
        )
        for part in passport.parts
        for score in part.scores
        if score.value is not None
    ]
    base = {} if not _is_hub_id(passport.model["name"]) else {"base_model": passport.model["name"]}
    options: dict[str, Any] = {"model_name": name, "eval_results": results} if results else {}
    card = ModelCardData(tags=["knowledge-editing", "lm-eval-editing"], **base, **options)
    return str(card.to_yaml())


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and " " not in name


def _markdown_lines(passport: Passport) -> Iterator[str]:
    yield f"# {escape_cell(_title(passport))}"
    yield ""
    yield from markdown_table([("", ""), *_summary(passport)])
    yield ""
    for statement in passport.edit["statements"]:
        yield f"- {escape_cell(statement)}"
    for part in passport.parts:
        yield from ("", f"## {escape_cell(part.name)}", "", escape_cell(part.question), "")
        if part.unscored:
            yield f"Unscored: {escape_cell(part.unscored)}"
            continue
        header = [*HEADER[1:-1], f"before ({part.compared_with})"]
        yield from markdown_table([header, *_rows(part)])
        notes = list(_notes(part))
        yield from ([""] if notes else [])
        for note in notes:
            yield f"- {escape_cell(note)}"


# -- HTML ----------------------------------------------------------------------------------------------------------


def html_page(passport: Passport) -> str:
    """``passport.html``, without a script; its content security policy allows the one style sheet by its hash."""
    path = packaged_file("lm_edit", "passport", "templates", "passport.css")
    if path is None:
        raise ValueError("lm_edit/passport/templates/passport.css is not installed")
    style = read_text(path, "style sheet")
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = html.escape(_title(passport))
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(CONTENT_POLICY.format(digest))}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{title}</h1>",
    ]
    body = [_html_table(["", ""], _summary(passport)), _html_list(passport.edit["statements"])]
    for part in passport.parts:
        body += [f"<h2>{html.escape(part.name)}</h2>", f"<p>{html.escape(part.question)}</p>"]
        if part.unscored:
            body.append(f'<p class="unscored">Unscored: {html.escape(part.unscored)}</p>')
            continue
        header = [*HEADER[1:-1], f"before ({part.compared_with})"]
        body += [_html_table(header, _rows(part)), _html_list(_notes(part))]
    return "\n".join([*head, *body, "</body>\n</html>\n"])


def _html_table(header: list[str], rows: Any) -> str:
    def line(tag: str, cells: Any) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>\n" if any(header) else ""
    return (
        f'<div class="scroll"><table>\n{head}<tbody>\n'
        + "\n".join(line("td", row) for row in rows)
        + ("\n</tbody></table></div>")
    )


def _html_list(texts: Any) -> str:
    items = "".join(f"<li>{html.escape(str(text))}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


FILES: Mapping[str, Callable[[Passport], str]] = {
    "passport.json": json_page,
    "passport.md": markdown_page,
    "passport.html": html_page,
}
