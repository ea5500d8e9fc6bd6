"""Few-shot prompts of several processes are those of one; lm-eval draws others in each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval.tasks import TaskManager
from ordinary_tasks import write_tasks

from lm_eval_tasks.report.rank_prompts import prompts_of_one_process

NUM_DOCUMENTS = 5


@pytest.fixture
def prompts(tmp_path: Path) -> Any:
    """`prompts(world_size, own=...)`: document -> its prompts, of all ranks of a run."""
    manager = TaskManager(include_path=str(write_tasks(tmp_path)), include_defaults=False)

    def build(world_size: int, name: str = "tiny_choice", own: bool = True, **options: Any) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for rank in range(world_size):
            task = manager.load([name])["tasks"][name]
            task.set_fewshot_seed(1234)
            with prompts_of_one_process(SimpleNamespace(world_size=world_size if own else 1), [task]):
                task.build_all_requests(rank=rank, world_size=world_size, **options)
            assert not {"build_all_requests", "construct_requests"} & {*vars(task)}
            for instance in task.instances:
                found.setdefault(instance.doc_id, []).append(instance.args[0])
        return found

    return build


@pytest.mark.parametrize("name", ["tiny_choice", "tiny_text"])
@pytest.mark.parametrize("options", [{}, {"limit": 4}, {"samples": [0, 2, 3]}], ids=str)
def test_prompts_do_not_depend_on_the_number_of_processes(prompts: Any, name: str, options: dict[str, Any]) -> None:
    one = prompts(1, name, **options)
    assert len(one) == min(options.get("limit", NUM_DOCUMENTS), len(options.get("samples", range(NUM_DOCUMENTS))))
    assert prompts(2, name, **options) == prompts(3, name, **options) == one
    assert prompts(1, name, own=False, **options) == one, "those of one process are lm-eval's"


def test_lm_eval_draws_other_examples_in_each_process(prompts: Any) -> None:
    """The reason for all of this; once it no longer holds, the scope can go."""
    assert prompts(2, own=False) != prompts(1)


def test_a_process_without_documents_asks_the_first(prompts: Any) -> None:
    one, two = prompts(1, limit=1), prompts(2, limit=1)
    assert two == {0: one[0] * 2}


def test_the_request_cache_of_lm_eval_is_not_written(
    prompts: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are by number of processes and would hold other prompts."""
    monkeypatch.setattr("lm_eval.api.task.save_to_cache", lambda **_: pytest.fail("written"))
    prompts(2, cache_requests=True)
    assert "tiny_choice: --cache_requests is ignored in a run of several processes" in caplog.text
