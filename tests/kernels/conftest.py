import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def numerics() -> ModuleType:
    """`tests/numerics.py`; under `--import-mode=importlib` tests cannot import their neighbours by name."""
    path = Path(__file__).parents[1] / "numerics.py"
    spec = importlib.util.spec_from_file_location("quantsink_numerics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
