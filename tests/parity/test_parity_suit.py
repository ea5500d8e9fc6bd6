"""SUIT by its formulas: numbers worked by hand, the identities of both subspaces, and an edit by plain algebra.

The released code could not be read, so no run of the authors can be repeated.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from layered_edits import EDIT_REQUESTS, load_wide

from edit_hooks import EditingError, load_editor
from edit_hooks.editors import suit
from edit_hooks.editors.suit import SUITConfig, entity_names, exchange, first_pairs
from edit_hooks.locate.moments.leading import leading_vectors, without_directions
from edit_hooks.locate.values.key_reader import mean_keys, read_rows
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.hooks import hooks, on_output

NAMES = ["Marie Curie", "the city of Vienna", "Lake Victoria", "a red bicycle"]
REQUEST, OTHER = EDIT_REQUESTS[:2]
TEMPLATES = ["{}", "The band released. {}"]


def wide(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("state", "first", "second", "expected"),
    [
        # Orthogonal: the parts 3 and 4 along them change places.
        ((3.0, 4.0, 7.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, -1.0, 0.0)),
        # h . w_1 = 3, h . w_2 = 5: 2 (w_1 - w_2).
        ((3.0, 4.0, 7.0), (1.0, 0.0, 0.0), (0.6, 0.8, 0.0), (0.8, -1.6, 0.0)),
    ],
)
def test_offsets_worked_by_hand(state, first, second, expected):
    offset = exchange(wide(state), wide(first, second)[None])
    torch.testing.assert_close(offset, wide(expected), rtol=0, atol=1e-12)


def test_an_offset_of_an_orthogonal_pair_keeps_the_norm():
    generator = torch.Generator().manual_seed(0)
    hidden, pairs = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 9), (5, 2, 9)))
    pairs = torch.nn.functional.normalize(pairs, dim=2)
    w1, w2 = pairs.unbind(1)
    along1, along2 = ((hidden * one).sum(1, keepdim=True) for one in (w1, w2))
    paper = (along2 - along1) * w1 + (along1 - along2) * w2
    torch.testing.assert_close(exchange(hidden, pairs), paper, rtol=0, atol=1e-12)
    assert bool((paper.norm(dim=1) < 4 * hidden.norm(dim=1)).all())
    basis = torch.linalg.qr(pairs.mT).Q.mT
    moved = hidden + exchange(hidden, basis)
    torch.testing.assert_close(moved.norm(dim=1), hidden.norm(dim=1), rtol=1e-12, atol=0)
    assert float((moved - hidden).norm(dim=1).min()) > 0.1


def test_a_pair_starts_orthogonal_and_without_an_offset():
    hidden, gradient = wide([3.0, 0.0, 4.0]), wide([0.0, 2.0, 0.0])
    pairs = first_pairs(hidden, gradient)
    half = 0.5**0.5
    torch.testing.assert_close(pairs[0], half * wide([0.6, -1.0, 0.8], [0.6, 1.0, 0.8]), rtol=0, atol=1e-12)
    assert float((pairs[:, 0] * pairs[:, 1]).sum()) == pytest.approx(0, abs=1e-12)
    assert float(exchange(hidden, pairs).norm()) < 1e-12


@pytest.mark.parametrize(("energy", "count"), [(0.0, 0), (0.7, 1), (0.74, 2), (0.95, 3)])
def test_keys_without_the_leading_directions_of_entities(energy, count):
    """Squares 36, 9, 4 of 49: .735, .918."""
    basis = leading_vectors(wide([0.0, 6.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 2.0]), energy)[1]
    purified = without_directions(wide([5.0, 7.0, 8.0]), basis)
    expected = [[5.0, 7.0, 8.0], [5.0, 0.0, 8.0], [0.0, 0.0, 8.0], [0.0, 0.0, 0.0]][count]
    torch.testing.assert_close(purified, wide(expected), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def wide_model():
    return load_wide("gpt2")


def settings_of(**given):
    return {
        "layers": [1],
        "num_steps": 4,
        "context_templates": TEMPLATES,
        "entities": NAMES,
        "l2": 0.5,
        "keep_intermediates": True,
        **given,
    }


def projector(width):
    """Onto half of the directions."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(width, width // 2, generator=generator, dtype=torch.float64)).Q
    return basis @ basis.T


