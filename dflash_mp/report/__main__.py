"""Look at runs: ``python -m dflash_mp.report RUN_FOLDER [ANOTHER ...]``.

One folder: its report.html is written anew. Several: a page with all of them side by side. Both
are single files that load nothing, and work for runs that still go on or were cut short.
"""

import argparse
import sys
from pathlib import Path

from dflash_mp.command import fail
from dflash_mp.config import UserError
from dflash_mp.report.page import comparison_page, run_page, write_page
from dflash_mp.report.run_files import REPORT, read_run


def main() -> None:
    """Parse the command line and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m dflash_mp.report outputs/a outputs/b --output ab.html",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument(
        "--output", type=Path, help=f"default: {REPORT} in the run folder, or comparison.html here"
    )
    arguments = parser.parse_args()
    folders = arguments.folders
    try:
        runs = [read_run(folder) for folder in folders]
    except UserError as error:
        fail(str(error))
    if len(runs) == 1:
        path, page = folders[0] / REPORT, run_page(runs[0])
    else:
        path, page = Path("comparison.html"), comparison_page(runs)
    sys.stdout.write(f"{write_page(arguments.output or path, page)}\n")


if __name__ == "__main__":
    main()
