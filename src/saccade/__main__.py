"""`python -m saccade`."""

from __future__ import annotations

import sys

try:
    from .cli import main

    status = main()
except KeyboardInterrupt:  # before `main` could catch it, or as it returned
    status = 130
sys.exit(status)