def true_key(model, tokenizer, request):
    rows = [rewriting_row(tokenizer, request, template) for template in TEMPLATES]
    return mean_keys(read_rows(model, rows, [1], 1).keys_RF[1], 1)[0].double()


def test_an_update_by_plain_algebra(wide_model):
    """a = P k' / (L2 + k'^T P k'), and the true key is written with the share k^T P k' / (L2 + k'^T P k')."""
    model, tokenizer = wide_model
    key = true_key(model, tokenizer, REQUEST)
    matrix = projector(len(key))
    editor = load_editor("suit", settings_of(projectors={1: matrix}, entity_energy=0.6))
    (delta,) = editor.edit(model, tokenizer, [REQUEST], measure=False)
    names = [tokenizer(name)["input_ids"] for name in NAMES]
    with torch.no_grad():
        states = {}
        module = next(m for n, m in model.named_modules() if n.endswith("1.mlp.c_proj"))
        handle = module.register_forward_pre_hook(lambda _, args: states.__setitem__("k", args[0][0, -1]))
        keys = []
        for ids in names:
            model(torch.tensor([ids]))
            keys.append(states["k"])
        handle.remove()
    _, values, vh = torch.linalg.svd(torch.stack(keys), full_matrices=False)
    shares = values.square().cumsum(0) / values.square().sum()
    count = int((shares < 0.6).sum()) + 1
    assert 0 < count < len(NAMES)
    purified = key - vh[:count].T @ (vh[:count] @ key)
    written = matrix @ purified / (0.5 + purified @ matrix @ purified)
    torch.testing.assert_close(delta.intermediates["keys.layer1"][0], purified, rtol=0, atol=1e-9)
    torch.testing.assert_close(delta.intermediates["adj_k.layer1"][:, 0], written, rtol=0, atol=1e-9)
    (record,) = delta.diagnostics["layers"]
    assert record["num_directions"] == count
    assert record["written_share"] == pytest.approx(float(key @ written), rel=1e-9)
    assert record["key_share"] == pytest.approx(float(purified.square().sum() / key.square().sum()), rel=1e-9)
    residual = delta.intermediates["resid.layer1"]
    (update,) = delta.weights().values()
    torch.testing.assert_close(update.T, residual @ written[None], rtol=0, atol=1e-9)


@pytest.mark.parametrize("joint", [False, True])
def test_without_both_subspaces_it_is_alphaedit(wide_model, joint):
    """Bit for bit, in the second step of a stream, too."""
    model, tokenizer = wide_model
    shared = {"projectors": {1: projector(len(true_key(model, tokenizer, REQUEST)))}}
    plain_settings = settings_of(**shared)
    del plain_settings["entities"]
    ours = load_editor("suit", settings_of(**shared, entity_energy=0.0, residual="offset"))
    plain = load_editor("alphaedit", plain_settings)
    results = []
    for editor in (ours, plain):
        first = editor.edit(model, tokenizer, [REQUEST, OTHER], joint=joint, measure=False)
        results.append([*first, *editor.edit(model, tokenizer, [OTHER], history=first[:1], measure=False)])
    for one, other in zip(*results, strict=True):
        for name, update in other.weights().items():
            torch.testing.assert_close(one.weights()[name], update, rtol=0, atol=0)


