"""Text that is safe to print, in errors and in log lines."""

from __future__ import annotations

import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.utils.errors import EditingError, first_line, unknown_keys_error
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.printable import MAX_MESSAGE, printable
from judges.base import CoverageError


def test_control_characters_are_escaped_and_line_feeds_kept() -> None:
    assert printable("a\x1b[31m\tb\r\nc\x9b\u202e\ud800é日") == "a\\x1b[31m\\tb\\r\nc\\x9b\\u202e\\ud800é日"


def test_long_texts_keep_beginning_and_end() -> None:
    shown = printable("start" + "\x00" * 10**6 + "end")
    assert len(shown) <= MAX_MESSAGE and shown.startswith("start\\x00") and shown.endswith("end")
    assert "characters" in shown


def test_quoted_values_are_shortened_before_the_words_around_them() -> None:
    prompts = [f"{name} {'x' * 900} {name}" for name in ("first", "second", "it's")]
    quoted = " and ".join(map(repr, prompts))
    message = printable(f"the user's prompts {quoted} don't fit the model's context; shorten them, or use another.")
    assert len(message) <= MAX_MESSAGE
    assert message.startswith("the user's prompts 'first xxx") and " [...] " in message
    assert message.endswith("""it's" don't fit the model's context; shorten them, or use another.""")
    assert printable(message) == message
    assert printable("'" + "x" * 200 + "' is long", 60).endswith("' is long")


@given(
    st.lists(st.one_of(st.text(max_size=400), st.text(max_size=400).map(repr)), max_size=9).map(" ".join),
    st.integers(60, 400),
)
def test_a_shortened_text_is_within_its_limit_printable_and_shortened_once(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit and shown.replace("\n", "").isprintable()
    assert printable(shown, limit) == shown and (shown == text or len(text) > limit or not text.isprintable())


def test_errors_of_libraries_keep_the_line_that_has_the_reason() -> None:
    assert first_line(RuntimeError("Error(s) in loading Model:\n\n\tsize mismatch\n\tmore")) == (
        "RuntimeError: Error(s) in loading Model: size mismatch"
    )
    assert first_line(ValueError("one\ntwo")) == "ValueError: one" and first_line(OSError()) == "OSError"


def test_many_unknown_keys_leave_room_for_the_accepted_ones() -> None:
    keys = [f"foreign_{number}" for number in range(40)]
    message = str(unknown_keys_error("setting", [*keys, "clampfactor"], ["lr", "clamp_factor"]))
    first, *_, more, accepted = message.splitlines()
    assert first == "unknown setting 'clampfactor'. Did you mean 'clamp_factor'?"
    assert more.startswith("and 35 more: 'foreign_") and accepted == "Accepted: clamp_factor, lr."


@pytest.mark.parametrize("kind", [EditingError, CoverageError])
def test_every_error_of_ours_is_printable(kind: type[EditingError]) -> None:
    error = kind("\x1b]0;title\x07" + "x" * 10**6)
    assert len(str(error)) <= MAX_MESSAGE and str(error).startswith("\\x1b]0;title\\x07x")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # processes of a run hand errors on


def test_unknown_keys_are_cut_one_by_one() -> None:
    message = str(unknown_keys_error("setting", ["l" * 10**6, "\x1blr"], ["lr"]))
    assert "Did you mean 'lr'" in message and message.endswith("Accepted: lr.") and len(message) < 600


def test_log_lines_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("lm_eval.edited_hf")
    assert get_logger("lm_eval.edited_hf") is logger and len(logger.filters) == 1
    with caplog.at_level(logging.WARNING, "lm_eval.edited_hf"):
        logger.warning("case %s", "\x1b[2J" + "x" * 10**6)
    (message,) = caplog.messages
    assert message.startswith("case \\x1b[2Jx") and len(message) <= MAX_MESSAGE
