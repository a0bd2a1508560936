"""Score programs: functions of a score and its indices, traced into a small language. Begin with `_language.py`."""
