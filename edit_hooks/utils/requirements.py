"""The versions of the packages that everything here is built on, checked before the first of them is imported."""

from __future__ import annotations

import functools
from importlib import metadata

from edit_hooks.utils.errors import EditingError

DISTRIBUTION = "lm-eval-editing"
CHECKED = ("lm-eval", "torch", "transformers")  # of others an old version may do


@functools.cache
def require_versions() -> None:
    """Refuse versions that this distribution does not support, by its own metadata.

    Raises:
        EditingError: names what is installed, what is needed, and the command that installs it.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    try:
        declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:  # a copy that is not installed
        return
    for requirement in declared:
        if requirement.name not in CHECKED or requirement.marker is not None:
            continue
        try:
            installed = metadata.version(requirement.name)
            # Builds of a vendor, as 2.4.0a0+git, have what the release has.
            accepted = Version(installed).base_version in requirement.specifier
        except (metadata.PackageNotFoundError, InvalidVersion):  # Python names what is missing
            continue
        if not accepted:
            raise EditingError(
                f"{requirement.name} {installed} is installed, but {DISTRIBUTION} needs {requirement.name}"
                f"{requirement.specifier}. Run: pip install '{requirement.name}{requirement.specifier}'"
            )
