import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

# Under --import-mode=importlib, tests cannot import their neighbours otherwise.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def numerics() -> ModuleType:
    """`tests/numerics.py`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        return import_module("numerics")
    finally:
        sys.path.pop(0)
