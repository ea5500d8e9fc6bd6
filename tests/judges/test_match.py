"""String judges in every script: properties of our own rules, and the published rule bit for bit."""

from __future__ import annotations

import re
import string
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.utils import logs
from judges.base import CORRECT, INCORRECT, Item
from judges.match import alias_match, contains, exact_match, match_ratio, normalize, words
from judges.squad import squad_match, squad_normalize
from judges.string_judge import RULES, StringJudge

# A name, what may surround it in a sentence, and another name
NAMES = {
    "chinese": ("罗马", "首都是", "。", "巴黎"),
    "japanese": ("ローマ", "首都は", "です。", "パリ"),
    "thai": ("โรม", "เมืองหลวงคือ", "", "ปารีส"),
    "khmer": ("រ៉ូម", "ទីក្រុង", "។", "ប៉ារីស"),
    "lao": ("ໂຣມ", "ນະຄອນ", "", "ປາຮີ"),
    "burmese": ("ရောမ", "မြို့", "။", "ပါရီ"),
    "korean": ("로마", "수도는 ", "입니다.", "파리"),
    "russian": ("\u0420\u0438\u043c", "\u044d\u0442\u043e ", ".", "\u041f\u0430\u0440\u0438\u0436"),
    "hindi": ("रोम", "राजधानी ", " है।", "पेरिस"),
    "arabic": ("روما", "العاصمة ", "؟", "باريس"),
    "english": ("Rome", "the capital is ", ".", "Paris"),
}
PUNCTUATION = [chr(point) for point in range(sys.maxunicode) if unicodedata.category(chr(point))[0] == "P"]


def released_normalize(text: str) -> str:
    """The four steps of SQuAD's evaluation, written from its description."""
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@given(st.text())
def test_the_published_rule_is_that_of_squad(text: str) -> None:
    assert squad_normalize(text) == released_normalize(text)


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)))
def test_on_ascii_our_rule_is_the_published_one(answer: str, gold: str) -> None:
    assert normalize(answer) == squad_normalize(answer)
    assert exact_match(answer, gold) == squad_match(answer, gold)
    padded_answer, padded_gold = (f" {squad_normalize(text)} " for text in (answer, gold))
    assert alias_match(answer, [gold]) == (padded_gold.strip() != "" and padded_gold in padded_answer)
    assert words(answer) == squad_normalize(answer).split()


@pytest.mark.parametrize("language", NAMES)
def test_right_answers_are_right_and_wrong_ones_wrong(language: str) -> None:
    name, before, after, other = NAMES[language]
    sentence, elsewhere = f"{before}{name}{after}", f"{before}{other}{after}"
    for text, is_right in ((sentence, True), (elsewhere, False)):
        assert contains(text, name) == alias_match(text, [name]) == is_right
        item = Item("q", name, text)
        labels = {rule: StringJudge(rule).judge([item]).verdicts[0].label for rule in RULES}
        assert labels["contains"] == labels["alias"] == (CORRECT if is_right else INCORRECT)
    assert exact_match(f"{name}{after if len(after) == 1 else ''}", name) and not exact_match(other, name)
    assert match_ratio(f"{name}{after}" if before[-1:] != " " else f"{name} {after}", name) == 1.0


@given(
    st.sampled_from(list(NAMES)),
    st.lists(st.sampled_from(PUNCTUATION), max_size=4),
    st.lists(st.sampled_from(PUNCTUATION)),
)
def test_marks_around_an_answer_do_not_count(language: str, before: list[str], after: list[str]) -> None:
    name = NAMES[language][0]
    answer = f"{''.join(before)}{name}{''.join(after)}"
    assert exact_match(answer, name) and contains(answer, name) and alias_match(answer, [name])


@given(st.text(st.characters(codec="utf-8")))
def test_forms_of_one_text_are_one_text(text: str) -> None:
    """Composed or not, and full-width in place of ASCII."""
    assert normalize(unicodedata.normalize("NFD", text)) == normalize(unicodedata.normalize("NFC", text))
    plain = "".join(character for character in text if character.isascii() and character.isalnum()) or "a1"
    wide = "".join(chr(ord(character) + 0xFEE0) for character in plain)
    assert normalize(f"\u0416{wide}") == normalize(f"\u0416{plain}")


@pytest.mark.parametrize(
    "written, plain",
    [
        (
            "\u0627\u0644\u0652\u0642\u064e\u0627\u0647\u0650\u0631\u064e\u0629",
            "\u0627\u0644\u0642\u0627\u0647\u0631\u0629",
        ),
        ("\u0627\u0644\u0642\u0640\u0640\u0627\u0647\u0631\u0629", "\u0627\u0644\u0642\u0627\u0647\u0631\u0629"),
        ("\u0643\u0631\u0645\u0627\u0646\u064a", "\u06a9\u0631\u0645\u0627\u0646\u06cc"),
        ("\u05d7\u05b5\u05d9\u05e4\u05b8\u05d4", "\u05d7\u05d9\u05e4\u05d4"),
        ("\u05d7\u05c7\u05db\u05b0\u05de\u05b8\u05d4", "\u05d7\u05db\u05de\u05d4"),
    ],
    ids=["vowel marks of Arabic", "a widened word", "Arabic letters in a Persian word", "points of Hebrew", "short o"],
)
def test_marks_that_are_optional_in_a_script_do_not_count(written: str, plain: str) -> None:
    assert exact_match(written, plain) and exact_match(plain, written)
    assert contains(f"{written}.", plain) and alias_match(f"in {plain}", [written])
    assert not exact_match("\u0622\u0628", "\u0627\u0628"), "madda is part of its letter"


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_our_rules_agree_with_each_other(answer: str, gold: str) -> None:
    once = normalize(answer)
    assert not set(once) & set(string.punctuation) and once == " ".join(once.split())
    assert not any(unicodedata.category(character) in ("Cf", "Ps", "Pe", "Po", "Pi", "Pf") for character in once)
    assert "".join(words(answer)) == once.replace(" ", "")
    if exact_match(answer, gold):
        assert contains(answer, gold) and alias_match(answer, [gold]) and match_ratio(answer, gold) == 1.0
    if alias_match(answer, [gold]):
        assert contains(answer, gold)


@given(
    st.sampled_from(["Ur", "Po", "Oz", "\u00c5s", "\u0420\u0438\u043c"]),
    st.sampled_from("bcdfg\u00e9\u0436"),
    st.booleans(),
)
def test_short_names_stay_whole_words(name: str, letter: str, is_before: bool) -> None:
    inside = f"{letter}{name}" if is_before else f"{name}{letter}"
    assert not contains(inside, name) and contains(f"in {name}, {letter}", name)


def test_a_warning_says_once_that_a_rule_is_for_english(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    for _ in range(2):
        assert not squad_match("\u7f57\u9a6c\u3002", "\u7f57\u9a6c") and squad_match("K\u00f6ln", "k\u00f6ln!")
    (record,) = caplog.records
    assert "made for English" in record.message and "*_contains" in record.message
