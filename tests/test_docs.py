"""README and the pages in docs/ name only things that exist; their snippets and the examples run as they stand."""

import pkgutil
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer.main

from quantsink.cli.main import app
from quantsink.models.inputs import cache_argument

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDERS = "quantsink|calibration|kernels|eval|tests|examples|docs"
SOURCES = frozenset(path.name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*"))
OTHER_PROJECTS = frozenset({"llama.cpp"})
COMMANDS = typer.main.get_command(app)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def python_snippets(page: Path) -> list[str]:
    """The fenced Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def code_lines(page: Path) -> list[str]:
    """The fenced and the indented lines of a page; a line that ends in a backslash goes on in the next."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in "\n".join([*blocks, *re.findall(r"^    .*", text, re.MULTILINE)]).split("\n")]


def code(page: Path) -> list[str]:
    """Everything that a page writes as code: its code lines and what stands between backticks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return code_lines(page) + [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text)]


def heading_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words after `quantsink` of each command that is no pattern with brackets, bars or dots."""
    for line in code_lines(page):
        line = re.split(r"\s#|>", line)[0].strip()
        if re.match(r"quantsink( |$)", line) and not re.search(r"[\[\]|{}]|\.\.\.|COMMAND", line):
            yield shlex.split(line)[1:]


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` begin with, and the words after its name."""
    command: Any = COMMANDS
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options(command: Any) -> set[str]:
    """The options of a command and of all commands below it."""
    names = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    return names.union({"--help"}, *(options(below) for below in getattr(command, "commands", {}).values()))


@pytest.fixture
def local_model(tmp_path: Path, tiny_llama: Callable[..., Any], tokenizer: Any) -> Path:
    """A folder with a tiny random model and its tokenizer, in place of the hub id in snippets and examples."""
    folder = tmp_path / "model"
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_snippets(page: Path, model: Path, namespace: dict[str, Any]) -> None:
    """Run a page's snippets in order, the hub id replaced by a local folder."""
    argument = cache_argument(transformers.LlamaForCausalLM)
    for snippet in python_snippets(page):
        source = snippet.replace(HUB_ID, str(model))
        # transformers before 5.21 has another name for the argument; the snippets say so in a comment.
        source = re.sub(r"\bcache=cache\b", f"{argument}=cache", source)
        exec(compile(source, str(page), "exec"), namespace)


def test_the_snippets_in_readme_run(local_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    run_snippets(ROOT / "README.md", local_model, namespace)
    assert namespace["model"].config.quantization_config.quant_method == "quantsink"
    assert namespace["tokens"].shape[1] > namespace["inputs"].input_ids.shape[1]
    assert namespace["cache"].get_seq_length() == namespace["tokens"].shape[1] - 1
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "smollm2-w8a8")
    assert saved("Gravity is").input_ids == namespace["tokenizer"]("Gravity is").input_ids


@pytest.mark.slow
def test_the_snippets_about_the_cache_run(local_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(local_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(local_model)
    namespace = {"model": model, "tokenizer": tokenizer, "inputs": tokenizer("Gravity is", return_tensors="pt")}
    run_snippets(ROOT / "docs" / "cache.md", local_model, namespace)
    assert namespace["cache"].get_seq_length() > 0


@pytest.mark.parametrize("example", ["find_sink_heads", "kv_cache", "quantize_and_generate"])
def test_examples_run(
    example: str, local_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [example, str(local_model)])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    assert capsys.readouterr().out


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in heading_anchors(file), f"{page.name} links to {target}: no such heading"


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w\.(?:py|h|cpp|md|json|j2|png)\b", text):
        assert (ROOT / path).is_file(), f"{page.name} names {path}"
    for folder in re.findall(rf"`((?:{FOLDERS})/[\w/-]*)`", text):
        assert (ROOT / folder).is_dir(), f"{page.name} names the folder {folder}"
    for name in re.findall(r"(?<![\w./*-])\w+\.(?:py|h|cpp)\b", text):
        assert name in SOURCES | OTHER_PROJECTS, f"{page.name} names {name}"


@each_page
def test_python_names_that_a_page_uses_exist(page: Path) -> None:
    for line in code(page):
        for name in re.findall(r"(?<![\w./-])quantsink(?:\.[A-Za-z]\w*)+", line):
            pkgutil.resolve_name(name)


@each_page
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page):
        for target in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", line):
            assert target in targets, f"{page.name} names `make {target}`"


@each_page
def test_options_that_a_page_names_exist(page: Path) -> None:
    for line in code(page):
        if line.startswith("--"):
            known = options(COMMANDS)
        elif re.match(r"quantsink [a-z]", line) and "|" not in line.split(" --")[0]:
            known = options(subcommand(line.split()[1:])[0])
        else:
            continue  # an option of pip, torchrun, pytest or a bench
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line.split(" #")[0]):
            assert option in known, f"{page.name}: {line}: no option {option}"


@each_page
def test_command_lines_on_a_page_parse(page: Path) -> None:
    for words in command_lines(page):
        command, rest = subcommand(words)
        if not hasattr(command, "commands"):
            with command.make_context("quantsink", [word for word in rest if word != "--help"]):
                pass