def test_later_steps_protect_purified_keys(wide_model):
    """The next update leaves the value of an earlier k' nearly alone, and not that of a key that was never written."""
    model, tokenizer = wide_model
    width = len(true_key(model, tokenizer, REQUEST))
    editor = load_editor("suit", settings_of(projectors={1: torch.eye(width).double()}, entity_energy=0.6, l2=1e-6))
    (first,) = editor.edit(model, tokenizer, [REQUEST], measure=False)
    carried = first.stream_state["keys.layer1"][:, 0]
    torch.testing.assert_close(carried, first.intermediates["keys.layer1"][0].to(carried), rtol=0, atol=1e-6)
    (second,) = editor.edit(model, tokenizer, [OTHER], history=[first], measure=False)
    (update,) = second.weights().values()
    (alone,) = editor.edit(model, tokenizer, [OTHER], measure=False)[0].weights().values()
    carried = carried.to(update)
    assert float((update.T @ carried).norm()) < 1e-3 * float((alone.T @ carried).norm())


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_every_row_exchanges_the_parts_of_its_own_state(wide_model, engine):
    """The first loss under given pairs, by the model's own forward pass with the states replaced."""
    model, tokenizer = wide_model
    generator = torch.Generator().manual_seed(2)
    pair = torch.nn.functional.normalize(torch.randn(1, 2, 32, generator=generator, dtype=torch.float64), dim=2)
    rows = [rewriting_row(tokenizer, REQUEST, template) for template in TEMPLATES]
    difference = pair[0, 0] - pair[0, 1]
    block = next(module for name, module in model.named_modules() if name.endswith("h.1"))
    losses, offsets = [], []
    for row in rows:

        def replaced(hidden, row=row):
            state = hidden[0, row.position]
            offsets.append(-difference * (difference @ state))
            hidden = hidden.clone()
            hidden[0, row.position] += offsets[-1]
            return hidden

        with torch.no_grad(), hooks(on_output(block, replaced)):
            log_p = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        losses.append(-sum(log_p[position, token] for position, token in row.labels) / len(row.labels))
    settings = settings_of(second_moments=["Some text to read."], num_steps=1, engine=engine, orthogonality=2.0)
    with mock.patch.object(suit, "first_pairs", return_value=pair):
        (delta,) = load_editor("suit", settings).edit(model, tokenizer, [REQUEST], measure=False)
    (record,) = delta.diagnostics["losses"]
    assert record["nll"] == pytest.approx(float(sum(losses)) / len(rows), rel=1e-9)
    cosine = float((pair[0, 0] * pair[0, 1]).sum())
    assert record["orthogonality"] == pytest.approx(2 * cosine**2, rel=1e-9)
    assert delta.diagnostics["cosine"] == pytest.approx(cosine, rel=1e-9)
    torch.testing.assert_close(delta.intermediates["z_delta"][0], offsets[0], rtol=0, atol=1e-9)


def test_names_come_from_a_file(tmp_path, wide_model):
    model, tokenizer = wide_model
    file = tmp_path / "names.txt"
    file.write_text("\n".join(["", *NAMES, "  "]), encoding="utf-8")
    settings = settings_of(second_moments=["Some text to read."], entity_energy=0.6, num_steps=1)
    editors = [load_editor("suit", {**settings, "entities": source}) for source in (NAMES, str(file))]
    listed, read = (one.edit(model, tokenizer, [REQUEST], measure=False)[0] for one in editors)
    assert read.meta["config"]["entities_digest"] and not listed.meta["config"]["entities_digest"]
    for name, update in listed.weights().items():
        torch.testing.assert_close(read.weights()[name], update, rtol=0, atol=0)
    file.write_text("Another Name\n", encoding="utf-8")
    with pytest.raises(EditingError, match="changed since"):
        load_editor("suit", read.meta["config"]).edit(model, tokenizer, [REQUEST], measure=False)


def test_own_names_are_distinct():
    names = entity_names("own")
    assert len(names) == len(set(names)) == 266


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stream": "exact", "layers": [1]}, "counts on an update"),
        ({"deflation": 0.01}, "counts on an update"),
        ({"entities": [" "]}, "has no name"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(EditingError, match=message):
        SUITConfig(**settings)


def test_a_file_without_names_is_refused(tmp_path, wide_model):
    model, tokenizer = wide_model
    file = tmp_path / "names.txt"
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(EditingError, match="it has no name"):
        load_editor("suit", settings_of(entities=str(file))).edit(model, tokenizer, [REQUEST], measure=False)
    with pytest.raises(EditingError, match="file of entities"):
        load_editor("suit", settings_of(entities=str(tmp_path / "none.txt"))).edit(model, tokenizer, [REQUEST])


def test_a_name_beyond_the_positions_of_a_model_is_refused(wide_model):
    model, tokenizer = wide_model
    name = "Port Amelin " * model.config.max_position_embeddings
    with pytest.raises(EditingError, match=r"a name in 'entities' takes \d+ tokens, and the model has \d+ positions"):
        load_editor("suit", settings_of(entities=[*NAMES, name])).edit(model, tokenizer, [REQUEST], measure=False)
