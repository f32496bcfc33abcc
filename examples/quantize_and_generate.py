"""Calibrate, quantize, save, load and generate: python examples/quantize_and_generate.py [MODEL]."""

import sys
import tempfile

import quantsink
from quantsink.cli.demo import model_name
from quantsink.models.source import find


def main() -> None:
    source = find(sys.argv[1] if len(sys.argv) > 1 else model_name())
    tokenizer, model = source.tokenizer(), source.model()

    calibration = quantsink.calibrate(model, tokenizer, data="builtin:prose", max_tokens=4096)
    quantsink.quantize(model, calibration, recipe="w8a8")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = quantsink.load(folder)  # or AutoModelForCausalLM.from_pretrained, after `import quantsink`

    ids = tokenizer("Gravity is", return_tensors="pt").input_ids
    tokens = loaded.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
