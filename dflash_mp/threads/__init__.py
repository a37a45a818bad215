"""``isolation=threads``: all ranks of a training as threads of one process, to see the race."""
