"""``lm-edit cache`` and ``lm-edit demo``: what is kept on disk."""

from __future__ import annotations

import argparse

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, table


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "prune"), default="show", help="default: show")
    parser.add_argument(
        "--max-size", help="prune: remove the least recently used files until this much is left, as 5GB"
    )
    parser.add_argument("--store", help="folder of the store; the user's when absent")


def _cache(given: argparse.Namespace) -> int:
    if given.action == "prune" and given.max_size is None:
        raise EditingError("say how much may stay: lm-edit cache prune --max-size 5GB (0 removes everything).")
    from edit_hooks.store.store import Store, sizes_outside_store
    from edit_hooks.utils.files import parse_size

    store = Store(given.store)
    if given.action == "prune":
        removed = store.prune(parse_size(given.max_size)) + store.remove_leftovers()
        print(f"{removed} files removed")
    print(f"store: {store.root}")
    sizes = store.size()
    total = (sum(count for count, _ in sizes.values()), sum(size for _, size in sizes.values()))
    beside = {} if given.store else sizes_outside_store(store)
    rows = [*sorted(sizes.items()), ("total", total), *((f"beside it: {name}", size) for name, size in beside.items())]
    table(("kind", "files", "size"), [(kind, str(count), f"{size / 1e6:.1f} MB") for kind, (count, size) in rows])
    return 0


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")


def _demo(given: argparse.Namespace) -> int:
    from edit_hooks.assets.demo_model import DEMO_NAME, demo_model_path

    folder = demo_model_path(given.dtype)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{DEMO_NAME}\n{folder} ({size / 1e6:.0f} MB)")
    return 0


VERBS: dict[str, Verb] = {
    "cache": Verb("show or prune the store of finished edits", _cache_arguments, _cache),
    "demo": Verb("say where the demo model is, converting it first if need be", _demo_arguments, _demo),
}
