"""Progress lines and bars go to stderr and leave stdout to the result."""

from quantsink.cli.console import loading, progress_bar


def test_without_a_terminal_each_step_of_loading_is_a_line_on_stderr(capsys):
    with loading("loading a model") as say:
        say("loading its weights")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["loading a model", "loading its weights"]


def test_progress_has_one_bar_per_name_on_stderr(capsys):
    with progress_bar() as progress:
        progress("prose", 1, 4)
        progress("code", 2, 2)
        progress("prose", 4, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "prose" in err
    assert "4/4" in err
    assert "2/2" in err
