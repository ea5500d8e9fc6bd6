"""Thoughts in the replies of reasoning models, and the answer behind them.

A thought ends with a closing marker. Its opening marker is often missing, because many chat templates write it into the
prompt. Texts that the model quotes may contain markers as well, so the answer begins behind the *last* closing marker,
and a marker that opens a thought behind it leaves no answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TAGS = "think|thinking|thought|thoughts|reasoning|analysis|reflection|scratchpad|seed:think"
# Opening and closing markers that are no tags: Mistral, Command A, OpenThinker, Kimi, Gemma 4
_PAIRS = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>", "<channel|>"),
)
_OPENINGS = "|".join([rf"<(?:{_TAGS})>", *(re.escape(opening) for opening, _ in _PAIRS)])
_CLOSINGS = "|".join([rf"</(?:{_TAGS})>", *(re.escape(closing) for _, closing in _PAIRS)])
_OPENING = re.compile(_OPENINGS, re.IGNORECASE)
_CLOSING = re.compile(_CLOSINGS, re.IGNORECASE)

# gpt-oss writes its thought and its answer in channels. A server that drops special tokens leaves their names.
_CHANNEL = "<|channel|>"
_FINAL_CHANNEL = re.compile(r"<\|channel\|>\s*final\b[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>")
_CHANNEL_TOKENS = (_CHANNEL, "<|message|>", "<|start|>", "<|end|>")
_BARE_ANALYSIS, _BARE_FINAL = "analysis", "assistantfinal"
# Granite 3.2 marks both parts by sentences, which count in this order only.
_SENTENCES = ("Here is my thought process:", "Here is my response:")

_TOKEN = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]?>|<\w{1,40}\|>|</?s>|<eos>|<end_of_turn>")

_OPENED = re.compile(
    rf"(?:(?:{_OPENINGS})(?:thought)?|<\|channel\|>\s*analysis\s*<\|message\|>)(?=\s*\Z)", re.IGNORECASE
)


class Answer(NamedTuple):
    """The part of a reply behind its thought.

    Args:
        text: ``None`` if the reply ends inside of a thought.
        is_behind_thought: whether there is a thought.
    """

    text: str | None
    is_behind_thought: bool


def split_answer(reply: str, think_end: str | None = None) -> Answer:
    """Return the answer behind the last thought of a reply.

    Args:
        reply: the full reply.
        think_end: text that ends the thought of every reply; one without it is a thought without an end. ``None`` for
            models of which this is not known. Common markers count in either case.
    """
    text, is_behind_thought = reply, False
    if think_end:
        _, end, text = reply.rpartition(think_end)
        if not end:
            return Answer(None, True)
        is_behind_thought = True
    for split in (_behind_bare_channels, _behind_channels, _behind_sentences, _behind_markers):
        answer = split(text)
        if answer.text is None:
            return answer
        text, is_behind_thought = answer.text, is_behind_thought or answer.is_behind_thought
    return Answer(text, is_behind_thought)


def opened_thought(prompt: str) -> str:
    """Return the marker with which a prompt opens the thought of its reply; the empty string without one."""
    opened = _OPENED.search(prompt[-200:])
    return opened[0] if opened else ""


def is_marker(token: str) -> bool:
    """Whether a special token marks thoughts, so that the text of a reply needs it."""
    return token in _CHANNEL_TOKENS or bool(_OPENING.fullmatch(token) or _CLOSING.fullmatch(token))


def without_special_tokens(text: str) -> str:
    """Return a text without the special tokens around it, such as ``<|im_end|>``, which some servers do not remove.

    A text with one inside of it stays as it is.
    """
    parts = [part for part in _TOKEN.split(text) if part.strip()]
    return text if len(parts) > 1 else "".join(parts).strip()


def _behind_markers(text: str) -> Answer:
    closings = list(_CLOSING.finditer(text))
    rest = text[closings[-1].end() :] if closings else text
    return Answer(None, True) if _OPENING.search(rest) else Answer(rest, bool(closings))


def _behind_bare_channels(text: str) -> Answer:
    thought = text.lstrip().removeprefix(_BARE_ANALYSIS)
    if thought == text.lstrip():
        return Answer(text, False)
    _, final, rest = thought.rpartition(_BARE_FINAL)
    if final:
        return Answer(rest, True)
    # The dropped token leaves no space behind the name; a reply about an analysis has one, or a mark.
    return Answer(None, True) if thought[:1].isupper() else Answer(text, False)


def _behind_channels(text: str) -> Answer:
    if _CHANNEL not in text:
        return Answer(text, False)
    finals = list(_FINAL_CHANNEL.finditer(text))
    rest = text[finals[-1].end() :] if finals else _CHANNEL
    return Answer(None if _CHANNEL in rest else rest, True)


def _behind_sentences(text: str) -> Answer:
    opening, closing = _SENTENCES
    if not text.lstrip().startswith(opening):
        return Answer(text, False)
    _, end, rest = text.rpartition(closing)
    return Answer(rest if end else None, True)
