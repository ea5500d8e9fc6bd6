"""The folder of the tasks of this package."""

from pathlib import Path

TASKS_DIR = Path(__file__).parent
