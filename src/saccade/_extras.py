"""The command that brings what an extra of Saccade needs, as errors say it."""

from __future__ import annotations


def installing(extra: str) -> str:
    """Saccade is installed from its sources: by its name pip would look for another package."""
    return f'pip install -c constraints.txt ".[{extra}]" in the folder of Saccade'
