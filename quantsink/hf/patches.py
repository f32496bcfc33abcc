"""Every change that quantsink makes to a user's model. Changes are made here and nowhere else, can be listed, and are
all undone if one of them fails. Reading or calibrating a model changes nothing.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import PreTrainedModel

from quantsink.hf.attention import NAME
from quantsink.hf.config import METHOD, UNIMPORTED
from quantsink.layers.replacement import locate
from quantsink.models.architecture import output_head
from quantsink.models.falcon import can_use_interface, interface_attributes
from quantsink.models.observe import configs_of

log = logging.getLogger(__name__)

_RECORD = "quantsink_changes"
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One change to a model."""

    place: str
    """Dotted name of the module; empty for the model itself."""
    what: str


class Changes:
    """The changes of one step, as they are made. `undo` takes them back, the newest first."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.made: list[Change] = []
        self._undo = contextlib.ExitStack()

    def undo(self) -> None:
        self._undo.close()
        self.made.clear()

    def put(self, place: str, new: nn.Module) -> None:
        """Put a module in the place of another, of a parameter, or where nothing is."""
        parent, name, original = locate(self.model, place)
        if original is None:
            what = f"{type(new).__name__} added"
            self._undo.callback(parent._modules.pop, name)
        elif isinstance(original, nn.Module):
            what = f"{type(new).__name__} replaces {type(original).__name__}"
            self._undo.callback(parent._modules.__setitem__, name, original)
        else:
            what = f"{type(new).__name__} replaces a parameter"
            self._undo.callback(_restore, parent._parameters, dict(parent._parameters))
            self._undo.callback(parent._modules.pop, name)
            del parent._parameters[name]
        parent._modules[name] = new
        self.made.append(Change(place, what))

    def set(self, owner: Any, place: str, name: str, value: Any) -> None:
        """Set an attribute of a module, or of a config of the module at `place`."""
        self._undo.callback(_reset, vars(owner), name, vars(owner).get(name, _ABSENT))
        vars(owner)[name] = value
        what = "attribute" if isinstance(owner, nn.Module) else "config attribute"
        self.made.append(Change(place, f"{what} {name}"))

    def hook(self, place: str, what: str, register: Callable[[], Iterable[RemovableHandle]]) -> None:
        """Register hooks; `register` does so and gives the handles that remove them."""
        for handle in register():
            self._undo.callback(handle.remove)
        self.made.append(Change(place, f"hook: {what}"))

    def configure(self, name: str, value: Any) -> None:
        """Set an attribute of every config in the model that has it, through its setter."""
        for config in configs_of(self.model):
            if hasattr(config, name) and getattr(config, name) != value:
                self._undo.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
                self.made.append(Change("", f"config attribute {name}"))

    def freeze(self) -> None:
        """No parameter needs a gradient."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            self._undo.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        if trained:
            self.made.append(Change("", "parameters without gradients"))


@contextlib.contextmanager
def changing(model: Any) -> Iterator[Changes]:
    """Make all of the block's changes or, if it raises, none."""
    changes = Changes(model)
    try:
        yield changes
        if changes.made:
            vars(model)[_RECORD] = (*listed(model), *changes.made)
    except BaseException:
        changes.undo()
        raise


def listed(model: Any) -> tuple[Change, ...]:
    """The changes that quantsink made to a model, in order."""
    changes: tuple[Change, ...] = vars(model).get(_RECORD, ())
    return changes


def use_attention(changes: Changes) -> None:
    """Let a model compute attention through quantsink; say so where another implementation was asked for."""
    model = changes.model
    before = model.config._attn_implementation
    if before == NAME:
        return
    if before not in (None, "sdpa"):
        log.warning(
            "attn_implementation=%r becomes %r, for every model that shares this config: without a SinkCache it "
            "computes as sdpa, and attention weights are not returned",
            before,
            NAME,
        )
    for place, module, attributes in interface_attributes(model):
        for name, value in attributes.items():
            if name not in vars(module):
                changes.set(module, place, name, value)
    for place, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or module.config._attn_implementation == NAME:
            continue
        if module._can_set_attn_implementation() or can_use_interface(module):
            changes.set(module.config, place, "_attn_implementation_internal", NAME)


def untie(changes: Changes, head: str) -> None:
    """Let the output head keep weights of its own, in this model and in what loads its config."""
    model = changes.model
    changes.set(model.config, "", "tie_word_embeddings", False)
    tied = getattr(model, "all_tied_weights_keys", {})
    kept = {target: source for target, source in tied.items() if not target.startswith(f"{head}.")}
    changes.set(model, "", "all_tied_weights_keys", kept)


def mark(changes: Changes, quantizer: Any) -> None:
    """Make a model with quantized modules one that transformers knows as quantized, and can save."""
    model = changes.model
    changes.freeze()
    changes.set(model.config, "", "quantization_config", quantizer.quantization_config)
    changes.set(model, "", "hf_quantizer", quantizer)
    changes.set(model, "", "is_quantized", True)
    changes.set(model, "", "quantization_method", METHOD)
    # A checkpoint of ours has the modules' own names, whatever the original had.
    changes.set(model, "", "_weight_conversions", [])
    head = output_head(model)
    if head is not None:
        module = model.get_submodule(head)
        changes.hook(head, "dense input rows", lambda: [module.register_forward_pre_hook(dense_rows)])
    changes.set(model.config, "", "attn_implementation", UNIMPORTED)


def dense_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last token's row, cut out of a prompt, keeps the prompt's strides; with weights that need no gradient
    `torch.matmul` then copies them all (SmolLM2-135M: 110 ms per prompt)."""
    if not args:
        return args
    x = args[0]
    return (x.reshape(-1, x.shape[-1]).view(x.shape), *args[1:])


def make_caches(changes: Changes, plan: Any, prepare: Callable[..., Any], before: Callable[..., Any]) -> None:
    """Let a model make its own `SinkCache` (hf.own_cache): `prepare` replaces transformers' method for `generate`,
    `before` runs ahead of each forward pass."""
    model = changes.model
    changes.set(model, "", "kv_cache_plan", plan)
    changes.set(model, "", "_prepare_cache_for_generation", prepare)
    changes.hook("", "a cache of its own", lambda: [model.register_forward_pre_hook(before, with_kwargs=True)])


def _reset(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _restore(parameters: dict[str, Any], before: dict[str, Any]) -> None:
    """Parameters as they were, in their order."""
    parameters.clear()
    parameters.update(before)
