"""The Markdown of measurements, complete or not (:mod:`how_fast_parts`), beside those of others."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from how_fast import EDITOR_ROWS, QUESTION_EDITS

ELSEWHERE = Path(__file__).with_name("measured.json")
GIB = 2**30
NONE = "-"

Parts = Mapping[str, Mapping[str, Any]]  # by name, the numbers of each measurement


def goals(key: str) -> dict[str, float]:
    """What a row must reach, by the number of edits made together."""
    goals: dict[str, dict[str, float]] = json.loads(ELSEWHERE.read_text())["goals"]
    return goals.get(key, {})


def markdown(about: Mapping[str, Any], parts: Parts) -> str:
    """Tables of everything that was measured."""
    elsewhere = json.loads(ELSEWHERE.read_text())
    if about["shape"] != elsewhere["shape"]:
        elsewhere = {}
    blocks = [
        _heading(about, parts, elsewhere),
        _editors(parts, elsewhere),
        _joint(parts),
        _answers(about, parts, elsewhere),
        _solves(parts),
        _time(parts),
        _notes(parts),
    ]
    return "\n".join(block for block in blocks if block)


def _heading(about: Mapping[str, Any], parts: Parts, elsewhere: Mapping[str, Any]) -> str:
    text = f"{about['device']}, torch {about['torch']}, {datetime.date.today()}: {about['model']}, requests from "
    text += f"{about['edits_from']}."
    if rate := parts.get("rate", {}).get("rate"):
        text += f" A large matrix product runs at {rate / 1e12:.3g} TFLOP/s."
    if about["most_steps"]:
        text += f" All editors make {about['most_steps']} steps, whatever the table names."
    if elsewhere:
        text += f"\n\nColumn EasyEdit, and numbers of ours before: {elsewhere['origin']}; {elsewhere['settings']}."
    return f"{text}\n"


def _editors(parts: Parts, elsewhere: Mapping[str, Any]) -> str:
    """Seconds per edit; a goal and an earlier number of ours stand behind the number."""
    names = {name: name.rpartition(" ") for name in parts}
    keys = {row.key for row in EDITOR_ROWS}
    counts = sorted({int(last) for key, _, last in names.values() if key in keys and last.isdigit()})
    if not counts:
        return ""
    together = ["alone" if count == 1 else f"{count} together" for count in counts]
    rows = [["editor, seconds per edit", "EasyEdit", "plain loop", *together, "share of the rate", "GiB"]]
    for row in EDITOR_ROWS:
        if not any(key == row.key for key, _, _ in names.values()):
            continue
        cells = [_beside(elsewhere, row.key, str(count), _cell(parts, f"{row.key} {count}")) for count in counts]
        known = [count for count in counts if "seconds" in parts.get(f"{row.key} {count}", {})]
        last = f"{row.key} {known[-1]}" if known else ""
        other = elsewhere.get("easyedit", {}).get(row.key, NONE)
        plain = _cell(parts, f"{row.key} plain")
        rows.append(
            [f"{row.editor}, {row.label}", other, plain, *cells, _share(parts, row.key, last), _gib(parts, last)]
        )
    return _table(rows)


def _beside(elsewhere: Mapping[str, Any], key: str, count: str, cell: str) -> str:
    numbers = [
        (word, elsewhere.get(kind, {}).get(key, {}).get(count)) for word, kind in (("goal", "goals"), ("was", "ours"))
    ]
    beside = ", ".join(f"{word} {number:g}" for word, number in numbers if number is not None)
    return f"{cell} ({beside})" if beside else cell


def _share(parts: Parts, key: str, last: str) -> str:
    """Of the rate of a large product, with as many edits together as were measured."""
    try:
        operations, rate = parts[f"{key} operations"]["operations"], parts["rate"]["rate"]
        return f"{operations / parts[last]['seconds'] / rate:.1%}"
    except KeyError:
        return NONE


def _joint(parts: Parts) -> str:
    names = sorted((name for name in parts if name.startswith("joint ")), key=lambda name: int(name.split()[1]))
    rows = [[f"{name.split()[1]} requests", _cell(parts, name), _gib(parts, name)] for name in names]
    return _table([["memit, one edit of", "seconds per request", "GiB"], *rows]) if rows else ""


def _answers(about: Mapping[str, Any], parts: Parts, elsewhere: Mapping[str, Any]) -> str:
    wanted = elsewhere.get("answers", {})

    def headed(text: str, key: str) -> str:
        return f"{text} (goal {wanted[key]:g})" if key in wanted else text

    what = f"{about['questions']} questions under {QUESTION_EDITS} edits"
    heads = [what, headed("scored, s", "scored"), f"{about['new_tokens']} tokens each, s"]
    rows = [
        [
            name.removeprefix("answers "),
            _cell(parts, name, "scored"),
            _cell(parts, name, "seconds"),
            _cell(parts, name, "tokens_per_second", ".0f"),
            _gib(parts, name),
        ]
        for name in parts
        if name.startswith("answers ")
    ]
    return _table([[*heads, headed("tokens/s", "tokens_per_second"), "GiB"], *rows]) if rows else ""


def _solves(parts: Parts) -> str:
    if "first" not in parts.get("solves", {}):
        return ""
    first, later = (_cell(parts, "solves", key) for key in ("first", "later"))
    return f"A covariance solve of 16 keys in float64: {first} s with the factorization, {later} s after it.\n"


def _time(parts: Parts) -> str:
    heads = ["where the time goes", "s", "operators", "s in them", "launches", "s in them", "s of the card", "busy"]
    rows = []
    for name, found in parts.items():
        if name.startswith("time ") and "seconds" in found:
            kinds = (("seconds", ".3g"), ("operators", "d"), ("operator_seconds", ".3g"), ("launches", "d"))
            cells = [_cell(parts, name, key, form) for key, form in (*kinds, ("launch_seconds", ".3g"))]
            card = found.get("card_seconds")
            busy = NONE if card is None else f"{card / found['seconds']:.0%}"
            rows.append([name.removeprefix("time "), *cells, _cell(parts, name, "card_seconds"), busy])
    return _table([heads, *rows]) if rows else ""


def _notes(parts: Parts) -> str:
    """What failed, what did not end, and which steps were not recorded."""
    notes = [f"- {name} failed: {found['error']}" for name, found in parts.items() if "error" in found]
    notes += [f"- {name} did not end." for name, found in parts.items() if "tries" in found]
    refused = {kind: why for found in parts.values() for kind, why in found.get("not_recorded", {}).items()}
    notes += [f"- Steps of {kind} were not recorded: {why}" for kind, why in refused.items()]
    return "\n".join([*notes, ""]) if notes else ""


def _cell(parts: Parts, name: str, key: str = "seconds", form: str = ".3g") -> str:
    number = parts.get(name, {}).get(key)
    return NONE if number is None else f"{number:{form}}"


def _gib(parts: Parts, name: str) -> str:
    number = parts.get(name, {}).get("peak_bytes")
    return NONE if number is None else f"{number / GIB:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others, ""])
