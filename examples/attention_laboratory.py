"""Does my attention need a sink, and do 8 bits need to know? python examples/attention_laboratory.py [NORMALIZER]."""

import sys

import torch

import quantsink
from quantsink.eval.lab import (
    AttentionSpec,
    Bits,
    OutputGate,
    Task,
    head_weights,
    in_8_bits,
    normalizer,
    solved,
    trained,
)


def main() -> None:
    weights_of_scores = normalizer(sys.argv[1] if len(sys.argv) > 1 else "softmax")
    task = Task(length=16)
    for spec in (AttentionSpec(weights_of_scores), AttentionSpec(weights_of_scores, (OutputGate(),))):
        model = trained(task, spec, seed=0)

        batch = task.batch(1024, torch.Generator().manual_seed(1))
        weights: list[torch.Tensor] = []
        with torch.no_grad():
            output = model.run(batch.features, record=weights)
        head = head_weights(weights[0], batch, layer=0)[0]
        print(f"{spec.name}: {solved(output, batch).share:.1%} solved, {head.bos:.3f} of idle weight on the BOS token")

        long = Task(length=256).batch(16, torch.Generator().manual_seed(2))
        with torch.no_grad(), in_8_bits(model, None):
            exact = model(long.features)
        for label, bits in (("all keys in 8 bits", Bits()), ("the BOS token exact", Bits(exact=(0,)))):
            with torch.no_grad(), in_8_bits(model, bits):
                error = (model(long.features) - exact).norm() / exact.norm()
            print(f"  {label}: relative error {error:.4f} at {long.features.shape[1]} tokens")

        if spec.expressible:
            calibration = quantsink.calibrate(model, None, long.features, seq_len=256)
            print(f"  calibration: {sum(h.sink for h in calibration.heads())} sink head of {len(calibration.heads())}")


if __name__ == "__main__":
    main()
