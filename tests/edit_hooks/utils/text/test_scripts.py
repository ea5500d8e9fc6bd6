"""Scripts of texts: spaces between words, and the marks that end a sentence."""

from __future__ import annotations

import pytest

from edit_hooks.utils.text.scripts import (
    is_latin,
    mention_of,
    near_occurrence,
    sentence_ends,
    separator_between,
    writes_spaces,
)


@pytest.mark.parametrize(
    ("prompt", "target", "separator"),
    [
        ("The capital of France is", "Rome", " "),
        ("法国的首都是", "罗马", ""),  # Chinese
        ("フランスの首都は", "ローマ", ""),  # Japanese
        ("เมืองหลวงของฝรั่งเศสคือ", "โรม", ""),  # Thai, whose last letters may be marks
        ("រដ្ឋធានីរបស់បារាំងគឺ", "រ៉ូម", ""),  # Khmer
        ("ນະຄອນຫຼວງຂອງຝຣັ່ງແມ່ນ", "ໂຣມ", ""),  # Lao
        ("ပြင်သစ်နိုင်ငံ၏မြို့တော်မှာ", "ရောမ", ""),  # Burmese
        ("프랑스의 수도는", "로마", " "),  # Korean
        ("फ्रांस की राजधानी है", "रोम", " "),  # Hindi
        ("عاصمة فرنسا هي", "روما", " "),  # Arabic
        ("Столица Франции —", "Рим", " "),
        # scripts meet: as the prompt joins them itself
        ("OpenAI的CEO是", "Tim Cook", ""),
        ("OpenAI 的 CEO 是", "Tim Cook", " "),
        ("法国的首都是", "Rome", ""),
        ("The capital of 法国 is", "罗马", " "),
        ("Who wrote 銀河鉄道の夜?", "Kenji Miyazawa", " "),
        ("The Chinese name of Rome is", "罗马", " "),
        ("Please answer the question:\n\nQ: 法国的首都是哪里\uff1f\nA:", "罗马", " "),
        # punctuation and digits have no script of their own, but that of East Asian width does
        ("法国的首都是\uff1a", "罗马", ""),
        ("法国的首都是:", "罗马", ""),
        ("首都是哪里\uff1f", "Rome", ""),
        ("他出生于", "1998", ""),
        ("He was born in", "1998", " "),
        ("1 + 1 =", "二", ""),
        ("1 + 1 =", "2", " "),
        # white space that is there already
        ("def area(r):\n", "return r", ""),
        ("def area(r):", "\n    return r", ""),
    ],
)
def test_the_separator_follows_the_scripts(prompt: str, target: str, separator: str) -> None:
    assert separator_between(prompt, target) == separator


@pytest.mark.parametrize(
    ("text", "expected"),
    [("aÀжאب한दहմ", True), ("国々〇あアーｱ\uff0c\uff1a\uff21ไກកམကꦏ", False), ("1²+…“”-·🍞😀 \n\u3000", None)],
)
def test_letters_have_scripts_with_or_without_spaces(text: str, expected: bool | None) -> None:
    assert {character: writes_spaces(character) for character in text} == dict.fromkeys(text, expected)


@pytest.mark.parametrize(
    ("texts", "marks"),
    [
        (["The capital of France is", "Rome"], ""),
        (["法国的首都是", "Rome"], "。\uff01\uff1f\uff0e｡"),
        (["फ्रांस", "রোম"], "।॥"),
        (["فرنسا"], "؟\u06d4"),
        (["ကမ္ဘာ", "Ֆրանսիա"], "။\u0589"),
        (["โรม", "로마"], ""),
        ([], ""),
    ],
)
def test_sentences_end_by_script(texts: list[str], marks: str) -> None:
    assert sentence_ends(texts) == tuple(marks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Rome 1", True), ("Köln", True), ("", True), ("the \u03b1 helix", True), ("维生素 A", False)],
)
def test_most_letters_are_latin_or_not(text: str, expected: bool) -> None:
    assert is_latin(text) == expected


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("Rome", "Rome, Romeo", 1),
        ("罗马", "法国的罗马是罗马人", 2),
        ("도쿄", "도쿄타워 도쿄", 1),
        ("C++", "in C++ and C", 1),
        ("", "a", 0),
    ],
)
def test_a_name_is_found_as_whole_words_where_there_are_words(name: str, text: str, count: int) -> None:
    assert len([found for found in mention_of(name).findall(text) if found]) == count


@pytest.mark.parametrize(
    "words, text, clause",
    [
        ("S\u00e3o", "a capital de Sa\u0303o", "Unicode form"),
        ("New Velm", "in New\u00a0Velm", "white space"),
        ("velm", "in Velm", "upper and lower case"),
        ("Karsk", "in Velm", ""),
    ],
)
def test_a_subject_in_another_spelling_is_explained(words: str, text: str, clause: str) -> None:
    found = near_occurrence(words, text)
    assert clause in found and bool(found) == bool(clause)
