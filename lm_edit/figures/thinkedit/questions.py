"""Shared by the figures of ThinkEdit: the columns and samples of KnowGIC under one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_edit.figures.needs import Needs, Options

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results.answers.documents import CaseDocument

# Endings of the columns, the published protocol first.
PROTOCOLS = (
    "sampled", "prob", "cloze_sampled", "cloze_prob", "relation_prob", "yes_no_sampled", "yes_no_prob",
)  # fmt: skip
BY_METRIC = f"--metric chooses the ending: {', '.join(PROTOCOLS)}"
COMMAND = "lm_eval --model edited_hf --tasks knowgic --model_args editor=r_rome --output_path results"


def choose_protocol(rows: DataFrame, needs: Needs, options: Options, columns: tuple[str, ...]) -> tuple[str, list[str]]:
    """The ending under which some row has each of the columns, and sentences about the choice for the caption.

    Raises:
        EditingError: if no ending has them all; for an unknown ``--metric``.
    """
    present = set(rows[rows["stage"] == ""]["metric"])
    accepted = PROTOCOLS if options.metric is None else (options.metric,)
    if options.metric is not None and options.metric not in PROTOCOLS:
        raise needs.missing(f"--metric {options.metric} is unknown. Accepted: {', '.join(PROTOCOLS)}")
    for protocol in accepted:
        if all(f"{column}_{protocol}" in present for column in columns):
            is_published = protocol == PROTOCOLS[0] or options.metric is not None
            return protocol, [] if is_published else [f"Protocol: {protocol}; the published one is {PROTOCOLS[0]}."]
    wanted = " and ".join(f"{column}_<{'|'.join(accepted)}>" for column in columns)
    raise needs.missing(f"no run has the columns {wanted}")


def choose_documents(
    documents: Sequence[CaseDocument], needs: Needs, options: Options, protocols: Sequence[str] = PROTOCOLS
) -> tuple[str, list[CaseDocument]]:
    """The first ending that some sample has, or that of ``--metric``, and its documents of ``--case``, if given.

    Args:
        protocols: the accepted endings, in the order of preference.

    Raises:
        EditingError: for an ending that is not accepted, or that no sample has, and for an unknown case.
    """
    if options.metric is not None and options.metric not in protocols:
        raise needs.missing(f"--metric {options.metric} is unknown. Accepted: {', '.join(protocols)}")
    accepted = protocols if options.metric is None else (options.metric,)
    by_protocol: dict[str, list[CaseDocument]] = {}
    for document in documents:
        if document.extras.get("chains"):
            by_protocol.setdefault(str(document.extras.get("columns")), []).append(document)
    protocol = next((name for name in accepted if name in by_protocol), None)
    if protocol is None:
        raise needs.missing(f"no sample has chains of facts under {' or '.join(accepted)}")
    of_protocol = by_protocol[protocol]
    chosen = [one for one in of_protocol if options.case in (None, one.case_id) and one.edits]
    if not chosen:
        known = ", ".join(list(dict.fromkeys(one.case_id for one in of_protocol))[:20])
        raise needs.missing(f"there is no case {options.case!r}; there are {known}")
    return protocol, chosen
