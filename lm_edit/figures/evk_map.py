"""Map of embeddings: edit prompts, their neighborhood prompts and virtual instances, in two dimensions by UMAP."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.json_io import read_json
from lm_edit.figures.charts import Chart, Points, Series
from lm_edit.figures.output import INSTALL
from lm_edit.figures.spec import FILE, FigureSpec, Inputs, Needs, Options

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

NEEDS = Needs(
    "evk_map",
    "one file of vectors written by lm-edit embed, and the JSON description beside it; and umap-learn",
    "lm-edit embed --edits counterfact --out vectors.safetensors",
    FILE,
)


def draw(vectors: ndarray, kinds: Sequence[str], title: str = "Embeddings of edits and virtual instances") -> Chart:
    """A point per vector, colored by its kind.

    Args:
        vectors: [N, H] hidden states. kinds: of each vector.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or len(kinds) != len(vectors):
        raise NEEDS.missing(f"{len(vectors)} vectors have {len(kinds)} kinds, unknown: {', '.join(unknown) or 'none'}")
    if len(vectors) < 4:
        raise NEEDS.missing(f"there are {len(vectors)} vectors; a map needs 4")
    places = reduce_dimensions(vectors)
    series = []
    for kind, (name, look) in KINDS.items():
        rows = [index for index, own in enumerate(kinds) if own == kind]
        if rows:
            xs, ys = ([float(places[row][axis]) for row in rows] for axis in (0, 1))
            series.append(Series(name=f"{name} (n = {len(rows)})", positions=xs, values=ys, color=look, style=look))
    panel = Points(title="", series=series, position_label="UMAP 1", value_label="UMAP 2", axes=False)
    caption = [
        f"UMAP of {len(vectors)} hidden states, cosine distance, {min(NEIGHBORS, len(vectors) - 1)} neighbors, "
        f"min_dist {MIN_DIST}, seed {SEED}. Distances on the map are not distances of the model."
    ]
    return Chart(name=NEEDS.figure, title=title, panels=[panel], caption=caption, columns=1)


def reduce_dimensions(vectors: ndarray) -> ndarray:
    """Coordinates [N, 2] by UMAP with a fixed seed, on one thread."""
    if importlib.util.find_spec("umap") is None:
        raise EditingError(f"figure {NEEDS.figure} needs umap-learn: {INSTALL}.")
    import umap

    reducer = umap.UMAP(
        n_neighbors=min(NEIGHBORS, len(vectors) - 1), min_dist=MIN_DIST, metric="cosine", random_state=SEED, n_jobs=1,
        init="spectral" if len(vectors) > NEIGHBORS else "random",
    )  # fmt: skip
    return reducer.fit_transform(vectors)


def _from_file(inputs: Inputs, options: Options) -> Chart:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = inputs.file(NEEDS)
    description = read_json(path.with_suffix(".json"), "description of vectors")
    try:
        vectors = load_file(path)["vectors"]
    except (SafetensorError, KeyError) as error:
        raise NEEDS.missing(f"{path} has no vectors ({error})") from None
    if not isinstance(description, Mapping) or not isinstance(description.get("rows"), list):
        raise NEEDS.missing(f"{path.with_suffix('.json')} does not describe vectors")
    return draw(vectors, [str(row["kind"]) for row in description["rows"]])


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="map of the embeddings of edits, neighbors and virtual instances",
    published="EVK figure 5",
    needs=NEEDS,
    draw=_from_file,
)
