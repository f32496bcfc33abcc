"""The model card of a checkpoint: hub metadata, what was quantized, and what was measured."""

from dataclasses import dataclass
from pathlib import Path

from quantsink.calibration.calibration import Calibration
from quantsink.kernels import Route
from quantsink.plan import Plan


@dataclass(frozen=True)
class Measured:
    """A quick measurement at export on text that the calibration did not read.

    `kl` is the mean KL divergence in nats per token; `top1` is the share of tokens with the same most likely token.
    """

    text: str
    tokens: int
    ppl_reference: float
    ppl: float
    kl: float
    top1: float


def model_card(
    model: str,
    recipe: str,
    calibration: Calibration,
    plan: Plan,
    parameters: int,
    measured: Measured | None,
    notes: tuple[str, ...] = (),
) -> str:
    """README.md of a checkpoint, with hub metadata in its front matter."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if _hub_id(model):
        lines += [f"base_model: {model}", "base_model_relation: quantized"]
    lines += ["tags:", "- quantsink", "- quantized", "- 8-bit", "---", ""]
    name = model.rstrip("/").rpartition("/")[2]
    lines += [f"# {name}, quantized by quantsink ({recipe})", ""]
    lines += [
        "```python",
        "import quantsink  # registers the format with transformers",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        "```",
        "",
    ]
    r = plan.recipe
    lines += ["| part | what was done |", "|---|---|"]
    lines += [
        f"| weights | {r.weights}, {len(plan.linears)} linear layers; embeddings native, output head {r.output_head} |"
    ]
    lines += [f"| activations | {r.activations.kind}, {r.activations.native_columns:.1%} of input columns native |"]
    if plan.attentions:
        heads = ", ".join(f"{plan.count(route)} {route.name.lower()}" for route in Route)
        lines += [f"| attention heads by route | {heads} |"]
    else:
        lines += ["| attention | native |"]
    if plan.cache is not None:
        widths = [bits for layer in plan.cache.bits.values() for bits in layer]
        mean = f"{sum(widths) / len(widths):.1f}" if widths else "no"
        exact = f"the first {plan.cache.sink_size} and the newest {plan.cache.options.residual} tokens exact"
        lines += [f"| KV cache | codes of {mean} bits on average, {exact}; not in the figures below |"]
    texts = "; ".join(f"{d.name}, {d.tokens:,} tokens" for d in calibration.domains)
    lines += [f"| calibrated on | {texts} |", f"| parameters | {parameters:,} |", ""]
    if measured is None:
        lines += ["Accuracy was not measured at export; `quantsink report` measures it.", ""]
    else:
        lines += [
            f"Measured at export on {measured.tokens:,} tokens of {measured.text} (not used for calibration); "
            "`quantsink report` measures properly, with intervals and baselines.",
            "",
            "| | original | this checkpoint |",
            "|---|---|---|",
            f"| perplexity | {measured.ppl_reference:.3f} | {measured.ppl:.3f} |",
            f"| KL to the original, nats per token | 0 | {measured.kl:.5f} |",
            f"| same most likely token | 100 % | {100 * measured.top1:.2f} % |",
            "",
        ]
    lines += [line for note in notes for line in (note, "")]
    return "\n".join(lines)


def _hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(parts) and not model.endswith(".gguf") and not Path(model).exists()
