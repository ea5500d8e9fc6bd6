"""How RippleEdits states facts: from the sentence of a fact to its prompt, subject and object.

A record has the sentence alone. Relations without a row here are stated as ``The name of the <relation> of {} is``,
with the relation's name in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

STATED: Mapping[str, str] = {
    "SIBLING": "The names of the siblings of {} are",
    "NUMBER_OF_CHILDREN": "The number of children {} has is",
    "SEX_OR_GENDER": "The gender of {} is",
    "PLACE_OF_BIRTH": "The place of birth of {} is",
    "PLACE_OF_DEATH": "The place of death of {} is",
    "PLACE_OF_BURIAL": "The place of burial of {} is",
    "COUNTRY": "The name of the country which {} is associated with is",
    "POSITION_HELD": "The name of the position held by {} is",
    "MEMBER_OF_SPORTS_TEAM": "The name of the sports team which {} is a member of is",
    "SEXUAL_ORIENTATION": "The sexual orientation of {} is",
    "OCCUPATION": "The occupation of {} is",
    "LEAGUE": "The name of the league which {} plays in is",
    "NATIVE_LANGUAGE": "The mother tongue of {} is",
    "AWARD_RECEIVED": "The name of the award {} won is",
    "FOLLOWS": "{} follows",
    "FOLLOWED_BY": "{} is followed by",
    "ETHNIC_GROUP": "The name of the ethnic group which {} is associated with is",
    "RELIGION": "The name of the religion which {} is associated with is",
    "EYE_COLOR": "The eye color of {} is",
    "DATE_OF_BIRTH": "The date of birth of {} is",
    "DATE_OF_DEATH": "The date of death of {} is",
    "CONTINENT": "The name of the continent which {} is part of is",
    "CAPITAL": "The name of the capital city of {} is",
    "CURRENCY": "The name of the currency in {} is",
    "OFFICIAL_LANGUAGE": "The official language of {} is",
    "LIKELY_ANTHEM": "The name of the anthem that is most likely to be performed in {} is",
    "CAPITAL_OF": "The name of the country which {} is the capital of is",
    "CAST_MEMBER": "The names of the cast members of {} are",
}


class StatedFact(NamedTuple):
    """A fact as a prompt with ``{}``, its subject, and its object."""

    prompt: str
    subject: str
    object: str


def read_fact(sentence: str, relation: str, other: str | None = None) -> StatedFact | None:
    """Take a sentence apart; ``None`` if it does not have the form of its relation.

    Args:
        other: the same fact with another object, where there is one: both share all up to the object. It decides where
            a subject or an object has the words of the relation's form.
    """
    words = relation.lower().replace("_", " ")
    before, _, after = STATED.get(relation, "{}").partition("{}")
    if relation not in STATED:
        before, after = f"The name of the {words} of ", " is"
    found = re.fullmatch(rf"{re.escape(before)}(?P<rest>.+?)\.?", sentence)
    if found is None:
        return None
    parts = found["rest"].split(f"{after} ")
    if len(parts) < 2:
        return None
    cuts = [(f"{after} ".join(parts[:number]), f"{after} ".join(parts[number:])) for number in range(1, len(parts))]
    if other is not None:
        cuts = [cut for cut in cuts if other.startswith(f"{before}{cut[0]}{after} ")] or cuts
    subject, target = cuts[-1] if other is not None else cuts[0]
    return StatedFact(f"{before}{{}}{after}", subject, target) if subject.strip() and target.strip() else None
