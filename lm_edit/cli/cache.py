"""``lm-edit cache`` and ``lm-edit demo``: files on disk."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, say, table

if TYPE_CHECKING:
    from edit_hooks.store.store import Store


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "prune"), default="show", help="default: show")
    parser.add_argument(
        "--max-size",
        help="prune: remove the least recently used files down to this size, as 5GB; not while a stream runs",
    )
    parser.add_argument("--store", help="folder of the store; default: the user's")
    parser.add_argument("--dry-run", action="store_true", help="prune: list the files and remove nothing")


def _run_cache(args: argparse.Namespace) -> int:
    if args.action == "prune" and args.max_size is None:
        raise EditingError("--max-size is missing: lm-edit cache prune --max-size 5GB (0 removes everything).")
    from edit_hooks.store.store import Store, sizes_outside_store
    from edit_hooks.utils.storage.files import parse_size

    store = Store(args.store)
    if args.action == "prune":
        _prune(store, parse_size(args.max_size), dry_run=args.dry_run)
    say(f"store: {store.root}")
    sizes = store.size()
    total = (sum(count for count, _ in sizes.values()), sum(size for _, size in sizes.values()))
    outside = {} if args.store else sizes_outside_store(store)
    rows = [*sorted(sizes.items()), ("total", total), *((f"outside: {name}", size) for name, size in outside.items())]
    table(("kind", "files", "size"), [(kind, str(count), f"{size / 1e6:.1f} MB") for kind, (count, size) in rows])
    return 0


def _prune(store: Store, max_bytes: int, *, dry_run: bool) -> None:
    """Prune the store, or list the files for a dry run."""
    store.require_marked()
    if not dry_run:
        say(f"{store.prune(max_bytes) + store.remove_leftovers()} files removed")
        return
    files = store.to_prune(max_bytes)
    for file in files:
        say(f"would remove {file.path}")
    say(f"{len(files)} files would be removed, {sum(file.num_bytes for file in files) / 1e6:.1f} MB")


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")


def _run_demo(args: argparse.Namespace) -> int:
    from edit_hooks.assets.demo_model import demo_model_path

    say(demo_model_path(args.dtype))  # alone, for $(lm-edit demo)
    return 0


VERBS: dict[str, Verb] = {
    "cache": Verb("show or prune the store of finished edits", _add_cache_arguments, _run_cache),
    "demo": Verb("print the folder of the demo model; convert the model on first use", _add_demo_arguments, _run_demo),
}
