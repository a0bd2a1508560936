"""Tables of series: windows, dates, the linear baseline, the picture. Begin with `_table.py`.

Imports what a task is.
"""
