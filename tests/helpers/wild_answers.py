"""Scripted free answers to the invented QAEdit records."""

from __future__ import annotations

WILD_TASK = "qaedit_wild_reliability"
WILD_ANSWERS = {
    "Who designed the Fenwick aqueduct?": " Orsa Lind. She",
    "In which city was the painter Jo Marsh born?": " The town of Brannock",
    "Which mark closes the third stanza of Pim's Ode?": " A bracket",
    "What year did the Halden tram start running?": " In 1911\nQ:",
}


def wild_texts(context: str, unedited: bool) -> str:
    """The edited model answers as above; the unedited one always answers 1911, which is right for the tram."""
    return " 1911." if unedited else WILD_ANSWERS.get(context.partition("Q: ")[2].split("\n")[0], " nothing")
