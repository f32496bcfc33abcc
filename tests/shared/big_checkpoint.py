"""A synthetic model of any size and its calibration, made in little memory, and an export of it under a memory limit.

`python tests/shared/big_checkpoint.py FOLDER` makes 8 GB of bfloat16 in 1 GB shards, exports them in a process that
may hold 3 GB, prints what that took as JSON and removes everything. `--limit 0` limits nothing. Needs 13 GB of disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.records import Domain, Settings, Statistics
from quantsink.calibration.statistics import empty_heads, empty_linear
from quantsink.checkpoint.streaming import stream
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import tokenizer_fingerprint
from quantsink.models.source import find, quiet_loading

BIG = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 19, "vocab_size": 32000}


def make(folder: Path, shard_bytes: int, **sizes: int) -> None:
    """A Llama in bfloat16, without ever holding more than one shard of it."""
    config = LlamaConfig(
        **sizes, num_attention_heads=sizes["hidden_size"] // 128, num_key_value_heads=sizes["hidden_size"] // 128,
        head_dim=128, max_position_embeddings=2048, tie_word_embeddings=False, dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"], bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(sizes["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="t0", eos_token="t1").save_pretrained(folder)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).bfloat16().state_dict()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in empty.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    torch.manual_seed(0)
    pool = torch.randn(2**22).mul_(0.02).bfloat16()
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names |= dict.fromkeys(shard, file)
        save_file({name: _filled(pool, like, len(name)) for name, like in shard.items()}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in empty.values())}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _filled(pool: torch.Tensor, like: torch.Tensor, shift: int) -> torch.Tensor:
    count = like.numel()
    return pool.roll(shift).repeat(-(-count // pool.numel()))[:count].view(like.shape)


def calibration(folder: Path) -> Calibration:
    """Statistics that nobody measured, for the model in `folder`."""
    source = find(str(folder))
    with quiet_loading():
        streamed = stream(source)
        tokenizer = source.tokenizer()
    found = Architecture.of(streamed.model)
    modules = dict(streamed.model.named_modules())
    heads = {layer.name: empty_heads(layer) for layer in found.attentions}
    for fields in heads.values():
        for name in ("rows", "windows", "output_energy", "bos_mass", "sink_mass", "entropy"):
            fields[name] += 1
        for name in ("logit_max", "rest_peak_max"):
            fields[name].zero_()
    linears = {name: empty_linear(modules[name].in_features) for name in found.linears}
    for fields in linears.values():
        for name, value in fields.items():
            fields[name] = torch.ones_like(value)
    settings = Settings(64, 64, 1, 64, 0, True, 0, "bfloat16")
    domain = Domain("nothing", "nothing", 64, 1, 1, 0, True, "0")
    return Calibration(
        found.model_type, str(folder), streamed.fingerprint(), tokenizer_fingerprint(tokenizer), 0, settings,
        found.attentions, (domain,), {"nothing": Statistics(heads, linears)},
    )  # fmt: skip


CHILD = """
import resource, sys, threading, time
from pathlib import Path
import quantsink.export.export
from quantsink.cli.main import main
from transformers import LlamaForCausalLM

def figures():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}

def watch():
    while True:
        peak[0] = max(peak[0], figures()["RssAnon"])
        time.sleep(0.005)

before, limit, growth = figures(), int(sys.argv[1]), int(sys.argv[2])
peak = [before["RssAnon"]]
limit = limit or (before["VmData"] + growth if growth else 0)
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
threading.Thread(target=watch, daemon=True).start()
code = main(sys.argv[3:])
print("figures", before["RssAnon"], peak[0], figures()["VmHWM"], file=sys.stderr)
sys.exit(code)
"""


def export(folder: Path, limit: int = 0, growth: int = 0, *options: str) -> dict[str, Any]:
    """`quantsink export` of `folder/model` in a process of its own, limited by RLIMIT_DATA: the kernel then refuses
    memory beyond the limit, but for files that are mapped without being written to.

    Args:
        limit: bytes that the process may take in all.
        growth: bytes that it may take beyond what it holds when everything is imported.

    Returns:
        Seconds, bytes in and out, anonymous memory before and at its peak, and VmHWM, the peak with mapped libraries.
    """
    command = [sys.executable, "-c", CHILD, str(limit), str(growth), "export", str(folder / "model")]
    command += ["--calibration", str(folder / "calibration"), "-o", str(folder / "out"), "--no-measure", "--json"]
    started = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    before, anonymous, resident = map(int, done.stderr.strip().splitlines()[-1].split()[1:])
    return {
        "limit": limit,
        "growth": growth,
        "seconds": round(time.monotonic() - started, 1),
        "bytes_in": sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")),
        "bytes_out": json.loads(done.stdout)["payload_bytes"],
        "anonymous_before": before,
        "anonymous_peak": anonymous,
        "rss_peak": resident,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=3_000_000_000, help="RLIMIT_DATA in bytes; 0: none")
    parser.add_argument("--shard", type=int, default=1_000_000_000, help="bytes of a shard of the model")
    parser.add_argument("--layers", type=int, default=BIG["num_hidden_layers"])
    parser.add_argument("options", nargs="*", help="of quantsink export, after --")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        make(given.folder / "model", given.shard, **{**BIG, "num_hidden_layers": given.layers})
        calibration(given.folder / "model").save(given.folder / "calibration")
        print(json.dumps(export(given.folder, given.limit, 0, *given.options)))
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
