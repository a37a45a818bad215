"""Why trainers that run one drafter per thread crash, shown on the installed torch."""
