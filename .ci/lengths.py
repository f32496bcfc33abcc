"""Fail on files over 600 lines and on Markdown lines over 100 columns; tables, code and links may be longer."""

import re
import subprocess
import sys
from pathlib import Path

FILE_LINES, MARKDOWN_COLUMNS = 600, 100
UNBREAKABLE = re.compile(r"^\s*(\||\[[^\]]+\]: )|https?://|\]\(")


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.h", "*.cpp", "*.md"],
        check=True,
        capture_output=True,
        text=True,
    )
    faults = []
    for name in filter(lambda name: Path(name).is_file(), listed.stdout.splitlines()):
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        if len(lines) > FILE_LINES:
            faults.append(f"{name}: {len(lines)} lines; at most {FILE_LINES}, so split it")
        if name.endswith(".md"):
            faults += [
                f"{name}:{number}: {len(line)} columns; wrap it at {MARKDOWN_COLUMNS}"
                for number, line in prose(lines)
                if len(line) > MARKDOWN_COLUMNS
            ]
    print("\n".join(faults), end="\n" if faults else "")
    return bool(faults)


def prose(lines: list[str]) -> list[tuple[int, str]]:
    """Numbered lines that can be wrapped: no fenced or indented code, no tables, no links."""
    wrappable, fenced = [], False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    ") and not UNBREAKABLE.search(line):
            wrappable.append((number, line))
    return wrappable


if __name__ == "__main__":
    sys.exit(main())
