"""Every error is a QuantSinkError with the exit code that the command line documents."""

import pytest

from quantsink import errors
from quantsink.errors import QuantSinkError, UsageError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.mark.parametrize("error", CLASSES)
def test_usage_errors_exit_with_2_and_all_others_with_1(error):
    assert issubclass(error, QuantSinkError)
    assert error("message").exit_code == (2 if issubclass(error, UsageError) else 1)
    assert error.__doc__


def test_a_wrong_recipe_is_wrong_usage():
    assert issubclass(errors.RecipeError, UsageError)
