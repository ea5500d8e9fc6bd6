"""The judge prompt of WILD in its authors' words, read at run time from their public repository.

The words are theirs, so this package holds only the address and the digest of the file. The prompt is one string
constant of a Python module; the module's text is searched for it and never executed.

Source: the released code of Yang et al., The Mirage of Model Editing: Revisiting Evaluation in the Wild (ACL 2025).
"""

from __future__ import annotations

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import read_text
from edit_hooks.utils.storage.pinned_file import PinnedFile

NAME = "published_wording"

SOURCE = PinnedFile(
    repository="WanliYoung/Revisit-Editing-Evaluation",
    commit="61ccca3c1ecdb3976c9c0924e9352f3e64cc7d48",
    path="easyeditor/evaluate/evaluate_utils.py",
    sha256="c785a2d8a882eebe84672f07466b54c7b9799de8809a858075bc7a36584dcc0a",
)
BEGIN, END = 'content_template = """', '""".strip()'

# The release fills these slots with str.format, without quoting; the other ones have the names of ours.
SLOTS = {"{target}": "{gold}", "{predicted_answer}": "{answer}"}


def fetch_published_wording() -> str:
    """Return the user message of the released judge, with this package's slots.

    Raises:
        EditingError: if the file is neither in the cache nor can be downloaded.
    """
    module = read_text(SOURCE.fetch())
    _, found, rest = module.partition(BEGIN)
    body, closed, _ = rest.partition(END)
    if not (found and closed):
        raise EditingError(f"{SOURCE.url} holds no text between {BEGIN!r} and {END!r}.")
    for theirs, ours in SLOTS.items():
        body = body.replace(theirs, ours)
    return body.strip()
