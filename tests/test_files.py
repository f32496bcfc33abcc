"""Output folders and files appear whole or not at all."""

import os
import signal
import subprocess
import sys

import pytest

from quantsink.errors import OutputError, UsageError
from quantsink.files import whole_folder, write_text


def ours(folder):
    return {path.name for path in folder.iterdir()} <= {"old", "new"}


def test_a_folder_appears_whole(tmp_path):
    with whole_folder(tmp_path / "out", ours) as work:
        (work / "a").write_text("a")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_nothing_and_loses_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")

    def fail():
        with whole_folder(tmp_path / "out", ours, force=True) as work:
            (work / "new").write_text("new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "old").read_text() == "old"


def test_a_folder_that_is_not_empty_is_refused_and_replaced_with_force(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(UsageError, match="not empty"), whole_folder(tmp_path / "out", ours):
        pass
    with whole_folder(tmp_path / "out", ours, force=True) as work:
        (work / "new").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_force_replaces_only_what_quantsink_wrote(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").write_text("mine")
    with (
        pytest.raises(UsageError, match="holds files that quantsink did not write"),
        whole_folder(tmp_path / "out", ours, force=True),
    ):
        pass
    assert (tmp_path / "out" / "thesis").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_kept(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file, not a folder"), whole_folder(tmp_path / "out", ours, force=True):
        pass
    with pytest.raises(OutputError, match="cannot be written"):
        write_text(tmp_path / "out" / "x", "text")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_kill_leaves_the_old_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    code = (
        "import sys, time, pathlib; from quantsink.files import whole_folder\n"
        "with whole_folder(pathlib.Path(sys.argv[1]), lambda folder: True, force=True) as work:\n"
        "    (work / 'new').write_text('new'); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]
