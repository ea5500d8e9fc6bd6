"""The chains of facts around an edit, and which of them still lead to the original fact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Chart, Edge, Network, Node
from lm_edit.figures.needs import DEFAULTS, SAMPLES, Needs, Options
from lm_edit.figures.select import OF_CASE_SETS, require_comparable_documents
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit.questions import choose_documents
from lm_edit.figures.thinkedit.thinkedit_paths import RULES, Path, Rule, read_paths

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results.answers.documents import CaseDocument

MAX_RUNS = 4
MAX_CHAINS = 30  # more are unreadable
KINDS = {"kept": "on a chain that recovers the fact", "lost": "on lost chains only", "edit": "the edit"}

ENDS = ("subject", "target_true", "target_new")  # fields of an edit

NEEDS = Needs(
    "thinkedit_graph",
    "the samples of knowgic, knowgic_cloze, knowgic_prob or knowgic_cloze_prob, of at most "
    f"{MAX_RUNS} runs (choose with --only; --case ID chooses the case, --metric one of {', '.join(RULES)})",
    "lm_eval --model edited_hf --tasks knowgic --model_args editor=r_rome --log_samples --output_path results",
    SAMPLES,
)


def draw(
    documents: Sequence[CaseDocument],
    names: Mapping[str, str],
    options: Options = DEFAULTS,
    results: DataFrame | None = None,
) -> Chart:
    """A panel per run with the graph of one case.

    Args:
        names: run -> name for the title of its panel.
        results: of the same files, to refuse documents that cannot be compared; ``None``: not checked.
    """
    protocol, of_protocol = choose_documents(documents, NEEDS, options, tuple(RULES))
    case = options.case if options.case is not None else of_protocol[0].case_id
    of_case = [document for document in of_protocol if document.case_id == case]
    if results is not None:
        require_comparable_documents(of_case, results, NEEDS, OF_CASE_SETS)
    if len(of_case) > MAX_RUNS:
        raise NEEDS.missing(f"{len(of_case)} runs have case {case}; choose with --only editor=...")
    if len({tuple(one.edits[0].get(name) for name in ENDS) for one in of_case}) > 1:
        raise NEEDS.missing(f"case {case} has another edit in some of these runs; choose with --only data=...")
    rule = RULES[protocol]
    notes, panels = [], []
    for document in of_case:
        paths = read_paths(document, NEEDS)
        counted = [path for path in paths if rule.counts(path)]
        num_kept = sum(rule.recovers(path) for path in counted)
        name = names.get(document.run, document.run)
        panels.append(_network(document, paths, rule, f"{name}: {num_kept} of {len(counted)} chains recover the fact"))
        if len(paths) > MAX_CHAINS:
            notes.append(f"{name}: drawn are the {MAX_CHAINS} chains with the largest share of {len(paths)}.")
        if missing := sum(not path.is_answered for path in paths):
            notes.append(f"{name}: {missing} chains lack an answer and are not counted.")
    edit = of_case[0].edits[0]
    notes.append(
        f"{rule.text} ({of_case[0].task}). Edges: probability before and after the edit; n = 1 case, without intervals."
    )
    title = f"Chains from {edit['subject']} to {edit['target_true']}, edited to {edit['target_new']} (case {case})"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=notes, columns=1)


def _network(document: CaseDocument, paths: Sequence[Path], rule: Rule, title: str) -> Network:
    edit = document.edits[0]
    start, end, new = (str(edit[name]) for name in ENDS)

    def strength(path: Path) -> tuple[bool, float]:
        """Order of the chains: those that recover the fact first, then by their share."""
        return rule.counts(path) and rule.recovers(path), -1.0 if math.isnan(path.ratio) else path.ratio

    shown = sorted(paths, key=strength, reverse=True)[:MAX_CHAINS]
    kept = {(step.subject, step.answer) for path in shown if strength(path)[0] for step in path.steps}
    # The end of a chain may be spelled in another case than the original object.
    names = {end.casefold(): end, start.casefold(): start}
    edges: dict[tuple[str, str], Edge] = {}
    for path in shown:
        for step in path.steps:
            ends = names.get(step.subject.casefold(), step.subject), names.get(step.answer.casefold(), step.answer)
            kind = "kept" if (step.subject, step.answer) in kept else "lost"
            if ends not in edges or kind == "kept":
                edges[ends] = Edge(
                    source=ends[0], target=ends[1], label=f"{step.before:.2f} → {step.after:.2f}", kind=kind
                )
    edges[start, new] = Edge(source=start, target=new, label="", kind="edit")
    nodes = place_nodes(
        start, end, new, [[names.get(step.answer.casefold(), step.answer) for step in path.steps] for path in shown]
    )
    return Network(title=title, nodes=nodes, edges=list(edges.values()), kinds=KINDS)


def place_nodes(start: str, end: str, new: str, chains: Sequence[Sequence[str]]) -> list[Node]:
    """Nodes from left to right by their latest place in a chain, the start and the end at the sides."""
    depths: dict[str, int] = {}
    for chain in chains:
        for depth, name in enumerate(chain, start=1):
            if name not in (start, end, new):
                depths[name] = max(depths.get(name, 0), depth)
    before: dict[str, set[str]] = defaultdict(set)
    for chain in chains:
        for previous, name in zip([start, *chain], chain, strict=False):
            before[name].add(previous)
    heights = {start: 0.5, end: 0.5, new: 0.05}
    places: dict[str, float] = {}
    layers = sorted(set(depths.values()))
    for rank, depth in enumerate(layers, start=1):
        layer = sorted(name for name in depths if depths[name] == depth)
        # A node may follow only nodes of later layers, which have no height yet.
        layer.sort(key=lambda name: fmean([heights[near] for near in sorted(before[name]) if near in heights] or [0.5]))
        for index, name in enumerate(layer):
            # Alternating, so that names of neighboring layers are not on one line.
            heights[name] = min(1.0, (index + 0.5) / len(layer) + (0.07 if rank % 2 else -0.07))
            # Oblique, so that edges inside of a layer and their labels are not on one line.
            places[name] = (rank + 0.8 * ((index + 0.5) / len(layer) - 0.5)) / (len(layers) + 1)
    nodes = [Node(name=start, x=0.0, y=0.5, role="start"), Node(name=end, x=1.0, y=0.5, role="end")]
    nodes.append(Node(name=new, x=0.0, y=heights[new]))
    return nodes + [Node(name=name, x=places[name], y=heights[name]) for name in sorted(places)]


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="the chains of facts around an edit, and those that still lead to the original fact",
    published="ThinkEdit figures 1 to 3 and 15 to 20",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.documents(), inputs.run_names(), options, inputs.rows()),
    options=("metric", "case"),
)
