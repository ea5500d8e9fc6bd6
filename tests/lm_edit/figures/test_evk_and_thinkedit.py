"""Figures of EVK and ThinkEdit: drawn values worked by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from result_rows import frame, row
from safetensors.numpy import save_file

from edit_hooks import EditingError
from edit_hooks.utils.storage.files import sha256_of
from lm_edit.figures.evk import evk_align, evk_glue, evk_map
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import Options
from lm_edit.figures.thinkedit import thinkedit_ckp, thinkedit_ifr, thinkedit_tradeoff

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import bars, categories, lines, points, texts


def aligned(value):
    return {"editor_config": {"evk_align": value}, "settings": f"align {value}"}


class TestGlue:
    def run(self, num_edits, value, align, **changes):
        return row(
            "memit", "editglue_cola", "f1", value, mode="sequential", num_edits=float(num_edits), is_rate=False,
            **aligned(align) | changes,
        )  # fmt: skip

    def test_a_line_with_and_one_without(self):
        rows = [self.run(100, 0.5, False), self.run(10, 0.6, False), self.run(100, 0.7, True)]
        chart = evk_glue.draw(frame(*rows, row("unedited", "editglue_cola", "f1", 0.65)))
        found = lines(chart)
        assert found["memit"] == ([10, 100], [0.6, 0.5]) and found["memit + EVK-Align"] == ([100], [0.7])
        assert found["unedited"][1] == [0.65, 0.65]
        assert [panel.title for panel in chart.panels] == ["CoLA"]

    def test_single_edits_say_nothing(self):
        with pytest.raises(EditingError, match="no run has num_edits"):
            evk_glue.draw(frame(row("memit", "editglue_cola", "f1", 0.5)))
        with pytest.raises(EditingError, match=r"runs of memit have 100 edits; choose with --only seed=0[.] It"):
            evk_glue.draw(frame(self.run(100, 0.5, False), self.run(100, 0.6, False, seed=1.0)))

    def test_groups_of_edits_are_no_point(self):
        """Files of older runs hold the unedited model's answers under the editor's name."""
        groups = {"mode": "batch", "group_size": 2.0, "n": 77.0, "run": "groups"}
        with pytest.raises(EditingError, match="no run has num_edits without group_size"):
            evk_glue.draw(frame(self.run(10, 0.9, False) | groups))
        rows = [self.run(10, 0.6, False), self.run(20, 0.9, False) | groups]
        chart = evk_glue.draw(frame(*rows, row("rome", "editglue_cola", "f1", 0.9, n=78.0)))
        assert lines(chart) == {"memit": ([10], [0.6])}
        assert "n = 30 cases. Data: mini; model: tiny; mode: sequential." in chart.caption[0]
        assert chart.caption[1:] == [
            "Not drawn, without a number of edits on one model: memit (batch, 20 edits, groups of 2), rome."
        ]

    def test_unscored_points_are_named_with_panel_and_position(self):
        cola = [self.run(number, value, False) for number, value in ((10, 0.6), (100, math.nan), (500, math.nan))]
        rte = [self.run(number, math.nan, False) | {"task": "editglue_rte"} for number in (10, 100)]
        chart = evk_glue.draw(frame(*cola, *rte))
        assert chart.sentences[1:] == ["Unscored (CoLA): memit at 100, 500.", "Unscored (RTE): memit."]

    def test_streams_of_other_edits_are_no_line(self):
        rows = [self.run(100, 0.5, False, edits="qaedit (hub)"), self.run(10, 0.6, False, edits="zsre (hub)")]
        with pytest.raises(EditingError, match=r"different edits \(qaedit \(hub\), zsre \(hub\)\)"):
            evk_glue.draw(frame(*rows))

    def test_runs_of_other_settings_are_no_line(self):
        batch = self.run(100, 0.5, False) | {"mode": "batch", "run": "other"}
        with pytest.raises(EditingError, match=r"the runs of memit differ in mode \(batch, sequential\)"):
            evk_glue.draw(frame(batch, self.run(500, 0.4, False)))


class TestAlign:
    def test_pairs_of_bars(self):
        rows = [
            row("rome", "counterfact_es", "efficacy_prob", value, **aligned(on))
            for on, value in ((False, 0.5), (True, 0.75))
        ]
        alone = row("memit", "counterfact_es", "efficacy_prob", 0.9, **aligned(False))
        chart = evk_align.draw(frame(*rows, alone | {"n": 77.0, "mode": "batch"}))
        assert categories(chart) == ["rome"]  # memit has no pair
        assert "n = 30 cases. Data: mini; model: tiny; mode: single." in chart.caption[0]
        assert chart.caption[1:] == ["Not drawn, run in one way only: memit."]
        assert bars(chart) == [(0, 0.5), (0, 0.75)]

    def test_without_a_pair(self):
        with pytest.raises(EditingError, match="no editor has runs with and without evk_align"):
            evk_align.draw(frame(row("rome", "counterfact_es", "efficacy_prob", 0.5, **aligned(False))))


class TestMap:
    KINDS = (*["edit"] * 8, *["neighborhood"] * 6, *["evk_all"] * 4)

    def vectors(self):
        return np.random.default_rng(0).normal(size=(len(self.KINDS), 6)).astype("float32")

    def write(self, folder, **changes):
        path = folder / "vectors.safetensors"
        save_file({"unedited": self.vectors()}, path)
        rows = [{"kind": kind, "case_id": "0", "prompt": "p"} for kind in self.KINDS]
        (folder / "vectors.json").write_text(json.dumps({"sha256": sha256_of(path), "rows": rows, **changes}))
        return Inputs([str(path)])

    def test_a_point_per_vector(self, monkeypatch):
        monkeypatch.setattr(evk_map, "reduce_dimensions", lambda vectors: vectors[:, :2])
        vectors = self.vectors()
        chart = evk_map.draw({"unedited": vectors, "edited": vectors + 1}, self.KINDS)
        assert np.allclose(sorted(points(chart, 1)), sorted(map(tuple, vectors[:, :2] + 1)))
        names = [series.name for series in chart.panels[0].series]
        assert names == ["neighborhood prompts (n = 6)", "virtual, all tokens (n = 4)", "edit prompts (n = 8)"]

    def test_the_caption_has_what_the_description_says(self, tmp_path, monkeypatch):
        monkeypatch.setattr(evk_map, "reduce_dimensions", lambda vectors: vectors[:, :2])
        described = {
            "model": "/home/somebody/models/tiny", "state": "after_norm", "sigma": 3.0, "relative": True, "seed": 5,
            "benchmark": "counterfact", "data_source": {"data": "hub:multi", "commit": "0123abc", "subset": "all"},
            "edits": [{"file": "/home/somebody/edit.safetensors", "checksum": "c", "editor": "memit"}],
            "skipped": {"the prompt lacks its subject, so it is not perturbed": 2},
        }  # fmt: skip
        caption = evk_map.SPEC.draw(self.write(tmp_path, **described), Options()).caption
        assert caption[1:] == [
            "Model: tiny; hidden states: after_norm; sigma of the noise: 3.0 (standard deviations of the embeddings), "
            "seed 5. Prompts: counterfact (data hub:multi, commit 0123abc).",
            "Edited by: memit (edit.safetensors).",
            "Left out: 2 (the prompt lacks its subject, so it is not perturbed).",
        ]
        plain = evk_map.facts_of({**described, "relative": False, "edits": [], "skipped": {}})
        assert len(plain) == 1 and "sigma of the noise: 3.0 (absolute)" in plain[0]

    def test_the_steps_of_a_stream_are_not_listed(self):
        """A stream of 2,010 single edits filled the caption with as many names."""
        stream = [{"file": f"stream/edit-{number:04d}.safetensors", "editor": "memit"} for number in range(2010)]
        other = {"file": "one.safetensors", "editor": None}
        edited = evk_map.facts_of({"edits": [*stream, other]})[1]
        assert edited == (
            "Edited by: memit (2010 files, stream/edit-0000.safetensors to stream/edit-2009.safetensors), "
            "unknown editor (one.safetensors)."
        )

    @pytest.mark.slow  # numba compiles for a minute
    def test_umap_from_a_file(self, tmp_path):
        pytest.importorskip("umap", reason="umap-learn is not installed")
        inputs = self.write(tmp_path)
        first, second = (evk_map.SPEC.draw(inputs, Options()) for _ in range(2))
        assert first == second and len(points(first)) == len(self.KINDS)

    def test_files_that_do_not_fit(self, tmp_path):
        with pytest.raises(EditingError, match="describes another file"):
            evk_map.SPEC.draw(self.write(tmp_path, sha256="0"), Options())
        with pytest.raises(EditingError, match=r"unknown kinds \(odd\)"):
            evk_map.draw({"unedited": self.vectors()}, [*self.KINDS[1:], "odd"])
        with pytest.raises(EditingError, match=r"lm-edit embed --out vectors.safetensors"):
            evk_map.SPEC.draw(Inputs([]), Options())


def knowgic(editor, ifr, ckp, protocol="sampled", **changes):
    changes = {"is_rate": False, **changes}
    yield row(editor, "knowgic", f"ifr_{protocol}", sum(ifr) / len(ifr), **changes)
    yield row(editor, "knowgic", f"ckp_{protocol}", ckp, **changes)
    for length, value in enumerate(ifr, start=1):
        yield row(editor, "knowgic", f"ifr_{length}_{protocol}", value, **changes)


class TestRecoveryAndPreservation:
    ROWS = (*knowgic("rome", (0.2, 0.4), 0.75, stderr=0.1), *knowgic("unedited", (1.0, 1.0), 1.0))

    def test_a_line_over_the_lengths(self):
        found = lines(thinkedit_ifr.draw(frame(*self.ROWS)))
        assert found["rome"] == ([1, 2], [0.2, 0.4]) and found["unedited"][1] == [1.0, 1.0]

    def test_bars_by_model(self):
        other = knowgic("memit", (0.5,), 0.5, model="other", model_hash="o")
        chart = thinkedit_ckp.draw(frame(*self.ROWS, *other))
        assert categories(chart) == ["memit", "rome"]
        assert bars(chart) == [(0, 0.5), (0, 0.75)]  # memit on other, rome on tiny; the rest was not run
        assert texts(chart).count("not run") == 2

    def test_points(self):
        chart = thinkedit_tradeoff.draw(frame(*self.ROWS))
        assert points(chart) == [(0.75, pytest.approx(0.3)), (1.0, 1.0)]  # IFR: (0.2 + 0.4) / 2
        series = chart.panels[0].series[0]
        assert (series.low[0], series.position_high[0]) == (pytest.approx(0.3 - 0.1959964), pytest.approx(0.9459964))

    def test_a_point_without_one_of_its_numbers_is_named(self):
        rows = knowgic("memit", (0.3,), math.nan)
        assert "Unscored: memit." in thinkedit_tradeoff.draw(frame(*self.ROWS, *rows)).sentences

    def test_protocols_are_chosen_not_mixed(self):
        rows = [*self.ROWS, *knowgic("rome", (0.9, 0.9), 0.1, "prob")]
        assert lines(thinkedit_ifr.draw(frame(*rows)))["rome"][1] == [0.2, 0.4]
        chosen = thinkedit_ifr.draw(frame(*rows), Options(metric="prob"))
        assert lines(chosen)["rome"][1] == [0.9, 0.9]
        only = thinkedit_ckp.draw(frame(*knowgic("rome", (0.9,), 0.1, "prob")))
        assert "Protocol: prob; the published one is sampled." in only.caption

    @pytest.mark.parametrize("draw", [thinkedit_ifr.draw, thinkedit_ckp.draw, thinkedit_tradeoff.draw])
    def test_other_tasks(self, draw):
        with pytest.raises(EditingError, match="lm_eval --model edited_hf --tasks knowgic"):
            draw(frame(row("rome", "bake_es", "efficacy_prob", 0.5)))
