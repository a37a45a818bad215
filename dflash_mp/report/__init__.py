"""The report of a run: pure functions from the files of a run folder to one HTML page."""
