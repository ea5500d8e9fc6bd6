"""lm-eval's index of its own 14,000 task files, made when a name needs it: reading them takes six seconds and more.

A run of editing tasks and of a user's folder needs none of these files. Every name has the entry that it has in
lm-eval's own index: an entry of another folder overrides one of lm-eval's, so the other folders are looked up first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Fill: TypeAlias = Callable[[Any, bool], None]  # lm-eval's constructor: a manager, with the default folder or without

# Of a manager, from all names: computed when they are read.
NAME_LISTS = ("_all_tasks", "_all_subtasks", "_all_groups", "_all_tags")
_PATTERN = re.compile(r"[*?\[]")


class LazyIndex(dict[str, Any]):
    """Name -> entry, like lm-eval's index; the entries of the default folder are added at the first look for another.

    Args:
        entries: of the other folders.
        complete: makes the index of all folders.
    """

    def __init__(self, entries: dict[str, Any], complete: Callable[[], dict[str, Any]]) -> None:
        super().__init__(entries)
        self.complete: Callable[[], dict[str, Any]] | None = complete

    def knows(self, name: object) -> bool:
        """Whether a name has an entry without those of the default folder."""
        return super().__contains__(name)

    def _all(self) -> dict[str, Any]:
        if (complete := self.complete) is not None:
            entries = complete()  # after Ctrl-C the next look begins again
            self.complete = None
            known = dict(super().items())  # lm-eval adds names of its own while it builds groups
            self.clear()
            self.update({**entries, **known})
        return self

    def __missing__(self, name: str) -> Any:
        if self.complete is None:
            raise KeyError(name)
        return self._all()[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or dict.__contains__(self._all(), name)

    def get(self, name: str, default: Any = None) -> Any:
        return dict.get(self if self.knows(name) else self._all(), name, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _of_all(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(dict, name)

    @functools.wraps(method)
    def complete_first(self: LazyIndex, *args: Any) -> Any:
        return method(self._all(), *args)

    return complete_first


for _name in ("__iter__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__reversed__", "__repr__"):
    setattr(LazyIndex, _name, _of_all(_name))
for _name in ("keys", "values", "items", "copy", "setdefault", "pop", "popitem"):
    setattr(LazyIndex, _name, _of_all(_name))


def make_lazy(task_manager: Any) -> Callable[[Any, Fill], None]:
    """Prepare lm-eval's class for managers whose index is a LazyIndex; return the function that fills one.

    Managers of a release with other attributes are filled at once.
    """
    matched: Any = getattr(task_manager, "match_tasks", None)
    own_methods = {"__getattr__", "__getstate__"} & vars(task_manager).keys()
    can_wait = matched is not None and not own_methods

    def missing(self: Any, name: str) -> Any:
        if name not in NAME_LISTS or (complete := vars(self).get("complete_manager")) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self).update({one: vars(complete())[one] for one in NAME_LISTS})
        return vars(self)[name]

    def state(self: Any) -> dict[str, Any]:
        """What is pickled and copied: a manager with all names, since another process may lack its folders."""
        lists = {name: getattr(self, name) for name in NAME_LISTS}
        return {name: value for name, value in vars(self).items() if name != "complete_manager"} | lists

    def match_tasks(self: Any, task_list: Sequence[str]) -> list[str]:
        index = vars(self).get("_index")
        names = [task_list] if isinstance(task_list, str) else list(task_list)
        if isinstance(index, LazyIndex) and all(index.knows(name) and not _PATTERN.search(name) for name in names):
            return sorted(set(names))
        return list(matched(self, task_list))

    def fill_lazily(manager: Any, fill: Fill) -> None:
        fill(manager, not can_wait)
        if not can_wait:
            return
        if not {"_index", *NAME_LISTS} <= vars(manager).keys():
            return fill(manager, True)

        @functools.cache
        def complete() -> Any:
            fill(whole := object.__new__(type(manager)), True)
            return whole

        manager._index = LazyIndex(manager._index, lambda: dict(vars(complete())["_index"]))
        vars(manager)["complete_manager"] = complete
        for name in NAME_LISTS:
            delattr(manager, name)

    if can_wait:
        task_manager.__getattr__, task_manager.match_tasks, task_manager.__getstate__ = missing, match_tasks, state
    return fill_lazily
