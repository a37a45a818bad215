"""One line of the doctor's report."""

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What was found at ``name``, and the fix where it is not well."""

    level: str
    name: str
    found: str
    fix: str = ""

    def line(self, where: str = "") -> str:
        """The finding as one line; ``where`` says on which ranks, if not on all."""
        place = f" [{where}]" if where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.level:8} {self.name:18} {self.found}{fix}{place}"


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(OK, name, found)


def enough(name: str, found: str, level: str, fix: str) -> Finding:
    """``level`` decides; the fix is left out where nothing is wrong."""
    return Finding(level, name, found, "" if level == OK else fix)
