"""Reading YAML: files and inline settings of users."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import read_text

MAX_NODES = 100_000  # of a document with its aliases written out
MAX_DEPTH = 100  # of nested lists and mappings
MAX_DIGITS = 300  # of a whole number; longer ones cannot even be printed


class _Refused(ValueError):
    """A YAML text that is well formed and not accepted; the message says why."""


class _Loader(yaml.SafeLoader):
    r"""The safe loader with JSON's surrogate pairs as one character, as in ``"\ud83d\ude00"``."""

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _Refused("a text holds half of a surrogate pair, which is no character") from None
        return node


def parse_yaml(text: str) -> Any:
    """Parse one YAML document with the safe loader.

    Raises:
        ValueError: for malformed text, repeated keys, numbers that are too long, deep nesting, and aliases that repeat
            themselves or write out to more than :data:`MAX_NODES` nodes; the message is one line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {}, MAX_DEPTH)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a secret
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(", ".join(filter(None, (error.context, error.problem))) + place) from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # TypeError: a mapping as a key
        raise ValueError(" ".join(str(error).split())) from None


def read_yaml(path: str | os.PathLike[str], what: str = "settings file") -> dict[str, Any]:
    """Read a mapping from a YAML file; ``~`` in the path is expanded.

    Args:
        what: kind of file, for messages.

    Raises:
        EditingError: if the file cannot be read (see :func:`edit_hooks.utils.storage.files.read_text`), is not YAML, or
        holds     something other than a mapping.
    """
    text = read_text(path, what)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise EditingError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(content, dict):
        raise EditingError(f"{path} holds {type(content).__name__}; a mapping of settings is needed.")
    return content


def line_of(text: str, keys: Sequence[str | int]) -> int:
    """Line, from 1, of an entry of a YAML text that :func:`parse_yaml` accepts; for messages.

    Args:
        keys: keys and positions from the outermost mapping inwards. The line of the last one that exists is returned.
    """
    node, line = yaml.compose(text, yaml.SafeLoader), 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(key)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            found = [(node.value[key], node.value[key])]
        else:
            found = []
        if not found:
            break
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


def _count_nodes(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """Number of nodes below a node with aliases written out.

    Args:
        sizes: id of a node -> its size; 0 while it is being counted.
        depth: levels that may be nested below this node.
    """
    if depth < 0:
        raise _Refused("it is nested too deeply")
    if (known := sizes.get(id(node))) is not None:
        if known == 0:
            raise _Refused("an alias refers to itself")
        return known
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        for pair in node.value:
            size += sum(_count_nodes(part, sizes, depth - 1) for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_count_nodes(part, sizes, depth - 1) for part in node.value)
    elif node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
        raise _Refused("a whole number has too many digits")
    if size > MAX_NODES:
        raise _Refused(f"its aliases write out to more than {MAX_NODES} values")
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that occurs twice, of which YAML would silently keep the last."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _Refused(f"the key {key.value[:80]!r} occurs twice; keep one of them")
            seen.add(key.value)
