"""What many tests do with a tiny model: calibrate, quantize, run, and damage a checkpoint of it."""

import torch
from safetensors.torch import load_file, save_file

import quantsink

IDS = torch.arange(2, 60)[None]


def calibrated(model, tokenizer, **options):
    options = {"seq_len": 64, "max_tokens": 512, **options}
    return quantsink.calibrate(model, tokenizer, "builtin:prose", **options)


def quantized(model, tokenizer, recipe="w8a8"):
    return quantsink.quantize(model, calibrated(model, tokenizer), recipe)


def logits(model, ids=IDS, **arguments):
    with torch.no_grad():
        return model(ids, **arguments).logits


def tampered(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
