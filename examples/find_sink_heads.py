"""List the heads that put their attention on the first token: python examples/find_sink_heads.py [MODEL]."""

import sys

import quantsink
from quantsink.cli.demo import model_name
from quantsink.models.source import find


def main() -> None:
    source = find(sys.argv[1] if len(sys.argv) > 1 else model_name())
    tokenizer, model = source.tokenizer(), source.model()

    calibration = quantsink.calibrate(model, tokenizer, data=["builtin:prose", "builtin:code"], max_tokens=8192)

    heads = calibration.heads()
    sink_heads = [head for head in heads if head.sink]
    print(f"{len(sink_heads)} of {len(heads)} heads put at least 0.3 of their weight on the first token")
    for head in sorted(sink_heads, key=lambda head: -head.bos_mass)[:10]:
        by_text = ", ".join(f"{name} {means['bos_mass']:.2f}" for name, means in head.domains.items())
        print(f"layer {head.layer:2d} head {head.head:2d}: {head.bos_mass:.3f} ({by_text}), entropy {head.entropy:.3f}")


if __name__ == "__main__":
    main()
