"""Text that is safe to print, in errors and in log lines."""

from __future__ import annotations

import logging
import pickle

import pytest

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.printable import MAX_MESSAGE, printable
from judges.base import CoverageError


def test_control_characters_are_escaped_and_line_feeds_kept() -> None:
    assert printable("a\x1b[31m\tb\r\nc\x9b\u202e\ud800é日") == "a\\x1b[31m\\tb\\r\nc\\x9b\\u202e\\ud800é日"


def test_long_texts_keep_beginning_and_end() -> None:
    shown = printable("start" + "\x00" * 10**6 + "end")
    assert len(shown) <= MAX_MESSAGE and shown.startswith("start\\x00") and shown.endswith("end")
    assert "characters" in shown


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
