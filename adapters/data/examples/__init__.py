"""Examples for offline training: rows of datasets read by their columns, tokenised once, cached and reported.

A row goes through these modules: `sources.py` opens files, `recognition.py` tells the format by the columns,
`formats.py` reads a row of it (with `conversations.py`, `pairs.py` and `steps.py`) as one of the values of `rows.py`,
and `preparer.py` makes tokens and weights of that. `preparation.py` does so for all rows before the first step, and
keeps them, as `prepared.py` reads them; `streaming.py` does so while training goes on. Rows that only together make
pairs are in `joined.py` and `ranked.py`; `report.py` counts what became of all.
"""
