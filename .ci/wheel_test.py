"""Build sdist and wheel, install the wheel into a clean environment and use it away from the sources; then once more
from the sources without a compiler.

An editable install finds a package that pyproject.toml forgot to list; only the wheel shows that it is missing. It is
built from the sdist, so that what MANIFEST.in forgot is missing there too.
"""

import os
import shutil
import subprocess
import sys
import tarfile
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

DATA = (
    ("quantsink", "py.typed"),
    ("quantsink.eval", "templates/report.html.j2"),
    ("quantsink.eval.lab", "tables/trigger.txt"),
)
for package, path in DATA:
    assert importlib.resources.files(package).joinpath(path).is_file(), f"{package} lacks its data file {path}"

owners = importlib.metadata.packages_distributions()
for name in ("kernels", "calibration", "eval", "tests"):
    assert "quantsink" not in owners.get(name, []), f"the wheel puts a top-level package {name} on the path"
"""

# Argument: `kernels` where the C++ kernels were built, `reference` where they could not be.
ATTENTION = """
import logging, sys
import torch
from quantsink.kernels import cpu as kernels, sink_attention
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("quantsink").addHandler(handler)
calls = []
operator = sys.modules["quantsink.kernels.sink_attention"]
operator.reference = lambda call: calls.append(1) or reference(call)

q, k, v = torch.randn(1, 6, 70, 64), torch.randn(1, 2, 70, 64), torch.randn(1, 2, 70, 64)
routes, mean, scaling = torch.tensor([0, 1, 2] * 2), k.mean((0, 2)), 0.125
out, again = (sink_attention(q, k, v, routes=routes, key_mean=mean, scaling=scaling) for _ in range(2))
expected = reference(Call.of(query=q, key=k, value=v, routes=routes, key_mean=mean, scaling=scaling))
assert torch.equal(out, again)
if sys.argv[1] == "kernels":
    assert kernels.library() is not None
    assert not warnings and not calls, (warnings, calls)
    assert (out - expected).norm() < 0.01 * expected.norm()
    print(f"C++ kernels in use: {kernels.library().isa()}")
else:
    assert kernels.library() is None
    assert len(warnings) == 1 and "compiler" in warnings[0], warnings
    assert len(calls) == 2
    assert torch.equal(out, expected)
    print(f"without a compiler: {warnings[0]}")
"""


def call(*command: str | Path, cwd: Path, **variables: str) -> None:
    print("+", *(f"{name}={value}" for name, value in variables.items()), *command, flush=True)
    # PYTHONPATH would bring the sources back.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, env={**env, **variables}, check=True)


def copy_sources(to: Path) -> None:
    """setuptools would leave a build folder here, and take up what an older one left."""
    left = (".venv", ".git", "build", "dist", "demo", "*.egg-info", "*.so", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*left))


def build(source: Path, to: Path) -> tuple[Path, Path]:
    """sdist, and the wheel built from it."""
    call(sys.executable, "-m", "build", "--outdir", to, source, cwd=to.parent)
    (sdist,), (wheel,) = to.glob("*.tar.gz"), to.glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: Path) -> list[str]:
    """The sources of the C++ kernels are in the sdist. Returns what is wrong."""
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "csrc").rglob("*.*")]
    missing = {"setup.py", "pyproject.toml", *sources} - files
    return [f"{name} is not in the sdist: list it in MANIFEST.in" for name in sorted(missing)]


def check_wheel(wheel: Path) -> list[str]:
    """Every module of the sources is in the wheel, and nothing lies beside the package. Returns what is wrong."""
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    problems = []
    if not any(file.startswith("quantsink/kernels/_cpu.") and file.endswith(".so") for file in files):
        problems.append(
            "the wheel holds no quantsink/kernels/_cpu*.so: the C++ kernels were not built (is there a g++?)"
        )
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
        copy_sources(scratch / "source")
        sdist, wheel = build(scratch / "source", scratch / "dist")
        problems = check_sdist(sdist) + check_wheel(wheel)
        if problems:
            print(*problems, sep="\n", file=sys.stderr)
            return 1
        elsewhere = scratch / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "probe.py").write_text(PROBE, encoding="utf-8")
        (elsewhere / "attention.py").write_text(ATTENTION, encoding="utf-8")
        call(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        binaries = scratch / "venv" / "bin"
        python = binaries / "python"
        install = (python, "-m", "pip", "install", "--quiet")
        call(*install, "-c", ROOT / "constraints.txt", wheel, cwd=elsewhere)
        call(python, "-m", "pip", "check", cwd=elsewhere)
        call(python, "probe.py", cwd=elsewhere)
        call(python, "attention.py", "kernels", cwd=elsewhere)
        call(binaries / "quantsink", "--help", cwd=elsewhere)
        # Everything else is installed already: only quantsink is built and replaced.
        again = ("--no-deps", "--force-reinstall", scratch / "source")
        call(*install, *again, cwd=elsewhere, CC="/bin/false", CXX="/bin/false")
        call(python, "attention.py", "reference", cwd=elsewhere)
    print(f"wheel test passed: {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
