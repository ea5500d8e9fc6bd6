"""NeuralDB: the residuals of MEMIT in a table at one layer, each added where a token's key is similar to its own.

Method of "NeuralDB: Scaling Knowledge Editing in LLMs to 100,000 Facts with Neural KV Database" (2507.18028), which has
no public code. A fact is a column of a table: its key k_i, the input of the rewrite module at the fact token, and its
residual r_i = v_i - W k_i with MEMIT's value v_i. At every token the module's output W k becomes

    W k + r_j   if cos(k, k_j) > gamma,   j = argmax_i cos(k, k_i),

and stays as it is otherwise, bit for bit. Values are optimized on the unedited model, each by itself, so a stream, a
joint edit and any order of the facts give the same table. A fact is added, changed and
deleted (:meth:`NeuralDB.remove`) by its column alone.

The paper leaves gamma, the layer and the reading of keys open. The defaults here are this package's: the layer where
MEMIT's last one would be, keys of bare prompts (``key: mean`` averages over the context templates, as MEMIT does), and
gamma from similarities of paraphrases and neighbors on the demo model.

Two facts with the same words up to the end of the subject have one key, so the later of them replaces the earlier; a
warning names it if they are different facts.

Where blocks normalize their MLP output (Gemma, OLMo 2), the value is optimized at that output instead of h^L, as MEMIT
does there.

Shapes: U requests of one delta, N entries, f and d input and output width of the module.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.placement import on_cpu
from edit_hooks.locate.streams.carried_keys import fact_of
from edit_hooks.locate.value_editor import (
    VALUE_CONTRACT_SETTINGS,
    MEMITValueConfig,
    ValueEditor,
    batch_diagnostics,
    check_reach,
    forward_maker,
    value_settings,
)
from edit_hooks.locate.values.key_reader import mean_keys
from edit_hooks.locate.values.value_batch import Site
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.locate.values.value_steps import OptimizedValue
from edit_hooks.memory.residual_table import KIND, MAX_COSINES, REMOVED
from edit_hooks.memory.steps import step_numbers
from edit_hooks.modeling.architectures import architecture_of, unwrapped
from edit_hooks.modeling.support import contribution_scale
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import COSINE

REPLACED_WARNING = (
    "another fact of the table was replaced, because its key is the same: facts with the same words up to the end of "
    "the subject share their key, and only the last of them holds. Put distinguishing words before the subject, or use "
    "an editor of weights."
)


@dataclass(kw_only=True)
class NeuralDBConfig(MEMITValueConfig):
    """MEMIT's settings of the value, and those of the table."""

    threshold: float = config_field(
        "gamma: cosine of a token's key with the nearest one of the table above which its residual is added",
        within=COSINE,
        default=0.65,
    )
    key: Literal["bare", "mean"] = config_field(
        "key of a fact; bare: that of the bare prompt; mean: half of it, half the mean over the other templates",
        default="bare",
    )
    same_key: float = config_field(
        "cosine of two keys from which on the later fact replaces the earlier one; rounding in bfloat16 leaves .9995",
        within=COSINE,
        default=0.999,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_layer("NeuralDB has a single table")


class FactColumn(NamedTuple):
    """One fact of the table, on the CPU: its key of unit length, its residual, and its identity."""

    key_F: torch.Tensor
    residual_D: torch.Tensor
    fact: str


class KnownFacts:
    """The entries of an edit; none for ``None``.

    They stay in their tensors: after a few thousand facts an object of each would take more time than the next fact.
    """

    def __init__(self, edit: HookEdit | None) -> None:
        self._edit = edit

    def __len__(self) -> int:
        return 0 if self._edit is None else len(self._edit.tensors["index"])

    @property
    def keys_NF(self) -> torch.Tensor:
        return torch.zeros(0, 0) if self._edit is None else self._edit.tensors["keys"]

    @property
    def number_N(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.int64) if self._edit is None else self._edit.tensors["index"]

    @property
    def facts(self) -> Sequence[str]:
        return [] if self._edit is None else self._edit.settings["facts"]

    @property
    def next_number(self) -> int:
        """The number of the next new entry."""
        return int(self.number_N.max()) + 1 if len(self) else 0

    def positions(self, facts: Container[str]) -> dict[str, int]:
        """The positions of those of some facts that are here."""
        return {fact: position for position, fact in enumerate(self.facts) if fact in facts}


class NeuralDB(ValueEditor[NeuralDBConfig]):
    """A table of facts at one layer, looked up by the cosine of keys."""

    name = "neural_db"
    config_class = NeuralDBConfig
    config_folders = ("neural_db",)
    supports_joint = True
    writes = ("hooks",)
    default_depth = 0.27
    stream_growth = StreamGrowth("f + d numbers per fact (74 kB at Llama 3 8B); a deleted fact leaves", "with facts")
    contract_settings: ClassVar[Settings] = {
        **{name: value for name, value in VALUE_CONTRACT_SETTINGS.items() if name != "second_moments"},
        "threshold": 0.9,
        # One layer of a random model moves an answer little.
        "num_steps": 12,
        "lr": 0.5,
        "clamp_factor": 20.0,
    }

    def compute(self, job: EditJob[NeuralDBConfig]) -> list[Delta]:
        config = job.config
        earlier = self._earlier(job.model, config, job.history)
        table, entries = KnownFacts(earlier), self._entries(job)
        deltas = []
        for group in _groups(job):
            new = [entries[number] for number in group]
            step, num_replaced = added(table, [entry for entry, _ in new], config.same_key)
            delta = Delta(hook_edit=self._hook_edit(job.model, config, earlier, step, ()))
            delta.diagnostics = {
                **batch_diagnostics([value for _, value in new]),
                "num_entries": len(table) + sum(number >= table.next_number for number in step),
                "num_replaced": num_replaced,
            }
            if config.keep_intermediates:
                delta.intermediates = {
                    "keys": torch.stack([entry.key_F for entry, _ in new]),
                    "residuals": torch.stack([entry.residual_D for entry, _ in new]),
                    "z_delta": torch.stack([value.delta_D for _, value in new]),
                }
            deltas.append(delta)
        return deltas

    def remove(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        history: Sequence[Delta],
    ) -> Delta:
        """Compute the delta that deletes facts from the table, as if they had never been written.

        Args:
            requests: facts by prompt and subject; their targets play no role.
            history: all steps so far.

        Raises:
            EditingError: the table has no such fact.
        """
        inner = unwrapped(model)
        config = self.resolve_config(inner, tokenizer)
        earlier = self._earlier(inner, config, history)
        table, facts = KnownFacts(earlier), {fact_of(request): request for request in requests}
        positions = table.positions(facts)
        for fact, request in facts.items():
            if fact not in positions:
                raise EditingError(
                    f"the fact {request.text!r} cannot be removed: it is none of the {len(table)} facts of this "
                    "table. A fact is known by its prompt and subject; its target does not matter."
                )
        gone = sorted(int(table.number_N[position]) for position in positions.values())
        delta = Delta(hook_edit=self._hook_edit(inner, config, earlier, {}, gone))
        delta.meta = {"editor": self.name, "config": config.to_dict(), "requests": []}
        delta.meta["removed"] = [request.to_dict() for request in requests]
        return delta

    def warnings(self, job: EditJob[NeuralDBConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        replaced = [REPLACED_WARNING] if delta.diagnostics["num_replaced"] else []
        return [*super().warnings(job, requests, delta), *replaced]

    def _entries(self, job: EditJob[NeuralDBConfig]) -> list[tuple[FactColumn, OptimizedValue]]:
        """Key and residual of every request, read and optimized on the unedited model."""
        model, config = job.model, job.config
        (layer,) = config.edited_layers
        site: Site = "block" if architecture_of(model).post_norm is None else "mlp"
        problems = self.problems(job)
        check_reach(job, problems, layer)
        terms = self.terms(job, forward_maker(model, config, layer, site))
        settings = value_settings(config, layer, site)
        values = optimize_values(model, problems, settings, config.engine, progress=job.progress, terms=terms)
        scale = contribution_scale(model) if site == "block" else 1.0  # Granite scales what its blocks add
        entries = []
        for request, value in zip(job.requests, values, strict=True):
            key_F = value.keys_NF[0] if config.key == "bare" else mean_keys(value.keys_NF, 1)[0]
            unit_F = nn.functional.normalize(key_F, dim=0)
            entries.append((FactColumn(unit_F.cpu(), (value.delta_D / scale).cpu(), fact_of(request)), value))
        return entries

    def _earlier(self, model: nn.Module, config: NeuralDBConfig, history: Sequence[Delta]) -> HookEdit | None:
        steps = (delta.hook_edit for delta in history)
        return HookEdit.after(steps, KIND, self._module(model, config), "a table")

    def _hook_edit(
        self,
        model: nn.Module,
        config: NeuralDBConfig,
        earlier: HookEdit | None,
        step: dict[int, FactColumn],
        removed: Sequence[int],
    ) -> HookEdit:
        """A step of a stream: the entries that it adds or changes, and the numbers of those that it removes."""
        if step:
            keys, residuals, facts = zip(*step.values(), strict=True)
            tensors = {"keys": torch.stack(keys), "residuals": torch.stack(residuals)}
        else:
            assert earlier is not None
            tensors, facts = {name: earlier.tensors[name][:0] for name in ("keys", "residuals")}, ()
        tensors["index"] = torch.tensor(list(step), dtype=torch.int64)
        settings = {"module": self._module(model, config), "threshold": config.threshold, "facts": list(facts)}
        return HookEdit(KIND, on_cpu(tensors), {**settings, REMOVED: list(removed), **step_numbers(earlier)})

    def _module(self, model: nn.Module, config: NeuralDBConfig) -> str:
        (layer,) = config.edited_layers
        return architecture_of(model).rewrite_name(layer)


def added(table: KnownFacts, new: Sequence[FactColumn], same_key: float) -> tuple[dict[int, FactColumn], int]:
    """The entries that new facts add to a table or change in it, by number.

    A fact that is there is changed, and so is the entry with the same key; the later of two new ones counts.

    Returns:
        The entries, and how many other facts they replace.
    """
    num_known, num_columns = len(table), len(table) + len(new)
    own_UF = torch.stack([entry.key_F for entry in new])
    rows_at_once = max(1, MAX_COSINES // num_columns)
    is_live_M = torch.arange(num_columns) < num_known  # columns of entries that are not replaced
    numbers = list[int]()  # of the new columns
    column_of = table.positions({entry.fact for entry in new})
    step, num_replaced, next_number = dict[int, FactColumn](), 0, table.next_number
    for row, entry in enumerate(new):
        if (place := row % rows_at_once) == 0:
            cosine_UM = _cosines(own_UF[row:][:rows_at_once], table.keys_NF, own_UF)
        column = column_of.get(entry.fact)
        if column is None and is_live_M.any():
            cosine, nearest = cosine_UM[place].masked_fill(~is_live_M, -torch.inf).max(0)
            if float(cosine) >= same_key:
                column = int(nearest)
                replaced = table.facts[column] if column < num_known else new[column - num_known].fact
                column_of.pop(replaced, None)
                num_replaced += 1
        if column is None:
            number, next_number = next_number, next_number + 1
        else:
            is_live_M[column] = False
            number = int(table.number_N[column]) if column < num_known else numbers[column - num_known]
        column_of[entry.fact] = num_known + row
        is_live_M[num_known + row] = True
        numbers.append(number)
        step[number] = entry
    return step, num_replaced


def _cosines(keys_UF: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    """Products [U, M] with the keys of unit length of all tables."""
    return torch.cat([keys_UF.to(table_NF) @ table_NF.T for table_NF in tables if len(table_NF)], 1)


def _groups(job: EditJob[NeuralDBConfig]) -> list[list[int]]:
    """Numbers of the requests of each delta."""
    indices = list(range(len(job.requests)))
    return [indices] if job.joint else [[index] for index in indices]
