"""Compare two snapshots of a model and a tokenizer."""

from __future__ import annotations

from typing import Any

from edit_hooks.modeling.fingerprint.guard import changes


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail with the names of everything that changed, appeared or disappeared."""
    changed = changes(before, after)
    details = "; ".join(f"{key}: {str(before.get(key))[:80]} -> {str(after.get(key))[:80]}" for key in changed[:8])
    assert not changed, f"{len(changed)} things differ, among them {details}"


def assert_same_state_but_seeds(
    before: dict[str, Any], after: dict[str, Any], generators: str = "random state"
) -> None:
    """Fail as `assert_same_state`, but not for the states of random generators, or of those with this in their name."""
    assert_same_state(*({key: state[key] for key in state if generators not in key} for state in (before, after)))
