"""Build the wheel, install it into a clean environment and use it away from the sources.

An editable install finds a package that pyproject.toml forgot to list; only the wheel shows that it is missing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where each folder of the sources lies in the wheel; pyproject.toml's package-dir says the same.
MAPPED = {
    "quantsink": "quantsink",
    "calibration": "quantsink/calibration",
    "kernels/python": "quantsink/kernels",
    "eval": "quantsink/eval",
}

# Runs in the clean environment. A module may need a package that only an extra or a GPU machine has; a package may not.
PROBE = """
import importlib, importlib.metadata, importlib.resources, importlib.util, pathlib, pkgutil, sys
import quantsink

home = pathlib.Path(quantsink.__file__).parent
assert home.is_relative_to(sys.prefix), f"quantsink was imported from {home}, not from the wheel"
optional = {"triton", "datasets", "pyarrow"}
names = []
for module in pkgutil.walk_packages(quantsink.__path__, "quantsink."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if module.ispkg or (error.name or "").split(".")[0] not in optional:
            raise
        print(f"not imported: {module.name} needs {error.name}")
    else:
        names.append(module.name)
print(f"imported {len(names)} modules")

for package, path in (("quantsink", "py.typed"), ("quantsink.eval", "templates/report.html.j2")):
    assert importlib.resources.files(package).joinpath(path).is_file(), f"{package} lacks its data file {path}"

owners = importlib.metadata.packages_distributions()
for name in ("kernels", "calibration", "eval", "tests"):
    assert "quantsink" not in owners.get(name, []), f"the wheel puts a top-level package {name} on the path"
"""


def call(*command: str | Path, cwd: Path) -> None:
    print("+", *command, flush=True)
    # PYTHONPATH would bring the sources back.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)


def build_wheel(scratch: Path) -> Path:
    """Build from a copy: setuptools would leave a build folder here, and take up what an older one left."""
    ignore = shutil.ignore_patterns(".venv", ".git", "build", "dist", "demo", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, scratch / "source", ignore=ignore)
    call(sys.executable, "-m", "build", "--wheel", "--outdir", scratch / "dist", scratch / "source", cwd=scratch)
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> list[str]:
    """Every module of the sources is in the wheel, and nothing lies beside the package. Returns what is wrong."""
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    problems = []
    for folder, place in MAPPED.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            expected = f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
            if expected not in files:
                problems.append(f"{path.relative_to(ROOT)} is not in the wheel: list its package in pyproject.toml")
    surplus = {file.split("/")[0] for file in files} - {"quantsink"}
    problems += [f"the wheel holds {name} at its top level" for name in sorted(surplus) if ".dist-info" not in name]
    if (ROOT / "kernels" / "__init__.py").exists():
        problems.append("kernels/__init__.py shadows the package `kernels` that transformers imports: remove it")
    return problems


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quantsink-wheel-") as name:
        scratch = Path(name)
        wheel = build_wheel(scratch)
        problems = check_contents(wheel)
        if problems:
            print(*problems, sep="\n", file=sys.stderr)
            return 1
        elsewhere = scratch / "elsewhere"
        elsewhere.mkdir()
        call(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        binaries = scratch / "venv" / "bin"
        python = binaries / "python"
        call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=elsewhere)
        call(python, "-m", "pip", "check", cwd=elsewhere)
        (elsewhere / "probe.py").write_text(PROBE, encoding="utf-8")
        call(python, "probe.py", cwd=elsewhere)
        call(binaries / "quantsink", "--help", cwd=elsewhere)
    print(f"wheel test passed: {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
