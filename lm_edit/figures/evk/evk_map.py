"""Map of embeddings: edit prompts, their neighborhood prompts and virtual instances, in two dimensions by UMAP."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import sha256_of
from edit_hooks.utils.storage.json_io import read_json
from lm_edit.figures.drawing.charts import Chart, Points, Series
from lm_edit.figures.drawing.output import INSTALL
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import FILE, Needs, Options
from lm_edit.figures.spec import FigureSpec
from lm_eval_tasks.report.run_options import portable

if TYPE_CHECKING:
    from numpy import ndarray

# kind of a vector -> (its name in the legend, color and marker)
KINDS = {
    "neighborhood": ("neighborhood prompts", 0),
    "evk_subject": ("virtual, subject", 2),
    "evk_relation": ("virtual, relation", 1),
    "evk_all": ("virtual, all tokens", 4),
    "edit": ("edit prompts", 3),  # drawn last, above the others
}
NEIGHBORS, MIN_DIST, SEED = 15, 0.1, 0  # UMAP's defaults, and a fixed seed
MIN_ROWS = NEIGHBORS + 1
MAX_NAMED = 3  # files of one editor in the caption

TENSORS = {"unedited": "unedited model", "edited": "edited model"}

NEEDS = Needs(
    "evk_map",
    "one file of vectors written by lm-edit embed, with its JSON description beside it; and umap-learn",
    "lm-edit embed --out vectors.safetensors",
    FILE,
)


def draw(vectors: Mapping[str, ndarray], kinds: Sequence[str], notes: Sequence[str] = ()) -> Chart:
    """A panel per model on one map; a point per vector, colored by its kind.

    Args:
        vectors: ``unedited`` and, with edits, ``edited``, each [N, H] hidden states. kinds: of each row.
    """
    import numpy

    models = [name for name in TENSORS if name in vectors]
    unknown = sorted(set(kinds) - set(KINDS))
    if not models or unknown or any(len(kinds) != len(vectors[name]) for name in models):
        raise NEEDS.missing(
            f"the vectors are not those of {len(kinds)} rows, or of unknown kinds ({', '.join(unknown)})"
        )
    if len(kinds) < MIN_ROWS:
        raise NEEDS.missing(f"there are {len(kinds)} prompts; a map needs {MIN_ROWS}")
    places = reduce_dimensions(numpy.concatenate([vectors[name] for name in models]))
    panels = [
        Points(
            title=TENSORS[name] if len(models) > 1 else "",
            series=_series(places[index * len(kinds) : (index + 1) * len(kinds)], kinds),
            position_label="UMAP 1",
            value_label="UMAP 2",
            axes=False,
        )
        for index, name in enumerate(models)
    ]
    caption = [
        f"UMAP of n = {len(kinds)} hidden states{' per model, on one map' if len(models) > 1 else ''}: cosine "
        f"distance, {NEIGHBORS} neighbors, min_dist {MIN_DIST}, seed {SEED}. Distances on the map are not distances of "
        "the model.",
        *notes,
    ]
    title = "Embeddings of edits and virtual instances"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption)


def _series(places: ndarray, kinds: Sequence[str]) -> list[Series]:
    series = []
    for kind, (name, look) in KINDS.items():
        rows = [index for index, own in enumerate(kinds) if own == kind]
        if rows:
            xs, ys = ([float(places[row][axis]) for row in rows] for axis in (0, 1))
            series.append(Series(name=f"{name} (n = {len(rows)})", positions=xs, values=ys, color=look, style=look))
    return series


def reduce_dimensions(vectors: ndarray) -> ndarray:
    """Coordinates [N, 2] by UMAP with a fixed seed, on one thread."""
    if importlib.util.find_spec("umap") is None:
        raise EditingError(f"figure {NEEDS.figure} needs umap-learn: {INSTALL}.")
    import umap

    reducer = umap.UMAP(
        n_neighbors=NEIGHBORS, min_dist=MIN_DIST, metric="cosine", random_state=SEED, n_jobs=1,
    )  # fmt: skip
    return reducer.fit_transform(vectors)


def _from_file(inputs: Inputs, options: Options) -> Chart:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = inputs.file(NEEDS)
    beside = path.with_suffix(".json")
    description = read_json(beside, "description of vectors")
    if not isinstance(description, Mapping) or not isinstance(description.get("rows"), list):
        raise NEEDS.missing(f"{beside} does not describe vectors")
    if description.get("sha256") != sha256_of(path):
        raise NEEDS.missing(f"{beside} describes another file than {path}")
    try:
        vectors = load_file(path)
    except SafetensorError as error:
        raise NEEDS.missing(f"{path} has no vectors ({error})") from None
    return draw(vectors, [str(row["kind"]) for row in description["rows"]], facts_of(description))


def facts_of(description: Mapping[str, Any]) -> list[str]:
    """Sentences for the caption: model, noise, prompts, edits and what is left out, as described beside the vectors."""
    known = portable(dict(description))
    unit = "standard deviations of the embeddings" if known.get("relative") else "absolute"
    sentences = [
        f"Model: {known.get('model')}; hidden states: {known.get('state')}; sigma of the noise: {known.get('sigma')} "
        f"({unit}), seed {known.get('seed')}."
    ]
    source = known.get("data_source") or {}
    origin = {"data": source.get("data"), "commit": source.get("commit") or source.get("revision")}
    origin["subset"] = source.get("subset") if source.get("subset") != "all" else None
    listed = ", ".join(f"{name} {value}" for name, value in origin.items() if value)
    sentences.append(f"Prompts: {known.get('benchmark')}{f' ({listed})' if listed else ''}.")
    if edits := known.get("edits"):
        sentences.append(f"Edited by: {', '.join(_named(edits))}.")
    if left_out := [f"{count} ({reason})" for reason, count in (known.get("skipped") or {}).items()]:
        sentences.append(f"Left out: {', '.join(left_out)}.")
    return [" ".join(sentences[:2]), *sentences[2:]]


def _named(edits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Editors with their files, of many files as of a stream the first and the last one."""
    for editor, group in itertools.groupby(edits, lambda edit: edit.get("editor") or "unknown editor"):
        files = [str(edit.get("file")) for edit in group]
        if len(files) > MAX_NAMED:
            yield f"{editor} ({len(files)} files, {files[0]} to {files[-1]})"
        else:
            yield from (f"{editor} ({file})" for file in files)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="map of the embeddings of edits, neighbors and virtual instances",
    published="EVK figure 5",
    needs=NEEDS,
    draw=_from_file,
)
