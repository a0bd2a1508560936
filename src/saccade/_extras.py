"""The command that brings what an extra of Saccade needs, as errors say it."""

from __future__ import annotations


class NotInstalled(ModuleNotFoundError):
    """An optional dependency is missing. The message says what needs it, and the command that installs it."""

    def __init__(self, needing: str, module: str, extra: str):
        super().__init__(f"{needing} needs {module}, which is not installed: {installing(extra)}", name=module)


def installing(extra: str) -> str:
    """Saccade is installed from its sources: by its name pip would look for another package."""
    return f'pip install -c constraints.txt ".[{extra}]" in the folder of Saccade'
