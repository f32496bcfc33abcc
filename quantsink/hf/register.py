"""How `import quantsink` makes itself known to torch and transformers without importing them.

Each of their registries gets its entry as soon as it exists: at once where its module is loaded, else right after that
module has run, by a finder on `sys.meta_path` that removes itself after the last entry. Other modules of theirs may be
half imported at that moment. So an entry is a stand-in, which imports quantsink's class or function when it is called.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

NAME = "quantsink"
"""Of the attention implementation and of the quantization method."""

Hook = Callable[[Any], object]
"""Called with a module that has just run."""


def attention(*args: Any, **kwargs: Any) -> Any:
    """`quantsink.hf.attention.forward`, which takes this function's place in the registry when it is imported."""
    from quantsink.hf.attention import forward

    return forward(*args, **kwargs)


def _operators(torch: Any) -> None:
    importlib.import_module("quantsink.kernels")


def _attention(modeling_utils: Any) -> None:
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def _mask(masking_utils: Any) -> None:
    """SDPA's mask carries padding and windows."""
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, masking_utils.sdpa_mask)


def _quantizer(auto: Any) -> None:
    """Written into the tables themselves: transformers' decorators refuse a second import of quantsink."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = _on_demand(
        "quantsink.hf.config", "QuantSinkConfig", auto.QuantizationConfigMixin
    )
    auto.AUTO_QUANTIZER_MAPPING[NAME] = _on_demand("quantsink.hf.quantizer", "QuantSinkQuantizer", auto.HfQuantizer)


HOOKS: dict[str, Hook] = {
    "torch": _operators,
    "transformers.masking_utils": _mask,
    "transformers.modeling_utils": _attention,
    "transformers.quantizers.auto": _quantizer,
}
"""The module that holds a registry -> what makes quantsink's entry in it."""


def register() -> None:
    """Make every entry of `HOOKS`, now or as soon as its module has been imported."""
    finder = _Finder(HOOKS)
    sys.meta_path.insert(0, finder)
    for name in HOOKS:
        if sys.modules.get(name) is not None:
            finder.run(importlib.import_module(name))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `hooks` as the finders behind it do, and runs each one's hook after the module."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self.hooks = dict(hooks)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.hooks:
            return None
        # Only those behind this one: two finders of this class would ask each other for ever.
        first = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[first:]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.run)
                return spec
        return None

    def run(self, module: ModuleType) -> None:
        """Run the hook of `module` once. A spec may be looked up without being loaded, so it is not done before."""
        hook = self.hooks.get(module.__name__)
        if hook is not None:
            hook(module)
            self.hooks.pop(module.__name__, None)
        if not self.hooks and self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Another loader, with `after` called when the module has run. The module keeps only that other loader."""

    def __init__(self, loader: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self.loader, self.after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.after(module)


def _on_demand(module: str, name: str, base: type) -> type:
    """A class that makes instances of `module.name`, which is imported for the first of them."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return type(name, (base,), {"__new__": new, "__doc__": f"Makes a `{module}.{name}`."})


__all__ = ["HOOKS", "NAME", "attention", "register"]
