"""What the tests of the command line share."""

import pytest

from quantsink.cli.main import main

SMALL = ["--seq-len", "64", "--max-tokens", "512"]


@pytest.fixture(scope="session")
def work(tmp_path_factory, tokenizer):
    """A model, its calibration and its checkpoint, made by the command line once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    assert main(["calibrate", str(folder / "model"), "-o", str(folder / "calibration"), *SMALL]) == 0
    export = ["export", str(folder / "model"), "--calibration", str(folder / "calibration")]
    assert main([*export, "-o", str(folder / "checkpoint")]) == 0
    return folder
