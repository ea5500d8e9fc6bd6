"""The chains of facts around an edit, and which of them still lead to the original fact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from lm_edit.figures.charts import Chart, Edge, Network, Node
from lm_edit.figures.spec import DEFAULTS, SAMPLES, FigureSpec, Needs, Options

if TYPE_CHECKING:
    from lm_edit.results import CaseDocument, Question

TASKS = ("knowgic_prob", "knowgic_cloze_prob")
MAX_RUNS = 4
MAX_CHAINS = 30  # more are unreadable
RECOVERED = 0.5  # of a chain's strength before the edit
KINDS = {"kept": "on a chain that recovers the fact", "lost": "on lost chains only", "edit": "the edit"}

NEEDS = Needs(
    "thinkedit_graph",
    f"the samples of {' or '.join(TASKS)}, of at most {MAX_RUNS} runs (choose with --only; --case ID chooses the case)",
    "lm_eval --model edited_hf --tasks knowgic_prob --model_args editor=r_rome --log_samples --output_path results",
    SAMPLES,
)


class Step(NamedTuple):
    """A fact of a chain: its ends, its question, and the probability of its answer before and after the edit."""

    subject: str
    answer: str
    question: str
    before: float
    after: float


class Path(NamedTuple):
    """A chain with its strengths R, the products of its steps' probabilities."""

    steps: tuple[Step, ...]

    @property
    def ratio(self) -> float:
        """Strength after the edit as a share of that before; NaN for an inactive chain."""
        before = math.prod(step.before for step in self.steps)
        return math.prod(step.after for step in self.steps) / before if before else math.nan


def draw(documents: Sequence[CaseDocument], names: Mapping[str, str], options: Options = DEFAULTS) -> Chart:
    """A panel per run with the graph of one case.

    Args:
        names: run -> name for the title of its panel.
    """
    of_tasks = [document for document in documents if document.task in TASKS and document.extras.get("chains")]
    if not of_tasks:
        raise NEEDS.missing("no sample has chains of facts")
    case = options.case if options.case is not None else of_tasks[0].case_id
    of_case = [document for document in of_tasks if document.case_id == case and document.edits]
    if not of_case:
        known = ", ".join(list(dict.fromkeys(document.case_id for document in of_tasks))[:20])
        raise NEEDS.missing(f"there is no case {case!r}; there are {known}")
    if len(of_case) > MAX_RUNS:
        raise NEEDS.missing(f"{len(of_case)} runs and tasks have case {case}; choose with --only editor=...")
    notes, panels = [], []
    for document in of_case:
        paths = read_paths(document)
        active = [path for path in paths if not math.isnan(path.ratio)]
        kept = [path for path in active if path.ratio >= RECOVERED]
        title = f"{names.get(document.run, document.run)}: {len(kept)} of {len(active)} chains recover the fact"
        panels.append(_network(document, paths, title))
        if len(paths) > MAX_CHAINS:
            notes.append(f"Drawn: the {MAX_CHAINS} chains with the largest share of {len(paths)}.")
    edit = of_case[0].edits[0]
    notes.append(
        "A chain recovers the fact if the product of its answers' probabilities (per token) after the edit is at least "
        f"{RECOVERED:g} of that before ({document.task}). Edges: probability before and after the edit; n = 1 case, "
        "without intervals."
    )
    title = f"Chains from {edit['subject']} to {edit['target_true']}, edited to {edit['target_new']} (case {case})"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=notes, columns=1)


def read_paths(document: CaseDocument) -> list[Path]:
    """The chains of a case and its answers' probabilities as the task scores them, exp of the mean log-probability."""
    prompts = list(dict.fromkeys(question.prompt for question in document.questions))
    scored = {(question.prompt, question.target): question for question in document.questions}
    paths = []
    for chain in document.extras["chains"]:
        steps, subject = [], str(document.edits[0]["subject"])
        for number, answer in chain:
            question = scored.get((prompts[number], answer)) or scored.get((prompts[number], f" {answer}"))
            if question is None:
                raise NEEDS.missing(f"case {document.case_id} has no answer {answer!r} to {prompts[number]!r}")
            steps.append(Step(subject, answer, prompts[number], *_probabilities(question)))
            subject = answer
        paths.append(Path(tuple(steps)))
    return paths


def _probabilities(question: Question) -> tuple[float, float]:
    before, after = question.unedited, question.answers.get("")
    values = []
    for answer in (before, after):
        if answer is None or answer.logprob is None or not answer.num_tokens:
            values.append(math.nan)
        else:
            values.append(math.exp(answer.logprob / answer.num_tokens))
    return values[0], values[1]


def _network(document: CaseDocument, paths: Sequence[Path], title: str) -> Network:
    edit = document.edits[0]
    start, end, new = (str(edit[name]) for name in ("subject", "target_true", "target_new"))
    shown = sorted(paths, key=lambda path: -1.0 if math.isnan(path.ratio) else path.ratio, reverse=True)[:MAX_CHAINS]
    kept = {(step.subject, step.answer) for path in shown if path.ratio >= RECOVERED for step in path.steps}
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
    published="ThinkEdit figures 1 and 15 to 20",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.documents(), inputs.run_names(), options),
    options=("case",),
)
