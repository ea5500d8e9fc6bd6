"""Blocks of the reference: harness options, columns of results, plans, model families, figures, the Python API."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import yaml
from block import ROOT, Block, definition, table

from edit_hooks.lm.options.harness import PARENT_OPTIONS
from lm_edit.figures.registry import all_figures
from lm_edit.results import schema
from lm_edit.sweeps.planning.plan import load_plan, shipped_plans

FAMILIES = ROOT / "docs" / "_data" / "families.yaml"
PUBLIC = ("edit_hooks", "edit_hooks.training", "edit_hooks.contract", "judges", "lm_eval_tasks", "lm_edit")
COLUMNS = {
    "results": schema.RESULT_COLUMNS,
    "cases": schema.CASE_COLUMNS,
    "retention": schema.RETENTION_COLUMNS,
    "breakdown": schema.BREAKDOWN_COLUMNS,
}


def harness_options(_: str) -> Block:
    """Options of lm-eval's class by their effect on editing documents."""
    parts = []
    for effect in ("honored", "no effect", "refused"):
        entries = []
        for name, option in PARENT_OPTIONS.items():
            if option.effect == effect:
                values = ", ".join(f"`{value}`" for value in option.accepted)
                accepted = f"Accepted: {values}." if values else ""
                entries.append(definition(f"`{name}`", option.note, accepted))
        parts += [f"## {effect.capitalize()}", *entries]
    return Block("\n\n".join(parts))


def columns(which: str) -> Block:
    """Columns of a table of results with their types."""
    entries = [definition(f"`{name}`", meaning, f"*{kind}*") for name, (kind, meaning) in COLUMNS[which].items()]
    return Block("\n\n".join(entries))


def schema_version(_: str) -> Block:
    """The version of the schema."""
    return Block(f"Version of the schema: {schema.SCHEMA_VERSION} (`SCHEMA_VERSION`).")


def plans(_: str) -> Block:
    """A section per shipped plan: what it reproduces, what its source leaves open, and what differs from it."""
    parts = []
    for name, path in shipped_plans().items():
        plan = load_plan(path)
        lines = [f"- *Not stated*: {text}" for text in plan.unstated]
        lines += [f"- *Differs*: {text}" for text in plan.differs]
        lines += [
            f"- *Without* {', '.join(f'`{name}`' for name in names)}: {reason}"
            for reason, names in plan.without.items()
        ]
        source = f"Source: {plan.source}." if plan.source else ""
        parts += [f"### {name}", f"{plan.description}. {source}", "\n".join(lines)]
    return Block("\n\n".join(part for part in parts if part))


def families(_: str) -> Block:
    """Model families by the result of their self-check, those with the largest offer first, and the number of each."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load(FAMILIES.read_text(encoding="utf-8"))
    offers: dict[str, list[str]] = {}
    for name, row in rows.items():
        offers.setdefault(row["offer"], []).append(name)
    most_first = sorted(offers, key=lambda offer: -len(offers[offer]))
    counts = "; ".join(f"{offer}: {len(offers[offer])}" for offer in most_first)
    heads = ("`model_type`", "class", "offered", "blocks", "scale", "what fails")
    cells = [_family(name, rows[name]) for offer in most_first for name in offers[offer]]
    return Block(f"{len(rows)} families ({counts}).\n\n{table(heads, cells)}")


def _family(name: str, row: dict[str, Any]) -> list[str]:
    fails = "; ".join(f"{check}: {reason}" for check, reason in row.get("failed", {}).items())
    scale = "" if "blocks" not in row else "none" if row["scale"] is None else f"{row['scale']:g}"
    attention = f"; `family=attention_output`: {row['attention_output']}" if "attention_output" in row else ""
    return [f"`{name}`", f"`{row['class']}`", row["offer"] + attention, str(row.get("blocks", "")), scale, fails]


def figures(_: str) -> Block:
    """All figures and tables of `lm-edit figure`."""
    rows = []
    for spec in all_figures():
        rows.append([f"[`{spec.name}`](docs/results/figures.md#{spec.name})", spec.published, spec.title])
    return Block(table(["figure", "follows", "shows"], rows))


def citation(_: str) -> Block:
    """The BibTeX entry of the software, of CITATION.cff."""
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in facts["authors"])
    fields = {
        "author": authors,
        "title": facts["title"],
        "version": facts["version"],
        "year": facts["date-released"].year,
        "note": facts["abstract"],
    }
    lines = [f"  {name:<7} = {{{value}}}," for name, value in fields.items()]
    return Block("\n".join(["```bibtex", "@software{lm_eval_editing,", *lines, "}", "```"]))


def api(package: str) -> Block:
    """Every name in ``__all__`` of a package, from its docstring."""
    names = sorted(importlib.import_module(package).__all__, key=str.lower)
    lines = ["```{eval-rst}", f".. currentmodule:: {package}", ""]
    for name in names:
        value = getattr(importlib.import_module(package), name)
        if isinstance(value, type):
            lines += [f".. autoclass:: {name}", "   :members:", *_inherited(value), "   :show-inheritance:", ""]
        elif callable(value):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. py:data:: {name}", f"   :type: {type(value).__name__}", ""]
    return Block("\n".join([*lines, "```"]))


def _inherited(cls: type) -> list[str]:
    """The option that shows what a class has of bases without an entry of their own, as the settings of an editor."""
    shown = {name for package in PUBLIC for name in importlib.import_module(package).__all__}
    bases = cls.__mro__[1:]
    own = [base for base in bases if base.__module__.partition(".")[0] in PUBLIC and base.__name__ not in shown]
    others = [base.__name__ for base in bases if base not in own and base is not object]
    return [f"   :inherited-members: {', '.join([*others, 'object'])}"] if own else []


REFERENCE_BLOCKS: dict[str, Callable[[str], Block]] = {
    "harness-options": harness_options,
    "columns": columns,
    "schema-version": schema_version,
    "plans": plans,
    "families": families,
    "figures": figures,
    "citation": citation,
    "api": api,
}
