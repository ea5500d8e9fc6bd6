"""lm-eval's own task files are read when a name needs them, and every name has the entry of lm-eval's index."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lm_eval.tasks.manager as manager_module
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

import lm_eval_editing_autoload  # noqa: F401  # the start-up hook, where .pth files are not read
from lm_eval_tasks.folder import TASKS_DIR
from lm_eval_tasks.startup.lazy_index import NAME_LISTS, LazyIndex, make_lazy

FILES = {
    "default/stock.yaml": "task: stock\ntag: shared",
    "default/other.yaml": "task: other\ntag: [shared, defaults]",
    "default/group.yaml": "group: stock_group\ntask: [stock, other]",
    "user/mine.yaml": "task: mine\ntag: shared",
    "user/other.yaml": "task: other\noutput_type: generate_until",
    "user/group.yaml": "group: my_group\ntask: [mine, stock]",
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The user's folder; lm-eval's own task files are three, and the folders of each index are recorded."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(manager_module, "__file__", str(tmp_path / "default" / "manager.py"))
    return [tmp_path / "default", tmp_path / "user"]


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The folders of each index that was made."""
    made: list[list[str]] = []
    build = TaskIndex.build

    def recorded(paths: Any, **options: Any) -> Any:
        made.append([Path(path).name for path in paths])
        return build(paths, **options)

    monkeypatch.setattr(TaskIndex, "build", staticmethod(recorded))
    return made


def facts(index: dict[str, Any]) -> dict[str, Any]:
    return {name: (entry.kind, entry.yaml_path, entry.tags, entry.cfg) for name, entry in index.items()}


def test_names_of_other_folders_need_no_default_ones(folders: list[Path], indexed: list[list[str]]) -> None:
    manager = TaskManager(include_path=str(folders[1]), metadata={"data": "mini"})
    assert manager.include_path == str(folders[1])
    assert manager.match_tasks(["bake_rq", "mine", "mine"]) == ["bake_rq", "mine"]
    assert set(manager.load(["bake_rq"])["tasks"]) == {"bake_rq"}
    assert "other" in manager.task_index and manager.task_index["other"].yaml_path == folders[1] / "other.yaml"
    assert manager.task_index.get("bake_rq") is manager.task_index["bake_rq"]
    assert indexed == [["lm_eval_tasks", "user"]]


@pytest.mark.parametrize(
    "look",
    [
        lambda manager: manager.all_tasks,
        lambda manager: manager.all_tags,
        lambda manager: manager.match_tasks(["st*"]),
        lambda manager: manager.match_tasks(["bake_rq", "stock"]),
        lambda manager: manager.task_index["stock"],
        lambda manager: manager.task_index.get("absent"),
        lambda manager: len(manager.task_index),
        lambda manager: list(manager.task_index.values()),
        lambda manager: dict(manager.task_index),
        lambda manager: "absent" in manager.task_index,
        lambda manager: manager.task_index.copy(),
        lambda manager: manager.task_index | {},
        lambda manager: manager.task_index == {},
        lambda manager: (
            manager.task_index.setdefault("absent_default", None) or manager.task_index.pop("absent_default")
        ),
        lambda manager: copy.copy(manager),
        lambda manager: pickle.dumps(manager),
    ],
)
def test_all_others_complete_the_index(
    look: Any, folders: list[Path], indexed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = TASKS_DIR / "bake"
    monkeypatch.setattr("lm_eval_tasks.startup.task_folders.TASKS_DIR", ours)
    eager = TaskIndex.build([folders[0], ours, folders[1]])
    indexed.clear()
    manager = TaskManager(include_path=[folders[1]])
    look(manager)
    assert indexed == [["bake", "user"], ["default", "bake", "user"]]
    assert facts(manager.task_index) == facts(eager) and sorted(eager) == manager.all_tasks
    assert manager.all_groups == sorted(name for name, entry in eager.items() if entry.kind.name == "GROUP")
    assert manager.match_tasks(["*stock*", "min*"]) == ["mine", "stock", "stock_group"]
    assert manager.task_index["shared"].tags == {"mine"} and manager.all_tags == sorted(
        name for name, entry in eager.items() if entry.kind.name == "TAG"
    )
    assert len(indexed) == 2


def test_what_is_added_to_the_index_stays_and_unknown_names_are_refused(folders: list[Path]) -> None:
    manager = TaskManager()
    entry = manager.task_index["bake_rq"]
    manager.task_index["group::bake_rq"] = entry
    assert manager.task_index["stock"].yaml_path == folders[0] / "stock.yaml"
    assert manager.task_index["group::bake_rq"] is entry
    with pytest.raises(KeyError):
        manager.task_index["absent"]
    with pytest.raises(AttributeError, match="'TaskManager' object has no attribute 'absent'"):
        manager.absent  # noqa: B018  # the attribute is read
    assert manager.match_tasks(["absent"]) == []


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_copies_and_pickled_managers_have_all_names(again: Any, folders: list[Path]) -> None:
    """As those of lm-eval, which processes of a pool can get."""
    manager = TaskManager(include_path=folders[1], metadata={"data": "mini"})
    other = again(manager)
    assert facts(other.task_index) == facts(dict(manager.task_index)) and "stock" in other.task_index
    assert other.all_tasks == manager.all_tasks and other.metadata == manager.metadata
    assert other.match_tasks(["*stock*"]) == ["stock", "stock_group"] and type(other.task_index.copy()) is dict


def test_after_ctrl_c_the_next_look_begins_again(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    manager = TaskManager()
    with monkeypatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            manager.task_index["stock"]
    assert manager.task_index["stock"].yaml_path == folders[0] / "stock.yaml" and "stock" in manager.all_tasks


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_relative_folder_is_that_of_its_time(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders[1].parent)
    manager = TaskManager(include_path="user")
    monkeypatch.chdir(folders[0])
    assert {"mine", "my_group", "stock"} <= set(manager.all_tasks) and manager.match_tasks(["min*"]) == ["mine"]
    assert manager.task_index["mine"].yaml_path == Path("user/mine.yaml")


def test_no_defaults_is_that_of_lm_eval(folders: list[Path]) -> None:
    manager = TaskManager(include_path=folders[1], include_defaults=False)
    assert type(manager.task_index) is dict and manager.all_tasks == ["mine", "my_group", "other", "shared"]


@pytest.mark.parametrize("attributes", [{}, {"_index": {}}, {"match_tasks": None}])
def test_managers_of_another_release_are_filled_at_once(attributes: dict[str, Any]) -> None:
    class Other:
        pass

    for name, value in {"match_tasks": lambda self, names: [], **attributes}.items():
        setattr(Other, name, value)
    fills: list[bool] = []
    manager = Other()
    make_lazy(Other)(manager, lambda one, with_defaults: fills.append(with_defaults))
    assert fills[-1] is True and not isinstance(getattr(manager, "_index", None), LazyIndex)
    assert not set(NAME_LISTS) & vars(manager).keys()
