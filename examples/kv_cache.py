"""Generate with a 4-bit KV cache and compare its size with a float32 cache: python examples/kv_cache.py [MODEL]."""

import sys

import torch

import quantsink
from quantsink.calibration.text import documents, parse_spec
from quantsink.cli.demo import model_name
from quantsink.models.inputs import cache_argument
from quantsink.models.source import find, quiet_loading


def main() -> None:
    source = find(sys.argv[1] if len(sys.argv) > 1 else model_name())
    with quiet_loading():
        model, tokenizer = source.model("float32"), source.tokenizer()

    calibration = quantsink.calibrate(model, tokenizer, data="builtin:prose", seq_len=512, max_tokens=4096)
    cache = quantsink.SinkCache.from_calibration(model, calibration, bits=4)

    text = next(iter(documents(parse_spec("builtin:heldout"))))
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=1500)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False, **{cache_argument(model): cache})
    print(tokenizer.decode(tokens[0, -40:]))

    config, length = model.config, cache.get_seq_length()
    float32_bytes = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    print(f"{length:,} tokens in {cache.nbytes():,} bytes; float32 would take {float32_bytes:,}")
    print(f"{cache.bits_per_number:.2f} bits per coded number; widths of heads:", *sorted(set(cache.policies[0].bits)))


if __name__ == "__main__":
    main()
