"""Reference texts of CounterFact, and the IDF weights of consistency.

The published ones are three files of the data server of ROME: ``attribute_snippets.json`` (texts about subjects that
have an object in a relation), ``idf.npy`` and ``tfidf_vocab.json`` (word -> index of its IDF). Without them, the
references are embedded texts in the same layout, and the IDF is computed from the references themselves.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import require_file, require_folder, sha256_of, user_path
from edit_hooks.utils.storage.json_io import read_json, read_rows
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.scoring.text_metrics import inverse_document_frequencies
from lm_eval_tasks.common.settings import Settings, text_setting

logger = get_logger("lm_eval.editing_tasks")

SNIPPETS, IDF, VOCABULARY = "attribute_snippets.json", "idf.npy", "tfidf_vocab.json"
SERVER = "https://rome.baulab.info/data/dsets"
# As in a public copy whose counterfact.json has the digest of the server's (see benchmark.py).
PUBLISHED_SHA256 = {
    SNIPPETS: "10b5c1cd105e54d5983c72de1b45bfc88bc7af786f7b99def2557886ff23385b",
    IDF: "c073d642589d4ac6432f467230329b36364a01e72de63a77a3624b745b923dda",
    VOCABULARY: "8a78c4f20d8d85dadfd14e283d71af255482ff18aa0eb8a81716024c05ff888b",
}
EMBEDDED = Path(__file__).parent / "data" / SNIPPETS

CONSISTENCY_FILES = text_setting(
    "consistency_files", f"published reference texts and IDF weights: {SNIPPETS}, {IDF}, {VOCABULARY}", "a folder"
)
CONSISTENCY_TEXTS = text_setting(
    "consistency_texts", "your own reference texts, whose IDF is computed from them", f"a file like {SNIPPETS}"
)

Key = tuple[str, str]  # ids of relation and new object


@dataclass(frozen=True)
class References:
    """Reference texts by relation and object, and the weight of each known word."""

    texts: Mapping[Key, Sequence[str]]
    weights: Mapping[str, float]


def find_references(settings: Settings) -> dict[str, str]:
    """Where the reference texts of a run are, for its documents; keyword arguments of :func:`load_references`.

    Raises:
        EditingError: for files that are missing or violate their layout, and for both settings together.
    """
    folder, texts = CONSISTENCY_FILES.read(settings), CONSISTENCY_TEXTS.read(settings)
    if folder and texts:
        raise EditingError("consistency_files and consistency_texts are two sources of reference texts; give one.")
    where = {"files": str(user_path(folder, "consistency_files"))} if folder else {}
    where |= {"texts": str(user_path(texts, "consistency_texts"))} if texts else {}
    load_references(**where)  # before the first edit
    return where


@functools.cache
def load_references(files: str = "", texts: str = "") -> References:
    """Read reference texts and IDF weights, once per process.

    Args:
        files: folder of the published files.
        texts: another file of reference texts; without both, the embedded one.

    Raises:
        EditingError: for files that are missing or violate their layout.
    """
    if not files:
        references = _read_snippets(Path(texts) if texts else EMBEDDED)
        documents = [text for group in references.values() for text in group]
        return References(references, inverse_document_frequencies(documents))
    folder = require_folder(files, "consistency_files")
    paths = [folder / name for name in PUBLISHED_SHA256]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise EditingError(
            f"consistency_files={folder} lacks {', '.join(missing)}. They are published at {SERVER}; with reference "
            "texts of your own, give consistency_texts=/path/to/file."
        )
    others = [path.name for path in paths if sha256_of(path) != PUBLISHED_SHA256[path.name]]
    if others:
        logger.warning("%s: %s differ from the published files; so may reference_score.", folder, ", ".join(others))
    return References(_read_snippets(folder / SNIPPETS), _read_weights(folder))


def _read_snippets(path: Path) -> dict[Key, list[str]]:
    """The texts of each pair of ids; pairs that occur twice are joined, as in the release."""
    references: dict[Key, list[str]] = defaultdict(list)
    for where, record in read_rows(require_file(path, "file of reference texts"), "file of reference texts"):
        if not isinstance(record, Mapping):
            raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
        fields = Fields(record, where)
        key = fields.text("relation_id"), fields.text("target_id")
        references[key] += [sample.text("text") for sample in fields.objects("samples")]
    return dict(references)


def _read_weights(folder: Path) -> dict[str, float]:
    """Word -> IDF."""
    vocabulary = read_json(folder / VOCABULARY, "vocabulary")
    try:
        idf = numpy.load(folder / IDF, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise EditingError(f"{folder / IDF} is not an array of numbers: {first_line(error)}.") from None
    is_index = isinstance(vocabulary, dict) and all(
        type(index) is int and 0 <= index < idf.size for index in vocabulary.values()
    )
    if not (is_index and idf.ndim == 1 and idf.dtype.kind == "f" and numpy.isfinite(idf).all()):
        raise EditingError(
            f"{folder}: {VOCABULARY} must map words to positions of {IDF}, a row of {idf.size} finite numbers."
        )
    return {word: float(idf[index]) for word, index in vocabulary.items()}
